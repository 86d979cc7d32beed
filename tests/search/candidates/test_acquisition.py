from __future__ import annotations

import numpy as np
import pytest

from splittune.search.candidates.acquisition import CandidateScores
from splittune.search.candidates.table import SplitTable
from splittune.search.models.interval import Interval
from splittune.search.models.step_time import StepTimes


def scores(
    *, most: list[float], cannot_oom: list[bool], gain: float = 0.0, deviation: float = 0.1, beyond: float = 0.0
) -> CandidateScores:
    """Of single steps on one device of 10 bytes; all are predicted to gain as much, give or take the deviation."""
    count = len(most)
    held, ones = np.array(most)[:, None], np.ones((count, 1))
    needed = Interval(
        sure=0 * ones,
        least=0 * ones,
        foretold=held,
        overhead=0 * ones,
        steady=ones,
        most=held,
        most_after_cache_flush=held,
        surprise=0 * ones,
        least_part=ones,
        trend_least=0 * ones,
        trend_most=0 * ones,
        goes_on=0 * ones,
        jump=0 * ones,
    )
    shards = np.arange(8.0, 8.0 + count)[:, None]
    return CandidateScores(
        table=SplitTable(global_batch_size=64, steps=np.ones(count), shards=shards),
        times=StepTimes(
            log_s=np.full(count, -gain), deviation=np.full(count, deviation), beyond=np.full(count, beyond)
        ),
        best_log_s=0.0,
        needed=needed,
        limits=np.array([10.0]),
        cannot_oom=np.array(cannot_oom),
        runs=np.ones(len(cannot_oom)),
    )


def test_what_surely_fits_runs_and_keeps_its_headroom() -> None:
    """The most that it may need is within the limit, and it cannot run out of memory on the way."""
    assert scores(most=[9, 10, 11, 9], cannot_oom=[True, True, True, False]).surely_feasible.tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_optimism_adds_deviations() -> None:
    """Two deviations of 10 % are 20 %, and one is 10."""
    one = scores(most=[9], cannot_oom=[True])
    assert [one.upper_bound(deviations)[0] for deviations in (2.0, 1.0)] == pytest.approx([0.2, 0.1])


def test_what_is_just_beyond_all_that_was_measured_may_be_faster() -> None:
    """By its upper bound; what is expected of it stays the same, so that no risk is taken for it. Twice as large shares
    are too far beyond."""
    known, just, far = (
        scores(most=[9], cannot_oom=[True], gain=-0.05, deviation=0.02, beyond=np.log(times)) for times in (1, 1.4, 2)
    )
    bounds = [one.upper_bound(2.0)[0] for one in (known, just, far)]
    assert bounds == pytest.approx([-0.01, -0.01 + 0.15 * np.log(1.4), -0.01])
    assert known.expected_improvement() == just.expected_improvement() == far.expected_improvement()


@pytest.mark.parametrize(("mean", "deviation"), [(0.05, 0.18), (-0.2, 0.1), (0.3, 0.01), (-0.1, 0.0), (0.1, 0.0)])
def test_what_is_expected_is_the_mean_of_what_improves(mean: float, deviation: float) -> None:
    """The mean of 1,000,000 drawn gains, those below 0 counted as 0."""
    one = scores(most=[9], cannot_oom=[False], gain=mean, deviation=deviation)
    gains = np.random.default_rng(0).normal(mean, deviation, 1_000_000)
    assert one.expected_improvement()[0] == pytest.approx(np.maximum(gains, 0.0).mean(), abs=5e-4)


def test_the_worked_number_of_expected_improvement() -> None:
    one = scores(most=[9], cannot_oom=[False], gain=0.05, deviation=0.18)
    assert one.expected_improvement()[0] == pytest.approx(0.0996, abs=5e-5)
