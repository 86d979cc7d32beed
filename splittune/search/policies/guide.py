"""Which split to measure next: what the models of memory and time make of every split that could still be the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splittune.search.attempts import Attempt
from splittune.search.candidates.acquisition import (
    CandidateScores,
    expected_improvement,
    fills_tiles,
    joint_feasibility,
    most_informative,
)
from splittune.search.candidates.balance import TimeOfShares
from splittune.search.candidates.generate import candidates, failures_on_alike
from splittune.search.candidates.table import (
    Floats,
    SplitTable,
    can_be_listed,
    concatenate,
    even_table,
    listed_table,
    open_rows,
    singles_table,
)
from splittune.search.models.memory import MemoryModel
from splittune.search.models.step_time import TimeModel
from splittune.split import BatchSplit, SplitSpace
from splittune.units import format_bytes

# Up to this many splits are simply measured, all of them.
TINY = 12
# A share may grow this much over the largest measured so far, whatever the memory model promises.
MAX_GROWTH = 16
# The even split is measured anew for a baseline with this much fewer accumulation steps.
BASELINE_GAIN = 0.05
# Expected gain, relative, from which a split is tried at once; below which another trial is not worth its time; and the
# least in noise.
GOOD_GAIN, LEAST_GAIN, NOISE_SHARE = 0.003, 0.001, 0.15
# From some share on another kernel may run. While there are fewer trials than this, a split is tried that tells of so large
# a gain if it is as far from any measured (in logarithms of shares) as makes this product.
NUM_TRIALS_TO_SPARE, SURPRISE, SURPRISE_FROM, LEAST_SURPRISE = 10, 0.1, (0.05, 0.1, 0.2), 5e-4
# Up to this many trials doubtful predictions are checked: those that could be off by so many deviations, and then gain.
NUM_TRIALS_WELL_SPENT, CHECK_DEVIATIONS, CHECK_GAIN = 12, 4, 0.005
# Shares are balanced once more as if each were faster by so many deviations, which brings those that only then are the best.
HOPE = 2
# Until a trial had full tiles, whose edges no line foresees, splits that have them are given so much more hope.
TILE_HOPE = 0.2
# Where memory is no straight line a split that the model cannot vouch for is tried if it could gain so much were it off by so
# many deviations, and if it is this likely to run, at first and after one ran out of memory.
VENTURE_GAIN, VENTURE_DEVIATIONS, VENTURE_CHANCES = 0.03, 2, (0.5, 0.9)
# A split that tells whether another fits should itself keep its headroom with this chance.
TELLING_CHANCE = 0.5
# A gain hoped for that is worth a trial that may keep too little headroom, or one of another split to learn from.
HOPED_GAIN, MAX_TARGETS = 0.003, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The split to measure next, and why: ``"even split at k=2: looking for the baseline"``."""

    split: BatchSplit
    reason: str


class Guide:
    """Proposes splits of `space` one after the other, from all attempts so far and from nothing else.

    The smallest even split comes first, then ever larger ones as far as the memory model vouches for them, until the
    even split at the fewest accumulation steps is measured: the baseline. Each of them teaches memory and time. Then the
    split with the largest expected gain, among those that cannot run out of memory, until none is expected to gain
    anything; a split that would gain much but is not sure to fit is approached by others that tell, and where memory is no
    straight line and none tells, ventured if it is likely to run. What trials are left up to `NUM_TRIALS_WELL_SPENT` check
    the predictions most in doubt.

    Args:
        space: the legal splits.
        min_headroom_bytes: what every device must keep free, one number for each.
    """

    def __init__(self, space: SplitSpace, min_headroom_bytes: Sequence[int]) -> None:
        self.space = space
        self._demands = np.array(min_headroom_bytes, dtype=float)
        self._evens = even_table(space)
        self._listed = listed_table(space)
        self._is_complete = can_be_listed(space)
        self._is_tiny = self._is_complete and len(self._listed) <= TINY
        self._memory = MemoryModel((), space.num_devices)
        self._seen: list[Attempt] = []

    def propose(self, attempts: Sequence[Attempt]) -> Proposal | None:
        """The next split; None when no other is worth measuring."""
        if not any(attempt.measurement.throughput is not None for attempt in attempts):
            return self._first(attempts)
        self._learn(attempts)
        proposal = self._tiny(attempts) if self._is_tiny else self._next_even(attempts)
        if proposal is None and not self._is_tiny:
            proposal = self._best(attempts)
        if proposal is None and not any(attempt.fits for attempt in attempts):
            return self._first(attempts)
        return proposal

    def has_open(self, attempts: Sequence[Attempt]) -> bool:
        """Whether any listed split is neither measured nor ruled out; none is where not even the smallest fits."""
        return any(attempt.fits for attempt in attempts) and bool(open_rows(self._listed, attempts).any())

    def warnings(self, attempts: Sequence[Attempt]) -> tuple[str, ...]:
        """What the models could not explain, in sentences; empty where they fitted."""
        if not any(attempt.measurement.throughput is not None for attempt in attempts):
            return ()
        self._learn(attempts)
        return (*self._memory.warnings(), *TimeModel(attempts).warnings())

    def _learn(self, attempts: Sequence[Attempt]) -> None:
        known = len(self._seen)
        if list(attempts[:known]) != self._seen:
            self._memory, known = MemoryModel((), self.space.num_devices), 0
        self._memory.observe(attempts[known:])
        self._seen = list(attempts)

    # --- the first splits --------------------------------------------------------------------------------------------

    def _first(self, attempts: Sequence[Attempt]) -> Proposal | None:
        """The smallest splits, until one fits."""
        if not attempts:
            smallest = self.space.num_devices * max(1, self.space.min_shard_size)
            starts = self._evens if len(self._evens) else self._listed
            rows = np.flatnonzero(starts.micro_batch_sizes <= max(smallest, starts.micro_batch_sizes.min()))
            return Proposal(split=starts.split(int(rows[0])), reason="the smallest even split: a safe start")
        table = self._listed
        if self.space.shares == "each" and not self.space.min_shard_size:
            table = concatenate(table, singles_table(self.space))
        table = table.where(open_rows(table, attempts))
        accumulating = table.where(table.steps > 1)
        if len(accumulating):
            likely_oom_devices = sorted({device for attempt in attempts for device in attempt.likely_oom_devices})
            burden = (
                accumulating.shards[:, likely_oom_devices].sum(axis=1)
                if likely_oom_devices
                else np.zeros(len(accumulating))
            )
            row = int(np.lexsort((-accumulating.steps, burden, accumulating.micro_batch_sizes))[0])
            return Proposal(split=accumulating.split(row), reason="nothing fitted so far: the smallest split left")
        # a single step holds one copy of the gradients less, and may fit where no accumulation does; if even shares do
        # not, that copy was not what was missing
        single = self._evens.where(self._evens.steps == 1)
        if len(table) and len(single) and not any(attempt.split.accumulation_steps == 1 for attempt in attempts):
            return Proposal(split=single.split(0), reason="nothing fits that accumulates: the whole batch at once")
        return None

    def _tiny(self, attempts: Sequence[Attempt]) -> Proposal | None:
        """Every split that is not sure to lack memory, smallest first."""
        table = self._listed.where(open_rows(self._listed, attempts))
        if len(table):
            least = self._memory.needed(table.steps, table.shards).least
            table = table.where(np.asarray((least <= self._limits()).all(axis=1)))
        if not len(table):
            return None
        row = int(np.lexsort((table.micro_batch_sizes, table.shards.max(axis=1)))[0])
        return Proposal(split=table.split(row), reason=f"one of {len(self._listed)} splits, all of which are measured")

    def _next_even(self, attempts: Sequence[Attempt]) -> Proposal | None:
        """The even split at the fewest steps that is sure to fit, where that is better than the ones that do."""
        safe = self._evens.where(open_rows(self._evens, attempts))
        if len(safe):
            most = self._memory.needed(safe.steps, safe.shards).most
            is_safe = (most <= self._limits()).all(axis=1)
            safe = safe.where(np.asarray(is_safe & self._is_grown(safe, attempts)))
        if not len(safe):
            return None
        fitting = [a.split.accumulation_steps for a in attempts if a.fits and self._evens.is_any_of([a.split]).any()]
        steps = int(safe.steps[0])
        if fitting and steps > (1 - BASELINE_GAIN) * min(fitting):
            return None
        return Proposal(split=safe.split(0), reason=f"even split at k={steps}: looking for the baseline")

    # --- the best by the models --------------------------------------------------------------------------------------

    def _best(self, attempts: Sequence[Attempt]) -> Proposal | None:
        time = TimeModel(attempts)
        outlook = self._score_candidates(attempts, time, attempts)
        if outlook is None:
            return None
        worth = outlook.gain * np.where(outlook.cannot_oom, outlook.chance, 0.0)
        row = int(worth.argmax())
        if outlook.chance[row] < 1 and worth[row] < HOPED_GAIN:
            row = int((worth * (outlook.chance == 1)).argmax())
        at_least = max(2 * worth[row], HOPED_GAIN)
        detour = self._detour(outlook, attempts, at_least)
        if detour is not None:
            return detour
        best = Proposal(split=outlook.table.split(row), reason=self._why(outlook, row)) if worth[row] > 0 else None
        if np.isinf(outlook.best_log_s) or worth[row] >= max(GOOD_GAIN, NOISE_SHARE * time.noise):
            return best
        return (
            self._venture(attempts, time, at_least)
            or self._second_look(outlook, attempts, time)
            or (best if worth[row] >= max(LEAST_GAIN, NOISE_SHARE * time.noise) else None)
        )

    def _score_candidates(
        self,
        attempts: Sequence[Attempt],
        time: TimeModel,
        ruling_out: Sequence[Attempt],
        steps: Floats | None = None,
        believed: Sequence[Sequence[TimeOfShares]] = (),
    ) -> CandidateScores | None:
        """What the models make of the splits worth judging.

        Where these are too many to list they are the even ones and those balanced by the curves `believed`, of the time
        model unless given; only those of `steps` where given.
        """
        table = self._listed
        ruling_out = [*ruling_out, *failures_on_alike(ruling_out, self._memory, self._limits())]
        if not self._is_complete:
            evens = self._evens if steps is None else self._evens.where(np.isin(self._evens.steps, steps))
            believed = believed or time.likely_curves
            balanced = candidates(self.space, steps, believed, self._memory, self._limits(), ruling_out)
            table = concatenate(evens, balanced)
        table = table.where(open_rows(table, ruling_out) & ~table.is_any_of([attempt.split for attempt in attempts]))
        if not len(table):
            return None
        times = time.predict(table.steps, table.shards)
        fitting = [attempt.split for attempt in attempts if attempt.fits]
        best = np.inf
        if fitting:
            steps = np.array([split.accumulation_steps for split in fitting], dtype=float)
            best = float(time.predict(steps, np.array([s.shard_sizes for s in fitting], dtype=float)).log_s.min())
        # with nothing to compare with, everything gains, the fastest most
        reference = best if fitting else float(times.log_s.max()) + 1
        needed, limits = self._memory.needed(table.steps, table.shards), self._limits()
        return CandidateScores(
            table=table,
            times=times,
            best_log_s=best,
            gain=expected_improvement(reference - times.log_s, times.deviation),
            needed=needed,
            limits=limits,
            chance=joint_feasibility(needed, limits),
            cannot_oom=(needed.most_after_cache_flush <= self._memory.budget_bytes).all(axis=1)
            & self._is_grown(table, attempts),
        )

    def _detour(self, outlook: CandidateScores, attempts: Sequence[Attempt], at_least: float) -> Proposal | None:
        """A split that tells whether a promising one fits, which is not sure enough of it to be tried."""
        table = outlook.table
        may_tell = outlook.cannot_oom & (outlook.chance >= TELLING_CHANCE)
        hoped = np.where(outlook.cannot_oom, 0.0, outlook.gain * outlook.chance)
        for target in np.argsort(-hoped, kind="stable")[:MAX_TARGETS]:
            if hoped[target] <= at_least:
                return None
            doubtful = np.flatnonzero(outlook.needed.most[target] > outlook.limits)
            row = most_informative(table, table.shards[target], doubtful, np.flatnonzero(may_tell), attempts)
            if row is not None:
                wanted = table.split(int(target))
                return Proposal(split=table.split(row), reason=f"tells whether {wanted} would fit")
        return None

    def _venture(self, attempts: Sequence[Attempt], time: TimeModel, at_least: float) -> Proposal | None:
        """Where memory is no straight line, a split that could gain much, and of which only its chances are known.

        What the allocator holds may be less with a larger share, so one that kept too little headroom rules no other out. After
        one ran out of memory only those are ventured that are likely to run.
        """
        outlook = None
        if not self._memory.is_affine and len(attempts) < NUM_TRIALS_WELL_SPENT:
            outlook = self._score_candidates(attempts, time, [a for a in attempts if a.measurement.throughput is None])
        if outlook is None or np.isinf(outlook.best_log_s):
            return None
        has_failed = any(attempt.measurement.throughput is None for attempt in attempts[1:])
        runs, fits = (outlook.needed.feasibility_below(room) for room in (self._memory.budget_bytes, outlook.limits))
        for attempt in attempts:  # the same share holds the same
            for device in attempt.lacking:
                fits[outlook.table.shards[:, device] == attempt.split.shard_sizes[device]] = 0.0
        hope = self._hope(outlook, attempts, VENTURE_DEVIATIONS) * np.cbrt(fits)
        is_open = (
            ~outlook.surely_feasible & (runs >= VENTURE_CHANCES[has_failed]) & self._is_grown(outlook.table, attempts)
        )
        row = int(np.where(is_open, hope, -np.inf).argmax())
        if not is_open[row] or hope[row] < max(VENTURE_GAIN, at_least):
            return None
        chances = f"runs with a chance of {runs[row]:.0%}, keeps its headroom with one of {fits[row]:.0%}"
        throughput = f"predicted {self._throughput(outlook, row):,.0f} samples/s"
        return Proposal(
            split=outlook.table.split(row), reason=f"{throughput}; memory is no straight line here: {chances}"
        )

    def _second_look(self, outlook: CandidateScores, attempts: Sequence[Attempt], time: TimeModel) -> Proposal | None:
        """With trials to spare, a split that could be the best were the model wrong.

        Where splits are too many to list, other ones are judged: those balanced by curves as they would then be.
        """
        if len(attempts) >= NUM_TRIALS_WELL_SPENT:
            return None
        if not self._is_complete:
            near = outlook.times.log_s < outlook.best_log_s + 2 * SURPRISE
            ran = [attempt.split.accumulation_steps for attempt in attempts if attempt.fits]
            steps = np.union1d(outlook.table.steps[near], ran)
            wrong = [time.surprising_curves(growth, SURPRISE) for growth in SURPRISE_FROM]
            other = self._score_candidates(attempts, time, attempts, steps, [*wrong, time.hopeful_curves(HOPE)])
            outlook = other or outlook
        if not outlook.surely_feasible.any():
            return None
        return self._surprise(outlook, attempts, time) or self._check(outlook, attempts)

    def _surprise(self, outlook: CandidateScores, attempts: Sequence[Attempt], time: TimeModel) -> Proposal | None:
        """The split that tells most of what no model foresees: another kernel from some share on."""
        if len(attempts) >= NUM_TRIALS_TO_SPARE:
            return None
        lost = outlook.times.log_s - outlook.best_log_s
        hope = time.distance(outlook.table.shards) * np.maximum(SURPRISE - lost, 0.0)
        row = int(np.where(outlook.surely_feasible, hope, -np.inf).argmax())
        if hope[row] < LEAST_SURPRISE:
            return None
        return Proposal(
            split=outlook.table.split(row),
            reason=f"far from what was measured: {self._throughput(outlook, row):,.0f} samples/s unless another kernel runs",
        )

    def _check(self, outlook: CandidateScores, attempts: Sequence[Attempt]) -> Proposal | None:
        """The split whose prediction is most in doubt, if it could still be the best."""
        hope = self._hope(outlook, attempts, CHECK_DEVIATIONS)
        row = int(np.where(outlook.surely_feasible, hope, -np.inf).argmax())
        if hope[row] < CHECK_GAIN:
            return None
        doubt = f"{self._throughput(outlook, row):,.0f} samples/s, give or take {outlook.times.deviation[row]:.1%}"
        return Proposal(split=outlook.table.split(row), reason=f"to check what is in doubt: {doubt}")

    def _hope(self, outlook: CandidateScores, attempts: Sequence[Attempt], deviations: float) -> Floats:
        """(N,) what each split gains, in logarithms of time, if it is better than predicted by so many deviations."""
        ran = np.array([a.split.shard_sizes for a in attempts if a.measurement.throughput is not None], dtype=float)
        hope = outlook.best_log_s - outlook.times.log_s + deviations * outlook.times.deviation
        return np.asarray(hope + TILE_HOPE * (fills_tiles(outlook.table.shards) & ~fills_tiles(ran)[1:].any()))

    # --- small things ------------------------------------------------------------------------------------------------

    def _why(self, outlook: CandidateScores, row: int) -> str:
        throughput, doubt = self._throughput(outlook, row), outlook.times.deviation[row]
        reason = f"predicted {throughput:,.0f} samples/s"
        if np.isfinite(outlook.best_log_s):
            gain = throughput * np.exp(outlook.best_log_s) / self.space.global_batch_size - 1
            reason += f" ({gain:+.1%}, give or take {doubt:.1%})"
        device = int((outlook.limits - outlook.needed.most[row]).argmin())
        if outlook.chance[row] < 1:
            return f"{reason}; runs, headroom on GPU {device} not sure"
        most, limit = (format_bytes(float(b[device])) for b in (outlook.needed.most[row], outlook.limits))
        return f"{reason}; GPU {device} at most at {most} of {limit}"

    def _throughput(self, outlook: CandidateScores, row: int) -> float:
        return self.space.global_batch_size / float(np.exp(outlook.times.log_s[row]))

    def _limits(self) -> Floats:
        return np.asarray(self._memory.budget_bytes - self._demands)

    def _is_grown(self, table: SplitTable, attempts: Sequence[Attempt]) -> NDArray[np.bool_]:
        largest = max(max(a.split.shard_sizes) for a in attempts if a.measurement.throughput is not None)
        return np.asarray((table.shards <= MAX_GROWTH * max(1, largest)).all(axis=1))
