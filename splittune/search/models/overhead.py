"""What torch's allocator reserves beyond what is allocated, by the trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement
from splittune.search.arrays import BoolArray, FloatArray
from splittune.search.models.memory_readings import size_of
from splittune.units import MIB

# Reserved beyond allocated, up to this says nothing of larger sizes; what goes beyond grows with
# them. Torch's caching allocator takes segments of 20 MiB for requests from 1 MiB and of 2 MiB for
# smaller ones, so one of each may be almost empty.
QUANTUM_BYTES = 22 * MIB
# Where trials of two sizes or more show that what the allocator adds is the same part, to `SAME`, of what comes and
# goes, it adds as much again with this probability. What was seen at one size, or varies more, tells of no other: free
# blocks between tensors of a few sizes do, and waste in every tensor does not. Choices: of a few that were tried these
# foretold best which of 30,000 splits, of 300 problems of three generators, ran.
STEADY = 0.5
SAME = 0.1
# Reserved are whole segments of so many bytes.
SEGMENT_BYTES = 2 * MIB


@dataclass(frozen=True, slots=True)
class Overhead:
    """Reserved minus allocated bytes, as a line: ``constant + ratio x allocated``."""

    constant: float
    ratio: float

    def __call__(self, allocated: FloatArray) -> FloatArray:
        return self.constant + self.ratio * allocated


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorOverhead:
    """The least and the most of it, as lines."""

    least: Overhead
    """Of all trials; another may reserve nothing."""
    most: Overhead
    after_flush: Overhead
    """The most that is left once the allocator, running short, has handed its free blocks back."""
    steady: float
    """Probability that it reserves the most of all trials again; see `STEADY`."""

    @classmethod
    def of(
        cls, runs: Sequence[Measurement], devices: Sequence[int], *, accumulates: bool, gathers: bool
    ) -> AllocatorOverhead:
        """Over all trials of `devices` with a share in that kind of step.

        Gradients that stay leave other gaps than such as come and go, and where a device gathers the outputs of others,
        what these took is free for the backward. Where there was no trial of the kind, the others tell. Without a share
        GPU 0 holds outputs alone, see `OverheadOfOutputs`. Of each excess up to `QUANTUM_BYTES` is constant, and the
        rest a ratio. Running short, the allocator hands its free blocks back: then the constant is the smallest one
        seen. Devices that never had a share are told by all others.
        """
        held = [
            [
                (run.split.accumulation_steps > 1, bool(_gathers(np.array(size_of(i, run.split)))), memory)
                for run in runs
                if run.split.shard_sizes[i] and (memory := run.memory[i]).peak_allocated_bytes
            ]
            for i in range(runs[0].split.num_devices)
        ]
        own = [told for i in devices for told in held[i]] or [told for one in held for told in one]
        own = [told for told in own if told[1] == gathers] or own
        of_kind = [memory for kind, _, memory in own if kind == accumulates] or [memory for *_, memory in own]
        pairs = [
            (memory.peak_allocated_bytes, max(0, memory.peak_reserved_bytes - memory.peak_allocated_bytes))
            for memory in of_kind
        ] or [(1, 0)]
        quanta = [min(excess, QUANTUM_BYTES) for _, excess in pairs]
        ratios = [max(0, excess - QUANTUM_BYTES) / allocated for allocated, excess in pairs]
        return cls(
            least=Overhead(min(quanta), min(ratios)),
            most=Overhead(max(quanta), max(ratios)),
            after_flush=Overhead(min(quanta), max(ratios)),
            steady=STEADY * _is_same_part(of_kind),
        )


@dataclass(frozen=True, slots=True)
class OverheadOfOutputs:
    """What is reserved on GPU 0 beyond what it held, by the trials in which it had no share, or nothing.

    Then nothing comes and goes but outputs, in large blocks, and what rests leaves no gaps: the ratio is of what is
    beside that. Worked: of 10 GiB alive 2 rest, and 12 are reserved. So of 14 GiB alive 17 are: a quarter of
    ``14 - 2`` comes on top. Up to the `largest` micro-batch of such trials these alone tell; beyond, those with a share
    may as well.
    """

    least: Overhead
    most: Overhead
    """Beside `QUANTUM_BYTES`."""
    largest: float

    @classmethod
    def of(cls, runs: Sequence[Measurement]) -> OverheadOfOutputs:
        """By those of these trials that tell."""
        told = [
            (memory.peak_allocated_bytes, memory.resting_bytes, memory.peak_reserved_bytes, run.split.micro_batch_size)
            for run in runs
            if run.split.gpu0_bsz == 0
            if (memory := run.memory[0]).resting_bytes is not None
            if memory.peak_allocated_bytes > memory.resting_bytes
        ]
        least = [_beside_rest(live, rest or 0, reserved - live) for live, rest, reserved, _ in told]
        most = [_beside_rest(live, rest or 0, reserved - live - QUANTUM_BYTES) for live, rest, reserved, _ in told]
        none, by_ratio, sizes = Overhead(0.0, 0.0), attrgetter("ratio"), [size for *_, size in told]
        return cls(
            least=min(least, key=by_ratio, default=none),
            most=max(most, key=by_ratio, default=none),
            largest=float(max(sizes, default=0)),
        )

    def at_least(self, sizes: FloatArray, live: FloatArray, adds: FloatArray) -> FloatArray:
        """(N,) the least at `sizes`, (N, 2), of `live` bytes, where trials with a share tell `adds`, each (N,)."""
        return np.where(self._tells(sizes), np.maximum(self.least(live), 0.0), adds)

    def at_most(self, sizes: FloatArray, live: FloatArray, adds: FloatArray) -> FloatArray:
        """(N,) the most, as `at_least`."""
        outputs = np.maximum(self.most(live), 0.0)
        either = np.maximum(adds, outputs)
        without = np.where(self._tells(sizes), np.minimum(outputs + QUANTUM_BYTES, either), either)
        return np.where(sizes[:, 0] > 0, adds, without)

    def _tells(self, sizes: FloatArray) -> BoolArray:
        return np.asarray((sizes[:, 0] == 0) & (sizes[:, 1] <= self.largest))


class Overheads:
    """What torch's allocator adds on every device, in steps of each kind, by the trials.

    Args:
        runs: the trials that ran, one at least.
        alike: of each device those that hold as much at equal shares, itself among them.
    """

    def __init__(self, runs: Sequence[Measurement], alike: Sequence[Sequence[int]]) -> None:
        self._told = {
            (device, accumulates, gathers): AllocatorOverhead.of(
                runs, devices, accumulates=accumulates, gathers=gathers
            )
            for device, devices in enumerate(alike)
            for accumulates in (False, True)
            for gathers in (False, True)
        }
        self._of_outputs = OverheadOfOutputs.of(runs)

    def least(self, device: int, sizes: FloatArray, live: FloatArray, *, accumulates: bool) -> FloatArray:
        """(N,) the least bytes on top of what is `live`, (N,), at `sizes`, (N, 2)."""
        adds = self._by_kind(device, sizes, accumulates, lambda told: told.least(live))
        return self._of_outputs.at_least(sizes, live, adds) if device == 0 else adds

    def most(self, device: int, sizes: FloatArray, live: FloatArray, *, accumulates: bool) -> FloatArray:
        """(N,) the most, as `least`."""
        adds = self._by_kind(device, sizes, accumulates, lambda told: told.most(live))
        return self._of_outputs.at_most(sizes, live, adds) if device == 0 else adds

    def after_flush(self, device: int, sizes: FloatArray, live: FloatArray, *, accumulates: bool) -> FloatArray:
        """(N,) the most that is left once the allocator has handed its free blocks back, as `least`."""
        adds = self._by_kind(device, sizes, accumulates, lambda told: told.after_flush(live))
        return self._of_outputs.at_most(sizes, live, adds) if device == 0 else adds

    def steady(self, device: int, sizes: FloatArray, *, accumulates: bool) -> FloatArray:
        """(N,) the probability that it adds the most again, at `sizes`, (N, 2)."""
        return self._by_kind(device, sizes, accumulates, lambda told: told.steady)

    def _by_kind(
        self, device: int, sizes: FloatArray, accumulates: bool, of: Callable[[AllocatorOverhead], FloatArray | float]
    ) -> FloatArray:
        """(N,) what trials tell that gather outputs of others where `sizes` do, and the others elsewhere."""
        alone, gathering = (of(self._told[device, accumulates, gathers]) for gathers in (False, True))
        return np.where(_gathers(sizes), gathering, alone)


def _gathers(sizes: FloatArray) -> BoolArray:
    """(...) whether outputs of others come to a device at `sizes`, (..., 2): GPU 0 holds those of the micro-batch."""
    return np.asarray(sizes[..., 0] < sizes[..., 1])


def _beside_rest(live: int, rest: int, adds: int) -> Overhead:
    """The line on which so much comes on top of what is `live`, in proportion to what of it does not rest."""
    ratio = max(0, adds) / (live - rest)
    return Overhead(-ratio * rest, ratio)


def _is_same_part(told: Sequence[DeviceMemory]) -> bool:
    """Whether trials of two sizes or more reserved the same part on top of what is beside the rest, but for segments.

    Worked: 10 MiB on top of 100, and 21 on top of 200, are 8 to 12 % and 9.5 to 11.5 %; 40 on top of 200 are 19 %.
    """
    beside = np.array([max(one.peak_allocated_bytes - (one.resting_bytes or 0), 1) for one in told], dtype=float)
    excess = np.array([one.peak_reserved_bytes - one.peak_allocated_bytes for one in told], dtype=float)
    least, most = (excess - SEGMENT_BYTES) / beside, (excess + SEGMENT_BYTES) / beside
    return len({one.peak_allocated_bytes for one in told}) > 1 and bool(most.min() >= (1 - SAME) * least.max())
