"""Compiled modules: replicas are compiled for themselves, and the user's module keeps its parameters."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from splittune import SplitConfig, autotune
from splittune.errors import ConfigError
from splittune.hardware import resolve_hardware
from splittune.parallel import BalancedDataParallel, Link, accumulate
from splittune.parallel.compiled import is_compiled
from splittune.parallel.data_parallel import Engine
from splittune.split import BatchSplit
from splittune.training import TrainingTask
from tests.parallel.models import ThreadedLink, assert_same, loss_of

# Functions that are compiled stay so for the process: each test has its own.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """No test finds what another one compiled, nor meets its limits."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Body(nn.Sequential):
    """What torch compiles where it is compiled by itself: of its own modules it compiles none in place."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Net(nn.Module):
    """A body, by itself or recomputed in the backward pass, and a head."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.body = Body(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8))
        self.head = nn.Linear(8, 3)
        self.recomputes = recomputes
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x)
        return self.head(hidden) * self.scale


class Counting:
    """A compiler that changes nothing, and counts the graphs it is given."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.recompile_limits: set[int] = set()

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_graphs += 1
        self.recompile_limits.add(torch._dynamo.config.recompile_limit)
        return graph.forward


def root(net: Net, backend: Any) -> nn.Module:
    return torch.compile(net, backend=backend)


def child(net: Net, backend: Any) -> nn.Module:
    net.body = torch.compile(net.body, backend=backend)
    return net


def in_place(net: Net, backend: Any) -> nn.Module:
    net.compile(backend=backend)
    return net


def child_in_place(net: Net, backend: Any) -> nn.Module:
    net.body.compile(backend=backend)
    return net


def whole(net: Net, backend: Any) -> nn.Module:
    return torch.compile(net, backend=backend, fullgraph=True)


ALL_WAYS = [root, child, in_place, child_in_place, whole]
Way = Callable[[Net, Any], nn.Module]


def batch_of(num_samples: int) -> Tensor:
    return torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(1))


def net(recomputes: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(recomputes)


def expected_of(plain: Net, batch: Tensor) -> dict[str, Tensor | None]:
    """The gradients of the whole batch, uncompiled, by parameter: names differ with what is compiled."""
    twin = copy.deepcopy(plain)
    loss_of(twin(batch)).backward()
    return {name: parameter.grad for name, parameter in twin.named_parameters()}


def wrap(module: nn.Module, engine: Engine = "window", link: Link | None = None) -> BalancedDataParallel:
    return BalancedDataParallel(module=module, shard_sizes=(1, 2, 3), device_ids=["cpu"] * 3, engine=engine, link=link)


@pytest.mark.parametrize(
    ("way", "engine", "threaded"),
    [(way, "window", way is child) for way in ALL_WAYS] + [(root, "torch", False), (child, "torch", True)],
)
def test_a_compiled_module_trains_as_on_one_device(way: Way, engine: Engine, threaded: bool) -> None:
    """Over windows of two micro-batches its gradients are those of the uncompiled module; it runs compiled code."""
    plain, batch, backend = net(), batch_of(10), Counting()
    expected = expected_of(plain, batch)
    own = dict(plain.named_parameters())
    wrapped = wrap(way(plain, backend), engine, ThreadedLink(3) if threaded else None)
    for _ in range(2):
        for micro in accumulate(wrapped, batch.split(6)):
            (loss_of(wrapped(micro)) * (len(micro) / len(batch))).backward()
        assert_same({name: parameter.grad for name, parameter in own.items()}, expected)
        wrapped.zero_grad()
    assert backend.num_graphs > 0
    assert {id(parameter) for parameter in wrapped.parameters()} == {id(parameter) for parameter in own.values()}


@pytest.mark.parametrize("way", [root, child, in_place])
def test_what_was_compiled_is_used_again(way: Way) -> None:
    """Later windows, other wrappers and other shards compile nothing: replicas share the code of their original."""
    backend = Counting()
    module = way(net(), backend)
    for shard_sizes in [(2, 3, 4), (4, 3, 2)]:  # sizes that were not seen are compiled for once more, for any size
        train_once(module, shard_sizes)
    num_graphs = backend.num_graphs
    for shard_sizes in [(2, 3, 4), (5, 6, 7), (9, 2, 2)]:
        train_once(module, shard_sizes)
    assert backend.num_graphs == num_graphs > 0


def train_once(module: nn.Module, shard_sizes: tuple[int, ...]) -> None:
    wrapped = BalancedDataParallel(module=module, shard_sizes=shard_sizes, device_ids=["cpu"] * len(shard_sizes))
    loss_of(wrapped(batch_of(sum(shard_sizes)))).backward()
    wrapped.zero_grad()


def test_every_device_may_have_code_of_its_own() -> None:
    """The compiler's limit of versions counts for each device, and is the user's again afterwards."""
    before = torch._dynamo.config.recompile_limit
    backend = Counting()
    wrap(root(net(), backend))(batch_of(6))
    assert min(backend.recompile_limits) >= 3 * 8
    assert torch._dynamo.config.recompile_limit == before


@pytest.mark.parametrize("way", [root, in_place])
def test_evaluation_and_a_single_device(way: Way) -> None:
    """Without gradients, and on one device, a compiled module gives what it gives by itself."""
    plain, batch = net(), batch_of(6)
    expected = copy.deepcopy(plain)(batch)
    module = way(plain, "eager")
    with torch.no_grad():
        torch.testing.assert_close(wrap(module)(batch), expected)
    single = BalancedDataParallel(module=module, shard_sizes=(6,), device_ids=["cpu"])
    torch.testing.assert_close(single(batch), expected)


@pytest.mark.parametrize("way", [root, child, in_place])
def test_checkpoints_inside_are_recomputed(way: Way) -> None:
    """A model that recomputes a part in its backward pass gives one device's gradients, compiled."""
    plain, batch = net(recomputes=True), batch_of(6)
    expected = expected_of(plain, batch)
    own = dict(plain.named_parameters())
    wrapped = wrap(way(plain, "aot_eager"))
    loss_of(wrapped(batch)).backward()
    assert_same({name: parameter.grad for name, parameter in own.items()}, expected)


@pytest.mark.parametrize(("way", "metered"), [(root, False), *((way, True) for way in ALL_WAYS)])
def test_on_virtual_gpus_every_operation_is_seen(way: Way, metered: bool) -> None:
    """Inside the meter a compiled module runs as written, at the cost of an uncompiled one, and compiles afterwards."""
    plain, batch, backend = net(), batch_of(6), Counting()
    expected = expected_of(plain, batch)
    own = dict(plain.named_parameters())
    hardware = resolve_hardware("3xT4")
    split = BatchSplit(global_batch_size=6, accumulation_steps=1, shard_sizes=(1, 2, 3))
    cost = cost_of(copy.deepcopy(plain), batch)
    module = way(plain, backend)
    with hardware.metered() if metered else nullcontext():
        loss_of(hardware.wrap(module, split)(batch)).backward()
        assert backend.num_graphs == 0 or not metered
        got = (hardware.clock(), hardware.memory()) if metered else cost
    assert got == cost
    assert_same({name: parameter.grad for name, parameter in own.items()}, expected)
    module(batch)
    assert backend.num_graphs > 0


def cost_of(module: nn.Module, batch: Tensor) -> tuple[Any, ...]:
    """Modelled time and memory of a step on three virtual GPUs."""
    hardware = resolve_hardware("3xT4")
    split = BatchSplit(global_batch_size=6, accumulation_steps=1, shard_sizes=(1, 2, 3))
    with hardware.metered():
        loss_of(hardware.wrap(module, split)(batch)).backward()
        return hardware.clock(), hardware.memory()


# whole jobs


@pytest.mark.parametrize("way", [root, child, in_place])
def test_a_compiled_model_is_tuned_and_trained(way: Way, tmp_path: Path) -> None:
    """autotune takes it as it is, leaves it so, and the config wraps it."""
    plain, batch = net(), batch_of(8)
    own = dict(plain.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    expected = expected_of(plain, batch)
    module = way(plain, "eager")
    targets = torch.zeros(8, 3)
    result = autotune(module, [(batch, targets)], devices="2xT4", progress=False, max_trials=4)
    assert all(torch.equal(before[name], parameter) for name, parameter in own.items())
    assert all(parameter.grad is None for parameter in own.values())
    assert [*own.values()] == [*module.parameters()]
    config = SplitConfig.load(result.config.save(tmp_path / "split.json"))
    wrapped = config.wrap(module)
    for micro in config.micro_batches(batch, wrapped):
        (loss_of(wrapped(micro.batch)) * micro.weight).backward()
    assert_same({name: parameter.grad for name, parameter in own.items()}, expected)


def test_a_compiled_wrapper_is_no_task() -> None:
    """The tuner wraps the module itself: the way on is named."""
    wrapped = torch.compile(wrap(net()), backend="eager")
    with pytest.raises(ConfigError, match=r"compiled wrapper.*Pass torch\.compile\(model\.module\)"):
        TrainingTask(wrapped, [(batch_of(2), torch.zeros(2, 3))])


# what a replica is made of


def test_hooks_of_a_compiled_module_run() -> None:
    """Those of the compiled module and those of its original, once a replica each."""
    plain = net()
    module = root(plain, "eager")
    seen: list[str] = []
    module.register_forward_hook(lambda *_: seen.append("compiled"))
    plain.register_forward_hook(lambda *_: seen.append("original"))
    wrap(module)(batch_of(6))
    assert sorted(seen) == ["compiled"] * 3 + ["original"] * 3


def test_compiling_the_wrapper_in_place_compiles_the_module() -> None:
    """``wrapped.compile()`` reaches every replica, also after the first call."""
    backend = Counting()
    wrapped = wrap(net())
    expected = wrapped(batch_of(6))
    wrapped.compile(backend=backend)
    torch.testing.assert_close(wrapped(batch_of(6)), expected)
    assert backend.num_graphs > 0


class Watching:
    """A gauge that remembers, weakly, which modules were run."""

    def __init__(self) -> None:
        self.ran: list[weakref.ref[nn.Module]] = []

    def begin(self, position: int, module: nn.Module) -> None:
        self.ran += [weakref.ref(part) for part in module.modules()]

    def end(self, position: int, output: Any) -> None:
        """Nothing to do."""


@pytest.mark.parametrize(("way", "engine"), [(root, "window"), (child, "torch"), (in_place, "window")])
def test_nothing_of_a_replica_is_kept(way: Way, engine: Engine) -> None:
    """Once its code is compiled, replicas are gone with the output: no reference cycle holds them."""
    wrapped, batch = wrap(way(net(), "eager"), engine), batch_of(6)
    for _ in range(2):
        loss_of(wrapped(batch)).backward()
    gc.collect()
    gauge = wrapped.gauge = Watching()
    gc.disable()
    try:
        loss_of(wrapped(batch)).backward()
        own = {id(part) for part in wrapped.modules()}
        assert gauge.ran
        assert [ref() for ref in gauge.ran if ref() is not None and id(ref()) not in own] == []
    finally:
        gc.enable()


# torch's own


def test_torchs_private_parts_are_there() -> None:
    """If this fails: see what torch.compile and nn.Module.compile leave behind, and change compiled.py."""
    compiled = torch.compile(net(), backend="eager")
    assert is_compiled(compiled), "torch has renamed torch._dynamo.eval_frame.OptimizedModule"
    cls, (original, context) = compiled.__reduce__()
    assert (cls, original) == (type(compiled), compiled._orig_mod)
    context_class = sys.modules["torch._dynamo.eval_frame"]._TorchDynamoContext
    assert isinstance(context, context_class)
    module = net()
    module.compile(backend="eager")
    cells = [cell.cell_contents for cell in module._compiled_call_impl.__closure__]
    assert any(isinstance(cell, context_class) for cell in cells), "nn.Module.compile has another shape"
    assert callable(nn.Module._call_impl)


def test_a_compiled_module_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should torch make them differently, the wrapper says so when it is made, and the module is whole."""
    plain = net()
    module = root(plain, "eager")
    monkeypatch.setattr(type(module), "__reduce__", lambda self: ("something", "else", "altogether"))
    with pytest.raises(TypeError, match=r"Wrap the module that was given to torch\.compile"):
        wrap(module)
    assert len(list(plain.parameters())) == 6


def test_code_of_unknown_kind_runs_as_written() -> None:
    """A call compiled in place by something that does not say how is left out in replicas, never
    run on the original."""
    plain, batch = net(), batch_of(6)
    expected = copy.deepcopy(plain)(batch)

    def of_somebody(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the original was run")

    plain.__dict__["_compiled_call_impl"] = of_somebody
    torch.testing.assert_close(wrap(plain)(batch), expected)
