"""A card's memory read by other ways than the profiler's: the allocator's own trace, and the whole card, sampled."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from unittest import mock

import torch

from splittune.profiling import profiler
from splittune.profiling.recorder import Phase, Recorder

SAMPLED_EVERY_S = 0.002
# The allocator gives blocks of multiples of this; its trace tells what was asked for.
ROUNDED_TO_BYTES = 512
MAX_EVENTS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A phase of a trial, in microseconds of the system's clock, and the seconds that the profiler's clock gave it."""

    phase: Phase
    begin_us: float
    end_us: float
    duration_s: float


@contextmanager
def watched_phases() -> Iterator[list[Window]]:
    """The phases of every trial measured inside, as they come."""
    windows: list[Window] = []

    class Watched(Recorder):
        @contextmanager
        def phase(self, name: Phase) -> Iterator[None]:
            begin_us = time.time_ns() / 1e3
            with super().phase(name):
                yield
            windows.append(
                Window(phase=name, begin_us=begin_us, end_us=time.time_ns() / 1e3, duration_s=self.times_s[name][-1])
            )

    with mock.patch.object(profiler, "Recorder", Watched):
        yield windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The largest sums over a window; what was freed and not yet reused counts as reserved."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(slots=True)
class Trace:
    """What the allocator wrote down of one device: every block and every segment, as they came and went."""

    events: Sequence[Mapping[str, Any]] = ()
    allocated_before_bytes: int = 0
    reserved_before_bytes: int = 0
    problem: str = ""
    """Why there is none."""

    def covers(self, windows: Sequence[Window]) -> bool:
        """Whether something was written down during the windows; else `problem` says what is wrong."""
        if not self.problem and not any(
            windows[0].begin_us <= event.get("time_us", 0) <= windows[-1].end_us for event in self.events
        ):
            self.problem = f"none of {len(self.events)} events lies within the trial: the clocks differ"
        return not self.problem

    def peaks(self, windows: Sequence[Window]) -> list[Peak]:
        """The peak in each window, what was held when it began included; windows are in order and do not overlap."""
        allocated, reserved = self.allocated_before_bytes, self.reserved_before_bytes
        at, peaks = 0, []
        for window in windows:
            while at < len(self.events) and self.events[at].get("time_us", 0) < window.begin_us:
                allocated, reserved = _after(self.events[at], allocated, reserved)
                at += 1
            most_allocated, most_reserved = allocated, reserved
            while at < len(self.events) and self.events[at].get("time_us", 0) <= window.end_us:
                allocated, reserved = _after(self.events[at], allocated, reserved)
                most_allocated, most_reserved = max(most_allocated, allocated), max(most_reserved, reserved)
                at += 1
            peaks.append(Peak(allocated_bytes=most_allocated, reserved_bytes=most_reserved))
        return peaks


def _after(event: Mapping[str, Any], allocated: int, reserved: int) -> tuple[int, int]:
    action, size = event.get("action"), int(event.get("size", 0))
    if action == "alloc":
        allocated += _rounded(size)
    elif action == "free_requested":  # the allocator's own count goes down here, before other streams are done
        allocated -= _rounded(size)
    elif action in ("segment_alloc", "segment_map"):
        reserved += size
    elif action in ("segment_free", "segment_unmap"):
        reserved -= size
    return allocated, reserved


def _rounded(size: int) -> int:
    return max(1, -(-size // ROUNDED_TO_BYTES)) * ROUNDED_TO_BYTES


@contextmanager
def traced(device: torch.device) -> Iterator[Trace]:
    """The allocator's trace of what runs inside, complete once the block is left.

    Recording it is private to torch; where it cannot be had, the trace is empty and `problem` says why.
    """
    trace = Trace()
    if device.type != "cuda":
        trace.problem = "virtual hardware has no allocator of torch's"
        yield trace
        return
    trace.allocated_before_bytes = torch.cuda.memory_allocated(device)
    trace.reserved_before_bytes = torch.cuda.memory_reserved(device)
    begin_us = time.time_ns() / 1e3
    try:
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MAX_EVENTS)
    except (AttributeError, TypeError, RuntimeError) as error:
        trace.problem = f"torch records no history here: {error}"
        yield trace
        return
    try:
        yield trace
        try:
            events = torch.cuda.memory._snapshot()["device_traces"][device.index or 0]
            since = [event for event in events if event.get("time_us", 0) >= begin_us]  # none of an earlier recording
            trace.events = sorted(since, key=lambda event: event["time_us"])
        except (AttributeError, KeyError, IndexError, TypeError, RuntimeError) as error:
            trace.problem = f"torch's snapshot could not be read: {type(error).__name__}: {error}"
    finally:
        torch.cuda.memory._record_memory_history(None)


def blocks_held(device: torch.device) -> tuple[int, int] | None:
    """Bytes of live blocks and of segments now, added up from ``torch.cuda.memory_snapshot()``; None without CUDA."""
    if device.type != "cuda":
        return None
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == (device.index or 0)]
    live = sum(
        block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"
    )
    return live, sum(segment["total_size"] for segment in segments)


@dataclass(slots=True)
class CardSamples:
    """Readings of the whole card, by the runtime, from a thread of its own."""

    used_bytes: list[int] = field(default_factory=list)
    outside_bytes: list[int] = field(default_factory=list)
    """Used less what our allocator held an instant later."""
    least_free_bytes: int | None = None
    problem: str = ""

    @property
    def most_used_bytes(self) -> int | None:
        return max(self.used_bytes, default=None)

    @property
    def typical_outside_bytes(self) -> float | None:
        return median(self.outside_bytes) if self.outside_bytes else None


@contextmanager
def sampled(device: torch.device, every_s: float = SAMPLED_EVERY_S) -> Iterator[CardSamples]:
    """Read the whole card's memory again and again while the block runs; nothing is read on virtual hardware."""
    samples, is_over = CardSamples(), threading.Event()

    def read() -> None:
        try:
            while not is_over.wait(every_s):
                free_bytes, total_bytes = torch.cuda.mem_get_info(device)
                held = torch.cuda.memory_reserved(device)
                samples.used_bytes.append(total_bytes - free_bytes)
                samples.outside_bytes.append(max(0, total_bytes - free_bytes - held))
                least = samples.least_free_bytes
                samples.least_free_bytes = free_bytes if least is None else min(least, free_bytes)
        except RuntimeError as error:
            samples.problem = str(error)

    if device.type != "cuda":
        samples.problem = "virtual hardware has no runtime to ask"
        yield samples
        return
    thread = threading.Thread(target=read, name="gpu-samples", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()
