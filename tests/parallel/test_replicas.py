"""Replicas: what they are made of, what of them is kept, and that nothing of them stays."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from splittune.hardware import resolve_hardware
from splittune.parallel import BalancedDataParallel, Link, TorchLink
from splittune.parallel.replicas import _as_torchs_hook_does, hook_tables_of, replicate
from splittune.split import BatchSplit
from tests.parallel.models import CPU, MODELS, WIDTH, Call, ThreadedLink, loss_of, mlp, vectors


def wrap(module: nn.Module, *shard_sizes: int, link: Link | None = None) -> BalancedDataParallel:
    return BalancedDataParallel(
        module=module, shard_sizes=shard_sizes, device_ids=["cpu"] * len(shard_sizes), link=link
    )


def replica_of(module: nn.Module) -> nn.Module:
    return replicate(module, TorchLink([CPU, CPU]), [1])[0]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside, only reference counts free anything: what is in a cycle stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# what a replica is made of


@pytest.mark.parametrize("name", MODELS)
def test_our_way_past_torchs_hook_gives_the_same(name: str) -> None:
    """Attribute by attribute, for every module of every model; a torch whose hook does more fails here."""
    for module in MODELS[name][0]().modules():
        if type(module)._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
            continue
        ours, torchs = _as_torchs_hook_does(module), module._replicate_for_data_parallel()
        assert type(ours) is type(torchs)
        assert list(vars(ours)) == list(vars(torchs))
        for attribute, value in vars(torchs).items():
            same = vars(ours)[attribute]
            if attribute in ("_parameters", "_buffers", "_modules"):
                assert type(same) is type(value)
                assert list(same.items()) == list(value.items())
                assert same is not vars(module)[attribute]
            else:
                assert same is value


def test_torchs_private_hook_is_there() -> None:
    """replicate() stands on this hook of nn.Module; should torch rename it or change what it does, look here first."""
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_buffer("buffer", torch.zeros(1))
    assert nn.RNN._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel
    replica = module._replicate_for_data_parallel()
    assert type(replica) is nn.Sequential
    assert replica._is_replica is True
    assert replica._parameters == {}
    assert replica._modules == module._modules
    assert replica._modules is not module._modules
    assert replica._buffers == module._buffers
    assert replica._buffers is not module._buffers


@pytest.mark.parametrize("name", MODELS)
def test_a_replica_has_every_tensor_under_its_name(name: str) -> None:
    """Parameters and buffers are copies of the module's, in its order; what is shared there is shared."""
    module = MODELS[name][0]()
    replica = replica_of(module)
    for own, copied in [
        (dict(module.named_parameters(remove_duplicate=False)), dict(replica.named_parameters(remove_duplicate=False))),
        (dict(module.named_buffers(remove_duplicate=False)), dict(replica.named_buffers(remove_duplicate=False))),
    ]:
        assert list(own) == list(copied)
        assert len({id(tensor) for tensor in own.values()}) == len({id(tensor) for tensor in copied.values()})
        for key, tensor in own.items():
            assert torch.equal(tensor, copied[key])
            assert tensor.requires_grad == copied[key].requires_grad
            assert tensor.numel() == 0 or tensor.data_ptr() != copied[key].data_ptr()


def test_a_replica_keeps_memory_formats() -> None:
    """Weights in channels_last are so on every device: kernels are chosen by it."""
    replica = replica_of(nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last))
    assert replica.weight.is_contiguous(memory_format=torch.channels_last)
    assert not replica.weight.is_contiguous()


def test_a_module_used_twice_is_replicated_once() -> None:
    """Modules that are shared in the tree are shared in the replica."""
    layer = nn.Linear(2, 2)
    replica = replica_of(nn.Sequential(layer, nn.ReLU(), layer))
    assert replica[0] is replica[2]
    assert replica[0] is not layer


def test_a_replica_may_be_changed_in_place() -> None:
    """A replica's forward may update its tensors; the module's and the other replicas' stay as they are."""

    def forget(module: Call, x: Tensor) -> Tensor:
        with torch.no_grad():
            module.scale.zero_()
        module.count += 1
        return x

    module = Call(forget)
    module.register_buffer("count", torch.zeros(()))
    module.register_buffer("other", torch.zeros(()))
    wrap(module, 0, 1, 1)(torch.ones(2))
    assert module.scale == 1
    assert (module.count, module.other) == (1, 0)


def test_lazy_modules_say_what_they_need() -> None:
    """A module without its shapes cannot be copied: torch's own advice is passed on."""
    with pytest.raises((RuntimeError, ValueError), match="initialize"):
        wrap(nn.LazyLinear(2), 1, 1)(torch.zeros(2, 3))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_torchscript_says_what_to_wrap() -> None:
    """A scripted module is refused with what to do."""
    with pytest.raises(TypeError, match=r"Wrap the nn\.Module it was scripted from"):
        wrap(torch.jit.script(nn.Linear(3, 2)), 1, 1)(torch.zeros(2, 3))


# buffers


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


@given(shards=st.lists(st.sampled_from([0, 2, 3]), min_size=1, max_size=4).filter(any), metered=st.booleans())
def test_running_statistics_are_those_of_the_first_active_device(shards: list[int], metered: bool) -> None:
    """BatchNorm's statistics advance by the first shard, also where GPU 0 has none, and on virtual GPUs."""
    torch.manual_seed(0)
    x, module = vectors(sum(shards)), Normed()
    alone = copy.deepcopy(module)
    alone(x[: next(shard for shard in shards if shard)])
    if metered:
        hardware = resolve_hardware(f"{len(shards)}xRTX3090")
        split = BatchSplit(global_batch_size=sum(shards), accumulation_steps=1, shard_sizes=tuple(shards))
        with hardware.metered():
            loss_of(hardware.wrap(module, split)(x)).backward()
    else:
        loss_of(wrap(module, *shards)(x)).backward()
    torch.testing.assert_close(module.norm.state_dict(), alone.norm.state_dict())
    assert module.norm.num_batches_tracked == 1


def test_statistics_advance_with_gpu0_bsz_0() -> None:
    """GPU 0 without samples still holds the statistics that are saved."""
    module = Normed()
    model = BalancedDataParallel(0, module, ["cpu"] * 3)
    for _ in range(3):
        model(vectors(7))
    assert module.norm.num_batches_tracked == 3
    before = copy.deepcopy(module.norm.state_dict())
    model.eval()(vectors(7))
    torch.testing.assert_close(module.norm.state_dict(), before)


def test_buffers_that_are_replaced_in_forward_are_kept() -> None:
    """A buffer that forward assigns, makes, resizes or drops is so afterwards, as on one device."""

    def forward(module: Call, x: Tensor) -> Tensor:
        module.average = module.average * 0.5 + x.mean() * module.scale
        module.made = x.detach().mean(0, keepdim=True)
        module.grown = torch.cat([module.grown, torch.ones(1)])
        module.dropped = None
        return x

    modules = [Call(forward), Call(forward)]
    for module in modules:
        for name, value in {
            "average": torch.ones(()),
            "made": None,
            "grown": torch.zeros(1),
            "dropped": torch.ones(1),
        }.items():
            module.register_buffer(name, value)
    x = torch.arange(3.0)
    modules[0](x)
    wrap(modules[1], 0, 3)(x)
    torch.testing.assert_close(dict(modules[1].named_buffers()), dict(modules[0].named_buffers()))


def test_what_forward_takes_out_of_a_replica_stays_in_the_module() -> None:
    """Its submodules, that is, with their buffers; those beside it are written back all the same."""

    def forward(module: Call, x: Tensor) -> Tensor:
        module.body[1].num_batches_tracked += 1
        module.body[0] = None
        return x * module.scale

    module = Call(forward)
    module.body = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
    inner = list(module.body)
    wrap(module, 0, 3)(torch.ones(3))
    assert list(module.body) == inner
    assert [int(norm.num_batches_tracked) for norm in inner] == [0, 1]


def test_a_buffer_saved_for_somebodys_backward_stays_usable() -> None:
    """Writing statistics back does not invalidate a graph outside that used an untouched buffer."""
    module = Call(lambda module, x: x * module.scale)
    module.register_buffer("weights", torch.tensor([2.0, 3.0]))
    regulariser = (module.scale * module.weights).sum()
    (wrap(module, 0, 2)(torch.ones(2)).sum() + regulariser).backward()
    assert module.scale.grad == 2 + 5


class Captures(nn.Module):
    """Installs a hook at its first forward and marks itself, as models do that collect their layers' outputs."""

    collecting: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        if not getattr(self, "is_hooked", False):
            self.layer.register_forward_hook(lambda module, args, output: Captures.collecting.append(output))
            self.is_hooked = True
        Captures.collecting = captured = []
        return self.layer(x), captured


def hooks_of(module: nn.Module) -> int:
    return sum(len(table) for child in module.modules() for table in hook_tables_of(child).values())


@pytest.mark.parametrize("engine", ["window", "torch"])
@pytest.mark.parametrize("shards", [(1, 2, 2), (0, 2, 3), (5,)])
def test_hooks_that_a_forward_installs_work_and_do_not_pile_up(engine: str, shards: tuple[int, ...]) -> None:
    """However often it is called, each forward captures once; the module has one hook at most, its own."""
    module = Captures()
    model = BalancedDataParallel(module=module, shard_sizes=shards, device_ids=["cpu"] * len(shards), engine=engine)
    for _ in range(3):
        output, captured = model(vectors(5))
        assert len(captured) == 1
        assert torch.equal(captured[0], output)
        output.sum().backward()
        assert hooks_of(module) <= 1
    output, captured = module(vectors(5))
    assert len(captured) == 1


def test_every_table_of_hooks_is_known() -> None:
    """What nn.Module keeps hooks in, state_dict's aside: should torch add a table, look here first."""
    tables = {name for name, value in nn.Module().__dict__.items() if "_hooks" in name and "state_dict" not in name}
    assert set(hook_tables_of(nn.Module())) == tables


def test_a_hook_that_comes_or_goes_within_a_window_is_seen() -> None:
    """Copies serve a whole window of micro-batches; a hook registered meanwhile runs from the next forward on."""
    module, calls = mlp(), []
    model = wrap(module, 2, 3)
    with model.no_sync():
        model(vectors(5)).sum().backward()
        handle = module.register_forward_hook(lambda *_: calls.append(1))
        model(vectors(5)).sum().backward()
        assert len(calls) == 2
        handle.remove()
        model(vectors(5)).sum().backward()
    assert len(calls) == 2


def test_forward_hooks_run_in_every_replica() -> None:
    """Hooks of the inner module see each shard; those of the wrapper see the whole."""
    module = mlp()
    model = wrap(module, 1, 2)
    inner: list[int] = []
    outer: list[int] = []
    backward: list[int] = []
    module.register_forward_hook(lambda replica, inputs, output: inner.append(len(output)))
    module[2].register_full_backward_hook(lambda replica, given, grads: backward.append(len(grads[0])))
    model.register_forward_hook(lambda wrapper, inputs, output: outer.append(len(output)))
    model(vectors(3)).sum().backward()
    assert (inner, outer, sorted(backward)) == ([1, 2], [3], [1, 2])


# nothing stays


@pytest.mark.parametrize("link", [None, ThreadedLink(3)], ids=["one thread", "threads"])
@pytest.mark.parametrize("trains", [True, False])
def test_nothing_is_kept_after_a_step(link: Link | None, trains: bool) -> None:
    """Replicas, their tensors and activations are gone with the output: no reference cycle holds them.

    Parameters that were copied out for an evaluation serve the next one.
    """
    born: list[weakref.ref[Any]] = []

    def forward(module: Call, x: Tensor) -> Tensor:
        hidden = torch.tanh(x * module.scale)
        born.extend(map(weakref.ref, (module, x, hidden, *([module.scale] if trains else []))))
        return hidden * 2

    module = Call(forward)
    model = wrap(module, 1, 2, 2, link=link)
    with without_garbage_collection():
        output = model(vectors(5)) if trains else torch.no_grad()(model)(vectors(5))
        if trains:
            output.sum().backward()
        del output
        alive = [ref() for ref in born]
        assert {id(thing) for thing in alive if thing is not None} <= {id(module), id(module.scale)}
    assert len(born) == (12 if trains else 9)


@pytest.mark.parametrize("link", [None, ThreadedLink(3)], ids=["one thread", "threads"])
@pytest.mark.parametrize("failing", [[0], [2], [0, 2], [0, 1, 2]], ids=str)
def test_nothing_is_kept_after_an_error(link: Link | None, failing: list[int]) -> None:
    """Once the exception is dropped, so is every tensor of the replicas, failed or not, without a collection."""
    born: list[weakref.ref[Any]] = []

    def forward(module: Call, x: Tensor) -> Tensor:
        hidden = torch.tanh(x * module.scale)
        born.extend(map(weakref.ref, (x, hidden)))
        if int(x[0]) in failing:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return hidden

    model = wrap(Call(forward), 1, 1, 1, link=link)
    with without_garbage_collection():
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.arange(3.0))
        assert [ref() for ref in born if ref() is not None] == []
    assert born


def test_virtual_gpus_are_empty_after_an_error() -> None:
    """Bytes on every virtual GPU return to the baseline once the exception is gone."""

    def forward(module: Call, x: Tensor) -> Tensor:
        hidden = torch.tanh(x * module.scale)
        if len(x) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return hidden

    hardware = resolve_hardware("3xRTX3090")
    with hardware.metered(), without_garbage_collection():
        split = BatchSplit(global_batch_size=4, accumulation_steps=1, shard_sizes=(1, 1, 2))
        model = hardware.wrap(Call(forward), split)
        baseline = hardware.allocated_bytes()
        with pytest.raises(torch.OutOfMemoryError):
            model(vectors(4))
        assert hardware.allocated_bytes() == baseline
