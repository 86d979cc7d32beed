"""Hypotheses where trials say how long each device worked: curves through its own busy times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from splittune.search.arrays import FloatArray
from splittune.search.choices import PENALTY, SIGNIFICANT, TOLERANCE
from splittune.search.models.curves import PLAIN, Curve, Work, fit_curve
from splittune.search.models.groups import grouped
from splittune.search.models.hypotheses import Hypothesis
from splittune.search.models.least_squares import non_negative
from splittune.search.models.step_trials import StepTrials
from splittune.search.models.weighing import Weighed, sizes_of_tiles, weigh

# With so many samples half is gone of what the first ones may be more work; there is a hypothesis for each. A choice,
# evenly spaced in logarithms. More of them: each proposal takes longer.
FADES = (2.0, 4.0, 8.0, 16.0, 32.0)
# A divisor in place of 0 seconds.
LEAST_SECONDS = 1e-12

WorkOf = Callable[[FloatArray, FloatArray], Work]  # how much work shares are, by what they took in seconds


@dataclass(frozen=True, slots=True)
class BusyTimes:
    """Hypotheses of these trials, all of which have busy times."""

    trials: StepTrials

    def forms(self) -> list[Weighed]:
        """Plain curves and, where shares took what these do not explain, with tiles or first samples that are more.

        What GPU 0 works on the whole micro-batch, where there is such work, may be in its curve, or
        beside it: while the others work, or once they have finished, when all wait for it.
        """
        per_sample_s = self._gpu0_per_sample_s()
        weighed = self._of_busy_times(self.trials.busy_s)
        if per_sample_s:
            less = self.trials.busy_s
            less[:, 0] = np.maximum(less[:, 0] - per_sample_s * self.trials.shards.sum(axis=1), 0.0)
            weighed += self._of_busy_times(less) + self._of_busy_times(less, per_sample_s)
        return weighed

    def fitted(self, forms: Sequence[Hypothesis]) -> list[Weighed]:
        """The forms of these trials, whatever those of others are: busy times tell them."""
        return self.forms()

    def hypotheses(self, fitted: list[Weighed]) -> list[Weighed]:
        """The same: nothing is left to draw."""
        return fitted

    def _of_busy_times(self, busy_s: FloatArray, gpu0_per_sample_s: float = 0.0) -> list[Weighed]:
        def of(curves: tuple[Curve, ...], log_prior: float = 0.0) -> list[Weighed]:
            """What further devices cost may grow with their samples or not: of few trials both are as likely."""
            linked = weigh(self.trials, curves, log_prior, gpu0_per_sample_s=gpu0_per_sample_s)
            if not any(linked[1].costs.per_gathered_sample_s):
                return [linked]
            unlinked = weigh(self.trials, curves, log_prior, gpu0_per_sample_s=gpu0_per_sample_s, with_links=False)
            return [(log_posterior - np.log(2), told) for log_posterior, told in (linked, unlinked)]

        plain = self._curves_of_busy_devices(busy_s, lambda *_: PLAIN)
        weighed = of(plain)
        if all(curve.has_form(self.trials.noise) for curve in plain):
            return weighed
        works: list[WorkOf] = [partial(Work.in_tiles, size) for size in sizes_of_tiles(self.trials.shards.max())]
        works += [partial(Work.fading, fades) for fades in FADES]
        for work_of in works:
            curves = self._curves_of_busy_devices(busy_s, work_of)
            if any(curve.work != PLAIN for curve in curves):
                weighed += of(curves, -2 * PENALTY)
        return weighed

    def _gpu0_per_sample_s(self) -> float:
        """Seconds that GPU 0 works for each sample of the micro-batch, by the lines of its kind.

        Non-negative least squares on relative errors: a floor and a slope that devices of as much
        memory share, and for GPU 0 a third term. 0 where GPU 0 has no such others and its part of
        the micro-batch never varied, so that nothing tells the two slopes apart, or where the term
        is in the noise.
        """
        trials, busy_s = self.trials, self.trials.busy_s
        kin = [i for i, total in enumerate(trials.totals) if total == trials.totals[0]]
        sizes = trials.shards.sum(axis=1)
        parts = trials.shards[:, 0] / sizes
        if trials.num_devices == 1 or (len(kin) == 1 and np.ptp(parts) < TOLERANCE):
            return 0.0
        shares, times = trials.shards[:, kin].ravel(), busy_s[:, kin].ravel()
        own = np.zeros_like(trials.shards[:, kin])
        own[:, 0] = sizes
        matrix, known = np.column_stack([shares > 0, shares, own.ravel()]), times > 0
        if not known.any():
            return 0.0
        scaled = matrix[known] / times[known, None]
        _, _, per_sample_s = non_negative(scaled, np.ones(known.sum()))
        largest = float((per_sample_s * sizes / np.maximum(busy_s[:, 0], per_sample_s * sizes + LEAST_SECONDS)).max())
        return float(per_sample_s) if largest > TOLERANCE + SIGNIFICANT * trials.noise else 0.0

    def _curves_of_busy_devices(self, busy_s: FloatArray, work_of: WorkOf) -> tuple[Curve, ...]:
        """A curve for each device: one for all of a speed, a borrowed one before any share."""
        trials = self.trials
        known: dict[int, Curve] = {}
        for group in self._same_speed_groups(busy_s):
            shares = np.concatenate([trials.shards[:, i] for i in group])
            times = np.concatenate([busy_s[:, i] for i in group])
            worked = (shares > 0) & (times > 0)
            if worked.any():
                work = work_of(shares[worked], times[worked])
                curve = fit_curve(work.of(shares[worked]), times[worked], trials.noise)
                known |= dict.fromkeys(group, replace(curve, work=work))
        at = min(curve.works[-1:] for curve in known.values())  # what was measured of all of them
        by_speed = sorted(sorted(known), key=lambda i: float(known[i](at)[0]))

        def likest(device: int) -> int:
            """The fastest with its memory, else the fastest."""
            return next((i for i in by_speed if trials.totals[i] == trials.totals[device]), by_speed[0])

        return tuple(known[i] if i in known else known[likest(i)] for i in range(trials.num_devices))

    def _same_speed_groups(self, busy_s: FloatArray) -> list[tuple[int, ...]]:
        """Devices of one memory that were as busy at equal shares; `busy_s` is (R, n)."""
        totals, shards = self.trials.totals, self.trials.shards
        tolerance = TOLERANCE + SIGNIFICANT * self.trials.noise

        def agreement(one: int, other: int) -> float:
            """The largest share with which both were as busy; 0 where they were not with any."""
            equal = (shards[:, one] == shards[:, other]) & (busy_s[:, one] > 0) & (busy_s[:, other] > 0)
            if totals[one] != totals[other] or not equal.any():
                return 0.0
            ratios, shares = np.log(busy_s[equal, one] / busy_s[equal, other]), shards[equal, one]
            agree = all(abs(np.median(ratios[shares == share])) < tolerance for share in np.unique(shares))
            return float(shares.max()) if agree else 0.0

        return grouped(range(self.trials.num_devices), agreement)
