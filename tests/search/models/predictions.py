"""What models of time and of memory say of splits, and what is true."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.problems.problem import Problem
from splittune.search import MemoryModel, TimeModel
from splittune.search.models.interval import Interval
from splittune.split import BatchSplit
from tests.search.problem import rows, trials

B = 64


def predicted(model: TimeModel, *wanted: BatchSplit) -> NDArray[np.float64]:
    return np.exp(model.predict(*rows(wanted)).log_s)


def doubts(model: TimeModel, *wanted: BatchSplit) -> NDArray[np.float64]:
    return model.predict(*rows(wanted)).deviation


def truth(problem: Problem, *wanted: BatchSplit) -> NDArray[np.float64]:
    return problem.step_times_s(*rows(wanted))


def model_of(problem: Problem, tried: Sequence[BatchSplit]) -> TimeModel:
    return TimeModel(trials(problem, tried))


def interval(model: MemoryModel, *wanted: BatchSplit) -> Interval:
    return model.needed(*rows(wanted))


def truth_of(problem: Problem, wanted: Sequence[BatchSplit]) -> NDArray[np.float64]:
    """Reserved bytes."""
    return problem.reserved(*rows(wanted))
