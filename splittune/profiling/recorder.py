"""Times and memory peaks of a trial's phases, as they run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Literal, cast

from splittune.hardware.base import DeviceMemory, Hardware, largest_readings
from splittune.profiling.measurement import KINDS_OF_MICRO_STEP, Measurement, Outcome
from splittune.split import BatchSplit

Phase = Literal["warm_up", "single_step", "micro_step", "update", "unbroken_round", "whole_step"]
# The phases whose allocator retries count and whose times a trial is judged by.
TIMED: tuple[Phase, ...] = ("micro_step", "update", "unbroken_round", "whole_step")


class Recorder:
    """Times and memory of a trial: wrap each part in `phase`, then ask for the `measurement`.

    The clock waits for every device before and after a phase, so its time is all of its work. Peaks
    start anew with each phase. The trial's are the largest of all phases, warm-up included:
    training goes through that as well.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self.times_s: dict[Phase, list[float]] = defaultdict(list)
        self.notes: list[str] = []
        self.loss_exponent: int | None = None
        self._busy_s: dict[Phase, list[list[float]]] = defaultdict(list)
        self._copied_s: list[list[float]] = []
        self._num_alloc_retries = 0
        self._memory: dict[Phase, list[tuple[DeviceMemory, ...]]] = defaultdict(list)
        self._resting: list[tuple[DeviceMemory, ...]] = []
        self._before_backward: list[tuple[int, ...]] = []
        self._phase: Phase | None = None

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        self._phase = name
        self._hardware.reset_peaks()
        if name == "micro_step":
            self._resting.append(self._hardware.memory())  # nothing has run since: the peak is what is held at rest
        # what takes time to ask for is asked before the clock, and after it
        num_retries_before = sum(self._hardware.num_alloc_retries())
        busy_before, copied_before = self._hardware.busy_s(), self._hardware.copied_s()
        start_s = self._hardware.clock()
        yield
        self.times_s[name].append(self._hardware.clock() - start_s)
        busy_after, copied_after = self._hardware.busy_s(), self._hardware.copied_s()
        if name in ("micro_step", "unbroken_round") and busy_before is not None and busy_after is not None:
            busy = [after - before for before, after in zip(busy_before, busy_after, strict=True)]
            if any(busy):  # else the job reached its model by another way, and nothing was seen
                self._busy_s[name].append(busy)
        if name == "micro_step" and copied_before is not None and copied_after is not None:
            copied = [after - before for before, after in zip(copied_before, copied_after, strict=True)]
            self._copied_s.append(copied)
        if name in TIMED:
            self._num_alloc_retries += sum(self._hardware.num_alloc_retries()) - num_retries_before
        self._memory[name].append(self._hardware.memory())

    def before_backward(self) -> None:
        """Note what is allocated now, between a forward and its backward; not while a real clock runs.

        Asking takes a while, so on cards it is done in the warm-up, whose steps are those that are timed.
        """
        if self._hardware.is_modelled or self._phase not in TIMED:
            self._before_backward.append(self._hardware.allocated_bytes())

    def drop_latest(self, **phases: int) -> None:
        """Forget the latest times of these phases, so many of each: what ran was no step. Its peaks of memory stay."""
        for name, count in phases.items():
            del self.times_s[cast("Phase", name)][-count:]
            if name == "micro_step":
                del self._copied_s[-count:]

    def measurement(self, split: BatchSplit) -> Measurement:
        """What was recorded of `split`, with outcome `OK`, and what was noted in `notes` and `loss_exponent`.

        Rounds are of at most `KINDS_OF_MICRO_STEP` micro-steps and an update; with each of them,
        if with any, goes an unbroken one.
        """
        micro_steps, updates = self.times_s["micro_step"], self.times_s["update"]
        if updates and len(micro_steps) == KINDS_OF_MICRO_STEP * len(updates):
            micro_steps, updates = _typical_and_once_a_step(micro_steps, updates)
        return Measurement(
            split=split,
            outcome=Outcome.OK,
            micro_step_times_s=tuple(micro_steps),
            update_times_s=tuple(updates),
            unbroken_round_times_s=tuple(self.times_s["unbroken_round"]),
            whole_step_times_s=tuple(self.times_s["whole_step"]),
            memory=self._peaks(),
            device_busy_s=self._device_busy_s(min(split.accumulation_steps, KINDS_OF_MICRO_STEP)),
            device_copied_s=self._device_copied_s(),
            num_alloc_retries=self._num_alloc_retries,
            notes=tuple(self.notes),
            loss_exponent=self.loss_exponent,
        )

    def _device_busy_s(self, num_micro_steps: int) -> tuple[float, ...] | None:
        """The median micro-step's; of unbroken rounds, which are as training is, where those ran.

        Worked: devices that worked 0.9 s and 0.6 s of an unbroken round of 3 micro-steps worked 0.3
        s and 0.2 s of one. A micro-step that is timed alone begins with idle devices, which wait
        for the host between their first kernels: there it may have been 0.35 s.
        """
        rounds = self._busy_s["unbroken_round"]
        micro_steps = [[busy / num_micro_steps for busy in each] for each in rounds] or self._busy_s["micro_step"]
        return tuple(map(median, zip(*micro_steps, strict=True))) if micro_steps else None

    def _device_copied_s(self) -> tuple[float, ...] | None:
        """The median typical micro-step's: parameters and gradients are copied in others, once a step."""
        copied = self._copied_s
        if len(copied) == KINDS_OF_MICRO_STEP * len(self.times_s["update"]):
            copied = copied[1::KINDS_OF_MICRO_STEP]
        return tuple(map(median, zip(*copied, strict=True))) if copied else None

    def _peaks(self) -> tuple[DeviceMemory, ...]:
        readings = [reading for phase in self._memory.values() for reading in phase]
        return tuple(
            replace(
                device,
                micro_step_peak_bytes=self._peak("micro_step", index),
                update_peak_bytes=self._peak("update", index),
                single_step_peak_bytes=self._peak("single_step", index),
                resting_bytes=max((reading[index].peak_allocated_bytes for reading in self._resting), default=None),
                before_backward_bytes=max((reading[index] for reading in self._before_backward), default=None),
            )
            for index, device in enumerate(largest_readings(readings))
        )

    def _peak(self, phase: Phase, index: int) -> int | None:
        return max((reading[index].peak_allocated_bytes for reading in self._memory[phase]), default=None)


def _typical_and_once_a_step(micro_steps: list[float], updates: list[float]) -> tuple[list[float], list[float]]:
    """The typical micro-steps, and what a step has but once.

    Rounds are of a first, a typical and a last micro-step. A step has its update once, and what the
    first and the last micro-step take beyond a typical one for copying parameters out and bringing
    gradients home. Worked: micro-steps of 5, 3 and 4 ms and an update of 2 ms give 3 ms a
    micro-step, and 2 + (5 + 4 - 2 x 3) = 5 ms a step.
    """
    firsts, typical, lasts = micro_steps[0::3], micro_steps[1::3], micro_steps[2::3]
    rounds = zip(firsts, typical, lasts, updates, strict=True)
    return typical, [update + max(0.0, first + last - 2 * middle) for first, middle, last, update in rounds]
