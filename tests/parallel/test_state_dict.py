"""Checkpoints: those of nn.DataParallel, loaded with or without its prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splittune.parallel import BalancedDataParallel, load_state_dict
from tests.parallel.models import MODELS


def wrap(module: nn.Module) -> BalancedDataParallel:
    return BalancedDataParallel(1, module, ["cpu", "cpu"])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


class WithChildNamedModule(nn.Module):
    """Its own keys look like a wrapper's: ``module.weight``, ``module.module.weight``, ``weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.module = nn.Linear(2, 2)
        self.module.module = nn.Linear(2, 2)


class WithExtraState(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.epoch = 0

    def get_extra_state(self) -> int:
        return self.epoch

    def set_extra_state(self, state: int) -> None:
        self.epoch = state


def wrapped_net() -> nn.Module:
    return wrap(net())


BUILDERS = {name: build for name, (build, _) in MODELS.items()} | {"net": net, "child": WithChildNamedModule}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_a_state_dict_is_that_of_nn_data_parallel(build: Callable[[], nn.Module]) -> None:
    """Keys, their order, the tensors and the version metadata are nn.DataParallel's."""
    module = build()
    ours, theirs = wrap(module).state_dict(), nn.DataParallel(module).state_dict()
    assert list(ours) == list(theirs)
    assert ours._metadata == theirs._metadata
    assert all(ours[key].data_ptr() == theirs[key].data_ptr() for key in ours)


@pytest.mark.parametrize("build", [net, WithChildNamedModule, WithExtraState, wrapped_net])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("prefixed", [True, False])
def test_keys_load_with_and_without_the_prefix(build: Callable[[], nn.Module], strict: bool, prefixed: bool) -> None:
    """A checkpoint of the wrapper, of nn.DataParallel or of the bare module loads, also where a child is `module`."""
    saved, module = build(), build()
    if isinstance(saved, WithExtraState):
        saved.epoch = 7
    state = (nn.DataParallel(saved) if prefixed else saved).state_dict()
    result = wrap(module).load_state_dict(state, strict=strict)
    assert result.missing_keys == result.unexpected_keys == []
    loaded, wanted = module.state_dict(), saved.state_dict()
    assert list(loaded) == list(wanted)
    assert all(
        torch.equal(loaded[key], wanted[key]) if isinstance(wanted[key], Tensor) else loaded[key] == wanted[key]
        for key in wanted
    )


def test_a_plain_dict_loads() -> None:
    """Keys stripped by hand carry no metadata and load all the same."""
    saved, module = net(), net()
    wrap(module).load_state_dict({key: value.clone() for key, value in saved.state_dict().items()})
    assert torch.equal(module[0].weight, saved[0].weight)


def test_part_of_a_state_loads_when_not_strict() -> None:
    """Without strict, what is missing is reported and the rest is loaded, for both kinds of keys."""
    for prefix in ("", "module."):
        module = net()
        result = wrap(module).load_state_dict({f"{prefix}0.bias": torch.full((3,), 5.0)}, strict=False)
        assert f"{prefix}0.weight" in result.missing_keys
        assert module[0].bias.tolist() == [5, 5, 5]


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, prefix: state.pop(f"{prefix}0.bias"), "Missing key.*0.bias"),
        (lambda state, prefix: state.update({f"{prefix}2.bias": torch.ones(1)}), "Unexpected key.*2.bias"),
        (lambda state, prefix: state.update({f"{prefix}0.bias": torch.ones(4)}), "size mismatch for .*0.bias"),
    ],
)
def test_a_mismatch_is_reported(prefix: str, change: Callable[[dict[str, Any], str], Any], message: str) -> None:
    """A missing key, one too many and a wrong shape each raise torch's own error, for both kinds of keys."""
    state = {f"{prefix}{key}": value for key, value in net().state_dict().items()}
    change(state, prefix)
    with pytest.raises(RuntimeError, match=message):
        wrap(net()).load_state_dict(state)


def test_foreign_keys_are_reported() -> None:
    """A checkpoint of something else altogether is an error, and changes nothing."""
    module = net()
    before = module[0].weight.clone()
    with pytest.raises(RuntimeError, match="Missing key"):
        wrap(module).load_state_dict(OrderedDict(encoder=torch.ones(1)))
    assert torch.equal(module[0].weight, before)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_assign_takes_the_tensors_themselves(prefix: str) -> None:
    """With assign=True the checkpoint's tensors become the module's, as for a module made on meta."""
    with torch.device("meta"):
        module = net()
    state = {f"{prefix}{key}": value for key, value in net().state_dict().items()}
    model = wrap(module)
    model.load_state_dict(state, assign=True)
    assert module[0].weight.data_ptr() == state[f"{prefix}0.weight"].data_ptr()
    assert model.eval()(torch.zeros(3, 2)).shape == (3, 3)


@pytest.mark.parametrize("build", [net, WithChildNamedModule, WithExtraState])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("prefixed", [True, False])
def test_a_plain_module_loads_a_wrappers_state(build: Callable[[], nn.Module], strict: bool, prefixed: bool) -> None:
    """What a wrapper saved loads without it as well, and the state that was given is left as it was."""
    saved, module = build(), build()
    state = (nn.DataParallel(saved) if prefixed else saved).state_dict()
    before = list(state)
    result = load_state_dict(module, state, strict=strict)
    assert result.missing_keys == result.unexpected_keys == []
    assert list(state) == before
    for name, value in saved.state_dict().items():
        assert (
            value == module.state_dict()[name]
            if isinstance(value, int)
            else torch.equal(module.state_dict()[name], value)
        )


def test_a_plain_module_refuses_foreign_keys() -> None:
    """Keys that fit neither way are torch's own error."""
    with pytest.raises(RuntimeError, match="Missing key"):
        load_state_dict(net(), {"module.encoder": torch.ones(1)})
