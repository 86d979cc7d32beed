from __future__ import annotations

import numpy as np
import pytest

from splittune.search.candidates.acquisition import CandidateScores
from splittune.search.candidates.table import SplitTable
from splittune.search.models.memory import Interval
from splittune.search.models.step_time import StepTimes


def scores(*, most: list[float], cannot_oom: list[bool]) -> CandidateScores:
    """Of single steps on one device of 10 bytes; all are predicted as fast as the best so far, give or take 10 %."""
    count = len(most)
    held, ones = np.array(most)[:, None], np.ones((count, 1))
    needed = Interval(
        sure=0 * ones,
        least=0 * ones,
        foretold=held,
        most=held,
        most_after_cache_flush=held,
        surprise=0 * ones,
        least_part=ones,
    )
    shards = np.arange(8.0, 8.0 + count)[:, None]
    return CandidateScores(
        table=SplitTable(global_batch_size=64, steps=np.ones(count), shards=shards),
        times=StepTimes(log_s=np.zeros(count), deviation=np.full(count, 0.1)),
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
    both = scores(most=[9, 9], cannot_oom=[True, True])
    assert both.optimistic_gain(np.array([2.0, 1.0])).tolist() == pytest.approx([0.2, 0.1])
