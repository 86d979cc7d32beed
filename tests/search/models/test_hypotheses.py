from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from splittune.search.models.curves import Curve
from splittune.search.models.hypotheses import Hypothesis, StepCosts, StepCounts

COSTS = StepCosts(
    per_micro_step_s=1.0, per_device_s=0.01, per_step_s=7.0, per_reduce_s=0.5, per_gathered_sample_s=(0.0, 0.1)
)


def counts(steps: int, *shards: int) -> StepCounts:
    return StepCounts.of(np.array([float(steps)]), np.array([shards], dtype=float))


def line(slope_s: float, floor_s: float = 0.0) -> Curve:
    return Curve(floor_s, slope_s, 0.0, np.array([1.0, 2.0]), np.zeros(2))


def test_the_worked_example() -> None:
    """3 steps of 4 + 6 samples: 3 micro-steps, 3 micro-steps of a further device, 1 step, 1 reduce,
    and 12 + 18 samples.
    """
    told = counts(3, 4, 6)
    assert told.matrix.tolist() == [[3, 3, 1, 1]]
    assert told.samples.tolist() == [[12, 18]]
    assert (told.micro_steps.tolist(), told.active_devices.tolist()) == ([3], [2])


def test_gpu0_alone_gathers_and_reduces_nothing() -> None:
    """An idle device takes no part, and GPU 0's own outputs need no link; those of GPU 1 alone do."""
    assert counts(3, 10, 0).matrix.tolist() == [[3, 0, 1, 0]]
    assert COSTS.of(counts(3, 10, 0)) == pytest.approx([3 + 7])
    assert COSTS.of(counts(3, 0, 10)) == pytest.approx([3 + 7 + 30 * 0.1])


def test_costs_are_paid_as_often_as_counted() -> None:
    """3 x 1 + 3 x 0.01 + 7 + 0.5 + 18 x 0.1 seconds."""
    assert COSTS.of(counts(3, 4, 6)) == pytest.approx([12.33])


def test_a_step_takes_as_long_as_its_slowest_device_or_the_host() -> None:
    """Shares of 4 and 6 take 4 s and 3 s; a host that needs 3 s for each of two devices takes 6 s."""
    shards = np.array([[4.0, 6.0]])
    quick = Hypothesis(curves=(line(1.0), line(0.5)), costs=COSTS)
    which, slowest_s = quick.slowest(shards)
    assert (which.tolist(), slowest_s.tolist()) == ([0], [4])
    assert quick.step_s(counts(3, 4, 6), slowest_s) == pytest.approx([3 * 4 + 12.33])
    waiting = Hypothesis(curves=quick.curves, costs=COSTS, host_s_per_device=3.0)
    assert waiting.step_s(counts(3, 4, 6), slowest_s) == pytest.approx([3 * 6 + 12.33])


def test_fewer_devices_are_hoped_to_pay_less_of_what_seems_constant() -> None:
    """1 s a micro-step may be all the second device's, and so may the update's 7 s be."""
    shared = Hypothesis(curves=(line(1.0), line(1.0)), costs=COSTS, most_host_s_per_device=20.0)
    alone, slowest_s = counts(2, 8, 0), np.array([8.0])
    assert shared.step_s(alone, slowest_s) == pytest.approx([2 * 8 + 2 * 1 + 7])
    assert shared.optimistic_step_s(alone, slowest_s) == pytest.approx([2 * 8])


def test_what_no_curve_explains_may_be_the_hosts() -> None:
    """Where a host that needs 3 s for each of three devices explains all, two wait for 6 s; of the
    update's 1 s half is left.
    """
    free = Hypothesis(curves=(line(0.1),) * 3, most_host_s_per_device=3.0)
    waiting = replace(free, costs=StepCosts(per_micro_step_s=20.0, per_step_s=1.0))
    hoped = waiting.optimistic_step_s(counts(2, 8, 8, 0), np.array([0.8]))
    assert hoped == pytest.approx([2 * 6 + 1 / 2])


def test_without_busy_times_fewer_devices_are_hoped_to_pay_their_part_at_least() -> None:
    """However much of it seems constant, one of two devices takes at least half of what both took."""
    unknown = Hypothesis(curves=(line(0.0, floor_s=9.0),) * 2, costs=StepCosts(per_micro_step_s=1.0), tells_busy=False)
    alone = counts(2, 8, 0)
    assert unknown.optimistic_step_s(alone, np.array([0.0])) == pytest.approx(
        unknown.step_s(alone, np.array([0.0])) / 2
    )


def test_what_gpu_0_works_on_the_whole_micro_batch_counts_as_its_own() -> None:
    """0.5 s for each of 10 samples makes GPU 0 the slowest, though it has the smaller share."""
    plain = Hypothesis(curves=(line(1.0), line(1.0)))
    assert plain.slowest(np.array([[4.0, 6.0]]))[1].tolist() == [6]
    gathers = replace(plain, gpu0_per_sample_s=0.5)
    which, slowest_s = gathers.slowest(np.array([[4.0, 6.0]]))
    assert (which.tolist(), slowest_s.tolist()) == ([0], [9])
