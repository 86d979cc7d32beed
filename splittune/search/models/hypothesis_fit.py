"""The hypotheses of step time that agree with the trials, and how much each is believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from splittune.search.choices import PENALTY
from splittune.search.models.busy_times import BusyTimes
from splittune.search.models.hypotheses import Hypothesis
from splittune.search.models.step_trials import StepTrials
from splittune.search.models.weighing import Weighed, weigh
from splittune.search.models.whole_steps import WholeSteps

# A hypothesis with less than this part of the largest posterior weight is forgotten. A choice that
# saves time.
LEAST_WEIGHT = 0.01
# By such a part the first trial may have taken longer than it would now, for it was cold: kernels are loaded, caches
# are empty. Choices, about as far apart as hypotheses are told apart. More of them: each proposal takes longer.
COLD = (0.03, 0.06, 0.1, 0.14)
# Beside such a cold first trial forms are sought as well. A choice: with those it is told how cold it was.
LIKELY_COLD = 0.1


def fit_hypotheses(trials: StepTrials) -> tuple[list[Hypothesis], StepTrials]:
    """Bayesian model averaging: the hypotheses, with weights that sum to 1, and the trials that they are of.

    These are without what made a cold first trial longer, if it was one: that is one number more, so the likeliest
    hypothesis must be likelier with it by more than `PENALTY`. Worked: of cards that work on tiles of 8 samples the
    first trial took 11.4 ms for 1 sample, and all others say 10. No hypothesis of tiles explains the 11.4, and
    without tiles it takes others to explain the rest; that it was cold, by 14 %, leaves nothing to explain.
    """
    model = BusyTimes if trials.tells_busy else WholeSteps
    fitted = model(trials).forms()
    if _unexplained(trials, fitted) > PENALTY:  # nothing can be likelier by more
        warm = model(trials.without_cold(LIKELY_COLD)).forms()
        both = [form for _, form in [*fitted, *warm]]
        told = {cold: max(log for log, _ in model(trials.without_cold(cold)).fitted(both)) for cold in (0.0, *COLD)}
        cold = max(COLD, key=lambda one: told[one])
        if told[cold] - PENALTY > told[0.0]:
            trials = trials.without_cold(cold)
            fitted = model(trials).fitted([form for _, form in warm])
    weighed = model(trials).hypotheses(fitted)
    logs = np.array([log_posterior for log_posterior, _ in weighed])
    weights = np.exp(logs - logs.max())
    weights[weights < LEAST_WEIGHT] = 0.0
    weights /= weights.sum()
    pairs = zip(weights, weighed, strict=True)
    return [replace(hypothesis, weight=float(weight)) for weight, (_, hypothesis) in pairs if weight], trials


def _unexplained(trials: StepTrials, forms: Sequence[Weighed]) -> float:
    """What the likeliest of these forms lacks in log likelihood to one that explains all that the trials took."""
    return -max(weigh(trials, form.curves, gpu0_per_sample_s=form.gpu0_per_sample_s)[0] for _, form in forms)
