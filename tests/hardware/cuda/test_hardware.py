from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from splittune.errors import DeviceError, NvmlUnavailableError
from splittune.hardware import Hardware
from splittune.hardware.base import Device, DeviceMemory
from splittune.hardware.cuda import CudaHardware
from splittune.hardware.cuda.nvml import NvmlMemory
from splittune.parallel import BalancedDataParallel
from splittune.split import BatchSplit
from splittune.units import GIB, MIB
from tests.hardware.cuda.fake_cuda import FakeCard, FakeCuda

CUDA = [torch.device("cuda", index) for index in range(4)]


class FakeNvml:
    """Answers as the driver would, until it is broken; `questions` are the devices asked for."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.is_broken = False
        self.reserve = 300 * MIB  # what the driver keeps, which cudaMemGetInfo leaves out of the total
        self.questions: list[tuple[str | None, str | None]] = []

    def device_memory(self, *, uuid: str | None, pci_bus_id: str | None) -> NvmlMemory:
        self.questions.append((uuid, pci_bus_id))
        if self.is_broken:
            raise NvmlUnavailableError("NVML went away.")
        card = self.cuda.cards[0] if uuid is None else self.cuda.cards[int(uuid[len("GPU-0000000")])]
        return NvmlMemory(total_bytes=card.total + self.reserve, free_bytes=card.total - card.used)


@pytest.fixture
def install(monkeypatch):
    """Puts fake cards in the place of torch.cuda's, function by function."""

    def installed(*cards: FakeCard, current: int = 0) -> FakeCuda:
        fake = FakeCuda(list(cards), current)
        fake.install(monkeypatch)
        return fake

    return installed


class Traveller(nn.Linear):
    """A module that notes where it was sent instead of going there."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.sent_to: list[torch.device] = []

    def to(self, device):
        self.sent_to.append(device)
        return self


def even(num_devices: int) -> BatchSplit:
    return BatchSplit.even(global_batch_size=8, accumulation_steps=1, num_devices=num_devices)


def test_it_is_a_hardware(install):
    """CudaHardware has what the protocol asks for, and says that its times are measured."""
    install(FakeCard())
    hardware: Hardware = CudaHardware(CUDA[:1])
    wanted = {name for name in vars(Hardware) if not name.startswith("_")}
    assert wanted <= set(dir(hardware))
    assert hardware.is_modelled is False
    assert hardware.spec is None
    assert hardware.busy_s() is None, "nothing is counted outside metered"


def test_devices_are_described_in_the_order_given(install):
    """The first device named is index 0; name, size and UUID come from torch, the UUID spelt as NVML does."""
    install(FakeCard(name="A", total=8 * GIB), FakeCard(name="B", total=16 * GIB))
    assert CudaHardware([CUDA[1], CUDA[0]]).devices == (
        Device(
            index=0,
            name="B",
            torch_device="cuda:1",
            total_bytes=16 * GIB,
            uuid="GPU-00000001-1111-2222-3333-444444444444",
        ),
        Device(
            index=1,
            name="A",
            torch_device="cuda:0",
            total_bytes=8 * GIB,
            uuid="GPU-00000000-1111-2222-3333-444444444444",
        ),
    )


def test_a_torch_without_uuids_leaves_them_unknown(install):
    """Where torch tells no UUID it is None, and NVML is asked by bus."""
    cuda = install(FakeCard())
    cuda.uuids = False
    nvml = FakeNvml(cuda)
    hardware = CudaHardware(CUDA[:1], nvml=nvml)
    hardware.memory()
    assert hardware.devices[0].uuid is None
    assert nvml.questions == [(None, "00000000:3A:00.0")]


def test_a_torch_without_bus_numbers_leaves_them_unknown(install):
    """Where torch tells no PCI numbers NVML is asked by UUID alone."""
    cuda = install(FakeCard())
    cuda.buses = False
    nvml = FakeNvml(cuda)
    CudaHardware(CUDA[:1], nvml=nvml).memory()
    assert nvml.questions == [("GPU-00000000-1111-2222-3333-444444444444", None)]


def test_cuda_without_a_number_is_the_current_device(install):
    """torch.device("cuda") means the current card, and is called by its number from then on."""
    install(FakeCard(), FakeCard(), current=1)
    assert CudaHardware([torch.device("cuda")]).devices[0].torch_device == "cuda:1"


def test_no_device_is_refused(install):
    """An empty list is answered with how to name one, or to leave it out."""
    install(FakeCard())
    with pytest.raises(DeviceError, match=r'no device is named: expected at least one, such as devices=\["cuda:0"\]'):
        CudaHardware([])


def test_a_device_that_is_not_cudas_is_refused(install):
    """Another kind of device is named with its place, and virtual GPUs are offered."""
    install(FakeCard())
    with pytest.raises(DeviceError, match=r"devices\[1\] is 'cpu': expected a CUDA device .* devices=\"4xRTX3090\""):
        CudaHardware([CUDA[0], torch.device("cpu")])


def test_a_card_that_is_not_there_is_refused(install):
    """A number beyond the visible cards is answered with those that are."""
    install(FakeCard(), FakeCard())
    with pytest.raises(DeviceError) as caught:
        CudaHardware([CUDA[0], CUDA[3]])
    assert str(caught.value) == (
        "devices[1] is 'cuda:3', which is not there: 2 CUDA devices are visible (cuda:0, cuda:1). "
        "Name one that is; CUDA_VISIBLE_DEVICES decides what is visible."
    )


@pytest.mark.parametrize("device", [torch.device("cuda"), CUDA[0]])
def test_a_machine_without_cuda_is_told_apart(install, device):
    """Where there is no card at all, the error says so instead of failing inside torch."""
    install()
    with pytest.raises(DeviceError, match=r"which is not there: (this torch .* is built without CUDA|no CUDA device)"):
        CudaHardware([device])


def test_a_card_named_twice_is_refused(install):
    """A card has one share: naming it twice, under either name, is an error that shows both places."""
    install(FakeCard(), FakeCard())
    with pytest.raises(DeviceError, match=r"devices\[2\] is 'cuda:0', which devices\[0\] names already"):
        CudaHardware([CUDA[0], CUDA[1], CUDA[0]])
    with pytest.raises(DeviceError, match=r"devices\[1\] is 'cuda:0', which devices\[0\] names already"):
        CudaHardware([torch.device("cuda"), CUDA[0]])


def test_memory_outside_is_what_nvml_sees_beyond_our_allocator(install):
    """Outside = NVML's used - torch's reserved, per device; total is NVML's, peaks are torch's."""
    cuda = install(
        FakeCard(reserved=19 * GIB, peak_reserved=20 * GIB, peak_allocated=18 * GIB, outside=1 * GIB),
        FakeCard(reserved=2 * GIB, peak_reserved=3 * GIB, peak_allocated=2 * GIB, outside=5 * GIB),
    )
    nvml = FakeNvml(cuda)
    first, second = CudaHardware(CUDA[:2], nvml=nvml).memory()
    assert first == DeviceMemory(
        device=0,
        total_bytes=24 * GIB + nvml.reserve,
        outside_bytes=1 * GIB + nvml.reserve,
        peak_allocated_bytes=18 * GIB,
        peak_reserved_bytes=20 * GIB,
    )
    assert first.headroom_bytes == 3 * GIB
    assert (second.device, second.outside_bytes) == (1, 5 * GIB + nvml.reserve)


def test_each_reading_follows_its_own_card(install):
    """With the order turned round, index 0 is the second card's figures."""
    cuda = install(FakeCard(outside=1 * GIB), FakeCard(outside=7 * GIB))
    nvml = FakeNvml(cuda)
    nvml.reserve = 0
    readings = CudaHardware([CUDA[1], CUDA[0]], nvml=nvml).memory()
    assert [(memory.device, memory.outside_bytes) for memory in readings] == [(0, 7 * GIB), (1, 1 * GIB)]


def test_outside_is_never_negative(install):
    """NVML read before our allocator grew shows less used than we hold: outside is then 0."""
    cuda = install(FakeCard(reserved=4 * GIB, peak_reserved=4 * GIB, outside=-1 * GIB))
    nvml = FakeNvml(cuda)
    nvml.reserve = 0
    assert CudaHardware(CUDA[:1], nvml=nvml).memory()[0].outside_bytes == 0


def test_a_capped_process_has_the_headroom_of_its_cap(install):
    """With half of 24 GiB allowed, 2 GiB outside and 10 GiB at the peak, 2 GiB are left: 12 - 10."""
    cuda = install(FakeCard(reserved=9 * GIB, peak_reserved=10 * GIB, outside=2 * GIB, fraction=0.5))
    nvml = FakeNvml(cuda)
    nvml.reserve = 0
    memory = CudaHardware(CUDA[:1], nvml=nvml).memory()[0]
    assert memory.total_bytes == 14 * GIB
    assert memory.headroom_bytes == 2 * GIB


@given(
    fraction=st.floats(0.01, 1.0),
    outside=st.integers(0, 24 * GIB),
    peak=st.integers(0, 24 * GIB),
)
def test_headroom_is_the_smaller_of_cap_and_device(fraction, outside, peak):
    """For any cap: the headroom is the cap's or the device's, whichever is less, and the total never grows."""
    card = FakeCard(peak_reserved=peak, outside=outside, fraction=fraction)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda = FakeCuda([card])
        cuda.install(monkeypatch)
        nvml = FakeNvml(cuda)
        nvml.reserve = 0
        memory = CudaHardware(CUDA[:1], nvml=nvml).memory()[0]
    allowed = int(fraction * card.total) if fraction < 1 else card.total
    assert memory.headroom_bytes == min(allowed - peak, card.total - outside - peak)
    assert memory.total_bytes <= card.total


def test_a_torch_that_does_not_tell_its_cap_has_none(install, monkeypatch):
    """Where torch has no get_per_process_memory_fraction the whole device counts."""
    cuda = install(FakeCard(fraction=0.5))
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    nvml = FakeNvml(cuda)
    nvml.reserve = 0
    assert CudaHardware(CUDA[:1], nvml=nvml).memory()[0].total_bytes == 24 * GIB


def test_without_nvml_torch_tells_and_it_is_said_once(install, caplog):
    """An NVML that cannot be reached is logged once; readings go on with torch's device-wide figures."""
    cuda = install(FakeCard(reserved=2 * GIB, outside=3 * GIB), FakeCard(outside=4 * GIB))
    nvml = FakeNvml(cuda)
    nvml.is_broken = True
    hardware = CudaHardware(CUDA[:2], nvml=nvml)
    with caplog.at_level(logging.WARNING, logger="splittune"):
        readings = [hardware.memory() for _ in range(3)]
    assert [memory.outside_bytes for memory in readings[-1]] == [3 * GIB, 4 * GIB]
    assert readings[-1][0].total_bytes == 24 * GIB
    assert len(nvml.questions) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "NVML went away. Meanwhile torch.cuda.mem_get_info tells what other programs hold."
    ]


def test_nvml_dying_half_way_does_not_end_the_search(install, caplog):
    """Readings before and after NVML's end agree on what is outside and left, but for the driver's reserve."""
    cuda = install(FakeCard(reserved=2 * GIB, peak_reserved=2 * GIB, outside=3 * GIB))
    nvml = FakeNvml(cuda)
    hardware = CudaHardware(CUDA[:1], nvml=nvml)
    before = hardware.memory()[0]
    nvml.is_broken = True
    after = hardware.memory()[0]
    nvml.is_broken = False
    again = hardware.memory()[0]
    assert before.headroom_bytes == after.headroom_bytes == 19 * GIB
    assert before.outside_bytes == after.outside_bytes + nvml.reserve
    assert again == after, "the source does not change back: trials are compared"
    assert len(caplog.records) == 1


def test_nvml_is_connected_only_when_memory_is_read(install, monkeypatch):
    """Making the hardware asks NVML nothing; by default it opens its own connection at the first reading."""
    install(FakeCard(outside=1 * GIB))
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes the import fail
    hardware = CudaHardware(CUDA[:1])
    assert hardware.memory()[0].outside_bytes == 1 * GIB


def test_peaks_are_reset_on_every_device(install):
    """A reset is for all devices of the job, and for no other."""
    cuda = install(FakeCard(), FakeCard(), FakeCard())
    CudaHardware([CUDA[2], CUDA[0]]).reset_peaks()
    assert cuda.log == [("reset", 2), ("reset", 0)]


def test_the_clock_is_read_when_every_device_has_finished(install, monkeypatch):
    """Every device is synchronised before the time is taken."""
    cuda = install(FakeCard(), FakeCard())
    monkeypatch.setattr("time.perf_counter", lambda: cuda.log.append(("read", None)) or 12.5)
    assert CudaHardware(CUDA[:2]).clock() == 12.5
    assert cuda.log == [("synchronize", 0), ("synchronize", 1), ("read", None)]


def test_recovery_collects_then_frees_then_resets(install, monkeypatch):
    """A failed backward ends first; garbage goes before the cache is emptied, which then holds it; peaks start anew."""
    cuda = install(FakeCard(), FakeCard())
    monkeypatch.setattr(gc, "collect", lambda: cuda.log.append(("collect", None)))
    CudaHardware(CUDA[:2]).recover()
    assert cuda.log == [
        ("finish_backward", 2),
        ("collect", None),
        ("synchronize", 0),
        ("synchronize", 1),
        ("empty_cache", None),
        ("reset", 0),
        ("reset", 1),
    ]


def test_recovery_frees_what_hangs_in_cycles(install):
    """A tensor that only a reference cycle holds is gone after recovery."""
    install(FakeCard())
    hardware = CudaHardware(CUDA[:1])
    tensor = torch.zeros(4)
    watch = weakref.ref(tensor)
    cycle = [tensor]
    cycle.append(cycle)
    del tensor, cycle
    hardware.recover()
    assert watch() is None


def test_a_thorough_recovery_frees_workspaces_too(install, monkeypatch):
    """Thoroughly means cuBLAS's workspaces as well, before the cache is emptied; a torch that cannot is no error."""
    cuda = install(FakeCard())
    hardware = CudaHardware(CUDA[:1])
    monkeypatch.setattr(gc, "collect", lambda: cuda.log.append(("collect", None)))
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: cuda.log.append(("workspaces", None)), raising=False
    )
    hardware.recover(thoroughly=True)
    assert [name for name, _ in cuda.log] == [
        "finish_backward",
        "collect",
        "synchronize",
        "workspaces",
        "collect",
        "empty_cache",
        "reset",
    ]
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    hardware.recover(thoroughly=True)
    assert cuda.log[-1] == ("reset", 0)


def test_allocations_and_retries_are_told_device_by_device(install):
    """What tensors hold, and how often the allocator tried again, in the order of the job's devices."""
    install(FakeCard(allocated=3, alloc_retries=1), FakeCard(allocated=5, alloc_retries=0))
    hardware = CudaHardware([CUDA[1], CUDA[0]])
    assert hardware.allocated_bytes() == (5, 3)
    assert hardware.num_alloc_retries() == (0, 1)


def test_free_memory_is_the_drivers(install, monkeypatch):
    """Neither what others hold nor torch's cache is free; what cannot be asked of is unknown, and no error."""
    install(FakeCard(total=100, reserved=60, outside=10), FakeCard(total=200, outside=20))
    hardware = CudaHardware([CUDA[1], CUDA[0]])
    assert hardware.free_bytes() == (180, 30)

    def lost(device):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    assert hardware.free_bytes() is None
    monkeypatch.delattr(torch.cuda, "mem_get_info")
    assert hardware.free_bytes() is None


def test_a_device_without_a_context_has_had_no_retries(install, monkeypatch):
    """Before CUDA begins torch's statistics are empty."""
    install(FakeCard())
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    assert CudaHardware(CUDA[:1]).num_alloc_retries() == (0,)


def test_metering_counts_how_long_devices_work(install):
    """Inside the context the wrapper reports its replicas; it asks nothing of CUDA by itself, and yields nothing."""
    cuda = install(FakeCard(), FakeCard())
    hardware = CudaHardware(CUDA[:2])
    wrapped = hardware.wrap(Traveller(), even(2))
    with hardware.metered() as value:
        assert value is None
        assert cuda.log == []
        assert hardware.busy_s() == (0.0, 0.0)
        assert cuda.log == [("synchronize", 0), ("synchronize", 1)], "events are read once they have happened"
        wrapped.gauge.begin(1, wrapped.module)
        cuda.now_ms[1] += 250
        wrapped.gauge.end(1, None)
        assert hardware.busy_s() == (0.0, 0.25)
    assert hardware.busy_s() is None


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_a_model_is_wrapped_for_its_split(install, num_devices):
    """The model goes to device 0 and the wrapper has the split's shards on the job's devices, in order."""
    install(*[FakeCard()] * 3)
    devices = [CUDA[2], CUDA[0], CUDA[1]][:num_devices]
    model = Traveller()
    wrapped = CudaHardware(devices).wrap(model, even(num_devices))
    assert isinstance(wrapped, BalancedDataParallel)
    assert wrapped.module is model
    assert model.sent_to == [CUDA[2]]
    assert [torch.device(device) for device in wrapped.devices] == devices
    assert wrapped.shard_sizes == even(num_devices).shard_sizes


def test_a_split_for_other_devices_is_refused(install):
    """A split with a share too many names both counts and leaves the model where it is."""
    install(FakeCard(), FakeCard())
    model = Traveller()
    with pytest.raises(DeviceError, match=r"has shares for 3 devices, but there are 2: cuda:0, cuda:1\."):
        CudaHardware(CUDA[:2]).wrap(model, even(3))
    assert model.sent_to == []


def moved_optimizer() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """AdamW with a step behind it, whose parameter is elsewhere: on 'meta', the other device of every machine."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    parameter.grad = torch.ones(3)
    optimizer.step()
    moved = nn.Parameter(torch.ones(3, device="meta"))
    optimizer.param_groups[0]["params"] = [moved]
    optimizer.state[moved] = optimizer.state.pop(parameter)
    return moved, optimizer


def test_an_optimizers_state_follows_its_parameters(install):
    """State left on another device is moved to the parameter's; the step counter stays a host scalar."""
    parameter, optimizer = (
        moved_optimizer()
    )  # its step is torch's own, and would look for a real card behind a fake one
    install(FakeCard())
    CudaHardware(CUDA[:1]).prepare_optimizer(optimizer)
    state = optimizer.state[parameter]
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }
    assert state["step"] == 1


def test_state_inside_lists_is_moved_too(install):
    """An optimizer that keeps a history of tensors has them moved as well."""
    install(FakeCard())
    parameter = nn.Parameter(torch.ones(3, device="meta"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"history": deque([torch.ones(3)]), "num_steps": 1}
    CudaHardware(CUDA[:1]).prepare_optimizer(optimizer)
    assert optimizer.state[parameter]["history"][0].device.type == "meta"


def test_an_optimizer_in_place_is_left_alone(install):
    """State that is where it belongs keeps its tensors and its dtype: loading would cast it."""
    install(FakeCard())
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    master = torch.ones(3, dtype=torch.float32)
    optimizer.state[parameter] = {"master": master, "step": torch.tensor(4.0)}
    optimizer.state["global"] = {"num_steps": 4}
    CudaHardware(CUDA[:1]).prepare_optimizer(optimizer)
    assert optimizer.state[parameter]["master"] is master


def test_an_optimizer_without_state_is_left_alone(install):
    """Before its first step an optimizer has nothing to move."""
    install(FakeCard())
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    CudaHardware(CUDA[:1]).prepare_optimizer(optimizer)
    assert len(optimizer.state) == 0


INSTANCE = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


@pytest.mark.parametrize("name", [INSTANCE, "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", "NVIDIA A30 MIG 1g.6gb+me"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_split_over_a_mig_instance_is_refused(install, name, place):
    """Several devices of which one is a MIG instance are refused: what was named, why, and what to do."""
    names = ["NVIDIA A30", "NVIDIA A30"]
    names[place] = name
    install(*(FakeCard(name=name) for name in names))
    with pytest.raises(DeviceError) as caught:
        CudaHardware(CUDA[:2])
    assert f"the job names 2 devices, and CUDA shows {', '.join(names)}: expected one" in str(caught.value)
    assert "instances cannot copy to one another" in str(caught.value)
    assert 'devices=["cuda:0"]' in str(caught.value)
    assert "nvidia-smi -mig 0" in str(caught.value)


def test_a_second_mig_instance_that_cuda_does_not_show_is_explained(install):
    """CUDA shows one instance only: naming a second is answered with that, not with what is visible."""
    install(FakeCard(name=INSTANCE))
    with pytest.raises(DeviceError, match="CUDA shows a process one instance only"):
        CudaHardware(CUDA[:2])
    with pytest.raises(DeviceError, match=r"'cuda:1', which is not there"):
        CudaHardware(CUDA[1:2])


def test_a_single_mig_instance_is_a_device(install):
    """One instance alone is a card like any other, and so are whole cards whose names merely resemble an instance's."""
    install(FakeCard(name=INSTANCE))
    assert CudaHardware(CUDA[:1]).devices[0].name == INSTANCE
    install(FakeCard(name="MIG Welder 3000"), FakeCard(name="AMIG 1g.5gb"))
    assert len(CudaHardware(CUDA[:2]).devices) == 2


def test_amds_devices_are_read_by_torch_alone(install, monkeypatch, caplog):
    """On AMD's devices NVML is never asked, torch's own figures go, and it is said once."""
    cuda = install(FakeCard(outside=3 * GIB))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    nvml = FakeNvml(cuda)
    with caplog.at_level(logging.INFO, logger="splittune"):
        hardware = CudaHardware(CUDA[:1], nvml=nvml)
        readings = [hardware.memory()[0] for _ in range(2)]
    assert [memory.outside_bytes for memory in readings] == [3 * GIB] * 2
    assert hardware.conditions() is None
    assert hardware.processes() is None
    assert nvml.questions == []
    assert [record.getMessage() for record in caplog.records] == [
        "NVML knows no AMD devices: torch.cuda.mem_get_info tells what other programs hold."
    ]
