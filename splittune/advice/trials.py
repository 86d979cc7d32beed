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
MIN_TRIALS = 32


# Times that the micro-batch is doubled before the search. A choice; one more would find jobs that were held to 16 times
# the steps they need.
MAX_DOUBLINGS = 3


class BudgetSpentError(Exception):
    """What the advice may take is taken."""


@dataclass(slots=True, kw_only=True)
class Budget:
    """What trials may take in all: as long as the search took, or on virtual cards so many trials."""

    max_trials: int | None = None
    max_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    num_trials: int = 0
    num_apart: int = 0
    """Of `num_trials`, those that are not taken from the budget: on modelled ranks they take no time to speak of."""
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    @property
    def left_s(self) -> float | None:
        return None if self.max_s is None else self.max_s - (self.clock() - self.started_s)

    def count_apart(self, num_trials: int) -> None:
        """Count trials that cost next to nothing."""
        self.num_trials += num_trials
        self.num_apart += num_trials

    def check(self) -> None:
        """Before something is begun.

        Raises:
            BudgetSpentError: nothing is left.
        """
        if self.max_trials is not None and self.num_trials - self.num_apart >= self.max_trials:
            raise BudgetSpentError(f"the trials that advice may take are done ({self.num_trials - self.num_apart})")
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
                _climb(split, measure, headroom)
            fitting = [each for each in seen.values() if each.outcome is Outcome.OK]
            if fitting:
                most_steps = max(fitting, key=lambda each: each.throughput or 0.0).split.accumulation_steps
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


def _climb(split: BatchSplit, measure: Callable[[BatchSplit], Measurement], headroom: Sequence[int]) -> None:
    """Measure `split`, and it with half the steps again, for as long as that is sure to fit and was faster."""
    run, rate = measure(split), 0.0
    for _ in range(MAX_DOUBLINGS):
        if run.outcome is not Outcome.OK or (run.throughput or 0.0) <= rate or run.split.accumulation_steps == 1:
            return
        rate, larger = run.throughput or 0.0, doubled(run.split)
        if not _surely_fits(run, larger, headroom):
            return
        run = measure(larger)


def doubled(split: BatchSplit) -> BatchSplit:
    """With half the accumulation steps, the shares as they were in proportion.

    Worked: 4 x (4+12) of 64 samples is 2 x (8+24).
    """
    steps, size = -(-split.accumulation_steps // 2), split.global_batch_size
    micro_batch_size = -(-size // steps)
    exact = [share * micro_batch_size / split.micro_batch_size for share in split.shard_sizes]
    shards = [int(share) for share in exact]
    by_rest = sorted(range(len(shards)), key=lambda index: (shards[index] - exact[index], index))
    for index in by_rest[: micro_batch_size - sum(shards)]:
        shards[index] += 1
    return BatchSplit(global_batch_size=size, accumulation_steps=steps, shard_sizes=tuple(shards))


def _surely_fits(run: Measurement, larger: BatchSplit, headroom: Sequence[int]) -> bool:
    """Whether every card has room even if all that it holds grew as the micro-batch does."""
    growth = larger.micro_batch_size / run.split.micro_batch_size
    return all(
        memory.peak_reserved_bytes * growth <= memory.total_bytes - memory.outside_bytes - demand
        for memory, demand in zip(run.memory, headroom, strict=False)
    )
