"""A few trials of the job under a change: the search's split, then a short search, the fastest in whole steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from splittune.advice.job import Change, Job
from splittune.errors import NoFeasibleSplitError
from splittune.options import SearchOptions, headroom_for, space_for
from splittune.profiling.measurement import LossPlacement, Measurement, Outcome
from splittune.search import find_best_split
from splittune.split import BatchSplit

# Splits to search for one remedy: even ones at fewer steps first, then what the models expect most of. A choice; twice
# as many find splits that are faster by a little, and leave other remedies untried.
MAX_TRIALS_EACH = 3
# On virtual cards the limit is one of trials, so that the same search gives the same advice. A choice: five remedies'
# trials; those of a search take as long, for it begins at the most accumulation steps.
MIN_TRIALS = 24


class BudgetSpentError(Exception):
    """What the advice may take is taken."""


@dataclass(slots=True, kw_only=True)
class Budget:
    """What trials may take in all: as long as the search took, or on virtual cards so many trials."""

    max_trials: int | None = None
    max_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    num_trials: int = 0
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    @property
    def left_s(self) -> float | None:
        return None if self.max_s is None else self.max_s - (self.clock() - self.started_s)

    def check(self) -> None:
        """Before something is begun.

        Raises:
            BudgetSpentError: nothing is left.
        """
        if self.max_trials is not None and self.num_trials >= self.max_trials:
            raise BudgetSpentError(f"the trials that advice may take are done ({self.num_trials})")
        if self.left_s is not None and self.left_s <= 0:
            raise BudgetSpentError(f"as much time as the search took is over ({self.max_s:.0f} s)")


@dataclass(slots=True, kw_only=True)
class Trials:
    """Runs a job under changes, within a budget."""

    job: Job
    options: SearchOptions
    budget: Budget
    loader_samples_per_s: float | None = None
    """What the loader gave when the job was opened; None where nobody could tell."""
    loader_advice: str = ""

    def at(self, split: BatchSplit, placement: LossPlacement, change: Change | None = None) -> Measurement:
        """One split in whole steps."""
        return self._run(change or Change(), placement, [split], max_trials=0, most_steps=None)

    def around(
        self, splits: Sequence[BatchSplit], placement: LossPlacement, change: Change, *, most_steps: int
    ) -> Measurement:
        """The fastest of `splits` and of a short search with at most `most_steps` accumulation steps, in whole steps.

        Raises:
            NoFeasibleSplitError: none fits.
        """
        return self._run(change, placement, splits, max_trials=MAX_TRIALS_EACH, most_steps=most_steps)

    def _run(
        self,
        change: Change,
        placement: LossPlacement,
        splits: Sequence[BatchSplit],
        *,
        max_trials: int,
        most_steps: int | None,
    ) -> Measurement:
        self.budget.check()
        runner = self.job.runner(change)
        try:
            facts = runner.open((placement,))
            self.loader_samples_per_s = facts.loader_samples_per_s or self.loader_samples_per_s
            self.loader_advice = facts.loader_advice
            headroom = headroom_for(facts.cards, self._headroom(change))
            profiler = runner.profiler(min_headroom_bytes=headroom, loss_placement=placement)
            seen: dict[BatchSplit, Measurement] = {}

            def measure(split: BatchSplit) -> Measurement:
                if split not in seen:
                    self.budget.num_trials += 1
                    seen[split] = profiler.measure(split)
                return seen[split]

            if max_trials == 0:
                self.budget.num_trials += 1
                return profiler.measure_whole_steps(splits[0])
            for split in splits:
                measure(split)
            space = replace(space_for(facts, self.options.shares), max_accumulation_steps=most_steps)
            lacking: NoFeasibleSplitError | None = None
            try:
                find_best_split(
                    space,
                    measure,
                    max_trials=max_trials,
                    timeout_s=None if self.budget.left_s is None else max(0.001, self.budget.left_s),
                    seed=self.options.seed,
                    min_headroom_bytes=headroom,
                )
            except NoFeasibleSplitError as error:
                lacking = error
            fitting = [each for each in seen.values() if each.outcome is Outcome.OK]
            if lacking is not None and not fitting:
                raise lacking
            fastest = max(fitting, key=lambda each: each.throughput or 0.0)
            self.budget.num_trials += 1
            return profiler.measure_whole_steps(fastest.split)
        finally:
            runner.close()

    def _headroom(self, change: Change) -> int | Sequence[int] | None:
        demanded = self.options.min_headroom_bytes
        if isinstance(demanded, Sequence) and change.order:
            return [demanded[index] for index in change.order]
        return demanded
