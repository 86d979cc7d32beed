"""Hardware with a scripted clock and scripted memory, which writes down what was asked of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from torch import nn, optim

from splittune.hardware.base import Device, DeviceConditions, DeviceMemory
from splittune.parallel import BalancedDataParallel
from splittune.split import BatchSplit

TOTAL_BYTES, OUTSIDE_BYTES = 1000, 100


def memory(device: int, peak: int, outside: int = OUTSIDE_BYTES) -> DeviceMemory:
    """`peak` bytes allocated and 10 more reserved, of 1,000."""
    return DeviceMemory(
        device=device,
        total_bytes=TOTAL_BYTES,
        outside_bytes=outside,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=peak + 10,
    )


@dataclass(kw_only=True)
class FakeHardware:
    """Two cards. Each phase takes the next of `durations_s`, and each reading of memory the next of `peaks`.

    What a test's job does to the cards it writes into `allocated`, `alloc_retries`, `others_hold` and `throttled`, one
    entry a card.
    """

    durations_s: Iterable[float] = field(default_factory=lambda: repeat(1.0))
    peaks: Iterable[tuple[int, int]] = field(default_factory=lambda: repeat((200, 100)))
    outside: Iterable[int] = field(default_factory=lambda: repeat(OUTSIDE_BYTES))
    busy: Iterable[tuple[float, float]] | None = None
    is_modelled: bool = False
    located: int | None = None
    on_recover: Callable[[], None] = lambda: None
    log: list[str] = field(default_factory=list)
    allocated: list[int] = field(default_factory=lambda: [0, 0])
    alloc_retries: list[int] = field(default_factory=lambda: [0, 0])
    others_hold: list[int] = field(default_factory=lambda: [0, 0])
    free: tuple[int, ...] | None = None
    throttled: list[tuple[str, ...]] | None = None

    spec = None
    devices = tuple(Device(index=index, name="fake", torch_device="cpu", total_bytes=TOTAL_BYTES) for index in range(2))

    def __post_init__(self) -> None:
        self._now_s, self._num_clock_reads = 0.0, 0
        self._busy_s, self._num_busy_reads = (0.0, 0.0), 0
        self._durations_s, self._peaks, self._outside = iter(self.durations_s), iter(self.peaks), iter(self.outside)
        self._busy = None if self.busy is None else iter(self.busy)

    def wrap(self, model: nn.Module, split: BatchSplit, **options: Any) -> BalancedDataParallel:
        self.log.append("wrap")
        return BalancedDataParallel(module=model, shard_sizes=split.shard_sizes, device_ids=["cpu", "cpu"])

    @contextmanager
    def metered(self) -> Iterator[None]:
        self.log.append("metered")
        try:
            yield
        finally:
            self.log.append("unmetered")

    def adopt(self, module: nn.Module) -> None:
        self.log.append(f"adopt {type(module).__name__}")

    def prepare_optimizer(self, optimizer: optim.Optimizer) -> None:
        self.log.append(f"prepare {type(optimizer).__name__}")

    def clock(self) -> float:
        """The second of two readings comes one duration later."""
        self._num_clock_reads += 1
        if self._num_clock_reads % 2 == 0:
            self._now_s += next(self._durations_s)
        return self._now_s

    def busy_s(self) -> tuple[float, ...] | None:
        if self._busy is None:
            return None
        self._num_busy_reads += 1
        if self._num_busy_reads % 2 == 0:
            self._busy_s = tuple(s + more for s, more in zip(self._busy_s, next(self._busy), strict=True))
        return self._busy_s

    def copied_s(self) -> tuple[float, ...] | None:
        return None

    def reset_peaks(self) -> None:
        self.log.append("reset_peaks")

    def memory(self) -> tuple[DeviceMemory, ...]:
        self.log.append("memory")
        outside = next(self._outside)
        peaks = next(self._peaks)
        return tuple(memory(device, peaks[device], outside + self.others_hold[device]) for device in range(2))

    def allocated_bytes(self) -> tuple[int, ...]:
        return tuple(self.allocated)

    def free_bytes(self) -> tuple[int, ...] | None:
        return self.free

    def num_alloc_retries(self) -> tuple[int, ...]:
        return tuple(self.alloc_retries)

    def conditions(self) -> tuple[DeviceConditions, ...] | None:
        if self.throttled is None:
            return None
        return tuple(DeviceConditions(throttle_reasons=reasons) for reasons in self.throttled)

    def locate(self, error: BaseException) -> int | None:
        return self.located

    def recover(self, *, thoroughly: bool = False) -> None:
        how = "recover thoroughly" if thoroughly else "recover"
        self._num_clock_reads = self._num_busy_reads = 0  # a phase that failed was not read a second time
        self.log.append(how if sys.exc_info()[0] is None else f"{how}, an exception in flight")
        self.on_recover()

    def told(self, *names: str) -> list[str]:
        """The entries of the log that are among `names`, in order."""
        return [entry for entry in self.log if entry in names]
