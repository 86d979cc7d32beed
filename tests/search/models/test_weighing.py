from __future__ import annotations

import numpy as np
import pytest

from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.curves import Curve
from splittune.search.models.step_trials import StepTrials
from splittune.search.models.weighing import MIXING_NOISE, weigh
from tests.search.problem import split


def log_posterior(units: float) -> float:
    """Of a curve that makes each of 8 trials of 1 to 8 samples, 1 s each, longer by so many units of noise."""
    ran = []
    for share in range(1, 9):
        of = split(share, 1, share)
        ran.append(
            JudgedTrial.of(Measurement(split=of, outcome=Outcome.OK, whole_step_times_s=(float(share),) * 3), [])
        )
    slow = Curve(0.0, float(np.exp(units * MIXING_NOISE)), 0.0, np.array([1.0, 8.0]), np.zeros(2))
    found, hypothesis = weigh(StepTrials.of(ran), (slow,))
    assert hypothesis.costs.per_micro_step_s == 0  # costs add time, and cannot take any away
    return found


def test_the_worked_example() -> None:
    """Off by one unit each: -6 log 3. By 11 and not by 10: less likely by 6 log(243 / 201), for the tail is heavy."""
    assert log_posterior(0.0) == pytest.approx(0, abs=1e-6)
    assert log_posterior(1.0) == pytest.approx(-6 * np.log(3))
    assert log_posterior(10.0) - log_posterior(11.0) == pytest.approx(6 * np.log(243 / 201))
