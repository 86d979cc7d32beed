"""What a policy sees and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from splittune.search.arrays import BoolArray, FloatArray
from splittune.search.candidates.acquisition import CandidateScores
from splittune.search.candidates.generate import candidates, neighbours
from splittune.search.candidates.table import (
    SplitTable,
    can_be_listed,
    concatenate,
    even_table,
    listed_table,
    open_rows,
)
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.kinds import kinds_of
from splittune.search.models.memory import MemoryModel
from splittune.search.models.step_time import TimeModel
from splittune.split import BatchSplit, SplitSpace

# A shard may be this many times as large as the largest that ran, whatever the memory model
# promises, while another is left. A choice: it bounds what growth that no trial has shown yet can do at once. Smaller
# takes more trials to reach a large batch.
MAX_GROWTH = 16

# So many of the fastest splits that fit have their neighbours among the candidates. A choice: of splits that are
# nearly as fast noise says which is the best, and the best may have no neighbours. More: each proposal takes longer.
NUM_NEAR = 4

ProposalKind = Literal[
    "start",
    "smallest left",
    "whole batch",
    "baseline",
    "improve",
    "tell apart",
    "risky",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The split to measure next, what for, and why."""

    split: BatchSplit
    kind: ProposalKind
    """What the trial is for: ``"baseline"``. Code reads this."""
    reason: str
    """Words for people: ``"even split at k=2: looking for the baseline"``. No code reads them."""


class Policy(Protocol):
    """One idea of what is worth a trial."""

    def propose(self, state: SearchState) -> Proposal | None:
        """The split to measure next; None where this policy wants no trial."""


@dataclass(frozen=True, kw_only=True)
class SpaceTables:
    """The splits of one space, listed once for a whole search."""

    space: SplitSpace
    evens: SplitTable
    """The even splits, fewest accumulation steps first."""
    listed: SplitTable
    """All splits where `is_complete`; else those that vary GPU 0's share."""
    is_complete: bool

    @classmethod
    def of(cls, space: SplitSpace) -> SpaceTables:
        return cls(space=space, evens=even_table(space), listed=listed_table(space), is_complete=can_be_listed(space))


@dataclass(frozen=True, kw_only=True)
class SearchState:
    """Everything a policy may look at: splits, the trials so far, and what the models make of them.

    It is built once for a proposal. Models and scores are worked out when a policy first asks for
    them.
    """

    tables: SpaceTables
    demands: FloatArray
    """(n,) bytes that every device must keep free."""
    trials: Sequence[JudgedTrial]
    """Oldest first."""
    memory: MemoryModel
    """It has seen `trials`."""
    doubt: float = 1.0
    """How many times its own deviations the time model was off of late, see `Calibration`."""

    @property
    def space(self) -> SplitSpace:
        return self.tables.space

    @cached_property
    def any_ran(self) -> bool:
        """Whether a trial ran; before one did, the models know nothing."""
        return any(trial.ran for trial in self.trials)

    @cached_property
    def any_fits(self) -> bool:
        return any(trial.fits for trial in self.trials)

    @cached_property
    def limits(self) -> FloatArray:
        """(n,) the bytes that each device may hold and keep its headroom."""
        return np.asarray(self.memory.budget_bytes - self.demands)

    @cached_property
    def kinds(self) -> tuple[int, ...] | None:
        """See `kinds_of`."""
        return kinds_of(self.space, self.trials)

    @cached_property
    def time(self) -> TimeModel:
        """For a state in which a trial ran."""
        return TimeModel(self.trials, self.kinds)

    @cached_property
    def scores(self) -> CandidateScores | None:
        """What the models say of the candidates; None where nothing ran or no candidate is left."""
        table = self._candidates() if self.any_ran else None
        return None if table is None or not len(table) else self._scores_of(table)

    def _candidates(self) -> SplitTable:
        """The splits that are neither measured nor ruled out.

        Where they are too many to list, candidates are the even ones, those balanced under the curves of
        the time model, and the neighbours of the fastest so far that fit, or where none does of those that ran.
        """
        table = self.tables.listed
        if not self.tables.is_complete:
            balanced = candidates(self.space, self.time.likely_hypotheses, self.memory, self.limits, self.trials)
            fitting = sorted((trial for trial in self.trials if trial.fits), key=lambda trial: -trial.throughput)
            known = fitting or [trial for trial in self.trials if trial.ran]
            near = [neighbours(trial.split, self.space.min_shard_size) for trial in known[:NUM_NEAR]]
            table = concatenate(self.tables.evens, balanced, *near)
        return table.where(open_rows(table, self.trials))

    def _scores_of(self, table: SplitTable) -> CandidateScores:
        times = self.time.predict(table.steps, table.shards)
        needed = self.memory.needed(table.steps, table.shards)
        budget = self.memory.budget_bytes
        is_within_budget = (needed.most_after_cache_flush <= budget).all(axis=1)
        cannot_oom = is_within_budget & self.is_grown_slowly(table)
        return CandidateScores(
            table=table,
            times=times,
            best_log_s=self.best_log_s,
            needed=needed,
            limits=self.limits,
            cannot_oom=cannot_oom,
            runs=np.where(cannot_oom, 1.0, needed.chance_below(budget)),
        )

    @cached_property
    def best_log_s(self) -> float:
        """Predicted for the fastest split that fits; infinite where none does."""
        fitting = [trial.split for trial in self.trials if trial.fits]
        if not fitting:
            return float("inf")
        table = SplitTable.of(fitting)
        return float(self.time.predict(table.steps, table.shards).log_s.min())

    def is_grown_slowly(self, table: SplitTable) -> BoolArray:
        """(N,) whether no shard is over `MAX_GROWTH` times as large as the largest that ran."""
        largest = max(max(trial.split.shard_sizes) for trial in self.trials if trial.ran)
        return np.asarray((table.shards <= MAX_GROWTH * max(1, largest)).all(axis=1))

    def is_untold_share(self, table: SplitTable) -> BoolArray:
        """(N,) whether a device has its first share, or GPU 0 more than the only one that it had.

        Of one share nobody knows what each further sample takes; replicas are told by one another, and GPU 0 by none.
        """
        had = np.array([trial.split.shard_sizes for trial in self.trials if trial.ran], dtype=float)
        largest = had.max(axis=0)
        untold = largest == 0
        untold[0] |= len(np.unique(had[had[:, 0] > 0, 0])) == 1
        return np.asarray((table.shards[:, untold] > largest[untold]).any(axis=1))

    def throughput(self, scores: CandidateScores, row: int) -> float:
        """Samples per second predicted for a candidate."""
        return self.space.global_batch_size / float(np.exp(scores.times.log_s[row]))
