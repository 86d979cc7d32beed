"""What one measured split teaches about the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splittune.profiling.measurement import Measurement, Outcome

if TYPE_CHECKING:
    from splittune.split import BatchSplit

# How messages name a device by its index within the job: `DeviceMemory.describe_lack` begins so, and so does torch's
# account of an error in a replica, whose number is the replica's place in the list of devices. The "GPU 1" and
# "device 1" in torch's own texts count torch's devices, and are not read.
_NAMED_DEVICE = re.compile(r"^device (\d+):|^Caught OutOfMemoryError in replica (\d+)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A measurement and the devices known to have lacked memory in it.

    `lacking` is empty where the split fitted, and also where it ran out of memory and nobody knows where.
    """

    measurement: Measurement
    lacking: frozenset[int] = field(default_factory=frozenset)

    @property
    def split(self) -> BatchSplit:
        return self.measurement.split

    @property
    def fits(self) -> bool:
        return self.measurement.outcome is Outcome.OK

    @property
    def lacks_memory(self) -> bool:
        return self.measurement.outcome in (Outcome.OUT_OF_MEMORY, Outcome.NO_HEADROOM)

    @property
    def throughput(self) -> float:
        """Samples per second of a split that fits; 0 of one that does not, which is never the best."""
        throughput = self.measurement.throughput
        return throughput if self.fits and throughput is not None else 0.0

    @property
    def likely_oom_devices(self) -> frozenset[int]:
        """The devices that lacked memory, else the likeliest: the one with the least left, else GPU 0.

        A guess is good enough to choose what to measure next, never to rule a split out.
        """
        if self.lacking or not self.lacks_memory:
            return self.lacking
        tightest = min(self.measurement.memory, key=lambda memory: memory.headroom_bytes, default=None)
        return frozenset({0 if tightest is None else tightest.device})

    def rules_out(self, split: BatchSplit) -> bool:
        """True when `split` must lack memory too, since this one did and no demand of `split` is smaller.

        Memory grows with a device's shard and with the micro-batch (GPU 0 gathers its outputs), and accumulation costs
        GPU 0 one more copy of the gradients, so a failure with several steps says nothing about a single one. The
        devices known to have lacked memory decide, each by itself; where none is known every shard must be at least
        as large. Example: GPU 0 lacked memory with shards (8, 8) in 2 steps; that rules out (9, 7), not (7, 9) or,
        in 1 step, (8, 24).
        """
        failed = self.split
        if not self.lacks_memory or split.micro_batch_size < failed.micro_batch_size:
            return False
        if failed.accumulation_steps > 1 and split.accumulation_steps == 1:
            return False
        if self.lacking:
            return any(split.shard_sizes[device] >= failed.shard_sizes[device] for device in self.lacking)
        return all(own >= other for own, other in zip(split.shard_sizes, failed.shard_sizes, strict=True))


def lacking_devices(measurement: Measurement, min_headroom_bytes: Sequence[int]) -> frozenset[int]:
    """The devices this measurement shows to lack memory, by their readings or by name in its message.

    `min_headroom_bytes` holds one demand for each device.
    """
    if measurement.outcome not in (Outcome.OUT_OF_MEMORY, Outcome.NO_HEADROOM):
        return frozenset()
    short = {
        memory.device for memory in measurement.memory if memory.headroom_bytes < min_headroom_bytes[memory.device]
    }
    named = _NAMED_DEVICE.match(measurement.message)
    if named is not None:
        device = int(named[1] or named[2])
        short |= {device} if device < measurement.split.num_devices else set()
    return frozenset(short)


def known_infeasible(split: BatchSplit, attempts: Iterable[Attempt]) -> bool:
    """True when one of the attempts shows that `split` lacks memory."""
    return any(attempt.rules_out(split) for attempt in attempts)


def next_for_baseline(even_splits: Sequence[BatchSplit], attempts: Sequence[Attempt]) -> BatchSplit | None:
    """The even split to measure next on the way to the baseline; None once that is settled.

    Fewest steps first, then twice as many until one fits (the last of all before giving up), then the middle between
    the last failure and the first that fits: 64 samples that fit from 5 steps on are measured at 1, 2, 4, 8, 6, 5.
    """
    known = {attempt.split: attempt.fits for attempt in attempts}
    fits = [known.get(split, False if known_infeasible(split, attempts) else None) for split in even_splits]
    first = next((place for place, answer in enumerate(fits) if answer), None)
    beyond = len(fits) if first is None else first
    last_failure = max((place for place, answer in enumerate(fits[:beyond]) if answer is False), default=-1)
    if first is None:
        last = len(fits) - 1
        place = min(max(0, 2 * last_failure + 1), last)
        return even_splits[place] if last_failure < last else None
    return even_splits[(last_failure + first) // 2] if first - last_failure > 1 else None


def best_attempt(attempts: Iterable[Attempt]) -> Attempt | None:
    """The fastest that fits; of equals the one with more headroom, then the one measured first."""
    return min((attempt for attempt in attempts if attempt.fits), key=lambda a: rank(a.measurement), default=None)


def rank(measurement: Measurement) -> tuple[float, float]:
    """Sorts measurements that fit from best to worst: faster first, then more headroom where it is least."""
    tightest = min((memory.headroom_bytes for memory in measurement.memory), default=float("-inf"))
    return -(measurement.throughput or 0.0), -tightest


def baseline_attempt(even_splits: Sequence[BatchSplit], attempts: Sequence[Attempt]) -> Attempt | None:
    """The even split at the fewest steps among those that fit; None where none does."""
    fitting = {attempt.split: attempt for attempt in attempts if attempt.fits}
    return next((fitting[split] for split in even_splits if split in fitting), None)
