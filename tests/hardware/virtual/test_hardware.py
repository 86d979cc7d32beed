from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from splittune.errors import DeviceError
from splittune.hardware import Hardware, is_out_of_memory, resolve_hardware
from splittune.hardware.virtual import VirtualHardware, find_gpu
from splittune.hardware.virtual.catalog import GPUS
from splittune.hardware.virtual.hardware import CUDA_CONTEXT_BYTES, VirtualLink
from splittune.split import BatchSplit
from splittune.training import Snapshot
from splittune.units import GIB, KIB, MIB

RTX3090 = find_gpu("RTX3090")


def cards(num_devices: int = 3) -> VirtualHardware:
    return VirtualHardware([RTX3090] * num_devices)


def split(*shard_sizes: int) -> BatchSplit:
    return BatchSplit(global_batch_size=sum(shard_sizes), accumulation_steps=1, shard_sizes=shard_sizes)


class Recurrent(nn.Module):
    """An LSTM on embedded tokens, part of it checkpointed, with a table that is kept as a plain attribute."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, sparse=sparse)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
        self.table = None

    def forward(self, tokens):
        if self.table is None or self.table.device != tokens.device:
            self.table = torch.arange(tokens.shape[1]).float().cos()[:, None]
        hidden, _ = self.lstm(self.embed(tokens) * self.table)
        return checkpoint(self.mlp, hidden.mean(1), use_reentrant=False)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.ConvTranspose2d(4, 4, 2), nn.Flatten(), nn.Linear(64, 3)
    ).to(memory_format=torch.channels_last)


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(20, 8), layer, nn.Flatten(), nn.Linear(40, 3))


TOKENS = partial(torch.randint, 0, 20, (9, 5))
JOBS = {
    "recurrent": (Recurrent, TOKENS),
    "sparse": (partial(Recurrent, sparse=True), TOKENS),
    "convolutions": (convolutions, partial(torch.randn, 9, 2, 5, 5)),
    "attention": (attention, TOKENS),
}


def takes_hardware(hardware: Hardware) -> Hardware:
    return hardware


def test_it_is_hardware():
    """It has all that the profiler asks of hardware, and says that its times are modelled."""
    hardware = takes_hardware(cards(2))
    promised = [name for name in vars(Hardware) if not name.startswith("_")]
    assert all(hasattr(hardware, name) for name in promised)
    assert hardware.is_modelled
    assert [(d.index, d.name, d.torch_device, d.total_bytes) for d in hardware.devices] == [
        (0, "RTX3090", "cpu", 24 * GIB),
        (1, "RTX3090", "cpu", 24 * GIB),
    ]


OCCUPIED = st.one_of(st.just(0), st.integers(0, 2 * GIB), st.integers(0, 512 * MIB).map(lambda n: n | 1))


@given(st.lists(st.tuples(st.sampled_from(GPUS), OCCUPIED), min_size=1, max_size=6))
def test_its_specification_makes_the_same_hardware_again(devices):
    """Any GPUs, with any number of bytes occupied, come back to the byte: a plan names what it was made on."""
    hardware = VirtualHardware([gpu for gpu, _ in devices], occupied_bytes=[occupied for _, occupied in devices])
    again = resolve_hardware(hardware.spec)
    assert isinstance(again, VirtualHardware)
    assert (again.gpus, again.outside_bytes) == (hardware.gpus, hardware.outside_bytes)
    assert again.spec == hardware.spec


def test_gpus_of_ones_own_have_no_specification():
    """A name alone would bring the catalog's GPU back, with other figures."""
    smaller = dataclasses.replace(RTX3090, total_bytes=2 * GIB)
    assert VirtualHardware([RTX3090, smaller]).spec is None
    assert VirtualHardware([RTX3090] * 2).spec == "2xRTX3090"


def test_what_others_hold_and_the_context_are_outside():
    """Capacity is total - occupied - context, and the headroom starts from there."""
    hardware = VirtualHardware([RTX3090] * 2, occupied_bytes=[5 * GIB, 0])
    with hardware.metered():
        first, second = hardware.memory()
    assert (first.outside_bytes, second.outside_bytes) == (5 * GIB + CUDA_CONTEXT_BYTES, CUDA_CONTEXT_BYTES)
    assert first.headroom_bytes == 24 * GIB - 5 * GIB - CUDA_CONTEXT_BYTES
    assert (first.peak_allocated_bytes, first.peak_reserved_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), 'no virtual GPU: expected at least one, e.g. devices="4xRTX3090".'),
        (([RTX3090] * 2, [0]), "occupied_bytes has 1 entries for 2 devices: give one each."),
        (
            ([RTX3090], [24 * GIB]),
            r"virtual GPU 0 \(RTX3090\): 24.00 GiB occupied \+ 273.8 MiB for the CUDA context of",
        ),
        (([RTX3090], [-1]), "leaves nothing. Occupy less, from 0 bytes up."),
    ],
)
def test_devices_that_cannot_be_are_refused(arguments, message):
    """The error has the arithmetic and what to do."""
    gpus, *occupied = arguments
    with pytest.raises(DeviceError, match=message):
        VirtualHardware(gpus, occupied_bytes=occupied[0] if occupied else None)


def test_a_split_for_other_devices_is_refused():
    """The number of shards is the number of devices."""
    with pytest.raises(DeviceError, match="is for 2 devices, and there are 3"):
        cards(3).wrap(nn.Linear(1, 1), split(1, 1))


@pytest.mark.parametrize("ask", ["clock", "busy_s", "link_bytes", "allocated_bytes", "reset_peaks", "memory"])
def test_figures_are_had_inside_metered_only(ask):
    """Outside nothing is counted, and the error says how to."""
    with pytest.raises(DeviceError, match=r"not metered here: do this inside `with hardware.metered\(\):`"):
        getattr(cards(), ask)()


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("shard_sizes", [(3, 2, 4), (0, 5, 4), (9, 0, 0)], ids=str)
@pytest.mark.parametrize("is_metered", [True, False], ids=["metered", "not metered"])
def test_gradients_are_exact_and_every_byte_comes_back(job, shard_sizes, is_metered):
    """Metered or not, gradients are those of the plain model; after a step only the model is left on the devices."""
    make, make_inputs = JOBS[job]
    torch.manual_seed(0)
    model, inputs = make(), make_inputs()
    model(inputs).square().mean().backward()
    expected = [parameter.grad.to_dense().clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    model.table = None
    hardware = cards()
    wrapper = hardware.wrap(model, split(*shard_sizes))
    with hardware.metered() if is_metered else nullcontext():
        for _ in range(2):
            before = hardware.allocated_bytes() if is_metered else None
            wrapper(inputs).square().mean().backward()
            grads = [parameter.grad.to_dense().tolist() for parameter in model.parameters()]
            model.zero_grad(set_to_none=True)
            model.table = None
            if is_metered:
                assert hardware.allocated_bytes() == before
                assert before[1:] == (0, 0)
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(torch.tensor(grad), reference, rtol=1e-4, atol=1e-6)


PARAMETER_BYTES = 4 * MIB


def wide() -> nn.Module:
    """Two parameters of 2 MiB each, and small activations."""
    return nn.Sequential(nn.Linear(32, 16 * KIB, bias=False), nn.Linear(16 * KIB, 32, bias=False))


def test_devices_hold_what_data_parallel_makes_them_hold():
    """Device i holds a copy of the parameters and its gradients until the backward pass is over,
    and device 0 the state."""
    hardware, model = cards(), wide()
    optimizer = torch.optim.AdamW(model.parameters())
    with hardware.metered():
        wrapper = hardware.wrap(model, split(1, 1, 1))
        hardware.prepare_optimizer(optimizer)
        assert hardware.allocated_bytes() == (PARAMETER_BYTES, 0, 0)
        wrapper(torch.ones(3, 32)).sum().backward()
        peaks = [memory.peak_allocated_bytes / PARAMETER_BYTES for memory in hardware.memory()]
        assert 2 <= peaks[1] < 3.2
        assert 2 <= peaks[2] < 3.2
        hardware.reset_peaks()
        optimizer.step()
        assert hardware.memory()[0].peak_allocated_bytes >= 5 * PARAMETER_BYTES  # with the update's temporaries
        optimizer.zero_grad(set_to_none=True)
        assert hardware.allocated_bytes() == (3 * PARAMETER_BYTES, 0, 0)


def test_state_that_an_optimizer_brings_along_is_on_device_0():
    """A user's optimizer that has trained already fills GPU 0 from the start, not from its next update on."""
    hardware, model = cards(), wide()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with hardware.metered():
        wrapper = hardware.wrap(model, split(1, 1, 1))
        hardware.prepare_optimizer(optimizer)
        assert hardware.allocated_bytes() == (3 * PARAMETER_BYTES, 0, 0)
    with hardware.metered():
        assert hardware.allocated_bytes() == (PARAMETER_BYTES, 0, 0)
    assert wrapper.module is model


def test_a_model_that_is_no_longer_wrapped_takes_no_memory():
    """What was wrapped for an earlier trial does not fill, or overfill, GPU 0 in the next."""
    occupied = RTX3090.total_bytes - CUDA_CONTEXT_BYTES - 3 * MIB
    hardware, model = VirtualHardware([RTX3090], occupied_bytes=[occupied]), wide()
    for _ in range(2):
        with hardware.metered():
            with pytest.raises(torch.OutOfMemoryError, match=r"allows this process 3\.0 MiB") as caught:
                hardware.wrap(model, split(1))
            assert is_out_of_memory(caught.value)
        del caught
        hardware.recover()


def test_metered_may_be_nested_and_starts_at_zero():
    """An inner `metered` goes on counting for the outer; the next one starts anew, with the wrapped model there."""
    hardware = cards()
    wrapper = hardware.wrap(wide(), split(1, 1, 1))
    times = []
    for _ in range(2):
        with hardware.metered():
            assert hardware.clock() == 0
            assert hardware.allocated_bytes() == (PARAMETER_BYTES, 0, 0)
            with hardware.metered():
                wrapper(torch.ones(3, 32))
            times.append((hardware.clock(), hardware.busy_s(), hardware.link_bytes()))
    assert times[0] == times[1]
    assert times[0][0] > 0


def test_recover_hands_cached_memory_back():
    """Afterwards only what is alive is reserved, and the peaks start from there; outside `metered` it does no harm."""
    hardware = cards()
    hardware.recover()
    with hardware.metered():
        wrapper = hardware.wrap(wide(), split(1, 1, 1))
        wrapper(torch.ones(3, 32)).sum().backward()
        wrapper.zero_grad(set_to_none=True)
        assert hardware.memory()[1].peak_reserved_bytes > 0
        hardware.recover()
        assert [memory.peak_reserved_bytes for memory in hardware.memory()] == [20 * MIB, 0, 0]


def test_recover_frees_what_a_failed_backward_left_behind():
    """Autograd's queue of this thread keeps gradients of replicas that were ready to run;
    afterwards it keeps nothing."""
    hardware, model = cards(), wide()
    with hardware.metered():
        wrapper = hardware.wrap(model, split(1, 1, 1))
        hidden = []
        model[0].register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
        loss = wrapper(torch.ones(3, 32)).sum()
        hidden[1].register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        del loss
        hidden.clear()
        hardware.recover()
        model.zero_grad(set_to_none=True)
        assert hardware.allocated_bytes() == (PARAMETER_BYTES, 0, 0)


def test_two_runs_give_identical_figures():
    """Clocks, bytes over the links and peaks repeat to the last digit, whatever was computed."""

    def figures(seed: int):
        torch.manual_seed(seed)
        hardware, model = cards(), Recurrent()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with hardware.metered():
            wrapper = hardware.wrap(model, split(1, 4, 4))
            hardware.prepare_optimizer(optimizer)
            for _ in range(3):
                wrapper(TOKENS()).sum().backward()
                optimizer.step()
            return hardware.clock(), hardware.busy_s(), hardware.link_bytes(), hardware.memory()

    assert figures(0) == figures(1)


@pytest.mark.parametrize(
    ("options", "foreach"),
    [({}, True), ({"foreach": False}, False), ({"fused": True}, None), ({"differentiable": True}, None)],
    ids=str,
)
def test_the_update_is_the_one_that_torch_chooses_on_gpus(options, foreach):
    """Multi-tensor unless the user chose otherwise; the snapshot of the optimizer's state undoes it."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    before = dict(optimizer.param_groups[0])
    snapshot = Snapshot(model, optimizer)
    cards().prepare_optimizer(optimizer)
    assert optimizer.param_groups[0]["foreach"] == foreach
    snapshot.restore()
    assert optimizer.param_groups[0] == before
    other = torch.optim.LBFGS(model.parameters())
    cards().prepare_optimizer(other)
    assert "foreach" not in other.param_groups[0]


def test_copies_keep_the_order_of_their_memory():
    """A replica's parameter is laid out as the original: channels last or transposed; an expanded one is made dense."""
    link = VirtualLink(cards())
    last, transposed = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(3, 4).t()
    for tensor in (last, transposed, torch.ones(3, 4)):
        assert link.copy(tensor, 1).stride() == tensor.stride()
    assert link.copy(torch.ones(1).expand(3, 4), 1).untyped_storage().nbytes() == 48


def test_a_further_module_lives_on_gpu_0() -> None:
    """What is adopted belongs to GPU 0 while it is metered, gradients too, and is charged there once."""
    hardware, critic = resolve_hardware("2xT4"), nn.Linear(256, 256)
    critic.weight.grad = torch.zeros(256, 256)
    hardware.adopt(critic)  # nothing is counted outside
    with hardware.metered():
        assert hardware.allocated_bytes() == (0, 0)
        for _ in range(2):
            hardware.adopt(critic)
        assert hardware.allocated_bytes() == (2 * 4 * 256 * 256 + 4 * 256, 0)
        hardware.adopt(nn.Sequential(nn.Linear(256, 256)))  # of a tree each module by itself
        assert hardware.allocated_bytes() == (2 * 4 * 256 * 256 + 4 * 256, 0)


def test_reading_the_clock_changes_no_time():
    """What is timed in parts takes as long together as unwatched: nobody waits for the devices in between."""

    def seconds(num_readings):
        hardware = resolve_hardware("2xT400-4GB")
        with hardware.metered():
            model = hardware.wrap(nn.Linear(64, 64), split(4, 4))
            for number in range(8):
                model(torch.ones(8, 64)).sum().backward()
                if number < num_readings:
                    hardware.clock()
            return hardware.clock()

    assert seconds(8) == seconds(0)
