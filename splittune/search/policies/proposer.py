"""Which split to measure next: the first policy that wants a trial decides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splittune.search.candidates.table import open_rows
from splittune.search.choices import SIGNIFICANT
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.calibration import Calibration
from splittune.search.models.memory import MemoryModel
from splittune.search.policies.base import Policy, Proposal, SearchState, SpaceTables
from splittune.search.policies.baseline import FindBaseline
from splittune.search.policies.confidence import UpperConfidenceBound
from splittune.search.policies.smallest_left import SmallestLeft
from splittune.search.policies.start_small import StartSmall
from splittune.search.policies.tell_apart import TellApart
from splittune.split import SplitSpace

POLICIES: tuple[Policy, ...] = (
    StartSmall(),
    FindBaseline(),  # what the result is compared with
    TellApart(),
    UpperConfidenceBound(),
    SmallestLeft(),
)


def propose(state: SearchState, policies: Sequence[Policy]) -> Proposal | None:
    """What the first policy that wants a trial proposes; None where none does."""
    return next((proposal for policy in policies if (proposal := policy.propose(state)) is not None), None)


class Proposer:
    """Proposes splits of `space` one after the other, from all trials so far and from nothing else.

    It keeps what does not change between proposals: the tables of splits, the memory model, and how
    far predictions were off, which take in each trial once.

    Args:
        space: the legal splits.
        min_headroom_bytes: what every device must keep free, one number for each.
        policies: what is asked, first to last.
    """

    def __init__(
        self, space: SplitSpace, min_headroom_bytes: Sequence[int], policies: Sequence[Policy] = POLICIES
    ) -> None:
        self._policies = policies
        self._tables = SpaceTables.of(space)
        self._demands = np.array(min_headroom_bytes, dtype=float)
        self._memory, self._calibration, self._latest = self._beginning()

    def propose(self, trials: Sequence[JudgedTrial]) -> Proposal | None:
        """The next split; None when no other is worth measuring."""
        return propose(self.state(trials), self._policies)

    def state(self, trials: Sequence[JudgedTrial]) -> SearchState:
        """What the policies see after these trials."""
        known = self._latest.trials
        if list(trials[: len(known)]) != known:
            self._memory, self._calibration, self._latest = self._beginning()
            known = self._latest.trials
        for trial in trials[len(known) :]:
            if self._latest.any_ran:
                self._calibration.observe(trial, self._latest.time)
            self._memory.observe([trial])
            self._latest = SearchState(
                tables=self._tables,
                demands=self._demands,
                trials=[*self._latest.trials, trial],
                memory=self._memory,
                doubt=self._calibration.doubt,
            )
        return self._latest

    def has_open(self, trials: Sequence[JudgedTrial]) -> bool:
        """Whether a listed split is neither measured nor ruled out; none is where nothing fits."""
        return any(trial.fits for trial in trials) and bool(open_rows(self._tables.listed, trials).any())

    def is_believed(self, trials: Sequence[JudgedTrial]) -> bool:
        """Whether the latest trials were within `SIGNIFICANT` times the deviations foretold."""
        return self.state(trials).doubt <= SIGNIFICANT

    def warnings(self, trials: Sequence[JudgedTrial]) -> tuple[str, ...]:
        """What the models could not explain, in sentences; empty where they fitted."""
        state = self.state(trials)
        if not state.any_ran:
            return ()
        return (*state.memory.warnings(), *state.time.warnings())

    def _beginning(self) -> tuple[MemoryModel, Calibration, SearchState]:
        memory, calibration = MemoryModel((), self._tables.space.num_devices), Calibration()
        state = SearchState(tables=self._tables, demands=self._demands, trials=[], memory=memory)
        return memory, calibration, state
