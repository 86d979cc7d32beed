from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.search.candidates.acquisition import (
    CandidateScores,
    expected_improvement,
    joint_feasibility,
    optimistic_gain,
)
from splittune.search.candidates.table import SplitTable
from splittune.search.models.memory import Interval
from splittune.search.models.step_time import StepTimes


def interval(least: float, most: float) -> Interval:
    """The same for one split and one device; the likeliest lies half way."""
    low, high = np.array([[least]]), np.array([[most]])
    return Interval(least=low, likely=(low + high) / 2, most=high, most_after_cache_flush=high)


def scores(
    *, gain: list[float], feasibility: list[float], cannot_oom: list[bool], shards: list[int]
) -> CandidateScores:
    """Of single steps on one device; all are predicted as fast as the best so far, give or take 10 %."""
    count = len(shards)
    return CandidateScores(
        table=SplitTable(global_batch_size=64, steps=np.ones(count), shards=np.array(shards, dtype=float)[:, None]),
        times=StepTimes(log_s=np.zeros(count), deviation=np.full(count, 0.1)),
        best_log_s=0.0,
        gain=np.array(gain),
        needed=interval(0, 1),
        limits=np.ones(1),
        feasibility=np.array(feasibility),
        cannot_oom=np.array(cannot_oom),
    )


@given(gain=st.floats(-1, 1), deviation=st.floats(0.001, 1))
def test_expected_improvement_is_the_mean_of_what_is_gained(gain: float, deviation: float) -> None:
    """It is what integrating the normal density over the gains above 0 makes, never negative, and at least the gain."""
    found = float(expected_improvement(np.array([gain]), np.array([deviation]))[0])
    at = np.linspace(gain - 9 * deviation, gain + 9 * deviation, 20_001)
    density = np.exp(-((at - gain) ** 2) / (2 * deviation**2)) / (deviation * np.sqrt(2 * np.pi))
    integral = float((np.maximum(at, 0) * density).sum() * (at[1] - at[0]))
    assert found == pytest.approx(integral, abs=1e-6)
    assert found >= max(0.0, gain) - 1e-12


def test_a_certain_gain_is_its_own_expectation() -> None:
    """Without any deviation a gain counts as it is, and a loss as nothing."""
    assert expected_improvement(np.array([0.2, -0.2]), np.zeros(2)).tolist() == pytest.approx([0.2, 0.0])


@pytest.mark.parametrize(
    ("least", "most", "limit", "expected"),
    [(8, 12, 10, 0.5), (8, 12, 12, 1.0), (8, 12, 7, 0.0), (8, 12, 11.9999, 0.999), (9, 9, 9, 1.0)],
)
def test_feasibility_is_the_part_of_the_interval_within_the_limit(
    least: float, most: float, limit: float, expected: float
) -> None:
    """Half of 8 to 12 GiB is below 10 GiB; only where all of it is, feasibility is 1."""
    gib = 1024.0**3
    found = joint_feasibility(interval(least * gib, most * gib), np.array([limit * gib]))
    assert found.tolist() == pytest.approx([expected])


def test_the_least_feasible_device_decides() -> None:
    """Two devices, one sure and one half: half."""
    low, high = np.array([[0.0, 800.0]]), np.array([[0.0, 1200.0]])
    needed = Interval(least=low, likely=low, most=high, most_after_cache_flush=high)
    assert joint_feasibility(needed, np.array([1000.0, 1000.0])).tolist() == pytest.approx([0.5])


def test_what_may_run_out_of_memory_has_no_value() -> None:
    """The best row is the best of those that cannot; an unsure headroom counts by its chance."""
    made = scores(gain=[0.9, 0.1, 0.05], feasibility=[1, 0.5, 1], cannot_oom=[False, True, True], shards=[8, 7, 6])
    assert made.value.tolist() == pytest.approx([0, 0.05, 0.05])
    assert made.surely_feasible.tolist() == [False, False, True]
    unsure = replace(made, gain=np.array([0.9, 0.1, 0.04]))
    assert unsure.best_row == 1


def test_optimism_adds_deviations() -> None:
    """Two deviations of 10 % are 20 %."""
    made = scores(gain=[0, 0], feasibility=[1, 1], cannot_oom=[True, True], shards=[16, 15])
    assert optimistic_gain(made, 2).tolist() == pytest.approx([0.2, 0.2])
