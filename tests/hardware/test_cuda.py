from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from splittune.errors import DeviceError, NvmlUnavailableError
from splittune.hardware import Hardware
from splittune.hardware.base import Device, DeviceMemory
from splittune.hardware.cuda import CudaHardware
from splittune.hardware.nvml import NvmlMemory
from splittune.parallel import BalancedDataParallel
from splittune.split import BatchSplit
from splittune.units import GIB, MIB

CUDA = [torch.device("cuda", index) for index in range(4)]


@dataclass
class FakeCard:
    """One card: what the driver and torch's allocator hold of it, in bytes."""

    name: str = "NVIDIA GeForce RTX 3090"
    total: int = 24 * GIB
    reserved: int = 0
    peak_reserved: int = 0
    peak_allocated: int = 0
    outside: int = 0
    fraction: float = 1.0

    @property
    def used(self) -> int:
        return self.reserved + self.outside


class FakeCuda:
    """The functions of torch.cuda that CudaHardware calls, and a log of those that act."""

    def __init__(self, cards: list[FakeCard], current: int = 0) -> None:
        self.cards = cards
        self.current = current
        self.log: list[tuple[str, int | None]] = []
        self.uuids = True
        self.buses = True

    def is_available(self) -> bool:
        return bool(self.cards)

    def device_count(self) -> int:
        return len(self.cards)

    def current_device(self) -> int:
        return self.current

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        card = self.cards[device.index]
        properties = SimpleNamespace(name=card.name, total_memory=card.total)
        if self.uuids:
            properties.uuid = f"0000000{device.index}-1111-2222-3333-444444444444"
        if self.buses:
            properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id = 0, 0x3A + device.index, 0
        return properties

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        card = self.cards[device.index]
        return card.total - card.used, card.total

    def memory_reserved(self, device: torch.device) -> int:
        return self.cards[device.index].reserved

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.cards[device.index].peak_allocated

    def max_memory_reserved(self, device: torch.device) -> int:
        return self.cards[device.index].peak_reserved

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return self.cards[device.index].fraction

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.log.append(("reset", device.index))

    def synchronize(self, device: torch.device) -> None:
        self.log.append(("synchronize", device.index))

    def empty_cache(self) -> None:
        self.log.append(("empty_cache", None))


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
        for name in vars(FakeCuda):
            if not name.startswith("_"):
                monkeypatch.setattr(torch.cuda, name, getattr(fake, name), raising=False)
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
    assert hardware.busy_s() is None


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
        for name in vars(FakeCuda):
            if not name.startswith("_"):
                monkeypatch.setattr(torch.cuda, name, getattr(cuda, name), raising=False)
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
    """Garbage goes first, so that its memory is in the cache that is emptied; peaks start anew at the end."""
    cuda = install(FakeCard(), FakeCard())
    monkeypatch.setattr(gc, "collect", lambda: cuda.log.append(("collect", None)))
    CudaHardware(CUDA[:2]).recover()
    assert cuda.log == [
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


def test_metering_leaves_cuda_alone(install):
    """Real devices always count: the context turns nothing on, and yields nothing."""
    cuda = install(FakeCard())
    with CudaHardware(CUDA[:1]).metered() as value:
        assert value is None
    assert cuda.log == []


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
    assert [torch.device(device) for device in wrapped.device_ids] == devices
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
    install(FakeCard())
    parameter, optimizer = moved_optimizer()
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
