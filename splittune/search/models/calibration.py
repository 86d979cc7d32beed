"""How far predictions of step times were off, in their own standard deviations."""

from __future__ import annotations

import numpy as np

from splittune.search.choices import LEAST_NOISE, SIGNIFICANT
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.step_time import TimeModel

# So many of the latest predictions count. A choice: earlier ones were made by models that knew
# less. Larger, and a model that has learned is doubted for longer: a single miss by far costs so many trials.
RECENT = 3
# A deviation that was predicted smaller counts as this: what is less is noise.
LEAST_DEVIATION = SIGNIFICANT * LEAST_NOISE


class Calibration:
    """Compares each trial with what the time model said of it before."""

    def __init__(self) -> None:
        self._scaled_errors: list[float] = []

    def observe(self, trial: JudgedTrial, model: TimeModel) -> None:
        """Take in a trial that `model`, of the trials before it, had foretold."""
        step_s = trial.measurement.step_time_s
        if step_s is None:
            return
        steps, shards = np.array([float(trial.split.accumulation_steps)]), np.array([trial.split.shard_sizes])
        told = model.predict(steps, shards.astype(float))
        off = float(np.log(step_s) - told.log_s[0])
        self._scaled_errors.append(off / max(float(told.deviation[0]), LEAST_DEVIATION))

    @property
    def doubt(self) -> float:
        """Root mean square of the latest scaled errors; at least 1, and 1 before there is any.

        Deviations times this are what predictions are worth. Worked: steps that took 2 % and 6 %
        longer than predicted give or take 2 % were off by 1 and 3 deviations, so it is
        ``sqrt((1 + 9) / 2) = 2.2``.
        """
        recent = self._scaled_errors[-RECENT:]
        return max(1.0, float(np.sqrt(np.mean(np.square(recent))))) if recent else 1.0
