"""The searches of a plan on one machine, or on many, under DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from splittune.config.data import current_versions
from splittune.errors import NoFeasibleSplitError
from splittune.hardware.virtual import VirtualHardware
from splittune.modelled_ddp import tune_ranks
from splittune.options import MIN_BATCH_NORM_SHARD, headroom_for
from splittune.planning.keep_trials import TrialKeeper
from splittune.planning.request import PlanRequest
from splittune.planning.result import Machine, PlannedSearch
from splittune.planning.storage import FinishedRows
from splittune.report.capacity.progress import PlanCallback
from splittune.report.capacity.row import LargestMicroBatch
from splittune.runners.modelled_ranks.one_card import OneCardTrials


@dataclass(slots=True)
class RankSweep:
    """The searches on these cards, a rank for each; what one card does is known to all of them."""

    request: PlanRequest
    machine: Machine
    hardware: VirtualHardware
    cards: OneCardTrials
    storage: FinishedRows | None
    callback: PlanCallback
    _identity: dict[str, Any] | None = field(default=None, init=False)

    def planned(self, size: int | None) -> PlannedSearch:
        """The row of this batch size: kept from an earlier plan, or searched now and kept."""
        if self.storage is None:
            return self._searched(size)
        kept = self.storage.row(self._identity_of(size), lambda: self._searched(size))
        return replace(kept, devices=self.machine.devices)

    def _searched(self, size: int | None) -> PlannedSearch:
        trials = TrialKeeper(self.callback)
        largest: LargestMicroBatch | None = None
        try:
            tuned = tune_ranks(self.cards, self.hardware, self.request.options, trials, global_batch_size=size)
            result, largest, lacking = tuned.result, tuned.largest, ""
        except NoFeasibleSplitError as error:
            result, lacking = None, str(error)
        return PlannedSearch(
            devices=self.machine.devices,
            cards=self.machine.cards,
            global_batch_size=trials.global_batch_size,
            strategy="ddp",
            result=result,
            lacking=lacking,
            trials=tuple(trials.trials),
            largest=largest,
            needs_values=self.cards.needs_values,
        )

    def _identity_of(self, size: int | None) -> dict[str, Any]:
        """What a row is kept under: as in one process, the job's parameters and one small step, of a card by itself."""
        if self._identity is None:
            self._identity = self._job_on_cards()
        options = self.request.options
        return self._identity | {"global_batch_size": size, "max_trials": options.max_trials}

    def _job_on_cards(self) -> dict[str, Any]:
        try:
            facts = self.cards.open(self.hardware)
            headroom = headroom_for(facts.cards, self.request.options.min_headroom_bytes)
            step = self.cards.small_step(MIN_BATCH_NORM_SHARD if self.cards.normalises_alone else 1)
        finally:
            self.cards.close()
        named = self.request.task.model.named_parameters()
        return {
            "strategy": "ddp",
            "machine": self.hardware.spec,
            "versions": current_versions(),
            "title": facts.title,
            "loader_batch_size": facts.loader_batch_size,
            "job_batch_size": facts.global_batch_size,
            "parameters": [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in named],
            "step": step.to_dict(),
            "min_headroom_bytes": list(headroom),
        }
