"""Step times of splits not yet tried, from those of the trials: a mean and its deviation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from splittune.search.arrays import FloatArray
from splittune.search.choices import LENGTHSCALE, MOST_UNLIKE, SIGNIFICANT, TOLERANCE
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models import POOR_FIT
from splittune.search.models.curves import DOUBT_OF_ONE_SHARE, Curve
from splittune.search.models.groups import grouped
from splittune.search.models.hypotheses import Hypothesis, StepCounts
from splittune.search.models.hypothesis_fit import fit_hypotheses
from splittune.search.models.step_trials import StepTrials

# Relative standard deviation of the residuals before trials say more, where busy times are unknown and more of a step
# must be guessed; else it is `TOLERANCE`. A choice. Larger, and splits far from the trials stay in doubt for longer.
BLIND_SIGNAL_STD = 0.06
# Variance that is added to that of the noise, so that the covariance can be inverted.
JITTER = 1e-8
# A device whose largest share took this part longer than a single sample has told how fast it is. A choice. Larger:
# more trials of larger shares on each device.
TELLING_GROWTH = 0.5
# For so many hypotheses the best split is solved. A choice: each is one more set of candidates.
MAX_HYPOTHESES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What N splits take, (N,) each."""

    log_s: FloatArray
    """Predicted logarithms of seconds a step."""
    deviation: FloatArray
    """Their standard deviations."""
    beyond: FloatArray
    """Logarithm of the slowest device's work over the most that one of its speed had; 0 where it had as much."""


class TimeModel:
    """Seconds a step: ``k (c + h (a - 1) + w + sum_i lambda_i s_i) + u + r (a - 1)``.

    k is the accumulation steps, a the number of devices with a share s_i. The slowest device works
    ``w = max(max_i t_i(s_i), g a)``: t_i is device i's `Curve`, from its busy times; devices of one
    kind share one. The host's thread needs g for each device. Outputs come to GPU 0 over links, and into the
    loss, in lambda_i a sample; devices of as much memory share it, but GPU 0's own go over no link. Without busy
    times all share one. What GPU 0 works on the whole micro-batch is its own or added to w. c, h, u, r and
    lambda are `StepCosts`, fitted to whole steps and to micro-steps, which pay for neither u nor r, by
    non-negative least squares on relative errors.

    Bayesian model averaging: several hypotheses are fitted and weighed by how likely they make the
    trials, and where they differ the prediction is in doubt. Such hypotheses are curves with and without steps at
    tiles, or first samples that are more work, and costs with links and without. Where busy times are unknown a single
    curve over the largest share stands for all devices, with the shares of each kind of device counted
    at each of several ratios, with several parts of the micro-batch added to GPU 0's, and with several half rates.

    Gaussian process: the residuals of the hypotheses are interpolated with an RBF kernel over
    logarithms of the micro-batch, GPU 0's share and the largest other share. Their deviation grows
    with the distance from what was measured. It vanishes where the formula holds, and rules where
    it does not.

    Args:
        trials: what was measured; those that ran count, and one must have.
        kinds: a number for each device, the same for those taken to be alike where busy times are
            unknown; None for those of as much memory.
    """

    def __init__(self, trials: Sequence[JudgedTrial], kinds: Sequence[int] | None = None) -> None:
        self._hypotheses, self._trials = fit_hypotheses(StepTrials.of(trials, kinds))
        self._weights = np.array([hypothesis.weight for hypothesis in self._hypotheses])
        self._residuals = self._trials.log_step_s - self._evaluate(self._trials.steps, self._trials.shards).log_s
        self._groups = self._interchangeable_groups()
        self._signal_std = max(TOLERANCE if self.tells_busy else BLIND_SIGNAL_STD, self.residual_rms)
        self._points = _features(self._trials.shards, self._groups)
        covariance = self._signal_std**2 * _rbf_kernel(self._points, self._points)
        covariance += (self.noise**2 + JITTER) * np.eye(len(self._points))
        self._inverse = np.linalg.inv(covariance)

    @property
    def noise(self) -> float:
        """Relative standard error of the trials' step times."""
        return self._trials.noise

    @property
    def tells_busy(self) -> bool:
        """Whether every trial says how long each device worked."""
        return self._trials.tells_busy

    @property
    def residual_rms(self) -> float:
        """Root mean square of the averaged residuals, in logarithms of seconds."""
        return float(np.sqrt(((self._weights @ self._residuals) ** 2).mean()))

    def warnings(self) -> tuple[str, ...]:
        """A sentence if more than `POOR_FIT` and noise is left unexplained; none if not."""
        # curves that left their form count, too
        residual = self._weights @ self._residuals
        for weight, hypothesis in zip(self._weights, self._hypotheses, strict=True):
            which, _ = hypothesis.slowest(self._trials.shards)
            residual = residual + weight * hypothesis.of_slowest(self._trials.shards, which, Curve.deviation)
        off = float(np.sqrt((residual**2).mean()))
        if off <= max(POOR_FIT, SIGNIFICANT * self.noise):
            return ()
        text = f"The time model did not fit: its form leaves {off:.0%} of the step times unexplained, so splits were "
        return (f"{text}compared by what was measured near them.",)

    @property
    def curves(self) -> tuple[Curve, ...]:
        """Each device's curve in the likeliest hypothesis."""
        return self.likely_hypotheses[0].curves

    @property
    def likely_hypotheses(self) -> list[Hypothesis]:
        """Up to `MAX_HYPOTHESES`, likeliest first."""
        return sorted(self._hypotheses, key=lambda hypothesis: -hypothesis.weight)[:MAX_HYPOTHESES]

    def predict(self, steps: FloatArray, shards: FloatArray) -> StepTimes:
        """The posterior of N splits: `steps` (N,), `shards` (N, n)."""
        near = self._signal_std**2 * _rbf_kernel(_features(shards, self._groups), self._points)
        gains = near @ self._inverse
        told = self._evaluate(steps, shards)
        mean, optimistic = self._weights @ told.log_s, self._weights @ told.optimistic_log_s
        logs = told.log_s + self._residuals @ gains.T
        log_s = np.asarray(self._weights @ logs)
        variance = np.maximum(self._signal_std**2 - np.einsum("ij,ij->i", gains, near), 0.0)
        variance = variance + (self._weights @ told.doubt) ** 2 + self._weights @ (logs - log_s) ** 2
        # With as many devices as no trial had, or as many beside GPU 0, what the model holds for constant
        # may be each device's: the mean lies half way to that, so that such splits get a trial.
        better = (mean - optimistic) / 2
        deviation = np.sqrt(variance) + np.abs(better)
        return StepTimes(log_s=log_s - better, deviation=deviation, beyond=self._weights @ told.beyond)

    def _evaluate(self, steps: FloatArray, shards: FloatArray) -> _Evaluation:
        """What each hypothesis says of N splits."""
        counts, seen = StepCounts.of(steps, shards), self._trials.counts
        unseen = ~np.isin(counts.active_devices, seen.active_devices)
        unseen |= ~np.isin(counts.linked_devices, seen.linked_devices)
        shape = len(self._hypotheses), len(steps)
        told = _Evaluation(*(np.empty(shape) for _ in fields(_Evaluation)))
        for i, hypothesis in enumerate(self._hypotheses):
            which, slowest_s = hypothesis.slowest(shards)
            told.log_s[i] = told.optimistic_log_s[i] = np.log(hypothesis.step_s(counts, slowest_s))
            optimistic_s = hypothesis.optimistic_step_s(counts.where(unseen), slowest_s[unseen])
            told.optimistic_log_s[i, unseen] = np.log(optimistic_s)
            told.doubt[i] = np.maximum(
                hypothesis.of_slowest(shards, which, Curve.doubt), self._doubt_of_kind(hypothesis, shards, which)
            )
            told.beyond[i] = hypothesis.of_slowest(shards, which, Curve.beyond)
        return told

    def _doubt_of_kind(self, hypothesis: Hypothesis, shards: FloatArray, which: NDArray[np.int64]) -> FloatArray:
        """(N,) doubt whether the slowest device is of the kind whose curve it shares; 0 where its own shares told.

        Devices that are not of one speed take as long for shares so small that launches take longest. If
        a device had no others, it takes at a larger share x something between what it took at its own
        largest share s and what its kind takes: half of ``log(t(x) / t(s))`` either way. Worked: a kind
        takes 2 ms for 1 to 2 samples, and 8 ms for 13; a device that had 2 takes 4 ms for 13, by a factor
        of 2 more or less. The more of s its samples took, the less is in doubt, up to `TELLING_GROWTH`: half as much
        where s took a quarter longer than a single sample. Without busy times every share that a device had counts as
        its own.

        Nothing tells the speed of a device that had none: its single sample is in as much doubt as another share of a
        device that had only one. In half as much, where another with as much memory had a share: cards of one model
        have as much, but not all that have are of one.
        """
        worked, totals = self._trials.busy_s > 0 if self.tells_busy else True, np.array(self._trials.totals)
        largest = np.where(worked, self._trials.shards, 0.0).max(axis=0)
        own, has_kin = np.maximum(largest, 1.0), np.isin(totals, totals[largest > 0])
        doubt = np.zeros(len(shards))
        for device, curve in enumerate(hypothesis.curves):
            if self.tells_busy and not largest[device]:
                doubt[which == device] = DOUBT_OF_ONE_SHARE / (2 if has_kin[device] else 1)
                continue
            least_s, own_s = curve(np.array([1.0, own[device]]))
            rows = (which == device) & (shards[:, device] > own[device])
            told = np.clip((own_s / least_s - 1) / TELLING_GROWTH, 0.0, 1.0)
            if rows.any() and told < 1:
                doubt[rows] = (1 - told) * np.abs(np.log(curve(shards[rows, device]) / own_s)) / 2
        return doubt

    def _interchangeable_groups(self) -> list[tuple[int, ...]]:
        """Devices beside GPU 0 that no prediction tells apart: all, or without busy times those of one kind."""
        kinds, tells_busy = self._trials.kinds, self._trials.tells_busy
        return grouped(range(1, len(kinds)), lambda one, other: tells_busy or kinds[one] == kinds[other])


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """What each of H hypotheses says of N splits, (H, N) each."""

    log_s: FloatArray
    optimistic_log_s: FloatArray
    """`log_s`, but better where no trial had as many devices, or as many beside GPU 0."""
    doubt: FloatArray
    """Relative standard deviation of the slowest device's curve, and of whether it is its own."""
    beyond: FloatArray
    """Logarithm of the slowest device's work over the most that its curve was fitted to."""


def _features(shards: FloatArray, groups: Sequence[Sequence[int]]) -> FloatArray:
    """(N, 2 + groups) logarithms of the micro-batch, GPU 0's share and each group's largest share.

    A share too small to matter, see `MOST_UNLIKE`, counts as the largest such share.
    """
    least = shards.max(axis=1) / MOST_UNLIKE
    others = [np.log1p(np.maximum(shards[:, list(group)].max(axis=1), least)) for group in groups]
    return np.column_stack([np.log1p(shards.sum(axis=1)), np.log1p(np.maximum(shards[:, 0], least)), *others])


def _rbf_kernel(some: FloatArray, others: FloatArray) -> FloatArray:
    """(S, O) correlations of residuals: ``exp(-distance^2 / (2 LENGTHSCALE^2))``, 0.6 at a distance of one."""
    squared = ((some[:, None, :] - others[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-squared / (2 * LENGTHSCALE**2)))
