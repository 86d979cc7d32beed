"""The accumulation steps and shares with which many cards, of a few kinds, are fastest: each of them measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.by_kind.balance import balanced_totals, largest_within
from splittune.search.by_kind.curve import CardCurve, Growth
from splittune.search.no_feasible import no_feasible_split
from splittune.search.result import Kind, SearchResult, Stopped, Trial
from splittune.split import BatchSplit, spread_evenly

# Times are refined where shares go, until shares repeat; so many times at most for each number of steps. A choice: on
# the catalog's cards two or three are enough.
MAX_REFINEMENTS = 6
# Numbers of accumulation steps beyond those from which no card is full any more: among a few there is one that whole
# samples suit. A choice.
MORE_STEPS = 16
# So many of them are foretold at most, taken evenly: of hundreds the micro-batches differ by little. A choice.
MAX_FORETOLD = 64
# A split is worth measuring if it is foretold to gain so much. A choice: less than times are foretold to.
LEAST_GAIN = 0.002
# The largest share that is tried: hardly anybody goes beyond. A choice.
MAX_SHARE = 2**16


class Ranks(Protocol):
    """What measures: one card by its kind and share, or all of them under a split."""

    def card(self, kind: int, share: int, *, accumulates: bool) -> Measurement: ...

    def measure(self, split: BatchSplit) -> Measurement: ...

    def measure_whole_steps(self, split: BatchSplit) -> Measurement: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesByKind:
    """The problem: a global batch over cards of some kinds, given as their devices."""

    global_batch_size: int
    kinds: tuple[tuple[int, ...], ...]
    """The devices of each kind; together 0, 1, 2 and so on."""
    min_headroom_bytes: tuple[int, ...]
    """One for each kind."""
    least_share: int = 1
    """Samples of every card in the largest micro-batch; where there are fewer samples than that, some have none."""
    may_try_more: bool = True
    """Whether shares beyond the global batch may be tried, to tell what the cards could take."""

    @property
    def num_devices(self) -> int:
        return sum(map(len, self.kinds))

    @property
    def least(self) -> int:
        return min(self.least_share, self.global_batch_size // self.num_devices)

    def split_of(self, accumulation_steps: int, totals: Sequence[int]) -> BatchSplit:
        """Each kind's samples spread evenly over its cards, a remainder over the last of them.

        Worked: 5 and 9 samples for the devices (0, 1) and (2, 3) make shards of 2 + 3 + 4 + 5.
        """
        shards = [0] * self.num_devices
        for devices, total in zip(self.kinds, totals, strict=True):
            for device, share in zip(devices, reversed(spread_evenly(total, len(devices))), strict=True):
                shards[device] = share
        return BatchSplit(
            global_batch_size=self.global_batch_size,
            accumulation_steps=accumulation_steps,
            shard_sizes=tuple(shards),
        )

    def even(self, accumulation_steps: int) -> BatchSplit:
        return BatchSplit.even(
            global_batch_size=self.global_batch_size,
            accumulation_steps=accumulation_steps,
            num_devices=self.num_devices,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundByKind:
    """The winner beside the even split, and the largest share that fits on each kind's cards in a step by itself."""

    result: SearchResult
    most: tuple[int, ...]
    are_bracketed: bool
    """Whether a share at most 1 % larger was seen to fail on each."""


def find_by_kind(
    problem: SharesByKind,
    ranks: Ranks,
    *,
    max_trials: int,
    on_measure: Callable[[BatchSplit, bool], None],
    on_trial: Callable[[Trial], None],
) -> FoundByKind:
    """The fastest split found with at most `max_trials` of all cards, confirmed beside the even split that fits.

    1. How much fits on a card of each kind, and with it the fewest accumulation steps, of tuned and of even shares.
    2. At those steps shares are balanced by what is known of the cards' times, and measured. That tells times where
       they are wanted, by which shares are balanced anew, until they repeat.
    3. Where a card is full at these steps, more of them may let it keep up with the others: those foretold to be faster
       are measured as well.

    What was run for a kind of card costs nothing for its further ones. `on_measure` is told each split and whether it
    is confirmed, `on_trial` what came of it.

    Raises:
        NoFeasibleSplitError: not even the least share fits on some card; the message says which, and what it lacks.
    """
    return _Study(problem, ranks, max_trials, on_measure, on_trial).run()


@dataclass(slots=True)
class _Study:
    problem: SharesByKind
    ranks: Ranks
    max_trials: int
    on_measure: Callable[[BatchSplit, bool], None]
    on_trial: Callable[[Trial], None]
    trials: list[Trial] = field(default_factory=list)
    _growth: Growth = field(default_factory=Growth)
    _curves: dict[bool, tuple[CardCurve, ...]] = field(default_factory=dict)
    _found: dict[BatchSplit, Measurement] = field(default_factory=dict)

    def run(self) -> FoundByKind:
        fewest, even = self._fewest_steps(), self._baseline()
        if fewest is not None:
            self._refine(fewest)
            self._try_more_steps(fewest)
        fitting = [run for run in self._found.values() if run.outcome is Outcome.OK]
        if not fitting:
            if not self.trials:  # what lacks is seen at the smallest shares
                self._measure(self._smallest(), "the smallest shares")
            raise no_feasible_split(self.trials, "space exhausted", self._demands())
        best = self._best_of(fitting)
        baseline = None if even is None else self._confirmed(even, "the baseline, once more")
        if baseline is not None and baseline.outcome is not Outcome.OK:
            baseline = None
        curves = self._curves_of(1)
        return FoundByKind(
            result=SearchResult(best=best, baseline=baseline, trials=tuple(self.trials), stopped=self._stopped()),
            most=tuple(curve.most for curve in curves),
            are_bracketed=all(curve.is_bracketed for curve in curves),
        )

    def _best_of(self, fitting: Sequence[Measurement]) -> Measurement:
        """The fastest that does as well once more; on a modelled clock that is the first, unless it crashes."""
        for run in sorted(fitting, key=lambda run: -(run.throughput or 0.0)):
            again = self._confirmed(run, "the fastest, once more")
            if again.outcome is Outcome.OK:
                return again
        raise no_feasible_split(self.trials, "space exhausted", self._demands())

    def _curves_of(self, accumulation_steps: int) -> tuple[CardCurve, ...]:
        """What is known of each kind; a step that accumulates holds its gradients meanwhile."""
        accumulates = accumulation_steps > 1
        if accumulates not in self._curves:
            problem = self.problem
            self._curves[accumulates] = tuple(
                CardCurve(
                    len(devices),
                    lambda share, kind=kind: self.ranks.card(kind, share, accumulates=accumulates),  # type: ignore[misc]
                    growth=self._growth,
                    demand_bytes=problem.min_headroom_bytes[kind],
                    limit=max(MAX_SHARE, problem.global_batch_size)
                    if problem.may_try_more
                    else problem.global_batch_size,
                    asked_for=problem.global_batch_size,
                    least=max(1, problem.least),
                )
                for kind, devices in enumerate(problem.kinds)
            )
        return self._curves[accumulates]

    def _steps_for(self, room_of: Callable[[tuple[CardCurve, ...]], int]) -> int | None:
        """The fewest accumulation steps whose micro-batch has room, by what fits; None where none has."""
        problem = self.problem
        if any(curve.most < max(1, problem.least) for curve in self._curves_of(1)):
            return None
        if room_of(self._curves_of(1)) >= problem.global_batch_size:
            return 1
        if any(curve.most < max(1, problem.least) for curve in self._curves_of(2)):
            return None
        steps = max(2, -(-problem.global_batch_size // room_of(self._curves_of(2))))
        return steps if self._is_legal(steps) else None

    def _is_legal(self, steps: int) -> bool:
        """Whether every card has its least share in the largest micro-batch."""
        if steps > self.problem.global_batch_size:
            return False
        return -(-self.problem.global_batch_size // steps) >= self.problem.least * self.problem.num_devices

    def _fewest_steps(self) -> int | None:
        return self._steps_for(lambda curves: sum(curve.count * curve.most for curve in curves))

    def _baseline(self) -> Measurement | None:
        """The even split at the fewest accumulation steps that fit, where the fullest card has no more than fits."""
        num_devices = self.problem.num_devices
        steps = self._steps_for(lambda curves: num_devices * min(curve.most for curve in curves))
        if steps is None:
            return None
        run = self._measure(self.problem.even(steps), "the even split at the fewest steps that fit")
        return run if run.outcome is Outcome.OK else None

    def _refine(self, steps: int) -> None:
        """Balance and measure, until the shares repeat."""
        share = max(1, -(-self.problem.global_batch_size // steps) // self.problem.num_devices)
        for curve in self._curves_of(steps):  # one share near those that are to come
            curve.run(min(share, max(1, curve.most)))
        for number in range(MAX_REFINEMENTS):
            split = self._balanced(steps)
            is_over = number > 0 and len(self.trials) >= self.max_trials
            if split is None or split in self._found or is_over:
                return
            for curve, devices in zip(self._curves_of(steps), self.problem.kinds, strict=True):
                for share in {split.shard_sizes[device] for device in devices}:
                    curve.run(share)
            self._measure(split, f"shares that finish together, at {steps} steps")

    def _balanced(self, steps: int) -> BatchSplit | None:
        problem, size = self.problem, -(-self.problem.global_batch_size // steps)
        totals = balanced_totals(size, self._curves_of(steps), least=problem.least)
        return None if totals is None else problem.split_of(steps, totals)

    def _try_more_steps(self, fewest: int) -> None:
        """Measure those that are foretold to be faster, the fastest first, where memory holds a card up."""
        if fewest == 1 and not self._is_any_full(fewest):
            return
        last = max(fewest, self._steps_without_full()) + MORE_STEPS
        further = [steps for steps in _evenly(fewest + 1, last, MAX_FORETOLD) if self._is_legal(steps)]
        for steps in sorted(further, key=self._foretold_s):
            fitting = [run.step_time_s for run in self._found.values() if run.outcome is Outcome.OK]
            best_s = min((time_s for time_s in fitting if time_s is not None), default=float("inf"))
            if len(self.trials) >= self.max_trials:
                return
            if self._foretold_s(steps) <= (1 - LEAST_GAIN) * best_s:  # with what the last ones told of the cards
                self._refine(steps)

    def _steps_without_full(self) -> int:
        """The fewest accumulation steps with which all cards end together, before the first of them is full.

        Worked: cards of 1 and 2 ms a sample, of which the faster holds 10, do 10 + 5 in 10 ms: 100 samples in 7 steps.
        """
        curves = self._curves_of(2)
        first_full_s = min(curve.time_s(curve.most) for curve in curves)
        room = sum(curve.count * largest_within(curve, first_full_s, most=curve.most) for curve in curves)
        return -(-self.problem.global_batch_size // max(1, room))

    def _is_any_full(self, steps: int) -> bool:
        split = self._balanced(steps)
        if split is None:
            return True
        full = [max(split.shard_sizes[device] for device in devices) for devices in self.problem.kinds]
        return any(share >= curve.most for share, curve in zip(full, self._curves_of(steps), strict=True))

    def _foretold_s(self, steps: int) -> float:
        """A step by the cards' curves, and what came once a step where that was measured."""
        split = self._balanced(steps)
        if split is None:
            return float("inf")
        once_s = min((run.update_time_s or 0.0 for run in self._found.values()), default=0.0)
        slowest_s = max(
            curve.time_s(max(split.shard_sizes[device] for device in devices))
            for curve, devices in zip(self._curves_of(steps), self.problem.kinds, strict=True)
        )
        return steps * slowest_s + once_s

    def _measure(self, split: BatchSplit, reason: str) -> Measurement:
        if split not in self._found:
            self.on_measure(split, False)
            self._found[split] = self.ranks.measure(split)
            self._note("search", self._found[split], reason)
        return self._found[split]

    def _confirmed(self, run: Measurement, reason: str) -> Measurement:
        self.on_measure(run.split, True)
        again = self.ranks.measure_whole_steps(run.split)
        self._note("confirm", again, reason)
        return again

    def _note(self, kind: Kind, run: Measurement, reason: str) -> None:
        self.trials.append(Trial(number=len(self.trials), kind=kind, measurement=run, reason=reason))
        self.on_trial(self.trials[-1])

    def _stopped(self) -> Stopped:
        searched = sum(trial.kind == "search" for trial in self.trials)
        return "max_trials" if searched >= self.max_trials else "converged"

    def _smallest(self) -> BatchSplit:
        steps = max(steps for steps in (1, self._most_steps()) if self._is_legal(steps))
        return self.problem.even(steps)

    def _most_steps(self) -> int:
        """With which every card has its least share."""
        return max(1, self.problem.global_batch_size // max(1, self.problem.least * self.problem.num_devices))

    def _demands(self) -> tuple[int, ...]:
        demands = [0] * self.problem.num_devices
        for devices, demand in zip(self.problem.kinds, self.problem.min_headroom_bytes, strict=True):
            for device in devices:
                demands[device] = demand
        return tuple(demands)


def _evenly(first: int, last: int, count: int) -> tuple[int, ...]:
    """Whole numbers from `first` to `last`, all of them or `count` as evenly as can be. Worked: 1, 4, 7 of 1 to 7."""
    if last - first < count:
        return tuple(range(first, last + 1))
    return tuple(first + place * (last - first) // (count - 1) for place in range(count))
