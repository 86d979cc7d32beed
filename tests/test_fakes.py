"""Fake tensors at a third of the cost are torch's own, operator by operator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from splittune.fakes import FakeTensor, FakeTensorMode, ShapeMode

# Of each operator, so that all of them take some ten seconds. A choice: of six each, in four dtypes, none differs.
SAMPLES_EACH = 2


class Described(NamedTuple):
    """All that can be asked of a fake tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: str
    storage_bytes: int
    storage: int
    """Equal for tensors that share one."""
    given_back: int | None
    """The argument that it is."""
    bits: tuple[bool, ...]


class Call(NamedTuple):
    """An operator with arguments."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def calls() -> Iterator[Call]:
    """Every operator of dense tensors that torch lists, out of place and in place, if it takes these real arguments."""
    # Private: torch's own list of its operators, with arguments for each. It takes seconds to import.
    from torch.testing._internal.common_methods_invocations import op_db

    for operator in op_db:
        if torch.float32 not in operator.dtypes:
            continue
        for sample in islice(operator.sample_inputs_func(operator, "cpu", torch.float32, False), SAMPLES_EACH):
            for function in filter(None, (operator.op, operator.inplace_variant)):
                args = (sample.input, *sample.args)
                if any(isinstance(one, Tensor) and one.layout is not torch.strided for one in tree_leaves(args)):
                    continue
                copied_args, copied_kwargs = tree_map_only(Tensor, Tensor.clone, (args, sample.kwargs))
                try:
                    function(*copied_args, **copied_kwargs)
                except Exception:  # noqa: BLE001 - torch's operators raise what they like
                    continue
                yield Call(f"{operator.name} {operator.variant_test_name}", function, args, sample.kwargs)


def described(call: Call, mode: FakeTensorMode) -> list[Described | str] | str:
    """What the operator gives for these arguments without their values; the class of what it raises."""
    args, kwargs = tree_map_only(Tensor, mode.from_tensor, (call.args, call.kwargs))
    try:
        with mode:
            out = call.function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the same
        return type(error).__name__
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    storages: dict[int, int] = {}
    for one in given:
        storages.setdefault(one.untyped_storage()._cdata, len(storages))
    return [
        Described(
            *(tuple(one.shape), one.stride(), one.storage_offset(), one.dtype, str(one.device)),
            one.untyped_storage().nbytes(),
            storages.setdefault(one.untyped_storage()._cdata, len(storages)),
            next((index for index, taken in enumerate(given) if taken is one), None),
            (one.is_neg(), one.is_conj(), one.requires_grad, one.is_inference()),
        )
        if isinstance(one, Tensor) and one.layout is torch.strided
        else str(one)
        for one in tree_leaves(out)
    ]


def modes() -> tuple[FakeTensorMode, ShapeMode]:
    return FakeTensorMode(allow_non_fake_inputs=True), ShapeMode(allow_non_fake_inputs=True)


@pytest.mark.filterwarnings("ignore")  # of torch, of its own operators
def test_every_operator_gives_again_what_it_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second time on, what ShapeMode gives by itself is what torch's own mode works out."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # of what raises without values
    num_asked = 0
    ask = FakeTensorMode.__torch_dispatch__

    def counted(*args: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        return ask(*args)

    num_given, wrong = 0, []
    for call in calls():
        plain, first = modes()
        expected = described(call, plain)
        described(call, first)
        with monkeypatch.context() as patched:
            patched.setattr(FakeTensorMode, "__torch_dispatch__", counted)
            num_asked = 0
            again = described(call, modes()[1])
        num_given += num_asked == 0
        if again != expected:
            wrong.append((call.name, expected, again))
    assert wrong == []
    assert num_given > 500


def test_a_step_with_gradients_is_torchs_own() -> None:
    """Activations, gradients and AdamW's state have the sizes and strides that torch's mode gives, twice over."""
    found = []
    for mode in (*modes(), modes()[1]):
        with mode:
            model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 5))
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                loss = nn.functional.cross_entropy(model(torch.ones(4, 3, 8, 8)), torch.zeros(4, dtype=torch.int64))
                loss.backward()
                optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append([(type(one), one.shape, one.stride(), one.dtype) for one in (loss, *gradients, *states)])
    assert found[0] == found[1] == found[2]


def test_values_that_are_known_stay_known() -> None:
    """A counter that is made of a number can be read and counted on, as often as one likes."""
    _, mode = modes()
    with mode:
        for start in (1.0, 5.0):
            counter = torch.tensor(start)
            counter += 1
            assert isinstance(counter, FakeTensor)
            assert counter.item() == start + 1


def test_other_sizes_types_and_flags_are_other_calls() -> None:
    """1, 1.0 and True are equal and no argument of the same sum; neither are sizes, strides and dtypes."""
    plain, mode = modes()
    for _ in range(2):
        for one in (plain, mode):
            with one:
                ints = torch.ones(3, dtype=torch.int64)
                assert [(ints + value).dtype for value in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
                grid = torch.ones(4, 6)
                assert (grid.t() + 1).stride() == (1, 6)
                assert (grid.t().contiguous() + 1).stride() == (4, 1)
                assert grid.sum(0).shape == (6,)
                assert grid.sum(0, keepdim=True).shape == (1, 6)
                assert grid[1:].storage_offset() == 6
                assert grid[2:].storage_offset() == 12
