"""Every device's peak memory at splits not yet tried: an interval that all agreeing models make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from splittune.profiling.measurement import Outcome
from splittune.search.arrays import FloatArray
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models import POOR_FIT
from splittune.search.models.memory_bounds import are_on_slope
from splittune.search.models.memory_phases import Phases, fit_phases
from splittune.search.models.memory_readings import (
    MICRO_BATCH,
    QUANTUM_BYTES,
    REPEATABILITY,
    SHARE,
    MemoryReadings,
    rows_of,
)
from splittune.split import BatchSplit

# Slopes of two devices agree to this part: a sample makes the same tensors on each, but kernels
# take other workspaces. A choice. Larger, and what one device taught bounds others less.
SLOPE_TOLERANCE = 0.1
# The same between devices of as much memory, which mostly are of one model. Was 0.05 before
# searches of drawn problems had it lowered.
SAME_MEMORY_SLOPE_TOLERANCE = 0.02
# A prediction that a trial exceeded raises the margin by this many times the error. A choice above
# 1: what was once too low may be so by more at larger sizes.
WIDENING = 1.5
# One that ran out of memory raises it by no less than this. A choice.
LEAST_WIDENING = 0.2
# Predictions that come true lower the margin, at once to no less than this. A choice. Smaller, and one
# good prediction makes up for many bad ones.
SETTLED_MARGIN = 0.3
# The margin is no more than this. A choice: growth that no trial has shown is at most twice what is
# foretold. Larger, and one surprise ends a search for larger sizes.
MOST_MARGIN = 1.0
# A trial tells something of the model if it was held likely to exceed the largest peak by this
# part; no less than this part is taken for unseen. A choice. Larger, and the margin settles later.
REACH = 0.03
# What is not known takes at least this part of the most that it can take, to all of it. A choice: of splits
# that were said to run with 16, 49, 75 and 96 %, 16, 49, 57 and 80 % did in searches of drawn problems.
# Smaller, and more risks are taken.
LEAST_PART = 0.25
# A model that does not fit is told where a device was filled to more than this part. A choice: on
# emptier devices it decides nothing.
FULL_ENOUGH = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Peak reserved bytes of every device, (N, n) each: at least, most likely, and at most."""

    least: FloatArray
    likely: FloatArray
    most: FloatArray
    most_after_cache_flush: FloatArray
    """`most` once the allocator, running short, has handed back its free blocks: more is an OOM."""

    def feasibility_below(self, limits: FloatArray) -> FloatArray:
        """(N,) probability to stay within `limits`, (n,), on the device where it is least.

        Below the likeliest is a half, or its part of the interval if that is more, evenly. Above it, where
        nothing was seen of what may grow, the logarithm of the excess is even between `LEAST_PART` of the
        most that it can be and that. Worked: 6 to 12 GiB, likeliest 8, stays below 7 with 0.25, below 9
        with 0.5, and below 10 GiB with ``0.5 + 0.5 log(2 / 1) / log(4 / 1) = 0.75``.
        """
        low, high = self.least, np.maximum(self.most, self.least)
        top, x = np.clip(self.likely, low, high), np.clip(limits, low, high)
        below = np.maximum((top - low) / np.maximum(high - low, 1.0), 0.5)
        rising = below * (x - low) / np.maximum(top - low, 1.0)
        part = np.maximum(x - top, 1.0) / np.maximum(high - top, 1.0)
        above = below + (1 - below) * np.clip(1 - np.log(part) / np.log(LEAST_PART), 0.0, 1.0)
        within = np.where(x < top, rising, np.where(x >= high, 1.0, above))
        return np.asarray(np.where(limits < low, 0.0, within).min(axis=1))


class MemoryModel:
    """Bounds on every device's peak memory, from the trials so far.

    In each phase of a step a device's live bytes are ``F + beta s + omega m + gamma [k > 1]``: s is
    its share, m the whole micro-batch (on GPU 0 alone, which gathers outputs), k the accumulation
    steps. The peak is the maximum over phases. Replicas hold the same tensors for a sample, so they
    share their coefficients; GPU 0 shares their beta, unless its trials say otherwise.

    No single line is fitted. All coefficients that agree with the trials make a polytope, and its
    corners give the least and the most at any other split. To agree, coefficients must

    - exceed no peak that was measured,
    - reach the peaks that lie above the flat of the smallest ones, and
    - have an F no less than what is held at rest, nor more than twice that.

    Where no line agrees there are two, see `fit_phases`.

    Worked: one trial that holds 6 GiB with 2 samples, 2 GiB of it at rest, bounds 4 samples by
    proportion: at most ``2 + 2 x (6 - 2) = 10`` GiB, and at least ``4 + 2 x (6 - 4) = 8``. More trials
    narrow the interval. A prediction that failed widens it by a margin: a part of the growth beyond
    the largest trial that demanded no more.

    Args:
        trials: what was measured, oldest first. Until one ran, with its memory read, nothing is
            known to be limited.
        num_devices: how many devices there are.
    """

    def __init__(self, trials: Sequence[JudgedTrial], num_devices: int) -> None:
        self._n = num_devices
        self._readings = MemoryReadings(num_devices)
        self.margin = 0.0
        """How many times the growth that no trial has shown `Interval.most` is raised by, see `MemoryModel`."""
        self._hands_back = True
        """Whether no device has run out of memory that its allocator was to have handed back: in pieces it cannot."""
        self.errors: list[float] = []
        """Of each prediction: measured over most, minus 1, on the device furthest above.

        Oldest first; below 0 where every device kept within.
        """
        self._phases: dict[int, Phases] = {}
        self.observe(trials)

    def observe(self, trials: Iterable[JudgedTrial]) -> None:
        """Learn from further trials, oldest first, after comparing each with its prediction."""
        for trial in trials:
            if self._readings.runs:
                self._check(trial)
            if trial.measurement.memory and trial.measurement.throughput is not None:
                self._readings.runs.append(trial.measurement)
            elif trial.lacks_memory:
                self._readings.failures.append(trial)
            if self._readings.runs:
                self._fit()

    @property
    def budget_bytes(self) -> FloatArray:
        """(n,) bytes each device has for this job: its total less the most that others held.

        Infinite before a trial ran.
        """
        return self._readings.budget_bytes()

    @property
    def knows_rest(self) -> bool:
        """Whether every trial that ran told what is held at rest."""
        return all(memory.resting_bytes is not None for run in self._readings.runs for memory in run.memory)

    def alike(self, device: int) -> tuple[int, ...]:
        """The replicas that held as much as `device` at every equal share, itself among them.

        GPU 0 is alone.
        """
        return self._readings.alike(device)

    @property
    def is_flat(self) -> bool:
        """Whether no size has raised a peak yet, and every device ran with two or more.

        A phase that no batch changes holds more then: the gradients' reduce, or the update.
        """
        each = [self._readings.readings(device) for device in range(self._n)]
        return all(len({r.row[SHARE] for r in one}) > 1 and not any(are_on_slope(one)) for one in each)

    def most_while_flat(self, needed: Interval) -> FloatArray:
        """(N, n) the most that is to be expected where memory `is_flat` and what is held at rest is known.

        What a sample takes is only known to be less than would have been seen, so bounds double with
        the share; `LEAST_PART` of that is reckoned with. Worked: 2 GiB at rest and 10 at most is 4.
        """
        at_rest = [[memory.resting_bytes or 0 for memory in run.memory] for run in self._readings.runs]
        rest = np.minimum(np.min(at_rest, axis=0), needed.most)
        return np.asarray(rest + LEAST_PART * (needed.most - rest))

    def warnings(self) -> tuple[str, ...]:
        """A sentence if the model did not fit; none while every device stayed far from full."""
        budget = self.budget_bytes
        if not any(self._readings.largest_held(device) > FULL_ENOUGH * budget[device] for device in range(self._n)):
            return ()
        apart = REPEATABILITY * max((phases.misfit for phases in self._phases.values()), default=0.0)
        exceeded = [error for error in self.errors if error > POOR_FIT]
        if apart > POOR_FIT:
            nearest = f"no straight lines come nearer to the peaks than {apart:.0%}"
            return (f"The memory model did not fit: {nearest}, so sizes near the limit were approached with care.",)
        if exceeded:
            trials = f"{len(exceeded)} of {len(self.errors)} trials took more than it held possible"
            most = f"by up to {max(exceeded):.0%}"
            return (f"The memory model did not fit: {trials}, {most}; it kept further away from the limit since.",)
        return ()

    def needed(self, steps: FloatArray, shards: FloatArray, micro_batches: FloatArray | None = None) -> Interval:
        """The peaks of N splits: `steps` (N,), `shards` (N, n), `micro_batches` (N,) or sums."""
        if not self._readings.runs:
            none = np.zeros_like(shards)
            return Interval(least=none, likely=none, most=none, most_after_cache_flush=none)
        accumulates = (steps > 1).astype(float)
        sizes = shards.sum(axis=1) if micro_batches is None else micro_batches
        columns = [self._needed_by(device, shards[:, device], sizes, accumulates) for device in range(self._n)]
        least, likely, most, after_flush = (np.stack(bound, axis=1) for bound in zip(*columns, strict=True))
        return Interval(least=least, likely=likely, most=most, most_after_cache_flush=after_flush)

    def _needed_by(
        self, device: int, shares: FloatArray, micro_batches: FloatArray, accumulates: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """The four bounds of `Interval` for one device, (N,) each."""
        readings, phases, overhead = self._readings, self._phases[device], self._overheads[device]
        rows = rows_of(device, shares, micro_batches, accumulates)
        floor_least, floor_most = readings.floors(device, accumulates)
        less, _ = readings.doubt_about_accumulating(device, accumulates)
        # allocated bytes first
        least = np.maximum(phases.lowest(rows) - less, floor_least)
        likely = np.maximum(phases.likely(rows), floor_most)
        # then what the allocator reserves
        held, after_flush = self._most_held(device, shares, micro_batches, accumulates)
        beyond = self.margin * self._unseen(device, shares, micro_batches, held)
        raised = held + beyond
        proven = (1 + REPEATABILITY) * readings.proven(device, shares, micro_batches, accumulates)
        least = least + overhead.least(least)
        most = np.minimum(raised, np.maximum(proven, least))
        bounds = (
            np.minimum(least, most),
            np.minimum(likely + overhead.mean(likely), most),
            most,
            np.minimum(most, after_flush + beyond) if self._hands_back else most,
        )
        idle = (shares == 0) & (device > 0)
        return tuple(np.where(idle, 0.0, bound) for bound in bounds)  # type: ignore[return-value]

    def _most_held(
        self, device: int, shares: FloatArray, micro_batches: FloatArray, accumulates: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """(N,) the most reserved bytes without a margin, and what is left of them after a cache flush."""
        readings, overhead = self._readings, self._overheads[device]
        _, floor = readings.floors(device, accumulates)
        _, more = readings.doubt_about_accumulating(device, accumulates)
        highest = self._phases[device].highest(rows_of(device, shares, micro_batches, accumulates))
        live = np.maximum(highest + more, floor)
        return live + overhead.most(live), live + overhead.after_flush(live)

    def _unseen(self, device: int, shares: FloatArray, micro_batches: FloatArray, held: FloatArray) -> FloatArray:
        """(N,) the part of `held` bytes that no trial has shown; at least `REACH` of them, and `QUANTUM_BYTES`."""
        beyond = held - self._readings.seen(device, shares, micro_batches)
        return np.maximum(beyond, np.maximum(REACH * held, QUANTUM_BYTES))

    # --- fitting ---------------------------------------------------------------------------------

    def _fit(self) -> None:
        self._overheads = [self._readings.allocator_overhead(self.alike(device)) for device in range(self._n)]
        self._phases = {}
        fitted: dict[tuple[int, ...], Phases] = {}
        for group in [*self._readings.same_memory_groups(), (0,)]:
            phases = self._fit_group(group, fitted)
            if phases is not None:
                fitted[group] = phases
                self._phases |= dict.fromkeys(group, phases)
        # a replica that never had a share borrows from the others; where none had, from GPU 0,
        # whose coefficients before omega are those of a replica
        replicas = [group for group in fitted if group != (0,)]
        for device in range(1, self._n):
            if device not in self._phases:
                self._phases[device] = (
                    fitted[self._likest(device, replicas)[0]] if replicas else fitted[0,].of_first(MICRO_BATCH)
                )

    def _fit_group(self, devices: tuple[int, ...], others: Mapping[tuple[int, ...], Phases]) -> Phases | None:
        """The coefficients of a group of devices; None without a reading.

        Its slope is within a tolerance of that of the likest group among the `others`.
        """
        readings = [reading for device in devices for reading in self._readings.readings(device)]
        if not readings:
            return None
        slopes = (-np.inf, np.inf)
        if others:
            likest, has_same_memory = self._likest(devices[0], others)
            tolerance = SAME_MEMORY_SLOPE_TOLERANCE if has_same_memory else SLOPE_TOLERANCE
            corners = others[likest].of_share.corners[:, SHARE]
            slopes = (corners.min() * (1 - tolerance), corners.max() * (1 + tolerance))
        full = [(row, self._live_bytes_when_full(i)) for i in devices for row in self._readings.oom_rows(i)]
        held = [(row, float(peak)) for i in devices for row, peak in self._readings.held_before_failure(i)]
        return fit_phases(
            readings,
            [*full, *held],
            slope_range=slopes,
            largest_budget_bytes=float(self.budget_bytes.max()),
        )

    def _likest(self, device: int, groups: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], bool]:
        """The first of `groups` with a device of as much memory, True; else the first, False."""
        totals, groups = [memory.total_bytes for memory in self._readings.runs[0].memory], list(groups)
        same_memory = [group for group in groups if totals[device] in {totals[other] for other in group}]
        return (same_memory or groups)[0], bool(same_memory)

    def _live_bytes_when_full(self, device: int) -> float:
        """Allocated bytes at which the device's budget is reserved."""
        budget = float(self.budget_bytes[device])
        return budget - float(self._overheads[device].most(np.array([budget]))[0])

    # --- learning from errors --------------------------------------------------------------------

    def _check(self, trial: JudgedTrial) -> None:
        """Compare a trial with its prediction, and widen or narrow the predictions to come."""
        split, memory = trial.split, trial.measurement.memory
        steps, shards = np.array([float(split.accumulation_steps)]), np.array([split.shard_sizes], dtype=float)
        predicted = self.needed(steps, shards)
        has_run = trial.measurement.throughput is not None
        if has_run and memory:
            held = np.array([reading.peak_reserved_bytes for reading in memory], dtype=float)
            most = predicted.most[0]
        elif trial.measurement.outcome is Outcome.OUT_OF_MEMORY or trial.oom_devices:
            most = predicted.most_after_cache_flush[0]  # the allocator had handed back what it could
            # where nobody knows which device it was: the one that came nearest to its budget
            lacking = trial.oom_devices or {int((most / np.maximum(self.budget_bytes, 1.0)).argmax())}
            held = np.array([self.budget_bytes[i] if i in lacking else 0.0 for i in range(self._n)])
        else:
            return
        errors = held / np.maximum(most, 1.0) - 1
        self.errors.append(float(errors.max()))
        self._hands_back &= has_run or self.errors[-1] <= 0
        enough = self._margin_enough_for(held, split, has_run=has_run)
        if not has_run and enough - self.margin > -LEAST_WIDENING:
            self._widen(max(WIDENING * (enough - self.margin), LEAST_WIDENING))
        elif self.errors[-1] > REPEATABILITY:
            # by nothing where less was held to be proven: the allocator varies
            self._widen(max(WIDENING * (enough - self.margin), 0.0))
        elif self._goes_beyond(predicted.likely[0]):
            self._narrow(WIDENING * enough)

    def _margin_enough_for(self, held: FloatArray, split: BatchSplit, *, has_run: bool) -> float:
        """The margin with which no device would have exceeded its prediction by what it `held`, (n,)."""
        size, accumulates = np.array([float(split.micro_batch_size)]), np.array([float(split.accumulation_steps > 1)])
        enough = []
        for device, share in enumerate(np.array(split.shard_sizes, dtype=float)[:, None]):
            told = self._most_held(device, share, size, accumulates)[0 if has_run else 1]
            enough.append((held[device] - told) / np.maximum(self._unseen(device, share, size, told), 1.0))
        return float(np.max(enough))

    def _widen(self, by: float) -> None:
        """A prediction was exceeded, or a device lacked memory."""
        self.margin = min(self.margin + by, MOST_MARGIN)

    def _narrow(self, enough: float) -> None:
        """A prediction came true, and would have with a margin that is `enough`."""
        self.margin = max(min(self.margin, SETTLED_MARGIN), min(self.margin, enough), self.margin / 2)

    def _goes_beyond(self, likely: FloatArray) -> bool:
        """Whether a prediction was beyond what had been measured, so that it tells something."""
        measured = np.array([[m.peak_reserved_bytes for m in run.memory] for run in self._readings.runs]).max(axis=0)
        return bool((likely > (1 + REACH) * measured).any())
