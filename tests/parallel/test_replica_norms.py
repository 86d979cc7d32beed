"""BatchNorm by the whole micro-batch in the replicas of one process: what one device would have made of it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from splittune.errors import ConfigError
from splittune.fakes import FakeTensorMode
from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.catalog import GPUS
from splittune.parallel import BalancedDataParallel, accumulate
from splittune.split import BatchSplit
from tests.parallel.models import Call, ThreadedLink, assert_same, loss_of
from tests.parallel.normed import NORMS, images, make, one_device, state_after, statistics_of
from tests.parallel.wrapped import steps
from tests.ranks.cases import config_of


def wrap(model: nn.Module, shards: tuple[int, ...], *, in_threads: bool = False) -> BalancedDataParallel:
    link = ThreadedLink(len(shards)) if in_threads else None
    devices = ["cpu"] * len(shards)
    return BalancedDataParallel(module=model, shard_sizes=shards, device_ids=devices, link=link, sync_batch_norm=True)


def step_of(wrapped: BalancedDataParallel, batch: Tensor, sizes: list[int]) -> dict[str, Tensor]:
    micros = ((wrapped, part) for part in accumulate(wrapped, batch.requires_grad_().split(sizes)))
    return state_after(wrapped.module, batch, micros)


def trainable(step: tuple[tuple[int, ...], list[int]]) -> bool:
    """On one device."""
    return min(step[1]) > 1


@pytest.mark.parametrize("in_threads", [False, True], ids=["in turn", "in threads"])
@pytest.mark.parametrize("name", sorted(NORMS))
@settings(max_examples=15, deadline=None)
@given(step=steps().filter(trainable))
def test_a_step_is_that_of_one_device(name: str, in_threads: bool, step: tuple[tuple[int, ...], list[int]]) -> None:
    """Any shards, zeros and single samples included, any micro-batches: outputs, gradients, inputs', statistics."""
    shards, sizes = step
    model, batch = make(name), images(sum(sizes))
    expected = one_device(copy.deepcopy(model), batch, sizes)
    assert_same(step_of(wrap(model, shards, in_threads=in_threads), batch, sizes), expected, 1e-12)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_in_float32_and_channels_last_too(memory_format: torch.memory_format) -> None:
    """To 1e-5, over two steps of the same wrapper; a share of nothing is none."""
    model, batch = make("two in a row", torch.float32, memory_format), images(20, torch.float32)
    batch = batch.contiguous(memory_format=memory_format)
    other, wrapped = copy.deepcopy(model), wrap(model, (10, 0, 3))
    for _ in range(2):
        expected = one_device(other, batch, [12, 8])
        assert_same(step_of(wrapped, batch, [12, 8]), expected, 1e-5)


def test_in_half_precision_statistics_are_in_float32() -> None:
    """Under autocast maps are bfloat16; running statistics are one device's to float32's accuracy."""
    model, batch = make("2d", torch.float32), images(12, torch.float32)
    other, wrapped = copy.deepcopy(model), wrap(model, (1, 4, 7))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = other(batch), wrapped(batch)
        loss_of(expected.float()).backward()
        loss_of(got.float()).backward()
    assert_same(statistics_of(model), statistics_of(other), 1e-6)
    grads = ({name: each.grad for name, each in module.named_parameters()} for module in (model, other))
    assert_same(*grads, 2e-2)  # bfloat16 has 8 bits


def test_the_users_module_is_as_it_was() -> None:
    """The same layers of the same classes, whose hooks run once a replica; nothing of it is in the state."""
    model = make("2d")
    before, seen = {name: id(each) for name, each in model.named_modules()}, []
    model.norm.register_forward_hook(lambda module, inputs, _: seen.append((type(module), len(inputs[0]))))
    keys, attributes = list(model.state_dict()), set(vars(model.norm))
    wrap(model, (2, 3))(images(5)).sum().backward()
    assert seen == [(nn.BatchNorm2d, 2), (nn.BatchNorm2d, 3)]
    assert {name: id(each) for name, each in model.named_modules()} == before
    assert (list(model.state_dict()), set(vars(model.norm))) == (keys, attributes)


def test_evaluation_waits_for_nobody() -> None:
    """Running statistics need no exchange; what normalises by its batch in evaluation too does so by the whole."""
    for name in ("2d", "without running statistics"):
        model, batch = make(name).eval(), images(5)
        with torch.no_grad():
            assert_same({"out": wrap(model, (2, 3))(batch)}, {"out": model(batch)}, 1e-12)


def test_a_single_sample_in_all_is_refused_as_torch_does() -> None:
    """Two samples on two devices train; one value a channel in all does not."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 4), nn.BatchNorm1d(4)).double()
    wrapped = wrap(model, (1, 1))
    wrapped(images(2)).sum().backward()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        wrapped(images(1))


class Failing(nn.Module):
    """Fails in the replica whose samples say so, before or after its BatchNorm."""

    def __init__(self, error: BaseException, *, after: bool) -> None:
        super().__init__()
        self.norm, self.error, self.after = nn.BatchNorm2d(2), error, after

    def forward(self, x: Tensor) -> Tensor:
        fails = bool((x < -100).any())
        if fails and not self.after:
            raise self.error
        x = self.norm(x)
        if fails:
            raise self.error
        return self.norm(x).flatten(1)


@pytest.mark.parametrize("in_threads", [False, True], ids=["in turn", "in threads"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("failing", [0, 3, 6])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), KeyError("k")], ids=["oom", "bug"])
def test_one_replicas_failure_sends_all_home(error: Exception, failing: int, after: bool, in_threads: bool) -> None:
    """The failing replica's own error is raised, whichever waits for it, and the next batch trains."""
    wrapped = wrap(Failing(error, after=after), (2, 2, 3), in_threads=in_threads)
    batch = images(7, torch.float32)
    bad = batch.clone()
    bad[failing] -= 1000
    with pytest.raises(type(error)) as raised:
        wrapped(bad)
    assert raised.value is error
    loss_of(wrapped(batch)).backward()


@pytest.mark.parametrize("in_threads", [False, True], ids=["in turn", "in threads"])
@pytest.mark.parametrize("skips", ["first", "other"])
def test_replicas_that_part_are_told(skips: str, in_threads: bool) -> None:
    """A replica that skips a layer which others wait at, or comes to another one, is an error that names both."""

    def forward(module: Call, x: Tensor) -> Tensor:
        if bool((x > 100).any()):
            return x if skips == "first" else module.other(x)
        return module.norm(x)

    model = Call(forward)
    model.norm, model.other = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    batch = images(6, torch.float32)
    batch[5] += 1000
    with pytest.raises(RuntimeError, match=r"active replica \d .* waits for it at BatchNorm (norm|other)"):
        wrap(model, (2, 2, 2), in_threads=in_threads)(batch)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_in_a_checkpoint_it_is_refused(use_reentrant: bool) -> None:
    """What runs it again in backward has no other replica to ask: an error that says so, not other gradients."""
    model = Call(lambda module, x: checkpoint(module.norm, x, use_reentrant=use_reentrant))
    model.norm = nn.BatchNorm2d(2)
    batch = images(6, torch.float32).requires_grad_()
    output = wrap(model, (2, 4))(batch)
    with pytest.raises(RuntimeError, match="BatchNorm norm was run again after its replica's forward"):
        output.sum().backward()


def test_the_gradient_of_the_gradient_is_refused() -> None:
    """As of SyncBatchNorm there is none, and no wrong one."""
    batch = images(6).requires_grad_()
    output = wrap(make("2d"), (2, 4))(batch)
    (grad,) = torch.autograd.grad(loss_of(output), batch, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


class Own(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Renamed(nn.BatchNorm2d):
    """One that leaves forward alone."""


def compiled() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm2d(2))
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("build", "options", "match"),
    [
        (lambda: nn.Sequential(Own(2)), {}, "layer 0 is a Own, whose forward is its own"),
        (compiled, {}, "the module is compiled"),
        (lambda: make("2d"), {"engine": "torch"}, "engine='torch'"),
    ],
    ids=["own forward", "compiled", "torch's engine"],
)
def test_what_cannot_be_done_is_said_when_it_is_wrapped(
    build: Callable[[], nn.Module], options: dict[str, str], match: str
) -> None:
    """Before anything runs, by name."""
    with pytest.raises(ConfigError, match=match):
        BalancedDataParallel(
            module=build(), shard_sizes=(2, 2), device_ids=["cpu"] * 2, sync_batch_norm=True, **options
        )


def test_what_is_compiled_later_is_refused_at_its_call() -> None:
    """Also where the wrapper itself compiles it."""
    wrapped = wrap(nn.Sequential(nn.BatchNorm2d(2)), (2, 2))
    wrapped.compile(backend="eager")
    with pytest.raises(ConfigError, match="the module is compiled"):
        wrapped(images(4, torch.float32))


@pytest.mark.parametrize("norm", [Renamed, nn.SyncBatchNorm])
def test_subclasses_with_torchs_forward_are_synchronised(norm: type[nn.BatchNorm2d]) -> None:
    """Torch's SyncBatchNorm too, which by itself refuses the CPU."""
    wrapped, batch = wrap(nn.Sequential(norm(2)), (1, 4)), images(5, torch.float32)
    assert_same({"out": wrapped(batch)}, {"out": nn.BatchNorm2d(2)(batch)})


def metered_step(sync_batch_norm: bool) -> tuple[nn.Module, dict[str, Tensor], list[float], list[object]]:
    """Two steps on two virtual GPUs: the module, its state, the modelled time of each, and memory after each."""
    gpu = next(gpu for gpu in GPUS if gpu.name == "RTX3090")
    hardware, model, batch = VirtualHardware([gpu, gpu]), make("two in a row"), images(8)
    split = BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(3, 5))
    times, memory, state = [], [], {}
    with hardware.metered():
        wrapped = hardware.wrap(model, split, sync_batch_norm=sync_batch_norm)
        for _ in range(2):
            model.zero_grad(set_to_none=False)
            begun = hardware.clock()
            state = step_of(wrapped, batch, [8])
            times.append(hardware.clock() - begun)
            batch.grad = None
            memory.append([each.peak_allocated_bytes for each in hardware.memory()])
    return model, state, times, memory


def test_virtual_gpus_count_it_and_are_exact() -> None:
    """The ledger follows replicas that run in turn: the same figures every time, more time than without."""
    model = make("two in a row")
    batch, expected = images(8), {}
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        expected = one_device(model, batch, [8])
    _, state, times, memory = metered_step(sync_batch_norm=True)
    assert_same(state, expected, 1e-12)
    assert metered_step(sync_batch_norm=True)[2:] == (times, memory)
    assert min(times) > max(metered_step(sync_batch_norm=False)[2])


def test_the_loop_of_a_config_is_one_devices() -> None:
    """`config.wrap(model, sync_batch_norm=True)`, on the virtual cards it names: 3 micro-batches of 8."""
    gpu = next(gpu for gpu in GPUS if gpu.name == "RTX3090")
    config = config_of(2, "dp", devices=VirtualHardware([gpu, gpu]).devices, virtual_spec="2xRTX3090")
    model, batch = make("two in a row"), images(24)
    expected = one_device(copy.deepcopy(model), batch, [8, 8, 8])
    wrapped = config.wrap(model, sync_batch_norm=True)
    batch.requires_grad_()
    micros = ((wrapped, micro.batch) for micro in config.micro_batches(batch, wrapped))
    assert_same(state_after(model, batch, micros), expected, 1e-12)


def modelled_step_s(sync_batch_norm: bool) -> float:
    """Of 32 images of 56 x 56 on each of four virtual GPUs, on shapes alone."""
    gpu = next(gpu for gpu in GPUS if gpu.name == "RTX3090")
    hardware, split = (
        VirtualHardware([gpu] * 4),
        BatchSplit.even(global_batch_size=128, accumulation_steps=1, num_devices=4),
    )
    with FakeTensorMode(), hardware.metered():
        layers = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(4)]
        wrapped = hardware.wrap(nn.Sequential(*layers), split, sync_batch_norm=sync_batch_norm)
        begun = hardware.clock()
        wrapped(torch.empty(128, 64, 56, 56)).mean().backward()
        return hardware.clock() - begun


def test_devices_work_at_the_same_time_in_backward_too() -> None:
    """Modelled, on fake tensors: a third more at most, not one device after the other, which would be twice as much."""
    assert 1 < modelled_step_s(sync_batch_norm=True) / modelled_step_s(sync_batch_norm=False) < 4 / 3
