"""What torch's allocator reserves beyond what is allocated, by the trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splittune.profiling.measurement import Measurement
from splittune.search.arrays import FloatArray
from splittune.units import MIB

# Reserved beyond allocated, up to this says nothing of larger sizes; what goes beyond grows with
# them. Torch's caching allocator takes segments of 20 MiB for requests from 1 MiB and of 2 MiB for
# smaller ones, so one of each may be almost empty.
QUANTUM_BYTES = 22 * MIB
# Where trials of two sizes or more show that what the allocator adds hardly falls as more is allocated, by `FALLEN` of
# what it was at most, it goes on so with this probability. What fell further, or was seen at one size, tells of no
# other. Choices: waste in every tensor is as steady as that, and free blocks between tensors of a few sizes are not.
STEADY = 0.5
FALLEN = 0.2


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
    def of(cls, runs: Sequence[Measurement], devices: Sequence[int], *, accumulates: bool) -> AllocatorOverhead:
        """Over all trials of `devices` with a share in that kind of step.

        Gradients that stay leave other gaps than such as come and go; where there was no trial of the kind, the others
        tell. Without a share GPU 0 holds outputs alone, see `overhead_of_outputs`. Of each excess up to
        `QUANTUM_BYTES` is constant, and the rest a ratio. Running short, the allocator hands its free blocks back: then
        the constant is the smallest one seen. Devices that never had a share are told by all others.
        """
        held = [
            [
                (run.split.accumulation_steps > 1, memory)
                for run in runs
                if run.split.shard_sizes[i] and (memory := run.memory[i]).peak_allocated_bytes
            ]
            for i in range(runs[0].split.num_devices)
        ]
        own = [pair for i in devices for pair in held[i]] or [pair for one in held for pair in one]
        of_kind = [memory for kind, memory in own if kind == accumulates] or [memory for _, memory in own]
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
            steady=STEADY * _hardly_fell(pairs),
        )


def overhead_of_outputs(runs: Sequence[Measurement]) -> Overhead:
    """The most that was reserved on GPU 0 beyond what it held, by the trials in which it had no share; else nothing.

    Then nothing comes and goes but outputs, in large blocks, and what rests leaves no gaps: the ratio is of what is
    beside that. Worked: of 10 GiB alive 2 rest, and 12 are reserved. So of 14 GiB alive 17 are: a quarter of
    ``14 - 2`` comes on top.
    """
    lines = [Overhead(0.0, 0.0)]
    for memory in (run.memory[0] for run in runs if run.split.gpu0_bsz == 0):
        live, rest = memory.peak_allocated_bytes, memory.resting_bytes
        if rest is not None and live > rest:
            ratio = max(0, memory.peak_reserved_bytes - live - QUANTUM_BYTES) / (live - rest)
            lines.append(Overhead(-ratio * rest, ratio))
    return max(lines, key=lambda line: line.ratio)


def _hardly_fell(pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether of two sizes or more none had much less excess than a smaller one; `pairs` are (size, excess) in bytes.

    Worked: 10 of 100, 30 of 200 and 25 of 300 fell by a sixth; 20 of 300 would have fallen by a third.
    """
    excess = np.array([more for _, more in sorted(pairs)], dtype=float)
    before = np.maximum.accumulate(excess)
    return len({size for size, _ in pairs}) > 1 and bool((excess >= (1 - FALLEN) * before).all())
