"""One machine and batch size of a plan, and what limits it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.diagnosis import diagnose
from splittune.report.explain import facts_of
from splittune.report.memory_parts import MemoryParts
from splittune.report.ranks import why_ranks
from splittune.report.state_parts import ModelBytes, PartsOfTrials
from splittune.report.words import count_of, gpus
from splittune.search.judged_trials import oom_devices_of
from splittune.search.result import Trial, speedup_over
from splittune.training.module_memory import ModuleMemory
from splittune.units import format_bytes

if TYPE_CHECKING:
    from splittune.config import SplitConfig
    from splittune.config.data import Strategy
    from splittune.hardware.base import Device
    from splittune.split import BatchSplit


class LimitedBy(str, Enum):
    """What the largest part of the limiting card's memory is."""

    SHARE = "share"
    WHOLE_BATCH = "whole_batch"
    FIXED = "fixed"
    UPDATE = "update"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestMicroBatch:
    """The largest micro-batch that was found to fit on a machine, as a step by itself.

    Worked: 4 x (20 + 40 + 40 + 40) fit and 140 is the largest; with `is_measured` one of 142 samples did not.
    """

    split: BatchSplit
    """It, or of a lower bound the largest of the trials."""
    is_measured: bool
    """True where sizes were tried until one at most 1 % larger did not fit; False for a lower bound."""

    @property
    def num_samples(self) -> int:
        return self.split.micro_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRow:
    """One machine and batch size: the best split, or the one that was given, and what it is compared with."""

    devices: str
    """The machine as it was named, ``"4xRTX3090"``."""
    cards: tuple[Device, ...]
    global_batch_size: int
    strategy: Strategy = "dp"
    """One process for all cards, or with "ddp" a rank for each."""
    best: Measurement | None
    """None where no split was found to fit; of a given split its own, also where that one does not fit."""
    baseline: Measurement | None = None
    """The even split at the fewest accumulation steps that fit; None where none does, or nobody looked."""
    trials: tuple[Trial, ...] = ()
    largest: LargestMicroBatch | None = None
    config: SplitConfig | None = None
    message: str = ""
    """What was lacking, and where; empty for what fits."""
    model: ModelBytes | None = None
    """What the model takes once; None where nobody said."""
    modules: tuple[ModuleMemory, ...] = ()
    """What its modules hold, most first."""
    is_given: bool = False
    """Whether its split was given, not searched: it has nothing beside it."""

    @property
    def fits(self) -> bool:
        return self.best is not None and self.best.outcome is Outcome.OK

    @property
    def ran(self) -> bool:
        """Whether its steps ran on the cards: it fits, or keeps less free than demanded."""
        return self.best is not None and self.best.throughput is not None

    @property
    def speedup(self) -> float | None:
        """Of the best over the even split; None without one of them."""
        return None if self.best is None or not self.fits else speedup_over(self.baseline, self.best)

    @property
    def parts(self) -> tuple[MemoryParts, ...]:
        """What each card's peak is made of at the best split; empty for what did not run."""
        if self.best is None or not self.ran:
            return ()
        return PartsOfTrials(self.trials, self.strategy, self.model).of(self.best)

    @property
    def needs_splitting(self) -> bool:
        """Whether memory shapes the split: the whole batch does not fit in one step, evenly spread."""
        return self.baseline is None or self.baseline.split.accumulation_steps > 1

    @property
    def limiting_device(self) -> int | None:
        """The card with the least headroom; of what does not fit the one that lacked memory. None where not known."""
        if self.best is not None and self.fits:
            return min(self.best.memory, key=lambda memory: memory.headroom_bytes).device if self.best.memory else None
        failed = _smallest([self.best] if self.best is not None else [trial.measurement for trial in self.trials])
        lacking = frozenset() if failed is None else oom_devices_of(failed, [0] * failed.split.num_devices)
        return min(lacking, default=None)

    @property
    def limited_by(self) -> LimitedBy | None:
        """The largest part of what is held on the limiting card; None where the trials do not tell."""
        device = self.limiting_device
        if device is None or not self.parts:
            return None
        return _largest_part(self.parts[device])

    @property
    def why(self) -> str:
        """Which card limits and why, in a sentence or two; what is lacking where nothing fits."""
        if self.best is None or not self.fits:
            return self.message
        if self.strategy == "ddp":
            return why_ranks(self.best, self.parts, self.limiting_device, self.cards)
        if self.is_given:
            return self._room_left(self.best)
        if not self.needs_splitting:
            return f"Memory does not limit it: the batch fits in one step, evenly spread. {self._room_left(self.best)}"
        return " ".join(facts_of(diagnose(self.trials, self.best, self.baseline, self.cards, is_modelled=True)))

    def _room_left(self, best: Measurement) -> str:
        device = self.limiting_device
        if device is None:
            return ""
        memory = best.memory[device]
        return (
            f"The fullest card is {gpus([device])}, with {format_bytes(memory.headroom_bytes)} of "
            f"{format_bytes(memory.total_bytes)} left at {count_of(best.split.shard_sizes[device], 'sample')}."
        )


class Named(Protocol):
    """A machine as it is used; a `CapacityRow` is one."""

    @property
    def devices(self) -> str: ...

    @property
    def strategy(self) -> Strategy: ...


def named_of(row: Named) -> str:
    """``"4xRTX3090"``, or ``'4xRTX3090 as "ddp"'``."""
    return row.devices if row.strategy == "dp" else f'{row.devices} as "{row.strategy}"'


def best_row(rows: Sequence[CapacityRow]) -> CapacityRow | None:
    """The fastest that fits; of equals the first. None where nothing does."""
    fitting = [row for row in rows if row.fits]
    return max(fitting, key=lambda row: (row.best.throughput if row.best is not None else None) or 0.0, default=None)


def _largest_part(parts: MemoryParts) -> LimitedBy | None:
    if parts.fixed_bytes is None:
        return LimitedBy.OUTSIDE if parts.outside_bytes > parts.peak_bytes else None
    fills = {
        LimitedBy.SHARE: parts.per_share_bytes or 0,
        LimitedBy.WHOLE_BATCH: parts.whole_batch_bytes or 0,
        LimitedBy.FIXED: parts.fixed_bytes,
    }
    if parts.update_peak_bytes is not None:
        fills = {LimitedBy.UPDATE: parts.update_peak_bytes}
    fills[LimitedBy.OUTSIDE] = parts.outside_bytes
    return max(fills, key=lambda what: fills[what])


def _smallest(failed: Sequence[Measurement]) -> Measurement | None:
    return min(failed, key=lambda run: (run.split.micro_batch_size, max(run.split.shard_sizes)), default=None)
