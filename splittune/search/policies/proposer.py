"""Which split to measure next: the first policy that wants a trial decides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splittune.search.candidates.table import open_rows
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.memory import MemoryModel
from splittune.search.policies.base import Policy, Proposal, SearchState, SpaceTables
from splittune.search.policies.baseline import FindBaseline
from splittune.search.policies.explore_far import ExploreFar
from splittune.search.policies.improve import ExpectedImprovement
from splittune.search.policies.measure_all import MeasureAll
from splittune.search.policies.probe_feasibility import ProbeFeasibility
from splittune.search.policies.risky import RiskyImprovement
from splittune.search.policies.smallest_left import SmallestLeft
from splittune.search.policies.start_small import StartSmall
from splittune.search.policies.verify_uncertain import VerifyUncertain
from splittune.split import SplitSpace

POLICIES: tuple[Policy, ...] = (
    StartSmall(),
    SmallestLeft(until="one ran"),
    MeasureAll(),
    FindBaseline(),
    ProbeFeasibility(),
    ExpectedImprovement(min_gain=0.003),  # worth a trial at once
    RiskyImprovement(),
    ExploreFar(),
    VerifyUncertain(),
    ExpectedImprovement(min_gain=0.001),  # worth one when nothing else is
    SmallestLeft(until="one fits"),
)


def propose(state: SearchState, policies: Sequence[Policy] = POLICIES) -> Proposal | None:
    """What the first policy that wants a trial proposes; None where none does."""
    return next((proposal for policy in policies if (proposal := policy.propose(state)) is not None), None)


class Proposer:
    """Proposes splits of `space` one after the other, from all trials so far and from nothing else.

    It keeps what does not change between proposals: the tables of splits, and the memory model,
    which takes in each trial once.

    Args:
        space: the legal splits.
        min_headroom_bytes: what every device must keep free, one number for each.
    """

    def __init__(self, space: SplitSpace, min_headroom_bytes: Sequence[int]) -> None:
        self._tables = SpaceTables.of(space)
        self._demands = np.array(min_headroom_bytes, dtype=float)
        self._memory = MemoryModel((), space.num_devices)
        self._seen: list[JudgedTrial] = []

    def propose(self, trials: Sequence[JudgedTrial]) -> Proposal | None:
        """The next split; None when no other is worth measuring."""
        return propose(self.state(trials))

    def state(self, trials: Sequence[JudgedTrial]) -> SearchState:
        """What the policies see after these trials."""
        self._learn(trials)
        return SearchState(tables=self._tables, demands=self._demands, trials=trials, memory=self._memory)

    def has_open(self, trials: Sequence[JudgedTrial]) -> bool:
        """Whether a listed split is neither measured nor ruled out; none is where nothing fits."""
        return any(trial.fits for trial in trials) and bool(open_rows(self._tables.listed, trials).any())

    def warnings(self, trials: Sequence[JudgedTrial]) -> tuple[str, ...]:
        """What the models could not explain, in sentences; empty where they fitted."""
        state = self.state(trials)
        return (*state.memory.warnings(), *state.time.warnings()) if state.any_ran else ()

    def _learn(self, trials: Sequence[JudgedTrial]) -> None:
        known = len(self._seen)
        if list(trials[:known]) != self._seen:
            self._memory, known = MemoryModel((), self._tables.space.num_devices), 0
        self._memory.observe(trials[known:])
        self._seen = list(trials)
