"""Virtual cards under ranks: each rank runs the trials of its own card, and rank 0 searches over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from splittune.hardware.virtual import VirtualHardware
from splittune.profiling.measurement import KINDS_OF_MICRO_STEP, Measurement, Outcome
from splittune.runners.base import DeviceSnapshot, JobFacts
from splittune.runners.modelled_ranks.kinds import CardKind, kinds_of
from splittune.runners.modelled_ranks.one_card import OneCardTrials
from splittune.runners.ranks.crew import Crew
from splittune.runners.ranks.journal import TrialJournal
from splittune.runners.ranks.memo import AnswerMemo
from splittune.runners.ranks.orders import Answer, Order, Probe
from splittune.split import BatchSplit
from splittune.training import TrainingTask

# A card's own runs say what fits on every card of its kind: one is only given up if ranks were lost in it twice. A
# split that loses them once is left alone. A choice.
MAX_CRASHES_OF_A_CARD = 2


class OwnCard:
    """One rank's virtual card, and the job as it runs on it. Open after `open`, which keeps the job as it was."""

    def __init__(self, task: TrainingTask, hardware: VirtualHardware, rank: int) -> None:
        """`hardware` has the cards of all ranks; rank r takes card r."""
        own = VirtualHardware([hardware.gpus[rank]], occupied_bytes=[hardware.occupied_bytes[rank]])
        self.rank, self.task, self.cards = rank, task, OneCardTrials(task, own)
        self._hardware, self._is_open = own, False
        (self._kind,) = kinds_of(own, [0])

    def open(self) -> JobFacts:
        """What is known of the job, on this card."""
        self._is_open = True
        return self.cards.open(self._hardware)

    def close(self) -> None:
        """Leave the job as it was found; once is enough."""
        if self._is_open:
            self._is_open = False
            self.cards.close()

    def obey(self, order: Order) -> Answer:
        assert isinstance(order, Probe), "a modelled clock has no other steps"
        if not order.scripts_hold:
            self.cards.forget_scripts()
        share, measured = order.shares[self.rank], None
        if share is not None:
            steps, in_full = order.accumulation_steps, order.in_full[self.rank]
            measured = self.cards.measure(self._kind, share, accumulation_steps=steps, in_full=in_full)
        return Answer(measurement=measured, needs_values=self.cards.needs_values, scripts_hold=self.cards.scripts_hold)


class CardsOfRanks:
    """`CardTrials` of cards that the ranks have: what rank 0 searches with."""

    def __init__(
        self,
        crew: Crew,
        own: OwnCard,
        facts: JobFacts,
        *,
        memo: AnswerMemo | None = None,
        journal: TrialJournal | None = None,
    ) -> None:
        """`facts` are this rank's, of a job that all ranks have open."""
        self._crew, self._own, self._facts, self._memo, self._journal = crew, own, facts, memo, journal
        self.buckets, self.buffer_bytes = own.cards.buckets, own.cards.buffer_bytes
        self.optimizer_state = own.cards.optimizer_state
        self.needs_values, self.scripts_hold = own.cards.needs_values, True

    def open(self, hardware: VirtualHardware) -> JobFacts:
        self._num_ranks = len(hardware.gpus)
        return replace(self._facts, cards=DeviceSnapshot.of(hardware))

    def close(self) -> None:
        self._own.close()

    def measure(self, kind: CardKind, share: int, *, accumulation_steps: int, in_full: bool = False) -> Measurement:
        """What a card of this kind does: the worst of what the ranks with one do, each on its own."""
        shares = [share if device in kind.devices else None for device in range(self._num_ranks)]
        found = self._probed("a card", shares, accumulation_steps, [in_full] * self._num_ranks)
        return _worst(found[device] for device in kind.devices).judged((kind.min_headroom_bytes,))

    def measure_ranks(
        self, ranks: Sequence[tuple[CardKind, int]], *, accumulation_steps: int, in_full: bool
    ) -> list[Measurement]:
        """Every rank's share on its own card, and one agreement on all of them."""
        largest = max(ranks, key=lambda rank: rank[1])
        found = self._probed(
            "a split in full" if in_full else "a split",
            [share for _, share in ranks],
            accumulation_steps,
            [in_full and rank == largest for rank in ranks],
        )
        return [found[device].judged((kind.min_headroom_bytes,)) for device, (kind, _) in enumerate(ranks)]

    def _probed(
        self, phase: str, shares: Sequence[int | None], accumulation_steps: int, in_full: Sequence[bool]
    ) -> dict[int, Measurement]:
        order = Probe(
            shares=tuple(shares),
            accumulation_steps=min(accumulation_steps, KINDS_OF_MICRO_STEP),
            in_full=tuple(in_full),
            scripts_hold=self.scripts_hold,
        )
        answers = self._answers(order, {"phase": phase, **order.identity})
        self.needs_values = next(filter(None, [self.needs_values, *(each.needs_values for each in answers)]), None)
        self.scripts_hold = self.scripts_hold and all(each.scripts_hold for each in answers)
        return {rank: each.measurement for rank, each in enumerate(answers) if each.measurement is not None}

    def _answers(self, order: Probe, trial: dict[str, Any]) -> list[Answer]:
        """What the ranks answer, or have answered; of a trial that has lost ranks, that it crashed."""
        known = None if self._memo is None else self._memo.get(trial)
        if known is not None:
            return known
        journal = self._journal
        num_crashes = 0 if journal is None else journal.num_crashes(trial)
        if num_crashes >= (MAX_CRASHES_OF_A_CARD if trial["phase"] == "a card" else 1):
            answers = [Answer(measurement=crashed(order, rank, num_crashes)) for rank in range(len(order.shares))]
        else:
            with nullcontext() if journal is None else journal.running(trial):
                answers = self._crew.obey(order)
        if self._memo is not None:
            self._memo.add(trial, answers)
        return answers


def _worst(found: Iterable[Measurement]) -> Measurement:
    """The first that did not get through, or else kept too little, or else the slowest."""
    order = [Outcome.CRASHED, Outcome.OUT_OF_MEMORY, Outcome.NO_HEADROOM, Outcome.OK]
    return min(found, key=lambda run: (order.index(run.outcome), -(run.step_time_s or 0.0)))


def crashed(order: Probe, rank: int, num_crashes: int) -> Measurement | None:
    """What a rank's part of a trial in which ranks were lost counts as; None of one that had none."""
    share, steps = order.shares[rank], order.accumulation_steps
    if share is None:
        return None
    size = max(1, share)
    split = BatchSplit(global_batch_size=steps * size, accumulation_steps=steps, shard_sizes=(size,))
    times = "once" if num_crashes == 1 else f"{num_crashes} times"
    return Measurement(split=split, outcome=Outcome.CRASHED, message=f"ranks were lost in this trial {times}")
