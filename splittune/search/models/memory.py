"""Every device's peak memory at splits not yet tried: an interval, from all models that agree with the trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splittune.search.attempts import Attempt
from splittune.search.models.memory_readings import RESTING_FRACTION, MemoryReadings, Reading, rows_of
from splittune.search.models.polytope import Bounds, Polytope, agreeing_with

Floats = NDArray[np.float64]

# Live bytes repeat to the kernel workspaces' changes from size to size.
TOLERANCE = 0.002
# A peak is a maximum of lines, so the line that rules at large sizes may be steeper than one through smaller ones: by
# this much, at first. It shrinks to the second with predictions that came true, and grows with those that did not.
STEEPENING, SETTLED_STEEPENING = 0.10, 0.03
# The same tensors for a sample on every card, but for kernels' workspaces: slopes agree to this, and better on cards
# with the same memory, which mostly are of a kind.
SHARED, SHARED_BY_KIND = 0.1, 0.02
# A prediction that a trial exceeded, or that ran out of memory, widens all that go beyond what was measured: by half as
# much again, and by no less than this.
WIDENING, LEAST_WIDENING = 1.5, 0.02
# One that came true without it narrows it again, but to no less than this.
SETTLED_MARGIN = 0.03
# Beyond its mean the allocator holds up to this part of what is live in any case.
UNEVEN = 0.01
# Errors above this are told to people.
POOR_FIT = 0.05
# They matter on a card of which the trials took more than this part.
FULL_ENOUGH = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Bytes that every device holds at the peak, (N, n) each: at least, most likely, and at most."""

    least: Floats
    likely: Floats
    most: Floats
    most_after_cache_flush: Floats
    """At most, when the allocator runs short and hands back what it can: beyond that it is out of memory."""

    def feasibility_below(self, limits: Floats) -> Floats:
        """(N,) from 0 to 1: how likely all devices stay within `limits` (n,), on the one where that is least.

        A triangle from the least to the most, with its top at the likeliest. Worked: 8 to 12 GiB, likeliest 9, stays below
        10 GiB with ``1 - (12 - 10)^2 / ((12 - 8) (12 - 9)) = 2 / 3``.
        """
        low, high = self.least, np.maximum(self.most, self.least)
        top, x = np.clip(self.likely, low, high), np.clip(limits, low, high)
        rising = (x - low) ** 2 / np.maximum((high - low) * (top - low), 1.0)
        falling = 1 - (high - x) ** 2 / np.maximum((high - low) * (high - top), 1.0)
        within = np.where(x < top, rising, falling)
        return np.asarray(np.where(limits < low, 0.0, within).min(axis=1))


class MemoryModel:
    """MemoryReadings of all devices, from the trials so far.

    In each phase a device's live bytes are ``F + beta s + omega m + gamma [k > 1]``: s its share, m the whole
    micro-batch (on GPU 0 alone, which gathers outputs), k the accumulation steps; the peak is the maximum over phases.
    Replicas hold the same tensors for a sample, so they share their coefficients, and GPU 0 shares their beta. No line
    is drawn through the trials. All coefficients that agree with them make a polytope: none may exceed a peak that was
    measured, those above the flat of the smallest peaks must reach it, F is no less than what is held at rest; its
    corners give the least and the most at any other split. With one trial that is a proportion: 6 GiB with 2 samples,
    2 GiB of them at rest, is 10 GiB at most with 4. More trials narrow it, and a prediction that failed widens it.

    Args:
        attempts: what was measured, oldest first. Before one ran, with its memory read, nothing is known to be limited.
        num_devices: how many devices there are.
    """

    def __init__(self, attempts: Sequence[Attempt], num_devices: int) -> None:
        self._n = num_devices
        self._peaks = MemoryReadings(num_devices)
        self.slope_slack = STEEPENING
        self.margin = 0.0
        """By how much the most predicted is raised where it goes beyond what was measured."""
        self._margin_of_strangers = 0.0
        """What of it came from cards that had no share before, of which it only was held that they are like others."""
        self.errors: list[float] = []
        """Of each prediction, oldest first: measured over the most predicted, minus 1, where it was furthest above; below 0
        where all kept within."""
        self._polytopes: dict[int, Polytope] = {}
        self.observe(attempts)

    def observe(self, attempts: Iterable[Attempt]) -> None:
        """Take in what was measured since, comparing it with what was predicted of it."""
        for attempt in attempts:
            if self._peaks.runs:
                self._check(attempt)
            if attempt.measurement.memory and attempt.measurement.throughput is not None:
                self._peaks.runs.append(attempt.measurement)
            elif attempt.lacks_memory:
                self._peaks.failures.append(attempt)
            if self._peaks.runs:
                self._fit()

    @property
    def budget_bytes(self) -> Floats:
        """(n,) bytes each device has for this job: its total less what others held at most; no end where nothing is known."""
        return self._peaks.budget_bytes()

    def alike(self, device: int) -> tuple[int, ...]:
        """The replicas that held as much as `device` whenever their shares were alike, itself among them; GPU 0 is alone."""
        return self._peaks.alike(device)

    @property
    def is_affine(self) -> bool:
        """Whether trials took no more than was held possible, and the allocator as much beyond what was live every time."""
        if not self._peaks.runs:
            return True
        _, commonly, amply, _ = self._excess
        is_kept = self.margin - self._margin_of_strangers < SETTLED_MARGIN
        return is_kept and amply.ratio - commonly.ratio < UNEVEN

    def doubts(self) -> tuple[str, ...]:
        """What no model could explain, in sentences; empty where one did, or where all cards stayed far from full."""
        room = self.budget_bytes
        if not any(self._peaks.largest_held(device) > FULL_ENOUGH * room[device] for device in range(self._n)):
            return ()
        worst = max((polytope.misfit for polytope in self._polytopes.values()), default=0.0)
        exceeded = [error for error in self.errors if error > POOR_FIT]
        if worst * TOLERANCE > POOR_FIT:
            text = f"The memory model did not fit: no straight lines come nearer to the peaks than {worst * TOLERANCE:.0%}, "
            return (f"{text}so sizes near the limit were approached with care.",)
        if exceeded:
            text = f"The memory model did not fit: {len(exceeded)} of {len(self.errors)} trials took more than it held possible, "
            return (f"{text}by up to {max(exceeded):.0%}; it kept further away from the limit since.",)
        return ()

    def needed(self, steps: Floats, shards: Floats, micro_batches: Floats | None = None) -> Interval:
        """What N splits need: `steps` is (N,), `shards` (N, n), `micro_batches` their sums unless given, (N,)."""
        if not self._peaks.runs:
            none = np.zeros_like(shards)
            return Interval(least=none, likely=none, most=none, most_after_cache_flush=none)
        accumulates = (steps > 1).astype(float)
        sizes = shards.sum(axis=1) if micro_batches is None else micro_batches
        columns = [self._needed_of(device, shards[:, device], sizes, accumulates) for device in range(self._n)]
        least, likely, most, squeezed = (np.stack(bound, axis=1) for bound in zip(*columns, strict=True))
        return Interval(least=least, likely=likely, most=most, most_after_cache_flush=squeezed)

    def _needed_of(
        self, device: int, shares: Floats, micro_batches: Floats, accumulates: Floats
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """The four bounds of one device, (N,) each."""
        peaks, polytope = self._peaks, self._polytopes[device]
        rows = rows_of(device, shares, micro_batches, accumulates)
        floor_least, floor_most = peaks.floors(device, accumulates)
        less, more = peaks.unknown_accumulating(device, accumulates)
        least = np.maximum(polytope.lowest(rows) - less, floor_least)
        likely = np.maximum(polytope.likely(rows), floor_most)
        live = np.maximum(polytope.highest(rows) + more, floor_most)
        scarcely, commonly, amply, squeezed = self._excess
        held = live + amply(live)
        reach = np.clip(4 * (held / max(1, peaks.largest_held(device)) - 1), 0.25, 1.0)
        raised = held * (1 + self.margin * reach)
        proven = (1 + TOLERANCE) * peaks.proven(device, shares, micro_batches, accumulates)
        least = least + scarcely(least)
        most = np.minimum(raised, np.maximum(proven, least))
        bounds = (
            np.minimum(least, most),
            np.minimum(likely + commonly(likely), most),
            most,
            np.minimum(most, raised - amply(live) + squeezed(live)),
        )
        idle = (shares == 0) & (device > 0)
        return tuple(np.where(idle, 0.0, bound) for bound in bounds)  # type: ignore[return-value]

    # --- fitting -----------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        self._excess = self._peaks.excesses()
        self._polytopes = {}
        fitted: dict[tuple[int, ...], Polytope] = {}
        for group in [*self._peaks.kinds(), (0,)]:
            polytope = self._fit_group(group, fitted)
            if polytope is not None:
                fitted[group] = polytope
                self._polytopes |= dict.fromkeys(group, polytope)
        # a replica that never had a share is taken to be like the others; where none had, like GPU 0 without omega
        replicas = [group for group in fitted if group != (0,)]
        for device in range(1, self._n):
            if device not in self._polytopes:
                known = fitted[self._likest(device, replicas)[0]] if replicas else fitted[0,].of_first(3)
                self._polytopes[device] = known

    def _fit_group(self, devices: tuple[int, ...], others: Mapping[tuple[int, ...], Polytope]) -> Polytope | None:
        """The coefficients of a kind of devices; the slope of the likest of the `others` is shared."""
        readings = [reading for device in devices for reading in self._peaks.readings(device)]
        if not readings:
            return None
        missed = [row for device in devices for row in self._peaks.missed(device, self._live_within(device))]
        slopes = (-np.inf, np.inf)
        if others:
            likest, is_of_a_kind = self._likest(devices[0], others)
            apart, corners = SHARED_BY_KIND if is_of_a_kind else SHARED, others[likest].corners[:, 1]
            slopes = (corners.min() * (1 - apart), corners.max() * (1 + apart))
        return agreeing_with(self._bounds(readings, missed, slopes))

    def _likest(self, device: int, groups: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], bool]:
        """Of `groups` the first that has a device of as much memory in all, else the first; whether there is one that has."""
        totals, groups = [memory.total_bytes for memory in self._peaks.runs[0].memory], list(groups)
        of_a_kind = [group for group in groups if totals[device] in {totals[other] for other in group}]
        return (of_a_kind or groups)[0], bool(of_a_kind)

    def _live_within(self, device: int) -> float:
        """Live bytes with which the device would be full."""
        room = float(self.budget_bytes[device])
        return room - float(self._excess[2](np.array([room]))[0])

    def _bounds(
        self, readings: Sequence[Reading], missed: Sequence[tuple[Floats, float]], slopes: tuple[float, float]
    ) -> Bounds:
        rows = np.array([reading.row for reading in readings])
        peaks = np.array([reading.peak_bytes for reading in readings], dtype=float)
        resting = [reading.resting_bytes for reading in readings]
        count, width = rows.shape
        tolerances = TOLERANCE * peaks
        # what lies above the flat of the small sizes is on a slope; one that steepens passes below the smaller ones
        accumulates = rows[:, 2]
        flat = np.array([peaks[accumulates == k].min() for k in accumulates])
        is_on_slope = peaks > flat + 2 * tolerances
        least = np.where(is_on_slope, peaks - tolerances - self.slope_slack * (peaks.max() - peaks), -np.inf)
        at_rest = np.zeros((count, width))
        at_rest[:, 0], at_rest[:, 2] = 1.0, accumulates
        least_at_rest = np.array(
            [RESTING_FRACTION * peaks.min() if rest is None else rest * (1 - TOLERANCE) for rest in resting]
        )
        # what is known at rest is a reading like others; a guess gives way first, wholly if need be
        give = np.array([1.0 if rest is None else TOLERANCE for rest in resting])
        all_rows, all_least, all_most = (
            [rows, at_rest],
            [least, least_at_rest],
            [peaks + tolerances, np.full(count, np.inf)],
        )
        slack = [np.maximum(tolerances, 1.0), np.maximum(give * least_at_rest, 1.0)]
        for row, live in missed:
            all_rows.append(row[None])
            all_least.append(np.array([live * (1 - TOLERANCE)]))
            all_most.append(np.array([np.inf]))
            slack.append(np.array([TOLERANCE * live]))
        # coefficients that no trial has varied are given an end: that of a whole peak
        ends = np.eye(width)
        largest = rows.max(axis=0)
        room = self.budget_bytes.max()
        end_most = np.where(largest > 0, peaks.max() / np.maximum(largest, 1), room)
        end_least = np.full(width, -np.inf)
        end_least[1], end_most[1] = slopes[0], min(end_most[1], slopes[1])
        if not accumulates.any() or accumulates.all():
            end_most[2] = 0.0  # part of what is fixed, until trials tell them apart
        all_rows.append(ends)
        all_least.append(end_least)
        all_most.append(end_most)
        slack.append(np.maximum(TOLERANCE * end_most, 1e-6))
        return Bounds(
            rows=np.concatenate(all_rows),
            least=np.concatenate(all_least),
            most=np.concatenate(all_most),
            slack=np.concatenate(slack),
        )

    def _check(self, attempt: Attempt) -> None:
        """Compare a trial with what was predicted of it; change how much steeper lines may become accordingly."""
        split, memory = attempt.split, attempt.measurement.memory
        steps, shards = np.array([float(split.accumulation_steps)]), np.array([split.shard_sizes], dtype=float)
        predicted = self.needed(steps, shards)
        most = predicted.most[0]
        if attempt.measurement.throughput is not None and memory:
            held = np.array([reading.peak_reserved_bytes for reading in memory], dtype=float)
        elif attempt.lacking:
            held = np.array([self.budget_bytes[i] if i in attempt.lacking else 0.0 for i in range(self._n)])
            most = predicted.most_after_cache_flush[0]  # the allocator had handed back what it could
        else:
            return
        errors = held / np.maximum(most, 1.0) - 1
        error = float(errors.max())
        self.errors.append(error)
        failed = attempt.measurement.throughput is None and error > -LEAST_WIDENING
        if error > TOLERANCE or failed:
            self.slope_slack = min(1.0, 2 * self.slope_slack)
            wider = max(WIDENING * error, LEAST_WIDENING) if failed else WIDENING * error
            self.margin += wider
            if not self._peaks.readings(int(errors.argmax())):
                self._margin_of_strangers += wider
        elif self._reached(predicted.likely[0]):
            if np.abs(held / np.maximum(predicted.likely[0], 1.0) - 1).max() < LEAST_WIDENING:
                self.slope_slack = max(SETTLED_STEEPENING, self.slope_slack / 2)
            margin, self.margin = self.margin, 0.0
            enough = WIDENING * float((held / np.maximum(self.needed(steps, shards).most[0], 1.0) - 1).max())
            self.margin = max(min(margin, SETTLED_MARGIN), min(margin, enough), margin / 2)
            self._margin_of_strangers = min(self._margin_of_strangers, self.margin)

    def _reached(self, likely: Floats) -> bool:
        """Whether a prediction went beyond what had been measured, so that it tells something."""
        measured = np.array([[m.peak_reserved_bytes for m in run.memory] for run in self._peaks.runs]).max(axis=0)
        return bool((likely > 1.1 * measured).any())
