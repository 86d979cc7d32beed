"""What the trials tell of each device's peaks: readings, what rests, and which are alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from splittune.profiling.measurement import Measurement
from splittune.search.arrays import BoolArray, FloatArray
from splittune.search.choices import TOLERANCE
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.groups import grouped
from splittune.split import BatchSplit

# Relative repeatability of a live-bytes peak; kernel workspaces change with the batch size. A
# choice. Larger, and predicted intervals are wider; smaller, and readings contradict each other.
REPEATABILITY = 0.002
# Without a reading at rest this part of the smallest peak stands for it: parameters are at rest,
# and their gradients, as large, come on top. Larger, and growth with the batch is taken for
# smaller.
RESTING_FRACTION = 0.5

Size = tuple[float, float]
"""Samples of a device's share, and, on GPU 0, of the micro-batch; else 0."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One peak of forward and backward on one device."""

    size: Size
    accumulates: bool
    """Whether gradients of earlier micro-batches were held."""
    peak_bytes: int
    resting_bytes: int | None
    """Held just before the forward, but for what a loop may keep of the batch before; None where unknown."""
    saved_bytes: int | None
    """What the forward left for the backward, and the output that is kept; None where unknown."""


@dataclass(slots=True)
class MemoryReadings:
    """The trials that ran, and those that lacked memory, seen device by device."""

    num_devices: int
    runs: list[Measurement] = field(default_factory=list)
    failures: list[JudgedTrial] = field(default_factory=list)
    _readings: dict[tuple[int, int], list[Reading]] = field(default_factory=dict, repr=False)
    """By device and number of runs: thousands of splits are judged by the same few."""
    _held: dict[tuple[int, int], FloatArray] = field(default_factory=dict, repr=False)
    """As `_readings`."""
    _groups: dict[int, list[tuple[int, ...]]] = field(default_factory=dict, repr=False)
    """By number of runs."""
    _gpu0_bounds: dict[tuple[int, ...], bool] = field(default_factory=dict, repr=False)
    """By number of runs and replicas: whether GPU 0 held no less than they did."""

    def budget_bytes(self) -> FloatArray:
        """(n,) bytes each device has for this job: its total less the most that others held."""
        budgets = [[memory.total_bytes - memory.outside_bytes for memory in run.memory] for run in self.runs]
        return np.array(budgets, dtype=float).min(axis=0) if budgets else np.full(self.num_devices, np.inf)

    def largest_share(self, devices: Sequence[int]) -> int:
        """The largest share with which one of `devices` ran; 0 before anything did."""
        return max((run.split.shard_sizes[i] for run in self.runs for i in devices), default=0)

    def is_as_large(self, one: int, other: int) -> bool:
        """Whether two devices have the same total memory, in all likelihood cards of one kind."""
        totals = [memory.total_bytes for memory in self.runs[0].memory]
        return totals[one] == totals[other]

    def largest_held(self, device: int) -> int:
        """The largest reserved peak of one device, in bytes; 0 before anything ran."""
        return max((run.memory[device].peak_reserved_bytes for run in self.runs), default=0)

    def update_bytes(self, device: int, sizes: FloatArray) -> FloatArray:
        """(2, N) the least and the most that one device's updates hold after steps of `sizes`, (N, 2); 0 where unknown.

        Beside parameters, gradients and the optimizer's state these hold outputs that a loop keeps: no fewer bytes than
        after smaller micro-batches, and no more than after larger ones. Worked: 50 bytes after 2 samples and 60 after
        40 are 50 to 60 after 4, and 60 after 80: what is kept grows little.
        """
        after = np.array([size_of(device, run.split)[1] for run in self.runs])[:, None]
        peaks = np.array([run.memory[device].update_peak_bytes or 0 for run in self.runs], dtype=float)[:, None]
        least = np.where(after <= sizes[:, 1], peaks, 0.0).max(axis=0, initial=0.0)
        most = np.where(after >= sizes[:, 1], peaks, np.inf).min(axis=0, initial=peaks.max(initial=0.0))
        return np.stack([least, np.maximum(least, most)])

    def readings(self, device: int) -> list[Reading]:
        """Every peak of forward and backward on one device; none of a replica without a share."""
        key = device, len(self.runs)
        if key not in self._readings:
            self._readings[key] = self._read(device)
        return self._readings[key]

    def of_kind(self, devices: Iterable[int], accumulates: bool) -> list[Reading]:
        """Every peak on these devices in that kind of step."""
        return [one for device in devices for one in self.readings(device) if one.accumulates == accumulates]

    def _read(self, device: int) -> list[Reading]:
        readings, kept_bytes, untold_bytes = [], self._kept_bytes(device), int(self.untold_bytes([device]))
        for run in self.runs:
            split, memory = run.split, run.memory[device]
            if split.shard_sizes[device] == 0 and device > 0:
                continue
            accumulates = split.accumulation_steps > 1
            size = size_of(device, split)
            rest, live = memory.resting_bytes, memory.before_backward_bytes
            rest = None if rest is None else max(0, rest - int(kept_bytes * max(size)))
            saved = None if rest is None or live is None else max(0, live - rest)
            rest = None if rest is None else max(0, rest - untold_bytes)
            readings.append(Reading(size, accumulates, memory.batch_peak_bytes, rest, saved))
            if memory.single_step_peak_bytes is not None and accumulates:
                readings.append(Reading(size, False, memory.single_step_peak_bytes, None, None))
        return readings

    def _kept_bytes(self, device: int) -> float:
        """What rests more for each sample of the batch before: a loop keeps its output until the next is there.

        As much as is beyond `REPEATABILITY`. A single step holds no gradients of earlier ones, so what it rests on with
        more samples is compared with what one that accumulates rests on, less what is known of these. Worked: 62 bytes
        rest after 2 samples, 68 after 8: 1 of each. And if the 2 were of a step that accumulates, with 20 of gradients,
        68 are 26 more than 42, so 4 and a third.
        """
        rests = [
            (run.split.accumulation_steps > 1, max(size_of(device, run.split)), run.memory[device].resting_bytes)
            for run in self.runs
        ]
        told = [(accumulates, size, rest) for accumulates, size, rest in rests if size and rest is not None]
        gradients = self.gradient_bytes([device])
        grown = [0.0]
        for accumulated, few, least in told:
            for accumulates, many, most in told:
                if many > few and accumulates <= accumulated:
                    more = gradients if accumulated > accumulates and np.isfinite(gradients) else 0.0
                    risen = most * (1 - REPEATABILITY) - (least - more) * (1 + REPEATABILITY)
                    grown.append(risen / (many - few))
        return max(grown)

    def untold_bytes(self, devices: Sequence[int]) -> float:
        """The most that a loop may keep on GPU 0 of the batch before, while trials of a single size do not tell it.

        So it is 0 once sizes differ, see `_kept_bytes`, and of other devices. All that rests beside parameters and
        gradients may be outputs, or the optimizer's state. These are as large as one another, and all that rests on a
        replica. And until an output replaced the one before, both were there: it is no more than was gone when backward
        began. Worked: 40 bytes rest, 16 on a replica, and a step that accumulates holds 10 more than one that does
        not: up to ``40 - 2 x 10 = 20``, or 15 if the peak was that much above what backward began with.
        """
        sizes = [run.split.micro_batch_size for run in self.runs]
        if 0 not in devices or len(set(sizes)) > 1:
            return 0.0
        gradients = self.gradient_bytes([0])
        most = [
            min(gpu0 - max(2 * gradients, *replicas, 0), first.batch_peak_bytes - (first.before_backward_bytes or 0))
            for run in self.runs
            for first, (gpu0, *replicas) in [(run.memory[0], [memory.resting_bytes or 0 for memory in run.memory])]
            if run.split.accumulation_steps > 1 and first.resting_bytes is not None
        ]
        return max(0.0, min(most, default=0.0))

    def untold_at(self, device: int, sizes: FloatArray) -> FloatArray | float:
        """(N,) what may be kept, `untold_bytes`, and rests at `sizes`, (N, 2), no smaller than those that ran; else 0.

        Of more samples no less is kept.
        """
        most = max(run.split.micro_batch_size for run in self.runs)
        return np.where(sizes[:, 1] >= most, self.untold_bytes([device]), 0.0)

    def knows(self, devices: Sequence[int], accumulates: bool) -> bool:
        """Whether a peak of that kind of step was read on one of `devices`."""
        return any(reading.accumulates == accumulates for device in devices for reading in self.readings(device))

    def points(
        self, devices: Sequence[int], accumulates: bool
    ) -> tuple[list[tuple[float, float, float]], list[tuple[float, float, float]], float | None]:
        """Where the peak of `devices` is at most and at least so many bytes, and what rests; None where unknown.

        A step that accumulates holds one more copy of the gradients: `most_gradient_bytes`. They are no larger than the
        parameters, which every peak holds: so at most it takes twice as much. What GPU 0 took counts for replicas, too,
        see `_no_emptier`.
        """
        at_most, at_least, gradients = [], [], self.most_gradient_bytes()
        rests: dict[bool, list[float]] = {True: [], False: []}
        for reading in (reading for device in self._no_emptier(devices) for reading in self.readings(device)):
            more = min(reading.peak_bytes, gradients) if accumulates and not reading.accumulates else 0
            at_most.append((*_counted(reading.size, devices), (reading.peak_bytes + more) * (1 + REPEATABILITY)))
        for reading in (reading for device in devices for reading in self.readings(device)):
            is_same = reading.accumulates == accumulates
            if is_same or accumulates:
                at_least.append((*reading.size, reading.peak_bytes * (1 - REPEATABILITY)))
            if reading.resting_bytes is not None:
                earlier = min(self.gradient_bytes(devices), RESTING_FRACTION * reading.resting_bytes)
                # without earlier gradients parameters still rest on GPU 0, and nothing does on a replica
                without = reading.resting_bytes - earlier if 0 in devices else 0.0
                rests[is_same].append(reading.resting_bytes if is_same or accumulates else without)
        for trial in self.failures:
            split, memory = trial.split, trial.measurement.memory
            counts = bool(memory) and (split.accumulation_steps > 1) <= accumulates
            held = [i for i in devices if i not in trial.oom_devices and split.shard_sizes[i]] if counts else []
            # what they held when another lacked memory
            at_least += [(*size_of(i, split), float(memory[i].peak_allocated_bytes)) for i in held]
        # gradients, taken off what rests where steps accumulate, are gone before a single one
        telling = rests[True] or rests[False] if accumulates else rests[True] + rests[False]
        return at_most, at_least, min(telling, default=None)

    def _no_emptier(self, devices: Sequence[int]) -> list[int]:
        """These devices, and those that hold no less with as many samples: for replicas GPU 0, on a card as large.

        It holds what they do, and the optimizer's state and the outputs beside; and so it was at every equal share, one
        at least. Worked: GPU 0 ran with 3 samples, though it kept too little free. So a replica can run with 3,
        whatever it held with 2.
        """
        key = len(self.runs), *devices
        if key not in self._gpu0_bounds:
            self._gpu0_bounds[key] = 0 not in devices and self._is_gpu0_fuller(devices)
        return [*devices, 0] if self._gpu0_bounds[key] else list(devices)

    def _is_gpu0_fuller(self, replicas: Sequence[int]) -> bool:
        more = [
            gpu0.peak_bytes - reading.peak_bytes
            for gpu0 in self.readings(0)
            for device in replicas
            for reading in self.readings(device)
            if (gpu0.size[0], gpu0.accumulates) == (reading.size[0], reading.accumulates)
        ]
        return self.is_as_large(0, replicas[0]) and min(more, default=-1) >= 0

    def saved(self, devices: Sequence[int]) -> list[tuple[float, float, float, float]]:
        """The size, what its forward left for the backward and what rested, of each trial of `devices` that tells.

        Of replicas only those that accumulate: others' parameters are copied in the forward.
        """
        return [
            (*reading.size, float(reading.saved_bytes), float(reading.resting_bytes))
            for device in devices
            for reading in self.readings(device)
            if reading.saved_bytes is not None and reading.resting_bytes is not None
            if reading.accumulates or device == 0
        ]

    def saved_part(self, devices: Sequence[int]) -> float:
        """Of the largest peak, less what rests, the part that the forward left; 0 where no trial tells."""
        told = [
            (reading.peak_bytes, reading.resting_bytes, reading.saved_bytes)
            for device in devices
            for reading in self.readings(device)
            if reading.saved_bytes is not None and reading.resting_bytes is not None
        ]
        peak, rest, saved = max(told, default=(1, 0, 0))
        return min(1.0, saved / max(1, peak - rest))

    def gradient_bytes(self, devices: Sequence[int]) -> float:
        """What a step that accumulates holds more than a single one; infinite where no trial read both."""
        return max(
            (
                float(run.memory[device].batch_peak_bytes - (run.memory[device].single_step_peak_bytes or 0))
                for run in self.runs
                for device in devices
                if run.memory[device].single_step_peak_bytes and run.split.accumulation_steps > 1
            ),
            default=np.inf,
        )

    def most_gradient_bytes(self) -> float:
        """What gradients of earlier micro-batches are at most, on any device; infinite where no trial tells what rests.

        Where steps accumulate parameters rest beside them, no smaller; before a single step parameters rest on GPU 0.
        Worked: of 20 bytes that rest on GPU 1 between micro-batches at most 10 are gradients.
        """
        rests = [
            reading.resting_bytes * (RESTING_FRACTION if reading.accumulates else 1.0)
            for device in range(self.num_devices)
            for reading in self.readings(device)
            if reading.resting_bytes is not None and (reading.accumulates or device == 0)
        ]
        return min(rests, default=np.inf)

    def oom_sizes(self, device: int, accumulates: bool, *, even_with_share: bool = True) -> list[Size]:
        """The size of each trial of that kind in which the device lacked memory, with a share or without."""
        return [
            size_of(device, trial.split)
            for trial in self.failures
            if device in trial.oom_devices and (trial.split.accumulation_steps > 1) <= accumulates
            if even_with_share or not trial.split.shard_sizes[device]
        ]

    def too_little_bytes(self, device: int, sizes: FloatArray, *, accumulates: bool) -> FloatArray:
        """(N,) the most that the device, or a replica `alike`, had when no more than `sizes`, (N, 2), ran it out; or 0.

        So there it takes more. Worked: GPU 1 ran out of memory with 2 samples and 10 GiB. Then 2 samples on GPU 2,
        which held the same with 1, take over 10 GiB as well, so 10 are too little.
        """
        budgets = self.budget_bytes()
        had = [
            np.where((sizes >= size).all(axis=1), budgets[one], 0.0)
            for one in self.alike(device)
            for size in self.oom_sizes(one, accumulates)
        ]
        return np.asarray(np.max([np.zeros(len(sizes)), *had], axis=0))

    def same_memory_groups(self) -> list[tuple[int, ...]]:
        """Replicas in groups whose peaks agreed at every equal share; largest share first."""
        most = {i: max(run.split.shard_sizes[i] for run in self.runs) for i in range(1, self.num_devices)}
        return grouped(sorted(most, key=lambda i: -most[i]), self._agreement)

    def _agreement(self, one: int, other: int) -> int:
        """The largest equal share of two replicas whose peaks were each time within `TOLERANCE`; else 0."""
        pairs = [
            (share, run.memory[one].batch_peak_bytes, run.memory[other].batch_peak_bytes)
            for run in self.runs
            if (share := run.split.shard_sizes[one]) == run.split.shard_sizes[other] > 0
        ]
        agree = all(abs(a - b) <= TOLERANCE * max(a, b) for _, a, b in pairs)
        return max((share for share, *_ in pairs), default=0) if agree else 0

    def alike(self, device: int) -> tuple[int, ...]:
        """The replicas in one `same_memory_groups` with `device`, itself among them.

        GPU 0 is alone, and so is every device before anything ran.
        """
        if len(self.runs) not in self._groups:
            self._groups[len(self.runs)] = self.same_memory_groups() if self.runs else []
        groups = self._groups[len(self.runs)]
        return next((group for group in groups if device in group), (device,))

    def seen(self, device: int, sizes: FloatArray) -> FloatArray:
        """(N,) the most reserved bytes of a trial that demanded no more than `sizes`, (N, 2); 0 without one.

        Trials of replicas that are `alike` count, too.
        """
        held = self._held_by_alike(device)
        return np.asarray(np.where((held[:, None, :2] <= sizes).all(axis=2), held[:, 2:], 0.0).max(axis=0, initial=0.0))

    def held_more(self, device: int, sizes: FloatArray, *, accumulates: bool) -> BoolArray:
        """(N,) whether a trial of the device, or of one `alike` or no emptier, demanded no less than `sizes`, (N, 2).

        Beyond such sizes nothing is unseen. Trials that accumulate tell of those that do not, too: they hold more.
        """
        alike = self.alike(device)
        ran = [
            _counted(size_of(one, run.split), alike)
            for one in self._no_emptier(alike)
            for run in self.runs
            if (run.split.accumulation_steps > 1) >= accumulates
        ]
        return np.asarray((np.array(ran).reshape(-1, 1, 2) >= sizes).all(axis=2).any(axis=0))

    def _held_by_alike(self, device: int) -> FloatArray:
        """(R, 3) size and bytes held, of each trial in which it took part."""
        key = device, len(self.runs)
        if key in self._held:
            return self._held[key]
        rows = np.array(
            [
                (*size_of(one, run.split), run.memory[one].peak_reserved_bytes)
                for one in self.alike(device)
                for run in self.runs
                if one == 0 or run.split.shard_sizes[one] > 0
            ],
            dtype=float,
        ).reshape(-1, 3)
        self._held[key] = np.unique(rows, axis=0)
        return self._held[key]


def _counted(size: Size, devices: Sequence[int]) -> Size:
    """What of a size counts for these devices: the micro-batch on GPU 0 alone."""
    return size if 0 in devices else (size[0], 0.0)


def size_of(device: int, split: BatchSplit) -> Size:
    """What a device's memory depends on."""
    return float(split.shard_sizes[device]), float(split.micro_batch_size) if device == 0 else 0.0
