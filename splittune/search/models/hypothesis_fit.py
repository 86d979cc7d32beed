"""The hypotheses of step time that agree with the trials, and how much each is believed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from splittune.search.models.busy_times import BusyTimes
from splittune.search.models.hypotheses import Hypothesis
from splittune.search.models.step_trials import StepTrials
from splittune.search.models.whole_steps import WholeSteps

# A hypothesis with less than this part of the largest posterior weight is forgotten. A choice that
# saves time.
LEAST_WEIGHT = 0.01


def fit_hypotheses(trials: StepTrials) -> list[Hypothesis]:
    """Bayesian model averaging: the hypotheses, with weights that sum to 1."""
    weighed = (BusyTimes(trials) if trials.tells_busy else WholeSteps(trials)).hypotheses()
    logs = np.array([log_posterior for log_posterior, _ in weighed])
    weights = np.exp(logs - logs.max())
    weights[weights < LEAST_WEIGHT] = 0.0
    weights /= weights.sum()
    pairs = zip(weights, weighed, strict=True)
    return [replace(hypothesis, weight=float(weight)) for weight, (_, hypothesis) in pairs if weight]
