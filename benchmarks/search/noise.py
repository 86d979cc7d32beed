"""How the times of real trials scatter: noise, outliers, a cold first trial, cards that grow warm."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What stands between a true time and a measured one. Each part is a factor, and may be absent.

    Example: ``Noise(relative=0.01)`` scatters every time by 1 % around its true value.
    """

    relative: float = 0.0
    """Standard deviation of a single time."""
    of_trial: float = 0.0
    """Standard deviation of what all times of a trial have in common: where clocks and hosts happen to be."""
    outliers: float = 0.0
    """The share of times that a hiccup of the host makes longer, by a Pareto-distributed part."""
    cold: float = 0.0
    """By how much the first trial is slower: kernels are loaded, caches are empty."""
    warming: float = 0.0
    """By how much cards are slower once they are warm; two thirds of it after `warming_trials`."""
    warming_trials: float = 5.0

    def factors(self, count: int, trial: int, rng: np.random.Generator) -> list[float]:
        """Of `count` times of the trial with this number, counted from 0."""
        common = 1.0 + self.of_trial * float(np.clip(rng.standard_normal(), -3, 3))
        common *= 1.0 + self.warming * (1.0 - exp(-trial / self.warming_trials))
        if trial == 0:
            common *= 1.0 + self.cold
        own = 1.0 + self.relative * np.clip(rng.standard_normal(count), -4, 4)
        hiccups = rng.random(count) < self.outliers
        own = own * np.where(hiccups, 1.0 + np.minimum(0.1 * rng.pareto(1.5, count), 3.0), 1.0)
        return [float(common * factor) for factor in own]


def drawn_noise(rng: np.random.Generator) -> tuple[Noise, list[str]]:
    """Some of all this, and its name where it is unusual: a fifth of all problems have none."""
    relative = float(rng.choice([0.0, 0.005, 0.01, 0.02]))
    if relative == 0.0:
        return Noise(), []
    unusual = []
    outliers = cold = warming = 0.0
    if rng.random() < 0.15:
        outliers = float(rng.uniform(0.02, 0.12))
        unusual.append("hiccups")
    if rng.random() < 0.1:
        cold = float(rng.uniform(0.02, 0.15))
        unusual.append("cold first trial")
    if rng.random() < 0.1:
        warming = float(rng.uniform(0.005, 0.02))
        unusual.append("warming")
    noise = Noise(
        relative=relative, of_trial=0.3 * relative, outliers=outliers, cold=cold, warming=warming, warming_trials=4.0
    )
    return noise, unusual
