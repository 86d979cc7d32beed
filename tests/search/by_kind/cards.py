"""Made-up ranks: cards whose time and memory are straight lines of their share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from splittune.hardware import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.split import BatchSplit

MIB = 2**20
TOTAL_BYTES = 1000 * MIB


@dataclass
class Line:
    """Cards of one kind: ``a + b s`` seconds, and a memory that is full at `most` samples."""

    count: int
    a: float
    b: float
    most: int = 10**9

    def time_s(self, share: int) -> float:
        return self.a + self.b * max(1, share)

    def room(self, share: int) -> int:
        """Bytes left at this share: 0 at `most`, where all but 100 MiB are a sample's."""
        return round(900 * MIB * (1 - share / self.most))


@dataclass
class LinedRanks:
    """Ranks on these cards, kind after kind; what comes once a step takes `once_s`."""

    kinds: Sequence[Line]
    once_s: float = 1e-6
    card_runs: list[tuple[int, int, bool]] = field(default_factory=list)
    splits: list[BatchSplit] = field(default_factory=list)

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        first, found = 0, []
        for kind in self.kinds:
            found.append(tuple(range(first, first + kind.count)))
            first += kind.count
        return tuple(found)

    def card(self, kind: int, share: int, *, accumulates: bool) -> Measurement:
        self.card_runs.append((kind, share, accumulates))
        split = BatchSplit(global_batch_size=share, accumulation_steps=1, shard_sizes=(share,))
        return self._measured(split, [self.kinds[kind]])

    def measure(self, split: BatchSplit) -> Measurement:
        self.splits.append(split)
        return self._measured(split, [kind for kind in self.kinds for _ in range(kind.count)])

    def measure_whole_steps(self, split: BatchSplit) -> Measurement:
        return self.measure(split)

    def _measured(self, split: BatchSplit, cards: Sequence[Line]) -> Measurement:
        rooms = [card.room(share) for card, share in zip(cards, split.shard_sizes, strict=True)]
        if min(rooms) < 0:
            return Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY, message=f"device {rooms.index(min(rooms))}")
        slowest_s = max(card.time_s(share) for card, share in zip(cards, split.shard_sizes, strict=True))
        return Measurement(
            split=split,
            outcome=Outcome.OK,
            micro_step_times_s=(slowest_s,),
            update_times_s=(self.once_s,),
            memory=tuple(
                DeviceMemory(
                    device=device,
                    total_bytes=TOTAL_BYTES,
                    outside_bytes=0,
                    peak_allocated_bytes=TOTAL_BYTES - room,
                    peak_reserved_bytes=TOTAL_BYTES - room,
                )
                for device, room in enumerate(rooms)
            ),
        )


def least_time_s(num_samples: int, kinds: Sequence[Line]) -> float:
    """The time in which the cards do that many samples, could they be cut: the sum of what each does in it is all."""
    per_s = sum(kind.count / kind.b for kind in kinds)
    return (num_samples + sum(kind.count * kind.a / kind.b for kind in kinds)) / per_s
