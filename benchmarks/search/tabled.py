"""A problem whose cards are tables: what it measures, and its best split by looking at every one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from benchmarks.search.makespan import least_makespans
from benchmarks.search.noise import Noise
from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.split import BatchSplit, SplitSpace
from splittune.units import MIB, format_bytes

MICRO_STEPS = 5
UPDATES = 3
WHOLE_STEPS = 5

Floats = NDArray[np.float64]
Bytes = NDArray[np.int64]


class Machine(ABC):
    """A job on cards, without noise. Tables have a row for each card and a column for each share 0 ... m.

    A micro-batch of m samples takes as long as its slowest card, at least `host_s` for each card at
    work, and `tail_s(m)` after that. Gradients are held over from earlier micro-batches wherever m
    is less than the global batch.
    """

    space: SplitSpace
    total_bytes: tuple[int, ...]
    outside_bytes: tuple[int, ...]
    min_headroom_bytes: tuple[int, ...]
    host_s: float
    """What the one Python thread needs to launch the work of one card."""

    @abstractmethod
    def busy_s(self, micro_batch_size: int) -> Floats:
        """Seconds of each card for each share."""

    @abstractmethod
    def tail_s(self, micro_batch_size: int) -> float:
        """What runs after the slowest card, on GPU 0 or the host."""

    @abstractmethod
    def update_s(self, num_active: int) -> float:
        """What happens once a step, with so many cards at work; never less with more of them."""

    @abstractmethod
    def reserved_bytes(self, micro_batch_size: int) -> Bytes:
        """Peak reserved of each card for each share."""

    def least_reserved_bytes(self, micro_batch_size: int) -> Bytes:
        """A bound that costs less than `reserved_bytes`, and never exceeds it."""
        return self.reserved_bytes(micro_batch_size)

    def reserved_by(self, card: int, share: int, micro_batch_size: int) -> int:
        """One entry of `reserved_bytes`."""
        return int(self.reserved_bytes(micro_batch_size)[card, share])

    @abstractmethod
    def phases(self, card: int, share: int, micro_batch_size: int) -> dict[str, int]:
        """Peak allocated by phase: the four optional fields of `DeviceMemory`."""


class TabledProblem:
    """A `Problem` over a `Machine`."""

    def __init__(self, *, seed: int, kind: str, machine: Machine, noise: Noise, tells_busy: bool) -> None:
        self.seed = seed
        self.kind = kind
        self.machine = machine
        self.noise = noise
        self.tells_busy = tells_busy
        self.min_headroom_bytes = machine.min_headroom_bytes
        self.measured: list[BatchSplit] = []
        self.num_oom = 0
        self._num_trials = 0

    def __repr__(self) -> str:
        space = self.machine.space
        return f"{space.global_batch_size} samples on {space.num_devices} cards, seed {self.seed}: {self.kind}"

    def space(self) -> SplitSpace:
        """The legal splits."""
        return self.machine.space

    def measure(self, split: BatchSplit) -> Measurement:
        """A short trial: 5 micro-steps and 3 updates."""
        self.measured.append(split)
        measurement = self._trial(split, is_whole=False)
        self.num_oom += measurement.outcome is Outcome.OUT_OF_MEMORY
        return measurement

    def confirm(self, split: BatchSplit) -> Measurement:
        """A longer trial: 5 whole steps."""
        return self._trial(split, is_whole=True)

    def runs(self, split: BatchSplit) -> bool:
        """Whether no card runs out of memory."""
        return not self._lacking(split, self._capacities)

    def fits(self, split: BatchSplit) -> bool:
        """Whether every card keeps its headroom."""
        m, limits = split.micro_batch_size, self._limits
        shares = reversed(list(enumerate(split.shard_sizes)))  # the last cards are alike, and known soonest
        return all(self.machine.reserved_by(card, share, m) <= limits[card] for card, share in shares)

    def throughput(self, split: BatchSplit) -> float:
        """Samples per second without noise: every micro-batch counted as the largest."""
        return split.global_batch_size / self._step_s(split)

    @cached_property
    def best_throughput(self) -> float | None:
        """Of the fastest split that fits: no split of the space is left out."""
        step_s = self._best_by_gpu0() if self.machine.space.shares == "gpu0" else self._best_by_each()
        return None if step_s is None else self.machine.space.global_batch_size / step_s

    @cached_property
    def _capacities(self) -> Bytes:
        free = zip(self.machine.total_bytes, self.machine.outside_bytes, strict=True)
        return np.array([total - outside for total, outside in free], dtype=np.int64)

    @cached_property
    def _limits(self) -> Bytes:
        return np.asarray(self._capacities - np.array(self.min_headroom_bytes), dtype=np.int64)

    def _lacking(self, split: BatchSplit, limits: Bytes) -> list[int]:
        m = split.micro_batch_size
        shares = enumerate(split.shard_sizes)
        return [card for card, share in shares if self.machine.reserved_by(card, share, m) > limits[card]]

    def _step_s(self, split: BatchSplit) -> float:
        num_active = sum(share > 0 for share in split.shard_sizes)
        busy_s = self._busy_s(split)
        micro_s = max(*busy_s, self.machine.host_s * num_active) + self.machine.tail_s(split.micro_batch_size)
        return split.accumulation_steps * micro_s + self.machine.update_s(num_active)

    def _busy_s(self, split: BatchSplit) -> list[float]:
        table = self.machine.busy_s(split.micro_batch_size)
        return [float(table[card, share]) for card, share in enumerate(split.shard_sizes)]

    def _sizes(self) -> list[tuple[int, int]]:
        """Every micro-batch size, with the fewest steps that have it: more of them only take longer."""
        space = self.machine.space
        most = min(space.global_batch_size, space.max_accumulation_steps or space.global_batch_size)
        sizes: dict[int, int] = {}
        for steps in range(1, most + 1):
            sizes.setdefault(-(-space.global_batch_size // steps), steps)
        return list(sizes.items())

    def _best_by_gpu0(self) -> float | None:
        """Every share of GPU 0 at every size, the fastest first, until one fits."""
        found: list[tuple[float, int, int]] = []
        for m, steps in self._sizes():
            shares = self._shares_by_gpu0(m)
            if not len(shares):
                continue
            cards = np.arange(shares.shape[1])
            num_active = (shares > 0).sum(axis=1)
            busy_s = self.machine.busy_s(m)[cards, shares].max(axis=1)
            micro_s = np.maximum(busy_s, self.machine.host_s * num_active) + self.machine.tail_s(m)
            update_s = np.array([self.machine.update_s(count) for count in range(len(cards) + 1)])
            step_s = steps * micro_s + update_s[num_active]
            least = self.machine.least_reserved_bytes(m)[cards, shares]
            possible = (least <= self._limits).all(axis=1)
            found += [
                (time_s, m, int(share))
                for time_s, share in zip(step_s[possible].tolist(), shares[possible, 0], strict=True)
            ]
        for time_s, m, gpu0_bsz in sorted(found):
            split = BatchSplit.with_gpu0(
                global_batch_size=self.machine.space.global_batch_size,
                accumulation_steps=dict(self._sizes())[m],
                num_devices=self.machine.space.num_devices,
                gpu0_bsz=gpu0_bsz,
            )
            if self.fits(split):
                return time_s
        return None

    def _shares_by_gpu0(self, m: int) -> Bytes:
        """One row for each share of GPU 0, the rest as even as integers allow and the larger parts first."""
        num_others = self.machine.space.num_devices - 1
        smallest = self.machine.space.min_shard_size
        if num_others == 0:
            return np.array([[m]], dtype=np.int64) if m >= smallest else np.empty((0, 1), dtype=np.int64)
        first = np.arange(m + 1)[:, None]
        rest, more = np.divmod(m - first, num_others)
        shares = np.concatenate([first, rest + (np.arange(num_others)[None, :] < more)], axis=1)
        return np.asarray(shares[shares.min(axis=1) >= smallest], dtype=np.int64)

    def _best_by_each(self) -> float | None:
        best = inf
        for m, steps in self._sizes():
            busy_s = np.where(self.machine.reserved_bytes(m) <= self._limits[:, None], self.machine.busy_s(m), inf)
            tail_s = self.machine.tail_s(m)
            for num_active, least_s in enumerate(least_makespans(busy_s, self.machine.space.min_shard_size)):
                if num_active and least_s < inf:
                    micro_s = max(float(least_s), self.machine.host_s * num_active) + tail_s
                    best = min(best, steps * micro_s + self.machine.update_s(num_active))
        return None if best == inf else best

    def _trial(self, split: BatchSplit, *, is_whole: bool) -> Measurement:
        if split not in self.machine.space:
            raise ValueError(f"{split} is not in the space of this problem, {self.machine.space}.")
        rng = np.random.default_rng([self.seed, self._num_trials, split.accumulation_steps, *split.shard_sizes])
        trial, self._num_trials = self._num_trials, self._num_trials + 1
        lacking = self._lacking(split, self._capacities)
        if lacking:
            return self._out_of_memory(split, lacking, rng)
        num_active = sum(share > 0 for share in split.shard_sizes)
        update_s, step_s = self.machine.update_s(num_active), self._step_s(split)
        memory = tuple(self._reading(split, card) for card in range(split.num_devices))
        if is_whole:
            whole = tuple(step_s * factor for factor in self.noise.factors(WHOLE_STEPS, trial, rng))
            measurement = Measurement(split=split, outcome=Outcome.OK, whole_step_times_s=whole, memory=memory)
            return measurement.judged(self.min_headroom_bytes)
        micro_s = (step_s - update_s) / split.accumulation_steps
        factors = self.noise.factors(MICRO_STEPS + UPDATES, trial, rng)
        median = float(np.median(factors[:MICRO_STEPS]))
        busy = [
            median * busy_s * (1 + self.noise.relative / 4 * rng.standard_normal()) for busy_s in self._busy_s(split)
        ]
        return Measurement(
            split=split,
            outcome=Outcome.OK,
            micro_step_times_s=tuple(micro_s * factor for factor in factors[:MICRO_STEPS]),
            update_times_s=tuple(update_s * factor for factor in factors[MICRO_STEPS:]),
            memory=memory,
            device_busy_s=tuple(busy) if self.tells_busy else None,
        ).judged(self.min_headroom_bytes)

    def _reading(self, split: BatchSplit, card: int) -> DeviceMemory:
        m, share = split.micro_batch_size, split.shard_sizes[card]
        phases = self.machine.phases(card, share, m)
        return DeviceMemory(
            device=card,
            total_bytes=self.machine.total_bytes[card],
            outside_bytes=self.machine.outside_bytes[card],
            peak_allocated_bytes=max(phases.values()),
            peak_reserved_bytes=self.machine.reserved_by(card, share, m),
            micro_step_peak_bytes=phases["micro_step_peak_bytes"],
            update_peak_bytes=phases["update_peak_bytes"],
            # with one micro-step a step it would say nothing new, and is not read
            single_step_peak_bytes=phases["single_step_peak_bytes"] if split.accumulation_steps > 1 else None,
            resting_bytes=phases["resting_bytes"],
            before_backward_bytes=phases["before_backward_bytes"],
        )

    def _out_of_memory(self, split: BatchSplit, lacking: list[int], rng: np.random.Generator) -> Measurement:
        """The readings end where the first card failed: nobody holds more than a card has, nor knows all phases."""
        failed = lacking[int(rng.integers(len(lacking)))]
        memory = []
        for card in range(split.num_devices):
            whole = self._reading(split, card)
            most = int(self._capacities[card])
            if card == failed:
                most -= int(rng.integers(0, max(1, min(most // 20, 512 * MIB))))
            elif card in lacking:
                most = int(most * rng.uniform(0.6, 0.99))
            reserved = min(whole.peak_reserved_bytes, most)
            memory.append(
                DeviceMemory(
                    device=card,
                    total_bytes=whole.total_bytes,
                    outside_bytes=whole.outside_bytes,
                    peak_allocated_bytes=min(whole.peak_allocated_bytes, int(reserved * 0.98)),
                    peak_reserved_bytes=reserved,
                )
            )
        return Measurement(
            split=split,
            outcome=Outcome.OUT_OF_MEMORY,
            memory=tuple(memory),
            message=f"CUDA out of memory on device {failed}, which has {format_bytes(int(self._capacities[failed]))}",
        )
