"""Every device's peak memory at splits not yet tried: the least and the most that agree with the trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import product

import numpy as np

from splittune.profiling.measurement import Outcome
from splittune.search.arrays import FloatArray
from splittune.search.choices import TOLERANCE
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models import POOR_FIT
from splittune.search.models.envelope import Envelope, Points, begins_above, steepest_from
from splittune.search.models.interval import SLACK, Interval
from splittune.search.models.jumps import Jump, taken_by_jumps
from splittune.search.models.memory_readings import (
    REPEATABILITY,
    RESTING_FRACTION,
    MemoryReadings,
    size_of,
)
from splittune.search.models.overhead import QUANTUM_BYTES, Overheads
from splittune.search.models.saved import MOST_AT_PEAK, Slopes, larger_on_gpu0, saved_slopes
from splittune.search.models.trend import Trend
from splittune.split import BatchSplit

# The margin is no more than this, and no less before a prediction was tested. A choice: growth that no trial has
# shown is at most twice what is foretold, unless a device ran out of memory. Larger, and one surprise ends a search for
# larger sizes; smaller, and more second trials run out of memory: algorithms take more than tensors do, which is seen
# when they run.
MOST_MARGIN = 1.0
# A prediction that came true divides the margin by this. A choice: of 4 and 8 the one with which the fewest searches
# ended far behind. Smaller: more trials on the way to large sizes.
FADING = 8
# Peaks exceed what is foretold without a margin so often at first, as if that were one in so many trials. A
# choice. More often, and fewer risks are taken; more trials, and what happens changes it less.
FIRST_SURPRISES = 1
FIRST_TRIALS = 5
# What is not known takes at least this part of the most that it can take. A choice: a sample that no peak
# has shown yet may take next to nothing. Smaller, and more risks are taken.
LEAST_PART = 1 / 32
# And this part where a peak is nothing but what rests and what the forward left: what else a sample takes shows in that
# peak. Where the forward left less, it is as the square of what it left. A choice. Larger: fewer risks.
MOST_PART = 0.35
# A model that does not fit is told where a device was filled to more than this part. A choice: on
# emptier devices it decides nothing.
FULL_ENOUGH = 0.25


class MemoryModel:
    """Bounds on every device's peak memory, from the trials so far.

    The peak of a device is the highest of its phases, and each phase takes ``F + beta s + omega m``: s is the device's
    share, m the whole micro-batch (on GPU 0 alone, which gathers outputs). `Envelope` bounds such a peak from what was
    measured. Steps that accumulate are a case of their own, since gradients are held from one micro-batch to the next.
    Replicas that held the same at equal shares are one; a sample takes as much on every device, to `TOLERANCE`.

    Worked: one trial that holds 6 GiB with 2 samples, 2 GiB of it at rest, bounds 4 samples by proportion: at most
    ``2 + 2 x (6 - 2) = 10`` GiB, and at least ``4 + 2 x (6 - 4) = 8``, for gradients are no larger than what rests.

    A prediction that a trial exceeded raises `Interval.most` from then on: the growth that no trial has shown counts
    `margin` times more.

    Args:
        trials: what was measured, oldest first. Until one ran, with its memory read, nothing is known to be limited.
        num_devices: how many devices there are.
    """

    def __init__(self, trials: Sequence[JudgedTrial], num_devices: int) -> None:
        self._n = num_devices
        self._readings = MemoryReadings(num_devices)
        self.margin = MOST_MARGIN
        """How many times the growth that no trial has shown is added to `Interval.most`."""
        self._jumps: list[Jump] = []
        self._hands_back = True
        """Whether no device has run out of memory that its allocator was to have handed back: in pieces it cannot."""
        self._num_surprises = 0
        """How many trials took more than was foretold without a margin."""
        self.unforeseen_ooms = 0.0
        """OOMs once a trial ran, each counted by the chance with which it was foretold to run."""
        self.errors: list[float] = []
        """Of each prediction: measured over most, minus 1, on the device furthest above.

        Oldest first; below 0 where every device kept within.
        """
        self._envelopes: dict[tuple[int, bool], Envelope] = {}
        """By device, and whether steps accumulate."""
        self._least_parts: dict[tuple[int, bool, bool], float] = {}
        """As `_envelopes`, with a share or without: see `Interval.least_part`."""
        self.observe(trials)

    def observe(self, trials: Iterable[JudgedTrial]) -> None:
        """Learn from further trials, oldest first, after comparing each with its prediction."""
        for one in trials:
            trial = self._located(one) if self._readings.runs else one
            if self._readings.runs:
                self._check(trial)
            if trial.measurement.memory and trial.measurement.throughput is not None:
                self._readings.runs.append(trial.measurement)
            elif trial.lacks_memory:
                self._readings.failures.append(trial)
            if self._readings.runs:
                self._fit()
            if trial.ran:
                self._explain_jumps()

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

    def warnings(self) -> tuple[str, ...]:
        """A sentence if the model did not fit; none while every device stayed far from full."""
        budget = self.budget_bytes
        if not any(self._readings.largest_held(device) > FULL_ENOUGH * budget[device] for device in range(self._n)):
            return ()
        exceeded = [error for error in self.errors if error > POOR_FIT]
        if not exceeded:
            return ()
        trials = f"{len(exceeded)} of {len(self.errors)} trials took more than it held possible"
        most = f"by up to {max(exceeded):.0%}"
        return (f"The memory model did not fit: {trials}, {most}; it kept further away from the limit since.",)

    def needed(self, steps: FloatArray, shards: FloatArray, micro_batches: FloatArray | None = None) -> Interval:
        """The peaks of N splits: `steps` (N,), `shards` (N, n), `micro_batches` (N,) or sums."""
        sizes = shards.sum(axis=1) if micro_batches is None else micro_batches
        told = np.zeros((len(fields(Interval)), *shards.shape))
        for accumulates in (False, True) if self._readings.runs else ():
            chosen = (steps > 1) == accumulates
            for device in range(self._n) if chosen.any() else ():
                asked = np.column_stack([shards[chosen, device], sizes[chosen] if device == 0 else 0 * sizes[chosen]])
                different, places = np.unique(asked, axis=0, return_inverse=True)
                told[:, chosen, device] = self._needed_by(device, different, accumulates)[:, places.ravel()]
        return Interval(**{field.name: rows for field, rows in zip(fields(Interval), told, strict=True)})

    def _needed_by_one(self, split: BatchSplit) -> Interval:
        """The peaks of one split, in one row."""
        return self.needed(np.array([float(split.accumulation_steps)]), np.array([split.shard_sizes], dtype=float))

    def _needed_by(self, device: int, sizes: FloatArray, accumulates: bool) -> FloatArray:
        """(13, N) the fields of `Interval` for one device at `sizes`, (N, 2)."""
        envelope = self._envelopes[device, accumulates]
        held, after_flush, unseen = self._held(device, sizes, accumulates)
        adds = held - self._alive(device, sizes, accumulates)
        most = held + self.margin * unseen
        flushed = np.minimum(most, after_flush + self.margin * unseen) if self._hands_back else most
        least_update, _ = self._readings.update_bytes(device, sizes)
        sure = envelope.sure(sizes, self._readings.untold_at(device, sizes))
        least = np.maximum(envelope.least(sizes), least_update)
        is_seen = self._readings.held_more(device, sizes, accumulates=accumulates)
        # somewhere beyond what ran it jumped, and nothing tells where
        if any(jump.device in self._readings.alike(device) for jump in self._jumps):
            too_much = np.where(is_seen, 0.0, self.budget_bytes[device] + 1.0)
            most, flushed = np.maximum(most, too_much), np.maximum(flushed, too_much)
        sure, least = np.minimum(sure, most), np.minimum(least, most)
        too_little = np.where(is_seen, 0.0, self._readings.too_little_bytes(device, sizes, accumulates=accumulates))
        least, most, flushed = (np.maximum(bound, too_little + 1.0) for bound in (least, most, flushed))
        each = np.ones(len(sizes))
        surprise = (FIRST_SURPRISES + self._num_surprises) / (FIRST_TRIALS + len(self.errors)) * each
        parts = [self._least_parts.get((device, accumulates, has_share), LEAST_PART) for has_share in (True, False)]
        least_part = np.where(sizes[:, 0] > 0, *parts)
        trend_least, trend_most, holds = self._trend(device, sizes, accumulates)
        # a line counts by how much less it leaves open than the bounds do
        left_open = np.clip((trend_most - trend_least) / np.maximum(held - sure, 1.0), 0.0, 1.0)
        goes_on = holds * (1 - left_open)
        jump = np.where(is_seen, 0.0, taken_by_jumps(self._jumps, self._readings, device, sizes[:, 0]))
        # what reserved as much with no more samples does so again
        is_as_much = self._readings.seen(device, sizes) >= (1 - TOLERANCE) * held
        steady = np.where(is_as_much, 1.0, self._overheads.steady(device, sizes, accumulates=accumulates))
        bounds = [sure, least, held, adds, steady, most, flushed]
        told = np.stack([*bounds, surprise, least_part, trend_least, trend_most, goes_on, jump])
        return np.where((sizes[:, 0] == 0) & (device > 0), 0.0, told)

    def _held(self, device: int, sizes: FloatArray, accumulates: bool) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(N,) the most reserved bytes without a margin, these after a cache flush, and the part no trial has shown."""
        live = self._alive(device, sizes, accumulates)
        held, after_flush = (
            live + adds(device, sizes, live, accumulates=accumulates)
            for adds in (self._overheads.most, self._overheads.after_flush)
        )
        unseen = held - self._readings.seen(device, sizes)
        is_seen = self._readings.held_more(device, sizes, accumulates=accumulates)
        # segments may be new where sizes are
        unseen = np.where(is_seen, 0.0, np.maximum(unseen, QUANTUM_BYTES))
        return held, after_flush, np.maximum(unseen, TOLERANCE * held)

    def _alive(self, device: int, sizes: FloatArray, accumulates: bool) -> FloatArray:
        """(N,) the most allocated bytes."""
        _, update_bytes = self._readings.update_bytes(device, sizes)
        return np.asarray(np.maximum(self._envelopes[device, accumulates].most(sizes), update_bytes))

    def _trend(self, device: int, sizes: FloatArray, accumulates: bool) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(N,) the least and the most reserved bytes if peaks go on as they grew, and the probability that they do."""
        told, has_share = np.zeros((3, len(sizes))), sizes[:, 0] > 0
        for trend, chosen in zip(self._trends[device, accumulates], (has_share, ~has_share), strict=True):
            if trend is not None and chosen.any():
                asked = sizes[chosen]
                least, most = np.maximum(trend.between(asked), self._readings.update_bytes(device, asked))
                least += self._overheads.least(device, asked, least, accumulates=accumulates)
                most += self._overheads.most(device, asked, most, accumulates=accumulates)
                told[:, chosen] = least, most, trend.chance(asked)
        return told[0], told[1], told[2]

    # --- fitting ---------------------------------------------------------------------------------

    def _fit(self) -> None:
        readings = self._readings
        self._overheads = Overheads(readings.runs, [readings.alike(device) for device in range(self._n)])
        self._envelopes, self._least_parts = {}, {}
        self._fit_trends()
        groups = [group for group in readings.same_memory_groups() if readings.readings(group[0])]
        least, most = saved_slopes(readings, [device for group in groups for device in group])
        self._most_output = most.micro_batch
        least_slope, most_slope, most_at_peak = least.share, MOST_AT_PEAK * most.share, MOST_AT_PEAK * most.micro_batch
        for group in [*groups, (0,)]:
            most_rest = np.inf
            for accumulates in sorted((True, False), key=lambda kind: not readings.knows(group, kind)):
                bounds = Slopes(least_slope, least.micro_batch), Slopes(most_slope, most_at_peak)
                envelope = self._fit_group(group, accumulates, bounds, most_rest)
                # without earlier gradients less may rest, by as much as parameters take
                most_rest = envelope.rest if readings.knows(group, False) else RESTING_FRACTION * envelope.rest
                self._envelopes |= {(device, accumulates): envelope for device in group}
                own_least, own_most = envelope.slopes
                most_slope = min(most_slope, own_most * (1 + TOLERANCE))
                least_slope = min(max(least_slope, own_least * (1 - TOLERANCE)), most_slope)
        # a replica that never had a share borrows from the others; where none had, from GPU 0
        known = [group[0] for group in groups] or [0]
        for device in range(1, self._n):
            likest = next((other for other in known if readings.is_as_large(other, device)), known[0])
            for accumulates in (False, True):
                self._envelopes.setdefault((device, accumulates), self._envelopes[likest, accumulates])
        self._least_parts = {of: self._least_part(*of) for of in product(range(self._n), (False, True), (False, True))}

    def _fit_trends(self) -> None:
        """Lines through the largest peaks of each device, or of those alike, with a share and without.

        On GPU 0 outputs peak in a phase of their own: peaks without a share tell of it alone, where they are of two
        sizes or more.
        """
        readings = self._readings
        self._trends: dict[tuple[int, bool], tuple[Trend | None, Trend | None]] = {}
        for group, kind in product([(0,), *readings.same_memory_groups()], (False, True)):
            replicas, own = readings.of_kind(range(1, self._n), kind), readings.of_kind(group, kind)
            beside = replicas, readings.gradient_bytes(range(self._n)), readings.untold_bytes(group)
            of_all = Trend.through(own, *beside)
            outputs = [one for one in own if one.size[0] == 0]
            tells = len({one.size for one in outputs}) > 1
            without = Trend.through(outputs, *beside) if tells else of_all
            self._trends |= {(device, kind): (of_all, without) for device in group}
        for (device, kind), lines in self._trends.items():
            ran_out = np.array(readings.oom_sizes(device, kind), dtype=float).reshape(-1, 2)
            is_wrong = self._trend(device, ran_out, kind)[1] <= self.budget_bytes[device]
            ended = [lines[int(share == 0)] for share, _ in ran_out[is_wrong]]  # these lines did not go on
            of_all, without = (None if any(line is one for one in ended) else line for line in lines)
            self._trends[device, kind] = of_all, without

    def _fit_group(
        self, devices: tuple[int, ...], accumulates: bool, slopes: tuple[Slopes, Slopes], most_rest: float
    ) -> Envelope:
        """What is known of devices that hold as much, in steps of one kind; `slopes` are the least and the most.

        Where no trial tells what rests, it is taken to be no more than `most_rest`, in bytes.
        """
        at_most, at_least, rest = self._readings.points(devices, accumulates)
        for device in devices:
            # what jumped did not grow to what it needed
            jumped = {jump.size[0] for jump in self._jumps if jump.device == device}
            ran_out = [size for size in self._readings.oom_sizes(device, accumulates) if size[0] not in jumped]
            sizes = np.array(ran_out, dtype=float).reshape(-1, 2)
            full = np.full(len(sizes), self.budget_bytes[device])
            # it needed more than it had
            adds = self._overheads.most(device, sizes, full, accumulates=accumulates)
            at_least += [(*size, live) for size, live in zip(sizes.tolist(), (full - adds + 1.0).tolist(), strict=True)]
        smallest, knows_rest = min(peak for *_, peak in at_most), rest is not None
        least, most = slopes
        if 0 in devices:
            at_most += larger_on_gpu0(self._readings, self._most_output, accumulates=accumulates)
        if rest is None:
            # parameters rest, and gradients come on top, as large
            rest = min(RESTING_FRACTION * smallest, most_rest)
        elif rest:
            # parameters rest, and gradients are as large: before a sample is, no more than these are held beside
            without_samples = (rest + self._readings.untold_bytes(devices)) * (2 if accumulates else 3)
            # what is held beyond that may be of samples, too: of layers that the backward computes again, say
            most = Slopes(*map(max, most, steepest_from(without_samples, at_most)))
            if without_samples < smallest and not begins_above(
                without_samples, Points.of(at_most), Points.of(at_least)
            ):
                at_most += [(0.0, 0.0, without_samples)]
        return Envelope.through(Points.of(at_most), Points.of(at_least), rest, least, most, knows_rest=knows_rest)

    def _least_part(self, device: int, accumulates: bool, has_share: bool) -> float:
        """The part of what is not known that the device takes at least: by what fills it, and by its failures.

        What ran out with a share does not tell of none. Worked: of a peak 90 % were left: ``0.35 x 0.9^2``, so 28 %.
        """
        parts = [LEAST_PART, MOST_PART * self._readings.saved_part(self._readings.alike(device)) ** 2]
        for size in self._readings.oom_sizes(device, accumulates, even_with_share=has_share):
            sure, _, foretold, *_ = self._needed_by(device, np.array([size]), accumulates)[:, 0]
            parts.append((float(self.budget_bytes[device]) - sure) / max(foretold - sure, 1.0))
        return min(max(parts), 1.0)

    # --- learning from errors --------------------------------------------------------------------

    def _located(self, trial: JudgedTrial) -> JudgedTrial:
        """The trial, and where it likely ran out of memory, if neither a reading nor a message tells.

        That is where least was left, if the bounds hold it possible there or nowhere; or the one device where they do.
        A guess: it makes more of the same unlikely, and rules no split out.
        """
        if trial.measurement.outcome is not Outcome.OUT_OF_MEMORY or trial.oom_devices:
            return trial
        told = self._needed_by_one(trial.split)
        possible = frozenset(np.flatnonzero(told.most_after_cache_flush[0] > self.budget_bytes).tolist())
        tightest = trial.likely_oom_devices if trial.measurement.memory else frozenset()
        likely = possible & tightest if possible else tightest
        return replace(trial, oom_devices=possible if len(possible) == 1 else likely)

    def _check(self, trial: JudgedTrial) -> None:
        """Compare a trial with its prediction, and raise the predictions to come if it took more."""
        split, memory = trial.split, trial.measurement.memory
        told = self._needed_by_one(split)
        has_run = trial.measurement.throughput is not None
        if has_run and memory:
            held, most = np.array([reading.peak_reserved_bytes for reading in memory], dtype=float), told.most[0]
        elif trial.measurement.outcome is Outcome.OUT_OF_MEMORY or trial.oom_devices:
            most = told.most_after_cache_flush[0]  # the allocator had handed back what it could
            # where nobody knows which device it was: the one that came nearest to its budget
            lacking = trial.oom_devices or {int((most / np.maximum(self.budget_bytes, 1.0)).argmax())}
            held = np.array([self.budget_bytes[i] if i in lacking else 0.0 for i in range(self._n)])
        else:
            return
        errors = held / np.maximum(most, 1.0) - 1
        self.errors.append(float(errors.max()))
        self._hands_back &= has_run or self.errors[-1] <= 0
        if not has_run:
            self.unforeseen_ooms += float(told.chance_below(self.budget_bytes)[0])
            left, is_sure = self.budget_bytes - told.foretold[0], told.most_after_cache_flush[0] <= self.budget_bytes
            taken = np.where(is_sure, left, 0.0)
            accumulates = split.accumulation_steps > 1
            ran_out = [i for i in trial.oom_devices if left[i] >= 0]
            self._jumps += [Jump(i, size_of(i, split), accumulates, float(taken[i])) for i in ran_out]
        enough, excess = self._beyond_foretold(held, split, has_run=has_run)
        self._num_surprises += excess > SLACK
        if not has_run:
            self.margin = max(self.margin, enough)
        elif self.errors[-1] > REPEATABILITY:
            self.margin = max(self.margin, min(enough, MOST_MARGIN))
        elif self._is_larger(held):
            self.margin = max(self.margin / FADING, min(self.margin, enough))

    def _explain_jumps(self) -> None:
        """What is foretold to need more than there is, by what ran since, did not jump: it tells of growth again."""
        before = len(self._jumps)
        self._jumps = [jump for jump in self._jumps if not self._is_foretold(jump)]
        if len(self._jumps) < before:
            self._fit()

    def _is_foretold(self, jump: Jump) -> bool:
        """Whether as much as is foretold is more than the device has; by `SLACK`, for so much readings are off."""
        foretold, _, _ = self._held(jump.device, np.array([jump.size], dtype=float), jump.accumulates)
        return bool(foretold[0] > (1 + SLACK) * self.budget_bytes[jump.device])

    def _beyond_foretold(self, held: FloatArray, split: BatchSplit, *, has_run: bool) -> tuple[float, float]:
        """By how much what devices `held`, (n,), exceeded what was foretold without a margin, where it did most.

        As the margin with which none would have, and as a part of what was foretold.
        """
        margins, excess = [], []
        for device in range(self._n):
            size = np.array([size_of(device, split)])
            told, after_flush, unseen = self._held(device, size, split.accumulation_steps > 1)
            foretold = float((told if has_run else after_flush)[0])
            margins.append((held[device] - foretold) / unseen[0])
            excess.append(held[device] / max(foretold, 1.0) - 1)
        return float(np.max(margins)), float(np.max(excess))

    def _is_larger(self, held: FloatArray) -> bool:
        """Whether a device held more than in any trial before, (n,), so that what was foretold of it was tested."""
        before = np.array([[m.peak_reserved_bytes for m in run.memory] for run in self._readings.runs]).max(axis=0)
        return bool((held > (1 + TOLERANCE) * before).any())
