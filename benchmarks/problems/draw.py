"""Problems drawn by a seed: cards like and unlike, memory taken by others, and what breaks straight lines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.problems.problem import CardMemory, CardTime, Problem

GIB = 1024**3


def draw(seed: int, *, max_noise: float = 0.02, tells_busy: bool = True) -> Problem:
    """The problem of this seed: 2 to 8 cards, a global batch from 8 to 2048, noise up to `max_noise`, or none.

    Cards tell their busy times, as they do for a model that is called once a step, unless
    `tells_busy` is off. Which one is slow can then not be told, so there are no shares of every
    card's own. Three tenths have two kinds of cards. In time a third are plain lines, a third have
    a knee, a third cliffs: tiles, an algorithm that changes, a ripple. A quarter have memory that
    is not affine: a power of the share, a jump, or an allocator that holds more than is live.
    """
    dice = _Dice(np.random.default_rng(seed))
    rng = dice.rng
    num_devices, global_batch_size = int(rng.integers(2, 9)), round(dice.log_uniform(8, 2048))
    is_unlike = bool(rng.random() < 0.3)
    kinds = rng.integers(0, 2, num_devices) if is_unlike else np.zeros(num_devices, int)
    share = global_batch_size / num_devices
    time_kind, times = _draw_times(dice, kinds, share)
    memory_kind, memories = _draw_memories(dice, kinds, share)
    sample_s = max(time.sample_s for time in times)
    slowest_s = float(max(time(np.array([share]))[0] for time in times))
    return Problem(
        seed=seed,
        kind=time_kind + memory_kind,
        B=global_batch_size,
        shares="each" if is_unlike and tells_busy else "gpu0",
        times=times,
        memories=memories,
        micro_step_s=slowest_s * dice.log_uniform(0.002, 0.2),
        replica_s=slowest_s * dice.log_uniform(0.0005, 0.1),
        output_s=sample_s * dice.zero_or(0, 0.05),
        update_s=slowest_s * dice.log_uniform(0.005, 0.3),
        reduce_s=slowest_s * dice.log_uniform(0.001, 0.1),
        noise=dice.zero_or(0, max_noise),
        tells_busy=tells_busy,
    )


@dataclass(frozen=True, slots=True)
class _Dice:
    rng: np.random.Generator

    def log_uniform(self, low: float, high: float) -> float:
        return float(math.exp(self.rng.uniform(math.log(low), math.log(high))))

    def zero_or(self, low: float, high: float) -> float:
        """0 in half of the cases."""
        return float(self.rng.choice([0.0, self.rng.uniform(low, high)]))


def _draw_times(dice: _Dice, kinds: NDArray[np.int64], share: float) -> tuple[str, tuple[CardTime, ...]]:
    rng = dice.rng
    kind = str(rng.choice(["affine", "knee", "cliff"], p=[0.35, 0.3, 0.35]))
    sample_s = dice.log_uniform(1e-4, 1e-2)
    base = CardTime(launch_s=sample_s * share * dice.log_uniform(0.005, 0.5), sample_s=sample_s)
    if kind == "knee":
        base.knee = max(1, int(share * rng.uniform(0.05, 0.6)))
    if kind == "cliff":
        base.tile, base.tile_weight = int(rng.choice([2, 4, 8, 16, 32])), float(rng.uniform(0.2, 1.0))
        if rng.random() < 0.5:
            base.switch_at = int(rng.integers(2, max(3, int(share * 1.2))))
            base.switch_factor = float(rng.choice([rng.uniform(1.03, 1.2), rng.uniform(0.85, 0.97)]))
        base.bump, base.bump_phase = float(rng.uniform(0, 0.01)), float(rng.uniform(0, 6))
    speeds = np.where(kinds == 1, rng.uniform(1.2, 2.5), 1.0)
    cards = (
        replace(base, sample_s=float(sample_s / speed), launch_s=float(base.launch_s / speed**0.3)) for speed in speeds
    )
    return kind, tuple(cards)


def _draw_memories(dice: _Dice, kinds: NDArray[np.int64], share: float) -> tuple[str, tuple[CardMemory, ...]]:
    rng, num_devices = dice.rng, len(kinds)
    sizes = np.array([rng.choice([11, 16, 24, 40]), rng.choice([12, 16, 24, 40, 48])]) * GIB
    totals = sizes[kinds]
    outside = rng.uniform(0.3, 0.7) * GIB + np.zeros(num_devices)  # the CUDA context
    if rng.random() < 0.6:  # other programs, on GPU 0 more often than elsewhere
        outside[0] += rng.uniform(0, 0.5) * totals[0]
    if kinds.any() and rng.random() < 0.3:
        outside[rng.integers(0, num_devices)] += rng.uniform(0, 0.3) * totals.min()
    room = float((totals - outside).min())
    parameters = room * dice.log_uniform(0.005, 0.12)
    state = parameters * float(rng.choice([0, 1, 2]))
    sample = room * dice.log_uniform(0.2, 20) / share
    output = sample * dice.zero_or(0, 0.3)
    workspaces = rng.uniform(0, 0.3, 2) * parameters  # cards of a kind choose the same kernels
    # with one step the gradients come as the activations go, so that only part of them adds to the peak
    stays = parameters * float(rng.uniform(0, 1))
    cards = []
    for i in range(num_devices):
        fixed = parameters * 2 - stays + float(workspaces[kinds[i]])
        on_gpu0 = i == 0
        cards.append(
            CardMemory(
                total=float(totals[i]),
                outside=float(outside[i]),
                fixed=fixed + state * on_gpu0,
                sample=sample,
                output=output * on_gpu0,
                accumulating=stays,
                reduce=fixed + (state + parameters) * on_gpu0,
                update=(parameters * 3 + state) * on_gpu0,
                parameters=parameters,
                state=state * on_gpu0,
            )
        )
    if rng.random() >= 0.25:
        return "", tuple(cards)
    power, reserve = float(rng.choice([1.0, rng.uniform(1.01, 1.06)])), dice.zero_or(0, 0.08)
    jump_at = int(rng.integers(2, max(3, int(share)))) if rng.random() < 0.5 else None
    jump = float(rng.uniform(0, 0.06)) * room
    return "+memory", tuple(replace(c, power=power, reserve=reserve, jump_at=jump_at, jump=jump) for c in cards)
