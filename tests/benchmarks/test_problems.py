"""The best split of a problem drawn for the benchmark is the best of all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.problems.draw import draw
from benchmarks.problems.problem import Problem


def best_of_all(problem: Problem) -> float | None:
    """By looking at every split of the space."""
    splits = list(problem.space())
    steps = np.array([split.accumulation_steps for split in splits], dtype=float)
    shards = np.array([split.shard_sizes for split in splits], dtype=float)
    fits = problem.which_fit(steps, shards)
    return float(problem.B / problem.step_times_s(steps, shards)[fits].min()) if fits.any() else None


def small_problems() -> list[int]:
    """Seeds of problems whose cards all have shares of their own, few enough to look at every split."""
    seeds = (seed for seed in range(3_000) if draw(seed).shares == "each")
    return [seed for seed in seeds if draw(seed).B <= 24 and draw(seed).num_devices <= 4]


@pytest.mark.parametrize("seed", small_problems())
def test_with_shares_of_their_own_the_best_is_that_of_all(seed: int) -> None:
    """Whichever cards take part: the fastest, or those that have room."""
    problem = draw(seed)
    assert problem.best_throughput == pytest.approx(best_of_all(problem))


def test_a_fast_card_without_room_stays_out() -> None:
    """The two fastest of three cards hold nothing but GPU 0's own: the third does all, and is the best there is."""
    problem = draw(small_problems()[0])
    roomy, full = problem.memories[-1], replace(problem.memories[-1], sample=1e15)
    roomy = replace(roomy, sample=1.0)
    fast = replace(problem.times[0], sample_s=problem.times[0].sample_s / 10)
    memories = (replace(problem.memories[0], sample=1e15), full, roomy)
    changed = replace(problem, memories=memories, times=(fast, fast, problem.times[0]), measured=[])
    best = changed.best_throughput
    assert best is not None
    assert best == pytest.approx(best_of_all(changed))
