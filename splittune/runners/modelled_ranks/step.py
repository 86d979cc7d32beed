"""The step of all ranks, put together from what each card does by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.ring import LastMicroStep, Ring, all_reduce_end_s
from splittune.profiling.measurement import KINDS_OF_MICRO_STEP, Measurement, Outcome
from splittune.runners.modelled_ranks.kinds import CardKind
from splittune.runners.modelled_ranks.one_card import CardTrials
from splittune.split import BatchSplit
from splittune.units import format_bytes, format_time

# From this part of the fullest card's peak on, optimizer state is worth a sentence. AdamW's is two fifths of what a
# rank holds before it has a sample. A choice.
_MUCH_STATE = 0.2
# What the message of a trial on one card calls it.
_ONLY_CARD = re.compile(r"\b(device|GPU) 0\b")


@dataclass(frozen=True, slots=True)
class RankTrials:
    """Trials of a job under DistributedDataParallel, one rank for each of the cards.

    A rank runs the micro-steps of its share without waiting for anybody (`no_sync`), all but the last one's backward,
    beside which gradients are added up bucket by bucket (`all_reduce_end_s`); then every rank does its own update.
    Before a step's first forward rank 0 gives the others its buffers. So a step takes

        max over ranks of the micro-steps + what of the all-reduce comes after them + the slowest update

    The ring is as fast as the slowest of the cards' links: catalogs say nothing of a network between machines.

    Worked: ranks that take 10 and 12 ms for each of 4 micro-steps, an all-reduce of which 3 ms are left over, and
    updates of 2 ms: 48 + 3 + 2 = 53 ms.
    """

    cards: CardTrials
    kinds: tuple[CardKind, ...]
    ring: Ring

    @classmethod
    def of(cls, cards: CardTrials, hardware: VirtualHardware, kinds: tuple[CardKind, ...]) -> RankTrials:
        slowest = min(gpu.link_bandwidth_bytes_per_s for gpu in hardware.gpus)
        return cls(cards, kinds, Ring(num_ranks=len(hardware.gpus), bandwidth_bytes_per_s=slowest))

    @property
    def needs_values(self) -> str | None:
        """Why trials run on real tensors; None as long as they do not."""
        return self.cards.needs_values

    def card(self, kind: int, share: int, *, accumulates: bool) -> Measurement:
        """What one card of that kind does with the share, judged; in three micro-steps where it accumulates."""
        steps = KINDS_OF_MICRO_STEP if accumulates else 1
        return self.cards.measure(self.kinds[kind], share, accumulation_steps=steps)

    def measure(self, split: BatchSplit) -> Measurement:
        """The step of all ranks, judged by the headroom demanded of each card."""
        return self._measure(split, in_full=False)

    def measure_whole_steps(self, split: BatchSplit) -> Measurement:
        """The same, its largest share run in full, should what is played not have been checked yet."""
        return self._measure(split, in_full=True)

    def _measure(self, split: BatchSplit, *, in_full: bool) -> Measurement:
        kind_of = {device: kind for kind in self.kinds for device in kind.devices}
        ranks = [(kind_of[device], share) for device, share in enumerate(split.shard_sizes)]
        each = self.cards.measure_ranks(ranks, accumulation_steps=split.accumulation_steps, in_full=in_full)
        return put_together(split, each, self._timed)

    def _timed(self, split: BatchSplit, runs: Sequence[Measurement]) -> Measurement:
        """The times of a step of ranks that do what these runs of one card each did."""
        steps, first_s = split.accumulation_steps, self.ring.broadcast_s(self.cards.buffer_bytes)
        synced_s = synchronised_s(split, runs, self.ring, self.cards.buckets, first_s)
        slowest_s = max(run.micro_step_time_s or 0.0 for run in runs)
        update_s = max(run.update_time_s or 0.0 for run in runs)
        return Measurement(
            split=split,
            outcome=Outcome.OK,
            micro_step_times_s=(slowest_s,),
            update_times_s=(synced_s + update_s - steps * slowest_s,),
            notes=(
                *self._slowest_of(runs),
                *self._account_of(synced_s - first_s - steps * slowest_s),
                *self._state_to_deal_out(runs),
            ),
        )

    def _state_to_deal_out(self, runs: Sequence[Measurement]) -> tuple[str, ...]:
        """What sharing the optimizer's state out would free, where that is much of what the fullest card holds."""
        state = self.cards.optimizer_state
        fullest = min((run.memory[0] for run in runs), key=lambda memory: memory.headroom_bytes)
        if self.ring.num_ranks == 1 or state.total_bytes < _MUCH_STATE * fullest.peak_reserved_bytes:
            return ()
        return tuple(filter(None, [state.if_dealt_out(self.ring.num_ranks)]))

    def _slowest_of(self, runs: Sequence[Measurement]) -> tuple[str, ...]:
        """Which rank the others wait for, and how long; of ranks that take the same, that."""
        if self.ring.num_ranks == 1:
            return ()
        times_s = [run.micro_step_time_s or 0.0 for run in runs]
        slowest_s = max(times_s)
        if min(times_s) == slowest_s:
            return (f"No rank waits for another: all take {format_time(slowest_s)} (modelled) for a micro-step.",)
        rank = times_s.index(slowest_s)
        card = next(kind.gpu.name for kind in self.kinds if rank in kind.devices)
        others_s = median(times_s[:rank] + times_s[rank + 1 :])
        who = (
            f"The slowest rank is {rank}, {card}: its micro-steps take {format_time(slowest_s)} (modelled), those of "
            f"the others {format_time(others_s)} in the median."
        )
        return (who,)

    def _account_of(self, left_s: float) -> tuple[str, ...]:
        if self.ring.num_ranks == 1:
            return ()
        num_bytes, bandwidth = sum(self.cards.buckets), self.ring.bandwidth_bytes_per_s
        whole_s = sum(map(self.ring.all_reduce_s, self.cards.buckets))
        links = (
            f"The all-reduce of {format_bytes(num_bytes)} over links of {bandwidth / 1e9:.1f} GB/s, the slowest "
            f"card's, takes {format_time(whole_s)} (modelled), of which {format_time(left_s)} come after the last "
            "backward."
        )
        buckets = (
            "Every card holds DistributedDataParallel's buckets beside its gradients, as torch does by default: "
            f"gradient_as_bucket_view=True frees {format_bytes(num_bytes)} on each."
        )
        return links, buckets


def synchronised_s(
    split: BatchSplit, runs: Sequence[Measurement], ring: Ring, buckets: Sequence[int], first_s: float = 0.0
) -> float:
    """Seconds of a step until all ranks have the sum of the gradients; its first forwards begin at `first_s`."""
    steps, micro_steps_s = split.accumulation_steps, [run.micro_step_time_s or 0.0 for run in runs]
    last = [LastMicroStep(start_s=first_s + (steps - 1) * one, duration_s=one) for one in micro_steps_s]
    return all_reduce_end_s(buckets, ring, last)


def put_together(
    split: BatchSplit, each: Sequence[Measurement], timed: Callable[[BatchSplit, Sequence[Measurement]], Measurement]
) -> Measurement:
    """The step of all ranks from what each did by itself, judged: `timed` gives its times.

    The first rank that did not get through its share decides what became of the step, then the first that kept too
    little. Worked: ranks 1 and 3 ran out of memory: the step did, and its message is rank 1's, about device 1.

    A rank whose card does not tell how long it worked, worked for as long as its micro-step took: that was by itself.
    """
    for device, run in enumerate(each):
        if run.throughput is None:
            return _failed(split, device, run)
    lacking = next((place for place, run in enumerate(each) if run.outcome is not Outcome.OK), None)
    return replace(
        timed(split, each),
        outcome=Outcome.OK if lacking is None else Outcome.NO_HEADROOM,
        memory=tuple(replace(run.memory[0], device=device) for device, run in enumerate(each)),
        device_busy_s=tuple((run.device_busy_s or (run.micro_step_time_s or 0.0,))[0] for run in each),
        message="" if lacking is None else _named(each[lacking].message, lacking),
    )


def _failed(split: BatchSplit, device: int, run: Measurement) -> Measurement:
    return Measurement(split=split, outcome=run.outcome, message=_named(run.message, device))


def _named(message: str, device: int) -> str:
    """The message of a trial on one card, about this one of many."""
    return _ONLY_CARD.sub(lambda found: f"{found[1]} {device}", message)
