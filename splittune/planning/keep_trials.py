"""Keeps the trials of a plan's search, for one that finds nothing returns none."""

from __future__ import annotations

from splittune.report.capacity.progress import PlanCallback
from splittune.runners.base import DeviceView
from splittune.search import Trial
from splittune.split import SplitSpace


class TrialKeeper:
    """Passes on what a search does, and keeps its trials: a search that finds nothing returns none."""

    def __init__(self, callback: PlanCallback) -> None:
        self.trials: list[Trial] = []
        self.global_batch_size = 0
        """Of the search, once it has begun."""
        self._callback = callback
        self.on_measure = callback.on_measure
        self.on_end = callback.on_end

    def on_start(self, cards: DeviceView, space: SplitSpace, max_trials: int) -> None:
        self.trials.clear()
        self.global_batch_size = space.global_batch_size
        self._callback.on_start(cards, space, max_trials)

    def on_trial(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._callback.on_trial(trial)

    def on_activity(self, what: str) -> None:
        """Nothing: beside its trials a plan's search does no more."""
