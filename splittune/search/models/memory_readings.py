"""What the trials tell of each device's peaks: readings, floors, and what the allocator holds beyond what is live."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement
from splittune.search.attempts import Attempt

Floats = NDArray[np.float64]

# MemoryReadings of two replicas with the same share that differ by less come from cards of a kind.
ALIKE = 0.01
# Without word of what is held at rest, half of the smallest peak is taken for it: parameters, beside their gradients.
RESTING_FRACTION = 0.5
# The allocator holds blocks of 20 MiB for requests from 1 MiB and of 2 MiB for smaller ones: that much more than is
# live says nothing of large sizes, what goes beyond grows with them.
QUANTUM_BYTES = 22 * 1024**2


@dataclass(frozen=True, slots=True)
class Reading:
    """A peak of forward and backward, what the device held at rest before (None where unknown), and its row."""

    row: Floats
    """Of `rows_of`."""
    peak_bytes: int
    resting_bytes: int | None

    @property
    def accumulates(self) -> float:
        return float(self.row[2])


@dataclass(frozen=True, slots=True)
class Excess:
    """Bytes the allocator holds beyond those that are live: some in any case, and some for each."""

    constant: float
    ratio: float

    def __call__(self, live: Floats) -> Floats:
        return self.constant + self.ratio * live


@dataclass(slots=True)
class MemoryReadings:
    """The trials that ran, and those that lacked memory, seen device by device."""

    num_devices: int
    runs: list[Measurement] = field(default_factory=list)
    failures: list[Attempt] = field(default_factory=list)
    _readings: dict[tuple[int, int], list[Reading]] = field(default_factory=dict, repr=False)
    """By device and number of runs: thousands of splits are judged by the same few."""
    _proofs: dict[tuple[int, int], Floats] = field(default_factory=dict, repr=False)

    def budget_bytes(self) -> Floats:
        """(n,) bytes each device has for this job: its total less what others held at most."""
        rooms = [[memory.total_bytes - memory.outside_bytes for memory in run.memory] for run in self.runs]
        return np.array(rooms, dtype=float).min(axis=0) if rooms else np.full(self.num_devices, np.inf)

    def largest_held(self, device: int) -> int:
        """The largest peak of what the allocator held."""
        return max((run.memory[device].peak_reserved_bytes for run in self.runs), default=0)

    def readings(self, device: int) -> list[Reading]:
        """What is known of forward and backward on one device; a replica without a share is not there."""
        key = device, len(self.runs)
        if key not in self._readings:
            self._readings[key] = self._read(device)
        return self._readings[key]

    def _read(self, device: int) -> list[Reading]:
        readings = []
        for run in self.runs:
            share, memory = run.split.shard_sizes[device], run.memory[device]
            if share == 0 and device > 0:
                continue
            accumulates, size = float(run.split.accumulation_steps > 1), run.split.micro_batch_size
            readings.append(Reading(row_of(device, share, size, accumulates), _peak(memory), memory.resting_bytes))
            if memory.single_step_peak_bytes is not None and accumulates:
                readings.append(Reading(row_of(device, share, size, 0.0), memory.single_step_peak_bytes, 0))
        return readings

    def missed(self, device: int, live_bytes: float) -> list[tuple[Floats, float]]:
        """The rows of the trials in which the device lacked memory, each with the live bytes that fill it."""
        return [
            (
                row_of(device, a.split.shard_sizes[device], a.split.micro_batch_size, a.split.accumulation_steps > 1),
                live_bytes,
            )
            for a in self.failures
            if device in a.lacking
        ]

    def kinds(self) -> list[tuple[int, ...]]:
        """Replicas in groups whose peaks agreed whenever their shares did; the one with the largest share first."""
        groups: list[list[int]] = []
        most = {i: max(run.split.shard_sizes[i] for run in self.runs) for i in range(1, self.num_devices)}
        for device in sorted(most, key=lambda i: -most[i]):
            home = next((group for group in groups if self._agree(group[0], device)), None)
            if home is None:
                groups.append([device])
            else:
                home.append(device)
        return [tuple(group) for group in groups]

    def _agree(self, one: int, other: int) -> bool:
        pairs = [
            (_peak(run.memory[one]), _peak(run.memory[other]))
            for run in self.runs
            if run.split.shard_sizes[one] == run.split.shard_sizes[other] > 0
        ]
        return bool(pairs) and all(abs(a - b) <= ALIKE * max(a, b) for a, b in pairs)

    def floors(self, device: int, accumulates: Floats) -> tuple[Floats, Floats]:
        """(N,) least and most of the phases that no batch size changes: the update, and the reduce.

        The reduce is part of the micro-step's peaks, so it is no more than the smallest of them.
        """
        updates = [run.memory[device].update_peak_bytes or 0 for run in self.runs]
        readings = self.readings(device)
        smallest = [min((r.peak_bytes for r in readings if r.accumulates == kind), default=None) for kind in (0.0, 1.0)]
        known = [peak for peak in smallest if peak is not None] or [0]
        reduce = [float(min(known) if peak is None else peak) for peak in smallest]
        by_kind = np.where(accumulates > 0, reduce[1], reduce[0])
        least = np.full(len(by_kind), min(updates), dtype=np.float64)
        return least, np.asarray(np.maximum(by_kind, max(updates)), dtype=np.float64)

    def unknown_accumulating(self, device: int, accumulates: Floats) -> tuple[Floats, Floats]:
        """(N,) what splits may need less and more where no reading has yet told one step from several.

        The gradients that stay are as large as the parameters, and both are held at rest: half of that.
        """
        others = range(1, self.num_devices) if self.num_devices > 1 else range(1)
        seen = {reading.accumulates for reading in self.readings(device) or self.readings(0)}
        if len(seen) == 2:
            return np.zeros_like(accumulates), np.zeros_like(accumulates)
        resting = [
            r.peak_bytes if r.resting_bytes is None else r.resting_bytes for i in others for r in self.readings(i)
        ]
        unknown = RESTING_FRACTION * max(resting, default=0)
        less, more = accumulates < min(seen), accumulates > max(seen)
        return np.where(less, unknown, 0.0), np.where(more, unknown, 0.0)

    def excesses(self) -> tuple[Excess, Excess, Excess, Excess]:
        """What the allocator holds beyond what is live: least, on average, most, and when it runs short.

        Running short it hands back the blocks that are free before it gives up, so of its quanta no more than the fewest
        seen are taken to stay.
        """
        pairs = [
            (memory.peak_allocated_bytes, max(0, memory.peak_reserved_bytes - memory.peak_allocated_bytes))
            for run in self.runs
            for memory in run.memory
            if memory.peak_allocated_bytes
        ] or [(1, 0)]
        quanta = [min(extra, QUANTUM_BYTES) for _, extra in pairs]
        ratios = [max(0, extra - QUANTUM_BYTES) / live for live, extra in pairs]
        return (
            Excess(0, max(0.0, 2 * min(ratios) - max(ratios))),
            Excess(float(np.mean(quanta)), float(np.mean(ratios))),
            Excess(max(quanta), max(ratios)),
            Excess(min(quanta), max(ratios)),
        )

    def alike(self, device: int) -> tuple[int, ...]:
        """The replicas of one kind with `device`, itself among them; GPU 0 is alone, and all are before anything ran."""
        return next((group for group in self.kinds() if device in group), (device,)) if self.runs else (device,)

    def proven(self, device: int, shares: Floats, micro_batches: Floats, accumulates: Floats) -> Floats:
        """(N,) the least that a trial held which demanded no less of the device, or of one of its kind; infinite without one."""
        key = device, len(self.runs)
        if key not in self._proofs:
            self._proofs[key] = self._prove(device)
        proven = np.full(len(shares), np.inf)
        for share, size, accumulating, held in self._proofs[key]:
            demanded = (shares <= share) & (accumulates <= accumulating) & (micro_batches <= size)
            proven = np.where(demanded, np.minimum(proven, held), proven)
        return proven

    def _prove(self, device: int) -> Floats:
        """(P, 4) share, micro-batch, [k > 1] and bytes held, of those that others do not prove, too."""
        rows = np.array(
            [
                (
                    run.split.shard_sizes[one],
                    run.split.micro_batch_size if device == 0 else np.inf,
                    float(run.split.accumulation_steps > 1),
                    run.memory[one].peak_reserved_bytes * self._beside(device, one),
                )
                for one in self.alike(device)
                for run in self.runs
                if one == 0 or run.split.shard_sizes[one] > 0
            ],
            dtype=float,
        ).reshape(-1, 4)
        rows = np.unique(rows, axis=0)
        demands, held = rows[:, :3], rows[:, 3]
        is_less = (demands[:, None] <= demands[None]).all(axis=2) & (held[:, None] >= held[None])
        np.fill_diagonal(is_less, False)
        return np.asarray(rows[~is_less.any(axis=1)])

    def _beside(self, device: int, other: int) -> float:
        """How many times what `other` held a device held at most when their shares were alike, and no less than once.

        Two that never had the same share are of one kind by a third: by `ALIKE`.
        """
        if device == other:
            return 1.0
        pairs = [
            (run.memory[device].peak_reserved_bytes, run.memory[other].peak_reserved_bytes)
            for run in self.runs
            if run.split.shard_sizes[device] == run.split.shard_sizes[other] > 0
        ]
        return max([1.0, *(own / max(1, beside) for own, beside in pairs)]) if pairs else 1 + ALIKE


def rows_of(device: int, shares: Floats, micro_batches: Floats, accumulates: Floats) -> Floats:
    """(N, 3), on GPU 0 (N, 4): what the coefficients F, beta, gamma and omega are multiplied by."""
    columns = [np.ones_like(shares), shares, accumulates]
    return np.column_stack([*columns, micro_batches] if device == 0 else columns)


def row_of(device: int, share: float, micro_batch: float, accumulates: float) -> Floats:
    """One row of `rows_of`."""
    one: Floats = rows_of(
        device, np.array([float(share)]), np.array([float(micro_batch)]), np.array([float(accumulates)])
    )[0]
    return one


def _peak(memory: DeviceMemory) -> int:
    return memory.peak_allocated_bytes if memory.micro_step_peak_bytes is None else memory.micro_step_peak_bytes
