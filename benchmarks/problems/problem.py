"""Tuning problems with a known truth: what each split takes, what memory it needs, and which one is best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.split import BatchSplit, SplitSpace
from splittune.split.space import Shares

NUM_MICRO_STEPS, NUM_UPDATES, NUM_WHOLE_STEPS = 5, 3, 5
HEADROOM_FRACTION = 0.05

Floats = NDArray[np.float64]


@dataclass(kw_only=True)
class CardTime:
    """Seconds one card works on a micro-step, by its share: launches, a slope, and what breaks the line."""

    launch_s: float
    sample_s: float
    knee: int = 0
    """Below this many samples the card is not full, and fewer take no less time."""
    tile: int = 1
    tile_weight: float = 0.0
    """How much of a tile that is not full is paid for: 0 none, 1 all."""
    switch_at: int | None = None
    switch_factor: float = 1.0
    """From `switch_at` samples another algorithm runs, this many times as slow."""
    bump: float = 0.0
    """Relative height of a ripple over the shares."""
    bump_phase: float = 0.0

    def __call__(self, shares: Floats) -> Floats:
        """(N,) shares to (N,) seconds; a share of 0 takes none."""
        tiles = np.ceil(shares / self.tile) * self.tile
        size = np.maximum(shares + self.tile_weight * (tiles - shares), self.knee)
        time = self.launch_s + self.sample_s * size
        if self.switch_at is not None:
            time = np.where(shares >= self.switch_at, time * self.switch_factor, time)
        time = time * (1 + self.bump * np.sin(shares * 1.7 + self.bump_phase))
        return np.where(shares > 0, time, 0.0)


# The part of what samples take at the peak that is there when backward begins: activations, without their gradients. A
# choice: real models on virtual cards had 0.53 and more.
SAVED_PART = (0.5, 1.0)


@dataclass(kw_only=True)
class CardMemory:
    """Bytes one card needs, by its share s, the micro-batch m and whether the step accumulates: a maximum over phases.

    forward and backward: ``fixed + sample x s + output x m + accumulating x [k > 1]``; reduce: the
    same with `reduce` alone; update: `update`. `power` above 1, and the jump, are what no line
    foresees.
    """

    total: float
    outside: float
    fixed: float
    sample: float
    output: float
    accumulating: float
    reduce: float
    update: float
    parameters: float
    state: float
    power: float = 1.0
    jump_at: int | None = None
    jump: float = 0.0
    reserve: float = 0.0
    """Relative excess of what the allocator holds, at most; it varies from share to share."""

    def grown(self, shares: Floats, micro_batches: Floats) -> Floats:
        """What samples take at the peak of forward and backward."""
        return np.asarray(self.sample * np.power(np.maximum(shares, 0), self.power) + self.output * micro_batches)

    def phases(self, shares: Floats, micro_batches: Floats, accumulates: Floats) -> tuple[Floats, Floats]:
        """MemoryReadings of forward, backward and reduce together, and of the update."""
        forward = self.fixed + self.grown(shares, micro_batches)
        if self.jump_at is not None:
            forward = forward + np.where(shares >= self.jump_at, self.jump, 0.0)
        idle = (shares == 0) & (self.update == 0)  # no replica there
        micro_step = np.maximum(forward, self.reduce) + self.accumulating * accumulates
        return np.where(idle, 0.0, micro_step), np.full_like(shares, self.update)

    def reserved(self, shares: Floats, micro_batches: Floats, accumulates: Floats) -> Floats:
        """What the allocator holds at the peak."""
        peak = np.maximum(*self.phases(shares, micro_batches, accumulates))
        return peak * (1 + self.reserve * (0.5 + 0.5 * np.sin(shares * 2.3 + 1)))


@dataclass(kw_only=True)
class Problem:
    """One job on one machine. Step time is k x micro-step + update; see `step_times_s` and `CardMemory`."""

    seed: int
    kind: str
    """What the draw was: "affine", "knee", "cliff" in time, with "+memory" where memory is not affine per phase."""
    B: int
    shares: Shares
    times: tuple[CardTime, ...]
    memories: tuple[CardMemory, ...]
    micro_step_s: float
    replica_s: float
    """Host's time for each card that takes part: one thread launches for all of them, one after the other."""
    output_s: float
    update_s: float
    reduce_s: float
    """Once a step, for each card beyond the first that takes part."""
    noise: float
    tells_busy: bool
    measured: list[BatchSplit] = field(default_factory=list)
    num_oom: int = 0
    num_micro_steps: int = 0

    @property
    def num_devices(self) -> int:
        return len(self.times)

    @property
    def min_headroom_bytes(self) -> tuple[int, ...]:
        return tuple(int(HEADROOM_FRACTION * (m.total - m.outside)) for m in self.memories)

    def space(self) -> SplitSpace:
        return SplitSpace(global_batch_size=self.B, num_devices=self.num_devices, shares=self.shares)

    # --- the truth ---------------------------------------------------------------------------------------------------

    def busy_s(self, shards: Floats) -> Floats:
        """(N, n) shards to (N, n) seconds."""
        return np.stack([time(shards[:, i]) for i, time in enumerate(self.times)], axis=1)

    def micro_step_times_s(self, shards: Floats) -> Floats:
        """(N, n) shards to (N,) seconds: the slowest card, or the host that launches for all; then the outputs."""
        active = (shards > 0).sum(axis=1)
        slowest = np.maximum(self.busy_s(shards).max(axis=1), self.replica_s * active)
        return self.micro_step_s + slowest + self.output_s * shards.sum(axis=1) * (active > 1)

    def updates_s(self, shards: Floats) -> Floats:
        return self.update_s + self.reduce_s * np.maximum((shards > 0).sum(axis=1) - 1, 0)

    def step_times_s(self, steps: Floats, shards: Floats) -> Floats:
        return steps * self.micro_step_times_s(shards) + self.updates_s(shards)

    def reserved(self, steps: Floats, shards: Floats) -> Floats:
        """(N, n) bytes held at the peak."""
        m, k = shards.sum(axis=1), (steps > 1).astype(float)
        return np.stack([card.reserved(shards[:, i], m, k) for i, card in enumerate(self.memories)], axis=1)

    def fits(self, split: BatchSplit) -> bool:
        """Whether every card keeps its headroom."""
        return bool(self.which_fit(*_rows([split]))[0])

    def which_fit(self, steps: Floats, shards: Floats) -> NDArray[np.bool_]:
        """(N,) which keep the headroom demanded."""
        room = np.array([m.total - m.outside for m in self.memories]) - np.array(self.min_headroom_bytes)
        return np.asarray((self.reserved(steps, shards) <= room).all(axis=1))

    def runs(self, split: BatchSplit) -> bool:
        """Whether it does not run out of memory."""
        room = np.array([m.total - m.outside for m in self.memories])
        return bool((self.reserved(*_rows([split])) <= room).all())

    def throughput(self, split: BatchSplit) -> float:
        """Samples per second, without noise."""
        return float(self.B / self.step_times_s(*_rows([split]))[0])

    @cached_property
    def best_throughput(self) -> float | None:
        """Of the exhaustive optimum; None where nothing fits."""
        if self.shares == "gpu0":
            steps, shards = _rows(list(_undominated(self.space())))
            fits = self.which_fit(steps, shards)
            return float(self.B / self.step_times_s(steps, shards)[fits].min()) if fits.any() else None
        # the bound of a micro-batch and a number of cards is quick, the exact time is not: only
        # where the bound is promising
        promising = sorted(bound for k, m in _micro_batches(self.B) for bound in self._bounds_of_each(k, m))
        best = math.inf
        for bound, k, m, count in promising:
            if bound >= best:
                break
            best = min(best, self._step_s_of(k, m, count, self._slowest_of(k, m, count, is_exact=True)))
        return self.B / best if best < math.inf else None

    def best_split(self) -> BatchSplit:
        """The exhaustive optimum of a space that varies GPU 0's share."""
        splits = list(_undominated(self.space()))
        steps, shards = _rows(splits)
        times = np.where(self.which_fit(steps, shards), self.step_times_s(steps, shards), np.inf)
        return splits[int(times.argmin())]

    def _bounds_of_each(self, k: int, m: int) -> Iterator[tuple[float, int, int, int]]:
        """(least step time, k, m, number of cards) with every card its own share, if any cards can take m."""
        if self._options(k, m) is not None:
            for count in range(1, self.num_devices + 1):
                slowest_s = self._slowest_of(k, m, count, is_exact=False)
                if slowest_s < math.inf:
                    yield self._step_s_of(k, m, count, slowest_s), k, m, count

    def _options(self, k: int, m: int) -> list[tuple[Floats, Floats]] | None:
        """For each card the shares above 0 that fit it, and their times; None where GPU 0 does not even fit idle."""
        sizes = np.arange(m + 1, dtype=float)
        options = []
        for i, card in enumerate(self.memories):
            room = card.total - card.outside - self.min_headroom_bytes[i]
            fits = card.reserved(sizes, np.full(m + 1, float(m)), np.full(m + 1, float(k > 1))) <= room
            if not fits[0]:
                return None
            fits[0] = False
            options.append((sizes[fits], self.times[i](sizes[fits])))
        return options

    def _slowest_of(self, k: int, m: int, count: int, *, is_exact: bool) -> float:
        """Least time within which `count` cards, whichever they are, can take m samples: by bisection over all times.

        Not exact, it is enough that their largest shares make m, which bounds it from below; exact, some shares must.
        """
        options = self._options(k, m)
        assert options is not None
        times = np.unique(np.concatenate([own_times for _, own_times in options]))
        low, high = 0, len(times)

        def suffices(within: float) -> bool:
            shares = [own[own_times <= within] for own, own_times in options]
            shares = [own for own in shares if len(own)]
            most = sorted((int(own.max()) for own in shares), reverse=True)[:count]
            if len(most) < count or sum(most) < m:
                return False
            if not is_exact:
                return True
            reachable = [1] + [0] * count  # of so many cards: bit j where j samples can be placed
            for own in shares:
                for taking_part in range(count, 0, -1):
                    reachable[taking_part] |= _placed(reachable[taking_part - 1], own, m)
            return bool(reachable[count] >> m & 1)

        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if suffices(float(times[middle])) else (middle + 1, high)
        return float(times[low]) if low < len(times) else math.inf

    def _step_s_of(self, k: int, m: int, count: int, slowest_s: float) -> float:
        slowest = max(slowest_s, self.replica_s * count)
        micro_step = self.micro_step_s + slowest + self.output_s * m * (count > 1)
        return k * micro_step + self.update_s + self.reduce_s * (count - 1)

    # --- measuring ---------------------------------------------------------------------------------------------------

    def measure(self, split: BatchSplit) -> Measurement:
        """A trial: a few micro-steps and updates, with noise; or what a failed one leaves."""
        self.measured.append(split)
        self.num_micro_steps += NUM_MICRO_STEPS
        return self._measure(split, whole=False)

    def confirm(self, split: BatchSplit) -> Measurement:
        """A trial in whole steps."""
        self.num_micro_steps += NUM_WHOLE_STEPS * split.accumulation_steps
        return self._measure(split, whole=True)

    def _measure(self, split: BatchSplit, *, whole: bool) -> Measurement:
        steps, shards = _rows([split])
        memory = self._readings(steps, shards)
        overfull = [m.device for m in memory if m.headroom_bytes < 0]
        if overfull:
            self.num_oom += 1
            message = f"device {overfull[0]}: CUDA out of memory"
            full = tuple(
                replace(m, peak_reserved_bytes=min(m.peak_reserved_bytes, m.total_bytes - m.outside_bytes))
                for m in memory
            )
            return Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY, memory=full, message=message)
        draws = np.random.default_rng([self.seed, len(self.measured), split.gpu0_bsz, split.accumulation_steps, whole])

        def noisy(time_s: float, count: int) -> tuple[float, ...]:
            return tuple(float(t) for t in time_s * np.maximum(0.5, 1 + self.noise * draws.standard_normal(count)))

        busy = self.busy_s(shards)[0] * (1 + self.noise / 2 * draws.standard_normal(self.num_devices))
        if whole:
            step_s = float(self.step_times_s(steps, shards)[0])
            times = {"whole_step_times_s": noisy(step_s, NUM_WHOLE_STEPS)}
        else:
            times = {
                "micro_step_times_s": noisy(float(self.micro_step_times_s(shards)[0]), NUM_MICRO_STEPS),
                "update_times_s": noisy(float(self.updates_s(shards)[0]), NUM_UPDATES),
            }
        return Measurement(
            split=split,
            outcome=Outcome.OK,
            **times,
            memory=memory,
            device_busy_s=tuple(map(float, busy)) if self.tells_busy and not whole else None,
        )

    def _readings(self, steps: Floats, shards: Floats) -> tuple[DeviceMemory, ...]:
        m, k = shards.sum(axis=1), (steps > 1).astype(float)
        part = np.random.default_rng([self.seed, 7]).uniform(*SAVED_PART)
        readings = []
        for i, card in enumerate(self.memories):
            micro_step, update = card.phases(shards[:, i], m, k)
            single, _ = card.phases(shards[:, i], m, np.zeros_like(k))
            resting = card.parameters * (1 + k[0]) + card.state if micro_step[0] else 0
            readings.append(
                DeviceMemory(
                    device=i,
                    total_bytes=int(card.total),
                    outside_bytes=int(card.outside),
                    peak_allocated_bytes=int(max(micro_step[0], update[0])),
                    peak_reserved_bytes=int(card.reserved(shards[:, i], m, k)[0]),
                    micro_step_peak_bytes=int(micro_step[0]),
                    update_peak_bytes=int(update[0]),
                    single_step_peak_bytes=int(single[0]) if k[0] else None,
                    resting_bytes=int(resting),
                    before_backward_bytes=int(resting + part * card.grown(shards[:, i], m)[0]) if micro_step[0] else 0,
                )
            )
        return tuple(readings)


def _micro_batches(global_batch_size: int) -> Iterator[tuple[int, int]]:
    """Each largest micro-batch m, with the fewest steps k that have it: more of that size only cost."""
    last = 0
    for k in range(1, global_batch_size + 1):
        m = -(-global_batch_size // k)
        if m != last:
            yield k, m
        last = m


def _undominated(space: SplitSpace) -> Iterator[BatchSplit]:
    fewest = {k for k, _ in _micro_batches(space.global_batch_size)}
    return (split for split in space if split.accumulation_steps in fewest)


def _rows(splits: Sequence[BatchSplit]) -> tuple[Floats, Floats]:
    steps = np.array([split.accumulation_steps for split in splits], dtype=float)
    return steps, np.array([split.shard_sizes for split in splits], dtype=float).reshape(len(splits), -1)


def _placed(reachable: int, shares: Floats, most: int) -> int:
    """The totals up to `most`, as bits, that one share more makes of the totals in `reachable`."""
    placed, runs = 0, np.split(shares.astype(int), np.flatnonzero(np.diff(shares) != 1) + 1)
    for run in runs:  # a run of neighbouring shares is shifted together, by doubling
        first, length, block = int(run[0]), len(run), reachable
        done = 1
        while done < length:
            step = min(done, length - done)
            block |= block << step
            done += step
        placed |= block << first
    return placed & ((1 << (most + 1)) - 1)
