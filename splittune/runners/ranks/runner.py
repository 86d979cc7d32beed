"""RanksRunner: rank 0's way of running trials on real cards, one a rank."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from splittune.errors import ConfigError, DeviceError
from splittune.hardware.base import Device
from splittune.hardware.virtual.ring import Ring
from splittune.profiling.measurement import KINDS_OF_MICRO_STEP, LossPlacement, Measurement, Outcome
from splittune.runners.base import DeviceSnapshot, JobFacts
from splittune.runners.modelled_ranks.step import put_together, synchronised_s
from splittune.runners.ranks.control import ControlGroup
from splittune.runners.ranks.crew import Crew
from splittune.runners.ranks.journal import TrialJournal
from splittune.runners.ranks.orders import Answer, Connect, Order, Probe, WholeSteps
from splittune.runners.ranks.own_card import OwnRealCard
from splittune.split import BatchSplit
from splittune.units import format_bytes, format_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """What a rank brings to a search: plain data."""

    node: str
    """The machine's name."""
    job: JobFacts
    """Of this rank's job, on its one card."""


def introduce(control: ControlGroup, job: JobFacts) -> tuple[Present, ...]:
    """What every rank brings, by rank; a collective.

    Raises:
        DeviceError: two ranks of a machine have the same card; on all ranks.
        RanksError: a rank was lost.
    """
    present = tuple(control.gather(Present(node=socket.gethostname(), job=job)))
    seen: dict[tuple[str, str], int] = {}
    for rank, each in enumerate(present):
        (card,) = each.job.cards.devices
        key = each.node, card.uuid or card.torch_device
        if card.uuid is not None and key in seen:
            raise DeviceError(
                f"ranks {seen[key]} and {rank} have the same card, {card.name} ({card.uuid}) on {each.node}: expected "
                "one for each rank. Start as many processes a machine as it has cards; LOCAL_RANK says which is whose."
            )
        seen[key] = rank
    return present


class RanksRunner:
    """A `Runner` whose trials are run by all ranks, each on its own card; only rank 0 has one, the others `follow`.

    Every rank measures its share by itself, beside buffers as large as DistributedDataParallel's buckets, and one
    agreement brings the ranks' figures together. A step's time is then put together from them and from an all-reduce
    that was timed once. Splits that every rank has proven, with headroom, may be measured in synchronised steps: the
    figure is the slowest rank's.

    Args:
        crew: all ranks.
        own: this rank's card, on which the job is open.
        present: what every rank brings.
        journal: of the trial on its way; None for none.
    """

    def __init__(
        self, crew: Crew, own: OwnRealCard, present: Sequence[Present], *, journal: TrialJournal | None = None
    ) -> None:
        self.crew, self._own, self._present, self._journal = crew, own, tuple(present), journal
        self.buckets, self.all_reduce_s = own.buckets, 0.0

    def open(self, placements: Sequence[LossPlacement]) -> JobFacts:
        """Have the ranks ready for synchronised steps, and time their all-reduce.

        Raises:
            ConfigError: a loss placement other than "output".
        """
        if tuple(placements) != ("output",):
            raise ConfigError(
                f'loss_placement asks for {", ".join(placements)} on ranks: expected "output", for every rank has a '
                "loss of its own. Leave it out."
            )
        answers = self.crew.obey(Connect())
        self.all_reduce_s = max(answer.all_reduce_s or 0.0 for answer in answers)
        rates = [each.job.loader_samples_per_s for each in self._present]
        known = [rate for rate in rates if rate is not None]
        return replace(
            self._present[0].job,
            cards=self._cards(),
            # each rank's loader reads its own part, and the slowest holds the others up
            loader_samples_per_s=len(known) * min(known) if len(known) == len(rates) else None,
        )

    def _cards(self) -> DeviceSnapshot:
        each = [rank.job.cards for rank in self._present]
        return DeviceSnapshot(
            devices=tuple(replace(cards.devices[0], index=rank) for rank, cards in enumerate(each)),
            is_modelled=each[0].is_modelled,
            spec=None,
            memory_before=tuple(replace(cards.memory_before[0], device=rank) for rank, cards in enumerate(each)),
            nodes=tuple(rank.node for rank in self._present),
        )

    @property
    def ring(self) -> Ring:
        """As fast as the all-reduce was measured."""
        num_ranks = len(self._present)
        moved = 2 * (num_ranks - 1) / num_ranks * sum(self.buckets)
        return Ring(num_ranks=num_ranks, bandwidth_bytes_per_s=max(moved, 1.0) / max(self.all_reduce_s, 1e-9))

    def profiler(self, *, min_headroom_bytes: Sequence[int], loss_placement: LossPlacement) -> RanksProfiler:
        return RanksProfiler(self, tuple(min_headroom_bytes))

    def close(self) -> None:
        """Leave this rank's job as it was found; the others do so when they are dismissed."""
        self._own.close()

    def answers(self, order: Order) -> list[Answer] | str:
        """What the ranks answer; or, of a trial in which ranks were lost before, in words what became of it."""
        if self._journal is None:
            return self.crew.obey(order)
        num_crashes = self._journal.num_crashes(order.identity)
        if num_crashes:
            return "ranks were lost in this trial, and started again"
        with self._journal.running(order.identity):
            return self.crew.obey(order)

    def card(self, rank: int) -> Device:
        """That rank's."""
        return self._present[rank].job.cards.devices[0]

    def node(self, rank: int) -> str:
        """That rank's machine."""
        return self._present[rank].node


@dataclass(frozen=True, slots=True)
class RanksProfiler:
    """Measures splits as `Profiler` does, on all ranks."""

    runner: RanksRunner
    min_headroom_bytes: tuple[int, ...]
    _proven: dict[BatchSplit, Measurement] = field(default_factory=dict)

    def measure(self, split: BatchSplit) -> Measurement:
        """Every rank's share by itself, and the step put together from that."""
        order = Probe(
            shares=split.shard_sizes,
            accumulation_steps=min(split.accumulation_steps, KINDS_OF_MICRO_STEP),
            in_full=(False,) * split.num_devices,
        )
        answers = self.runner.answers(order)
        if isinstance(answers, str):
            return Measurement(split=split, outcome=Outcome.CRASHED, message=answers)
        demands = zip(_measured(answers), self.min_headroom_bytes, strict=True)
        measured = put_together(split, [run.judged((demand,)) for run, demand in demands], self._timed)
        if measured.outcome is Outcome.OK:
            self._proven[split] = measured
        return measured

    def measure_whole_steps(self, split: BatchSplit) -> Measurement:
        """Synchronised steps of DistributedDataParallel, of a split that every rank has proven, with headroom.

        Where that was in an earlier run it is proven anew first.
        """
        if split not in self._proven:
            again = self.measure(split)
            if again.outcome is not Outcome.OK:
                return again
        answers = self.runner.answers(WholeSteps(split=split))
        if isinstance(answers, str):
            return Measurement(split=split, outcome=Outcome.CRASHED, message=answers)
        runs, proven = _measured(answers), self._proven[split]
        measured = Measurement(
            split=split,
            outcome=Outcome.OK,
            whole_step_times_s=tuple(map(max, zip(*(run.whole_step_times_s for run in runs), strict=True))),
            memory=tuple(replace(run.memory[0], device=rank) for rank, run in enumerate(runs)),
            device_busy_s=proven.device_busy_s,
            num_alloc_retries=sum(run.num_alloc_retries for run in runs),
            notes=(*proven.notes, *runs[0].notes),  # of steps that were skipped, which all ranks did together
        )
        return measured.judged(self.min_headroom_bytes)

    def _timed(self, split: BatchSplit, runs: Sequence[Measurement]) -> Measurement:
        """The slowest rank's times, and what comes after them: the rest of the all-reduce, the slowest update."""
        slowest = max(range(len(runs)), key=lambda rank: runs[rank].micro_step_time_s or 0.0)
        run, runner = runs[slowest], self.runner
        micro_s, update_s = run.micro_step_time_s or 0.0, max(one.update_time_s or 0.0 for one in runs)
        left_s = synchronised_s(split, runs, runner.ring, runner.buckets) - split.accumulation_steps * micro_s
        more_s = max(left_s, 0.0) + update_s - (run.update_time_s or 0.0)
        return Measurement(
            split=split,
            outcome=Outcome.OK,
            micro_step_times_s=run.micro_step_times_s,
            update_times_s=tuple(time_s + more_s for time_s in run.update_times_s),
            unbroken_round_times_s=tuple(time_s + more_s for time_s in run.unbroken_round_times_s),
            num_alloc_retries=sum(one.num_alloc_retries for one in runs),
            notes=(*self._account_of(runs, slowest, left_s), *_notes_of(runs)),
        )

    def _account_of(self, runs: Sequence[Measurement], slowest: int, left_s: float) -> tuple[str, str]:
        runner = self.runner
        times_s = [run.micro_step_time_s or 0.0 for run in runs]
        others_s = median(times_s[:slowest] + times_s[slowest + 1 :])
        who = (
            f"The slowest rank is {slowest}, {runner.card(slowest).name} on {runner.node(slowest)}: its micro-steps "
            f"take {format_time(times_s[slowest])}, those of the others {format_time(others_s)} in the median."
        )
        all_reduce = (
            f"The all-reduce of {format_bytes(sum(runner.buckets))} takes {format_time(runner.all_reduce_s)} by "
            f"itself, of which about {format_time(max(left_s, 0.0))} come after the last backward."
        )
        return who, all_reduce


def _measured(answers: Sequence[Answer]) -> list[Measurement]:
    found = [answer.measurement for answer in answers if answer.measurement is not None]
    assert len(found) == len(answers), "every rank has a share, or a sample that stands in"
    return found


def _notes_of(runs: Sequence[Measurement]) -> list[str]:
    return [f"Rank {rank}: {note}" for rank, run in enumerate(runs) for note in run.notes]
