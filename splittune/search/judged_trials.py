"""A trial as the search judges it: does it fit, which devices lacked memory, what is ruled out?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.arrays import BoolArray, FloatArray

if TYPE_CHECKING:
    from splittune.split import BatchSplit

# How a message names a device by its index within the job. `DeviceMemory.describe_lack` begins with
# "device 1:". torch's account of an error in a replica gives the replica's place in the list of
# devices. The "GPU 1" and "device 1" inside torch's own texts count torch's devices, and are not
# read.
_NAMED_DEVICE = re.compile(r"^device (\d+):|^Caught OutOfMemoryError in replica (\d+)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTrial:
    """A measurement, judged by the headroom demanded, and the devices that lacked memory."""

    measurement: Measurement
    oom_devices: frozenset[int] = field(default_factory=frozenset)
    """Empty where the split fitted, and where it ran out of memory on a device that nobody
    names."""
    lacks_cached: bool = False
    """It ran, and torch's allocator held in free blocks what it lacked: larger shares may leave fewer of them."""

    @classmethod
    def of(cls, measurement: Measurement, min_headroom_bytes: Sequence[int]) -> JudgedTrial:
        """`measurement`, judged by what each device must keep free."""
        judged = measurement.judged(min_headroom_bytes)
        return cls(
            measurement=judged,
            oom_devices=oom_devices_of(judged, min_headroom_bytes),
            lacks_cached=_lacks_cached(judged, min_headroom_bytes),
        )

    @property
    def split(self) -> BatchSplit:
        return self.measurement.split

    @property
    def ran(self) -> bool:
        """Its steps were timed; it may have kept too little headroom."""
        return self.measurement.throughput is not None

    @property
    def fits(self) -> bool:
        return self.measurement.outcome is Outcome.OK

    @property
    def lacks_memory(self) -> bool:
        return self.measurement.outcome in (Outcome.OUT_OF_MEMORY, Outcome.NO_HEADROOM)

    @property
    def throughput(self) -> float:
        """Samples per second of a split that fits; 0 of one that does not, never the best."""
        throughput = self.measurement.throughput
        return throughput if self.fits and throughput is not None else 0.0

    @property
    def likely_oom_devices(self) -> frozenset[int]:
        """The devices known to have lacked memory, else the one with the least left, else GPU 0.

        This is a guess. It may choose what to measure next, but never rules a split out.
        """
        if self.oom_devices or not self.lacks_memory:
            return self.oom_devices
        tightest = min(self.measurement.memory, key=lambda memory: memory.headroom_bytes, default=None)
        return frozenset({0 if tightest is None else tightest.device})

    def rules_out(self, split: BatchSplit) -> bool:
        """Whether `split` must lack memory because this one did, see `rules_out_each`."""
        steps, shards = np.array([float(split.accumulation_steps)]), np.array([split.shard_sizes], dtype=float)
        return bool(self.rules_out_each(steps, shards)[0])

    def rules_out_each(self, steps: FloatArray, shards: FloatArray) -> BoolArray:
        """(N,) which splits must lack memory because this one did.

        `steps` is (N,), `shards` (N, n).

        A split is ruled out if a device known to have lacked memory gets as many samples or more,
        see `largest_open_shards`. Where no such device is known, every shard must be at least as
        large. Example: GPU 0 lacked memory with shards (8, 8) in 2 steps. That rules out (9, 7). It
        rules out neither (7, 9) nor, in 1 step, (8, 24).
        """
        if not self.lacks_memory:
            return np.zeros(len(steps), dtype=bool)
        micro_batches = shards.sum(axis=1)
        if self.oom_devices:
            return np.asarray((shards > self.largest_open_shards(steps, micro_batches)).any(axis=1))
        are_larger = (shards >= np.array(self.split.shard_sizes)).all(axis=1)
        return np.asarray(self._tells_of(steps) & self._gathers_as_much(micro_batches) & are_larger)

    def largest_open_shards(self, steps: FloatArray, micro_batches: FloatArray) -> FloatArray:
        """(N, n) the largest shard of each device that this failure leaves open.

        `steps` and `micro_batches` are (N,). Infinite where the failure says nothing of a device;
        -1 where a device lacked memory without any sample. Example: GPU 0 lacked memory with shards
        (8, 8) in 2 steps. In 2 steps of 16 samples that leaves (7, inf).
        """
        largest = np.full((len(steps), self.split.num_devices), np.inf)
        for device in self.oom_devices:
            holds = self._tells_of(steps) & (self._gathers_as_much(micro_batches) if device == 0 else True)
            largest[holds, device] = self.split.shard_sizes[device] - 1
        return largest

    def _tells_of(self, steps: FloatArray) -> BoolArray:
        """(N,) accumulation costs one more copy of the gradients: a failure with several steps tells nothing of one."""
        return np.asarray((steps > 1) | (self.split.accumulation_steps == 1))

    def _gathers_as_much(self, micro_batches: FloatArray) -> BoolArray:
        """(N,) GPU 0 gathers the outputs of the whole micro-batch: with a smaller one the same shard may fit there."""
        return np.asarray(micro_batches >= self.split.micro_batch_size)


def oom_devices_of(measurement: Measurement, min_headroom_bytes: Sequence[int]) -> frozenset[int]:
    """The devices that lack memory, by their readings or by name in the message.

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


def _lacks_cached(measurement: Measurement, min_headroom_bytes: Sequence[int]) -> bool:
    """See `JudgedTrial.lacks_cached`."""
    ran = measurement.outcome is Outcome.NO_HEADROOM and measurement.throughput is not None
    return (
        ran
        and bool(measurement.memory)
        and all(
            memory.headroom_bytes + memory.peak_reserved_bytes - memory.peak_allocated_bytes
            >= min_headroom_bytes[memory.device]
            for memory in measurement.memory
        )
    )


def known_infeasible(split: BatchSplit, trials: Iterable[JudgedTrial]) -> bool:
    """Whether one of the trials shows that `split` lacks memory."""
    return any(trial.rules_out(split) for trial in trials)


def best_trial(trials: Iterable[JudgedTrial]) -> JudgedTrial | None:
    """The fastest that fits; of equals the one with more headroom, then the one measured first."""
    return min((trial for trial in trials if trial.fits), key=lambda trial: rank(trial.measurement), default=None)


def rank(measurement: Measurement) -> tuple[float, float]:
    """Sorts measurements that fit: faster first, then more headroom where it is least."""
    tightest = min((memory.headroom_bytes for memory in measurement.memory), default=float("-inf"))
    return -(measurement.throughput or 0.0), -tightest
