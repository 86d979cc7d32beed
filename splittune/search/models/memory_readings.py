"""What the trials tell of each device's peaks: readings, floors, and what the allocator adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from splittune.profiling.measurement import Measurement
from splittune.search.arrays import FloatArray
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.groups import grouped
from splittune.units import MIB

# Relative repeatability of a live-bytes peak; kernel workspaces change with the batch size. A
# choice. Larger, and predicted intervals are wider; smaller, and readings contradict each other.
REPEATABILITY = 0.002
# Replicas with the same share are of one kind if their peaks differ by no more than this part. A
# choice, five times the repeatability of a peak (`REPEATABILITY`). Larger, and a device's own
# workspaces are put on others; smaller, and each device is learned alone, from fewer trials.
PEAK_TOLERANCE = 0.01
# Without a reading at rest this part of the smallest peak stands for it: parameters are at rest,
# and their gradients, as large, come on top. Larger, and growth with the batch is taken for
# smaller.
RESTING_FRACTION = 0.5
# Reserved beyond allocated, up to this says nothing of larger sizes; what goes beyond grows with
# them. Torch's caching allocator takes segments of 20 MiB for requests from 1 MiB and of 2 MiB for
# smaller ones, so one of each may be almost empty.
QUANTUM_BYTES = 22 * MIB

# Columns of `rows_of`, in order: what F, beta, gamma and, on GPU 0 alone, omega are multiplied by.
CONSTANT = 0
SHARE = 1
ACCUMULATES = 2
MICRO_BATCH = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """One peak of forward and backward on one device."""

    row: FloatArray
    """(3,) or, on GPU 0, (4,): one row of `rows_of`."""
    peak_bytes: int
    resting_bytes: int | None
    """Held just before the forward; None where unknown."""

    @property
    def accumulates(self) -> float:
        """1 with several accumulation steps, 0 with one."""
        return float(self.row[ACCUMULATES])


@dataclass(frozen=True, slots=True)
class Overhead:
    """Reserved minus allocated bytes, as a line: ``constant + ratio x allocated``."""

    constant: float
    ratio: float

    def __call__(self, allocated: FloatArray) -> FloatArray:
        return self.constant + self.ratio * allocated


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorOverhead:
    """What torch's allocator reserves beyond what is allocated, as four lines."""

    least: Overhead
    mean: Overhead
    most: Overhead
    after_flush: Overhead
    """The most that is left once the allocator, running short, has handed its free blocks back."""


@dataclass(slots=True)
class MemoryReadings:
    """The trials that ran, and those that lacked memory, seen device by device."""

    num_devices: int
    runs: list[Measurement] = field(default_factory=list)
    failures: list[JudgedTrial] = field(default_factory=list)
    _readings: dict[tuple[int, int], list[Reading]] = field(default_factory=dict, repr=False)
    """By device and number of runs: thousands of splits are judged by the same few."""
    _proofs: dict[tuple[int, int], FloatArray] = field(default_factory=dict, repr=False)
    """As `_readings`."""
    _seen: dict[tuple[int, int], FloatArray] = field(default_factory=dict, repr=False)
    """As `_readings`."""
    _groups: dict[int, list[tuple[int, ...]]] = field(default_factory=dict, repr=False)
    """By number of runs."""

    def budget_bytes(self) -> FloatArray:
        """(n,) bytes each device has for this job: its total less the most that others held."""
        budgets = [[memory.total_bytes - memory.outside_bytes for memory in run.memory] for run in self.runs]
        return np.array(budgets, dtype=float).min(axis=0) if budgets else np.full(self.num_devices, np.inf)

    def largest_held(self, device: int) -> int:
        """The largest reserved peak of one device, in bytes; 0 before anything ran."""
        return max((run.memory[device].peak_reserved_bytes for run in self.runs), default=0)

    def readings(self, device: int) -> list[Reading]:
        """Every peak of forward and backward on one device; none of a replica without a share."""
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
            row = row_of(device, share, size, accumulates)
            readings.append(Reading(row, memory.batch_peak_bytes, memory.resting_bytes))
            if memory.single_step_peak_bytes is not None and accumulates:
                # 0 at rest bounds nothing: the reading beside it tells what is held there
                readings.append(Reading(row_of(device, share, size, 0.0), memory.single_step_peak_bytes, 0))
        return readings

    def oom_rows(self, device: int) -> list[FloatArray]:
        """The row of each trial in which the device lacked memory."""
        return [self._row_of_failure(device, trial) for trial in self.failures if device in trial.oom_devices]

    def held_before_failure(self, device: int) -> list[tuple[FloatArray, int]]:
        """Of each trial in which another device lacked memory, the row and the bytes that this one held until then.

        Its peak was no less. Left out are bytes that phases of fixed size may have held.
        """
        flat = min((reading.peak_bytes for reading in self.readings(device)), default=0)
        held = [
            (self._row_of_failure(device, trial), trial.measurement.memory[device].peak_allocated_bytes)
            for trial in self.failures
            if trial.measurement.memory and device not in trial.oom_devices
        ]
        return [(row, peak) for row, peak in held if row[SHARE] and peak > (1 + PEAK_TOLERANCE) * flat]

    @staticmethod
    def _row_of_failure(device: int, trial: JudgedTrial) -> FloatArray:
        split = trial.split
        return row_of(device, split.shard_sizes[device], split.micro_batch_size, split.accumulation_steps > 1)

    def same_memory_groups(self) -> list[tuple[int, ...]]:
        """Replicas in groups whose peaks agreed at every equal share; largest share first."""
        most = {i: max(run.split.shard_sizes[i] for run in self.runs) for i in range(1, self.num_devices)}
        return grouped(sorted(most, key=lambda i: -most[i]), self._agree)

    def _agree(self, one: int, other: int) -> bool:
        """Whether two replicas had equal shares, each time with peaks within `PEAK_TOLERANCE`."""
        pairs = [
            (run.memory[one].batch_peak_bytes, run.memory[other].batch_peak_bytes)
            for run in self.runs
            if run.split.shard_sizes[one] == run.split.shard_sizes[other] > 0
        ]
        return bool(pairs) and all(abs(a - b) <= PEAK_TOLERANCE * max(a, b) for a, b in pairs)

    def alike(self, device: int) -> tuple[int, ...]:
        """The replicas in one `same_memory_groups` with `device`, itself among them.

        GPU 0 is alone, and so is every device before anything ran.
        """
        if len(self.runs) not in self._groups:
            self._groups[len(self.runs)] = self.same_memory_groups() if self.runs else []
        groups = self._groups[len(self.runs)]
        return next((group for group in groups if device in group), (device,))

    def floors(self, device: int, accumulates: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(N,) least and most bytes of the phases that no batch size changes: update and reduce.

        The reduce happens within forward and backward, so the smallest of their peaks bounds it.
        """
        updates = [run.memory[device].update_peak_bytes or 0 for run in self.runs]
        smallest = smallest_peaks(self.readings(device))
        of_all = min(smallest.values(), default=0)
        single, accumulating = (float(smallest.get(kind, of_all)) for kind in (0.0, 1.0))
        reduce = np.where(accumulates > 0, accumulating, single)
        least = np.full(len(reduce), min(updates), dtype=np.float64)
        return least, np.asarray(np.maximum(reduce, max(updates)), dtype=np.float64)

    def doubt_about_accumulating(self, device: int, accumulates: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(N,) bytes that splits may need less, and more, until both kinds of step were read.

        Accumulating keeps gradients from one micro-batch to the next. They are as large as the
        parameters, and both are held at rest: so the doubt is half of what is held there.
        """
        others = range(1, self.num_devices) if self.num_devices > 1 else range(1)
        seen = {reading.accumulates for reading in self.readings(device) or self.readings(0)}
        if len(seen) == 2:
            return np.zeros_like(accumulates), np.zeros_like(accumulates)
        resting = [
            r.peak_bytes if r.resting_bytes is None else r.resting_bytes for i in others for r in self.readings(i)
        ]
        doubt = RESTING_FRACTION * max(resting, default=0)
        less, more = accumulates < min(seen), accumulates > max(seen)
        return np.where(less, doubt, 0.0), np.where(more, doubt, 0.0)

    def allocator_overhead(self, devices: Sequence[int]) -> AllocatorOverhead:
        """What the allocator reserved beyond what was allocated, over all trials of `devices`.

        Of each excess up to `QUANTUM_BYTES` is constant, and the rest a ratio. Running short, the
        allocator hands its free blocks back: then the constant is the smallest one seen. Devices that
        never held anything are told by all others.
        """
        held = [
            [run.memory[i] for run in self.runs if run.memory[i].peak_allocated_bytes] for i in range(self.num_devices)
        ]
        own = [memory for i in devices for memory in held[i]]
        pairs = [
            (memory.peak_allocated_bytes, max(0, memory.peak_reserved_bytes - memory.peak_allocated_bytes))
            for memory in (own or [memory for one in held for memory in one])
        ] or [(1, 0)]
        quanta = [min(excess, QUANTUM_BYTES) for _, excess in pairs]
        ratios = [max(0, excess - QUANTUM_BYTES) / allocated for allocated, excess in pairs]
        return AllocatorOverhead(
            # as far below the smallest ratio seen as the largest is above it
            least=Overhead(0, max(0.0, 2 * min(ratios) - max(ratios))),
            mean=Overhead(float(np.mean(quanta)), float(np.mean(ratios))),
            most=Overhead(max(quanta), max(ratios)),
            after_flush=Overhead(min(quanta), max(ratios)),
        )

    def proven(self, device: int, shares: FloatArray, micro_batches: FloatArray, accumulates: FloatArray) -> FloatArray:
        """(N,) reserved bytes that are enough, by a trial with no smaller demand; else infinite.

        A trial of a replica in one group with the device counts, too.
        """
        key = device, len(self.runs)
        if key not in self._proofs:
            self._proofs[key] = self._prove(device)
        proven = np.full(len(shares), np.inf)
        for share, size, accumulating, held in self._proofs[key]:
            demanded = (shares <= share) & (accumulates <= accumulating) & (micro_batches <= size)
            proven = np.where(demanded, np.minimum(proven, held), proven)
        return proven

    def seen(self, device: int, shares: FloatArray, micro_batches: FloatArray) -> FloatArray:
        """(N,) the most reserved bytes of a trial that demanded no more, of the device or one alike; 0 without one."""
        key = device, len(self.runs)
        if key not in self._seen:
            self._seen[key] = self._held_by_alike(device)
        most = np.zeros(len(shares))
        for share, size, held in self._seen[key]:
            most = np.where((share <= shares) & (size <= micro_batches), np.maximum(most, held), most)
        return most

    def _held_by_alike(self, device: int) -> FloatArray:
        """(R, 3) share, micro-batch (on GPU 0, else 0) and bytes held, of each trial in which it took part."""
        return np.array(
            [
                (
                    run.split.shard_sizes[one],
                    run.split.micro_batch_size if device == 0 else 0,
                    run.memory[one].peak_reserved_bytes,
                )
                for one in self.alike(device)
                for run in self.runs
                if one == 0 or run.split.shard_sizes[one] > 0
            ],
            dtype=float,
        ).reshape(-1, 3)

    def _prove(self, device: int) -> FloatArray:
        """(P, 4) share, micro-batch, [k > 1] and bytes held, without rows that others imply."""
        rows = np.array(
            [
                (
                    run.split.shard_sizes[one],
                    run.split.micro_batch_size if device == 0 else np.inf,
                    float(run.split.accumulation_steps > 1),
                    run.memory[one].peak_reserved_bytes * self._held_beside(device, one),
                )
                for one in self.alike(device)
                for run in self.runs
                if one == 0 or run.split.shard_sizes[one] > 0
            ],
            dtype=float,
        ).reshape(-1, 4)
        rows = np.unique(rows, axis=0)
        demands, held = rows[:, :3], rows[:, 3]
        is_implied = (demands[:, None] <= demands[None]).all(axis=2) & (held[:, None] >= held[None])
        np.fill_diagonal(is_implied, False)
        return np.asarray(rows[~is_implied.any(axis=1)])

    def _held_beside(self, device: int, other: int) -> float:
        """How many times what `other` held `device` held at most at equal shares; at least 1.

        If the two never ran the same shard size, they are linked only through a third device: then
        `PEAK_TOLERANCE` is allowed.
        """
        if device == other:
            return 1.0
        pairs = [
            (run.memory[device].peak_reserved_bytes, run.memory[other].peak_reserved_bytes)
            for run in self.runs
            if run.split.shard_sizes[device] == run.split.shard_sizes[other] > 0
        ]
        return max([1.0, *(own / max(1, beside) for own, beside in pairs)]) if pairs else 1 + PEAK_TOLERANCE


def rows_of(device: int, shares: FloatArray, micro_batches: FloatArray, accumulates: FloatArray) -> FloatArray:
    """(N, 3), on GPU 0 (N, 4): what the coefficients F, beta, gamma and omega are multiplied by."""
    columns = [np.ones_like(shares), shares, accumulates]
    return np.column_stack([*columns, micro_batches] if device == 0 else columns)


def row_of(device: int, share: float, micro_batch: float, accumulates: float) -> FloatArray:
    """One row of `rows_of`."""
    one: FloatArray = rows_of(
        device, np.array([float(share)]), np.array([float(micro_batch)]), np.array([float(accumulates)])
    )[0]
    return one


def smallest_peaks(readings: Sequence[Reading]) -> Mapping[float, int]:
    """The smallest peak of each kind of step: 0 for a single one, 1 for one that accumulates."""
    smallest: dict[float, int] = {}
    for reading in readings:
        smallest[reading.accumulates] = min(reading.peak_bytes, smallest.get(reading.accumulates, reading.peak_bytes))
    return smallest
