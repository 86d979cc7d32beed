"""What peaks grow with, for people to read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splittune.search.models.growth import growth_of
from splittune.split import BatchSplit
from tests.search.problem import MIB, Job, linear_job


def runs_of(problem: Job, *splits: tuple[int, tuple[int, ...]]):
    return [
        problem.measure(BatchSplit(global_batch_size=problem.B, accumulation_steps=k, shard_sizes=shards))
        for k, shards in splits
    ]


def test_shares_outputs_and_gradients_that_stay_are_told_apart() -> None:
    """Trials at several sizes and numbers of steps give the cost of a sample, and of one of the
    micro-batch, exactly.
    """
    problem = linear_job(B=48, num_devices=3, sample_mib=2.0, output_mib=0.5, gradients_mib=7.0, fixed_mib=10.0)
    runs = runs_of(problem, (12, (2, 1, 1)), (6, (2, 3, 3)), (2, (4, 10, 10)), (1, (16, 16, 16)), (1, (4, 22, 22)))
    grown = growth_of(runs)
    assert grown.per_sample_bytes == pytest.approx(2.0 * MIB, rel=1e-3)
    assert grown.per_micro_batch_sample_bytes == pytest.approx(0.5 * MIB, rel=0.02)


def test_what_does_not_vary_is_not_known() -> None:
    """One size of share, or of the micro-batch, tells nothing of its cost."""
    problem = linear_job(B=48, num_devices=3, sample_mib=2.0)
    assert growth_of(runs_of(problem, (4, (4, 4, 4)))).per_sample_bytes is None
    assert growth_of([]).per_sample_bytes is None
    same_size = growth_of(runs_of(problem, (4, (4, 4, 4)), (4, (2, 5, 5))))
    assert same_size.per_sample_bytes == pytest.approx(2.0 * MIB, rel=1e-3)
    assert same_size.per_micro_batch_sample_bytes is None


def test_a_floor_does_not_flatten_the_line() -> None:
    """Small sizes that peak in another phase are left out while larger ones tell."""
    problem = linear_job(B=64, num_devices=2, sample_mib=2.0, fixed_mib=10.0)
    runs = runs_of(problem, (32, (1, 1)), (16, (2, 2)), (4, (8, 8)), (2, (16, 16)), (1, (32, 32)))
    floored = [
        replace(
            run,
            memory=tuple(replace(m, peak_allocated_bytes=max(m.peak_allocated_bytes, 20 * MIB)) for m in run.memory),
        )
        for run in runs
    ]
    assert growth_of(floored).per_sample_bytes == pytest.approx(2.0 * MIB, rel=1e-3)


def test_a_single_card_counts_all_as_its_share() -> None:
    """With one device its share is the micro-batch, and nothing is left for outputs."""
    problem = linear_job(B=32, num_devices=1, sample_mib=3.0, fixed_mib=5.0)
    grown = growth_of(runs_of(problem, (8, (4,)), (4, (8,)), (2, (16,))))
    assert grown.per_sample_bytes == pytest.approx(3.0 * MIB, rel=1e-3)
    assert grown.per_micro_batch_sample_bytes == 0.0
