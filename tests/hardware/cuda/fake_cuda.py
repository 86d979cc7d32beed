"""torch.cuda over cards that a test describes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from splittune.units import GIB


@dataclass
class FakeCard:
    """One card: what the driver and torch's allocator hold of it, in bytes."""

    name: str = "NVIDIA GeForce RTX 3090"
    total: int = 24 * GIB
    reserved: int = 0
    peak_reserved: int = 0
    allocated: int = 0
    peak_allocated: int = 0
    alloc_retries: int = 0
    outside: int = 0
    fraction: float = 1.0

    @property
    def used(self) -> int:
        return self.reserved + self.outside


class FakeEvent:
    """Notes what its device's clock says when it is recorded."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool) -> None:
        assert enable_timing, "an event without timing cannot be asked for it"
        self.cuda = cuda
        self.device: int | None = None
        self.at_ms = 0.0

    def record(self, stream: int) -> None:
        self.device, self.at_ms = stream, self.cuda.now_ms[stream]
        self.cuda.num_recorded += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.device is not None, "an event that was never recorded has no time"
        assert self.device == end.device, "events of two devices cannot be compared"
        return end.at_ms - self.at_ms


class FakeCuda:
    """The functions of torch.cuda that CudaHardware calls, and a log of those that act."""

    def __init__(self, cards: list[FakeCard], current: int = 0) -> None:
        self.cards = cards
        self.current = current
        self.log: list[tuple[str, int | None]] = []
        self.now_ms = [0.0] * len(cards)  # how far each card has come; a test moves it
        self.num_recorded = 0
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

    def memory_allocated(self, device: torch.device) -> int:
        return self.cards[device.index].allocated

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {"num_ooms": 99, "num_alloc_retries": self.cards[device.index].alloc_retries}

    def current_stream(self, device: torch.device) -> int:
        return device.index

    def Event(self, *, enable_timing: bool = False) -> FakeEvent:  # noqa: N802  torch's name
        return FakeEvent(self, enable_timing)

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

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put these functions in the place of torch.cuda's, and of a backward pass on these cards."""
        for name in vars(FakeCuda):
            if not name.startswith("_") and name != "install":
                monkeypatch.setattr(torch.cuda, name, getattr(self, name), raising=False)
        monkeypatch.setattr(
            "splittune.hardware.cuda.hardware.finish_backward",
            lambda devices: self.log.append(("finish_backward", len(devices))),
        )
