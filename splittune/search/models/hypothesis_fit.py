"""The hypotheses of step time that agree with the trials, and how much each is believed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from splittune.search.arrays import FloatArray
from splittune.search.models.cost_fit import fit_costs
from splittune.search.models.curves import Curve, fit_curve
from splittune.search.models.groups import grouped
from splittune.search.models.hypotheses import Hypothesis
from splittune.search.models.kinds import kind_alone
from splittune.search.models.least_squares import non_negative
from splittune.search.models.step_trials import SIGNIFICANT_DEVIATIONS, StepTrials

Weighed = tuple[float, Hypothesis]  # a log posterior, but for a constant, and its hypothesis

# Kernels may work on tiles of so many samples: powers of two, as tiles of matrix products are. A
# choice; 2 was added while drawn problems were searched. Each size is one more hypothesis.
TILES = (2, 4, 8, 16, 32)
# What a hypothesis with tiles lacks in log prior: it must make the trials e^2 = 7 times as likely
# to be believed as much as one without. A choice.
TILE_PENALTY = 2.0
# Without busy times: how many samples of one kind of device take as long as one of another. There is
# a hypothesis for each ratio. A choice, evenly spaced in logarithms: the fastest cards in use have
# some ten times the speed of the slowest, and the ratios go to twice that.
SPEED_RATIOS = tuple(np.geomspace(1 / 19, 19, 17))
# Between the neighbours of the likeliest one it is then sought with so many tries. A choice: a thousandth is left.
MOST_RATIOS = 16
# What a ratio lacks in log prior, for its squared logarithm: devices mostly are alike. A choice.
RATIO_PENALTY = 0.5
# Without busy times: what GPU 0 works for each sample of the micro-batch, in samples of a device of ratio 1. There is a
# hypothesis for each. A choice: less than the first is nearly a larger ratio of GPU 0; with the last it takes longer
# than another of ratio 1 does with all samples.
GPU0_PARTS = tuple(np.geomspace(0.03, 1.5, 6))
# Beside each of them every kind's ratio is sought anew, at so many times the likeliest without. A choice: what seemed
# slow may be GPU 0's own work, and up to three times as fast.
RATIO_CHANGES = tuple(np.geomspace(1 / 3, 3, 9))
# What a hypothesis with such work lacks in log prior. A choice: it has one coefficient more.
GPU0_PENALTY = 1.0
# What is constant in a micro-step is tried at these parts of the shortest one of a kind alone. A choice: the likeliest
# is where ratios are sought from, so denser parts save few tries.
FLOORS = tuple(np.linspace(0.0, 0.9, 10))
# Hypotheses are compared as if the noise were at least this: none is exactly true, so small
# residuals must not decide. A choice. Larger, and more hypotheses are averaged.
MIXING_NOISE = 0.03
# A hypothesis with less than this part of the largest posterior weight is forgotten. A choice that
# saves time.
LEAST_WEIGHT = 0.01
# The host's seconds for each device are tried at these parts of the most that the trials allow. A
# choice, denser near the most: there the host decides most steps.
HOST_SHARES = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
# Waiting for the host is believed if it leaves less than this part of the squared errors. A choice.
HOST_GAIN = 0.5
# Busy times at equal shares differ by less than this, and noise, between devices of one speed. A
# choice. Larger, and unlike devices share a curve; smaller, and each is learned alone.
BUSY_TOLERANCE = 0.02
# Of a micro-step, further devices are taken to cost at most this part: something is left for the work itself.
MOST_OVERHEAD = 0.9
# GPU 0's part of the micro-batch must vary by this much to tell what grows with which. A choice.
LEAST_VARIATION = 0.02
# So often the devices that were the slowest are told anew by curves of their own. A choice: mostly the
# second time changes nothing.
OWN_CURVES = 3
# What a hypothesis with a curve for each kind lacks in log prior. A choice: it has more coefficients.
OWN_CURVES_PENALTY = 1.0
# A divisor in place of 0 seconds.
LEAST_SECONDS = 1e-12


def fit_hypotheses(trials: StepTrials) -> list[Hypothesis]:
    """Bayesian model averaging: the hypotheses, with weights that sum to 1."""
    fit = Fit(trials)
    return _with_weights(fit.from_busy_times() if trials.tells_busy else fit.from_whole_steps())


@dataclass(slots=True)
class Fit:
    """Hypotheses under construction."""

    trials: StepTrials

    def from_busy_times(self) -> list[Weighed]:
        """Curves without tiles and, while those are not well known, with tiles of each size.

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

    def _of_busy_times(self, busy_s: FloatArray, gpu0_per_sample_s: float = 0.0) -> list[Weighed]:
        def of(curves: tuple[Curve, ...], log_prior: float = 0.0) -> list[Weighed]:
            """What further devices cost may grow with their samples or not: of few trials both are as likely."""
            linked = self._weighed(curves, log_prior, gpu0_per_sample_s)
            if not any(linked[1].costs.per_gathered_sample_s):
                return [linked]
            unlinked = self._weighed(curves, log_prior, gpu0_per_sample_s, with_links=False)
            return [(log_posterior - np.log(2), told) for log_posterior, told in (linked, unlinked)]

        plain = self._curves_of_busy_devices(busy_s, tile=1)
        weighed = of(plain)
        if all(curve.is_well_known(self.trials.noise) for curve in plain):
            return weighed
        tiled = [self._curves_of_busy_devices(busy_s, tile) for tile in self._tiles()]
        for curves in tiled:
            if any(curve.tile > 1 for curve in curves):
                weighed += of(curves, -TILE_PENALTY)
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
        if trials.num_devices == 1 or (len(kin) == 1 and np.ptp(parts) < LEAST_VARIATION):
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
        return float(per_sample_s) if largest > BUSY_TOLERANCE + SIGNIFICANT_DEVIATIONS * trials.noise else 0.0

    def from_whole_steps(self) -> list[Weighed]:
        """A single curve, the shares of each kind of device at several ratios; also with tiles.

        Ratios are sought kind after kind, each beside the others' likeliest: from equal ones, and where there are
        several kinds once more, from the likeliest so far or those that each kind alone tells. At the likeliest tiles
        are tried, and what GPU 0 may work on the whole micro-batch.
        """
        equal, kinds = np.ones(self.trials.num_devices), self._kinds_of_unknown_speed()
        weighed = [self._at(ratios) for ratios in (equal, *self._ratios_alone())]
        for again in (False, True)[: len(kinds)]:
            ratios = _ratios(_likeliest(weighed)) if again else equal
            for kind in kinds:
                own = self._at_ratios_of(kind, ratios)
                weighed += own
                ratios = _ratios(_likeliest(own))
        likeliest = _ratios(_likeliest(weighed))
        weighed += self._with_own_curves(_likeliest(weighed))
        weighed += self._with_work_of_gpu0(likeliest)
        for tried in {tuple(likeliest), tuple(equal)}:
            tiled = [self._single_curve(np.array(tried), tile) for tile in self._tiles()]
            weighed += [self._weighed(curves, -TILE_PENALTY) for curves in tiled if curves[0].tile > 1]
        return weighed

    def _ratios_alone(self) -> list[FloatArray]:
        """Ratios, (n,), by what each kind took alone: one for each of `FLOORS`; none where not two of them were.

        Of a micro-step alone, t, a part c is constant, so a sample takes ``(t - c) / s``. Nothing tells c: worked,
        20 ms and 35 ms for 10 samples are a ratio of 1.75 with a c of 0, and of 2.5 with 10 ms. It is 1 for a kind
        that was not alone.
        """
        trials, kinds = self.trials, np.array(self.trials.kinds)
        alone = np.array([kind_alone(shards, trials.kinds) for shards in trials.shards.tolist()], dtype=float)
        largest = trials.shards.max(axis=1)
        times, sizes = np.full((2, trials.num_devices), np.nan)
        told = set(alone[~np.isnan(alone)].tolist())
        for kind in told:
            row = np.where(alone == kind, largest, 0.0).argmax()
            times[kinds == kind], sizes[kinds == kind] = trials.micro_step_s[row], largest[row]
        if len(told) < 2:
            return []
        samples_s = [(times - part * np.nanmin(times)) / sizes for part in FLOORS]
        return [np.nan_to_num(seconds / np.nanmin(seconds), nan=1.0) for seconds in samples_s]

    def _with_own_curves(self, start: Hypothesis) -> list[Weighed]:
        """A curve for each kind of device, through the trials that it was the slowest of; also with tiles.

        Expectation maximisation: which is the slowest is told by the curves so far. A kind that was
        hardly ever the slowest keeps the curve that it has in `start`.
        """
        weighed: list[Weighed] = []
        hypothesis = start
        for tile in (*[1] * OWN_CURVES, *self._tiles()):
            curves = self._own_curves(hypothesis, start.curves, tile)
            if tile > 1 and all(curve.tile == 1 for curve in curves):
                continue
            penalty = OWN_CURVES_PENALTY + (TILE_PENALTY if tile > 1 else 0.0)
            weighed.append(self._weighed(curves, -penalty))
            hypothesis = weighed[-1][1] if tile == 1 else hypothesis
        return weighed

    def _own_curves(self, told: Hypothesis, others: tuple[Curve, ...], tile: int) -> tuple[Curve, ...]:
        """The curves of each kind where `told` tells which device was the slowest, else those of the `others`."""
        trials, kinds = self.trials, np.array(self.trials.kinds)
        which, _ = told.slowest(trials.shards)
        shares = trials.shards[np.arange(len(which)), which]
        times = trials.micro_step_s - self._further_devices_s(shares)
        curves = list(others)
        for kind in set(kinds.tolist()):
            own = kinds[which] == kind
            curve = fit_curve(shares[own], times[own], trials.noise, tile) if len(np.unique(shares[own])) > 1 else None
            if curve is not None:
                curves = [curve if kinds[i] == kind else old for i, old in enumerate(curves)]
        return tuple(curves)

    def _with_work_of_gpu0(self, ratios: FloatArray) -> list[Weighed]:
        """Where GPU 0 works on every sample of the micro-batch while the others work, beside ratios sought from these.

        Of shares in proportion nothing tells such work from slow devices. Worked: 2 samples on each of 3 others take
        36 ms where each takes 18 ms, and where GPU 0 takes 6 ms for each of all 6.
        """
        weighed = []
        for part in GPU0_PARTS if self.trials.num_devices > 1 else ():
            found = self._at(ratios, part)
            for kind in self._kinds_of_unknown_speed():
                others = _ratios(found[1])
                tried = [self._at(np.where(kind, change * others, others), part) for change in RATIO_CHANGES]
                found = max(tried, key=lambda pair: pair[0])
            weighed.append(found)
        return weighed

    def _at(self, ratios: FloatArray, gpu0_part: float = 0.0) -> Weighed:
        """With a single curve for all, at these ratios, (n,), and so much of `GPU0_PARTS`."""
        prior = -RATIO_PENALTY * float((np.log(np.unique(ratios)) ** 2).sum()) - GPU0_PENALTY * (gpu0_part > 0)
        curves = self._single_curve(ratios, gpu0_part=gpu0_part)
        return self._weighed(curves, prior, gpu0_part * curves[0].slope_s)

    def _at_ratios_of(self, kind: NDArray[np.bool_], others: FloatArray) -> list[Weighed]:
        """One hypothesis for each ratio of the devices `kind`, (n,), beside the ratios of the `others`, (n,)."""

        def at(ratio: float) -> Weighed:
            return self._at(np.where(kind, ratio, others))

        weighed = [at(ratio) for ratio in SPEED_RATIOS]
        middle, step = np.log(_ratios(_likeliest(weighed))[kind][0]), np.log(SPEED_RATIOS[1] / SPEED_RATIOS[0])
        found = minimize_scalar(
            lambda log_ratio: -at(float(np.exp(log_ratio)))[0],
            bounds=(middle - step, middle + step),
            method="bounded",
            options={"maxiter": MOST_RATIOS},
        )
        return [*weighed, at(float(np.exp(found.x)))]

    def _weighed(
        self,
        curves: tuple[Curve, ...],
        log_prior: float = 0.0,
        gpu0_per_sample_s: float = 0.0,
        *,
        with_links: bool = True,
    ) -> Weighed:
        """The hypothesis of these curves with the costs that fit them best, weighed by what trials took."""
        trials = self.trials
        plain = Hypothesis(
            curves=curves,
            most_host_s_per_device=float((trials.micro_step_s / trials.counts.active_devices).min()),
            gpu0_per_sample_s=gpu0_per_sample_s,
            tells_busy=trials.tells_busy,
        )
        which, slowest_s = plain.slowest(trials.shards)
        told = self._with_costs(plain, slowest_s, with_links)
        residual = np.log(told.step_s(trials.counts, slowest_s)) - trials.log_step_s
        residual = residual + told.of_slowest(trials.shards, which, Curve.deviation)
        if trials.tells_busy:
            different = {id(curve): curve for curve in curves}.values()
            residual = np.concatenate([residual, *(curve.deviations for curve in different)])
        return log_prior - float((residual**2).sum()) / (2 * max(trials.noise, MIXING_NOISE) ** 2), told

    # --- curves ----------------------------------------------------------------------------------

    def _tiles(self) -> list[int]:
        """The sizes of tiles that a measured share fills."""
        return [tile for tile in TILES if tile <= self.trials.shards.max()]

    def _single_curve(self, ratios: FloatArray, tile: int = 1, gpu0_part: float = 0.0) -> tuple[Curve, ...]:
        """One curve for all devices, through micro-steps at the largest share times its ratio.

        GPU 0's share is larger by `gpu0_part` of the micro-batch.
        """
        trials = self.trials
        # of a single size the curve may take all: what is constant falls out of the comparison
        scaled = trials.shards * ratios
        scaled[:, 0] += gpu0_part * trials.shards.sum(axis=1)
        shares = scaled.max(axis=1)
        curve = fit_curve(shares, trials.micro_step_s - self._further_devices_s(shares), trials.noise, tile)
        assert curve is not None
        at_ratio = {ratio: replace(curve, ratio=float(ratio)) for ratio in set(ratios)}
        return tuple(at_ratio[ratio] for ratio in ratios)

    def _further_devices_s(self, shares: FloatArray) -> FloatArray:
        """(R,) seconds of a micro-step that grow with the number of devices; 0 where trials had as many."""
        trials, active = self.trials, self.trials.counts.active_devices
        if len(np.unique(active)) == 1:
            return np.zeros(len(active))
        micro_s = trials.micro_step_s
        matrix = np.column_stack([np.ones_like(shares), shares, active - 1.0]) / micro_s[:, None]
        _, _, further_s = non_negative(matrix, np.ones_like(shares))
        return np.asarray(np.minimum(further_s * (active - 1.0), MOST_OVERHEAD * micro_s))

    def _kinds_of_unknown_speed(self) -> list[NDArray[np.bool_]]:
        """Which devices may differ from the commonest kind, (n,) for each: GPU 0, each size of memory, each other kind.

        Cards of one model have as much memory, so where kinds were not told apart they likely are of one speed.
        """
        kinds = np.array(self.trials.kinds)
        if len(kinds) == 1:
            return []
        masks = [np.arange(len(kinds)) == 0]
        for numbers in (np.array(self.trials.totals), kinds):
            others = numbers[1:].tolist()
            masks += [numbers == kind for kind in sorted(set(others), key=lambda kind: -others.count(kind))[1:]]
        return [mask for place, mask in enumerate(masks) if not any((mask == other).all() for other in masks[:place])]

    def _curves_of_busy_devices(self, busy_s: FloatArray, tile: int) -> tuple[Curve, ...]:
        """A curve for each device: one for all of a speed, a borrowed one before any share."""
        trials = self.trials
        known: dict[int, Curve] = {}
        for group in self._same_speed_groups(busy_s):
            shares = np.concatenate([trials.shards[:, i] for i in group])
            times = np.concatenate([busy_s[:, i] for i in group])
            worked = (shares > 0) & (times > 0)
            curve = fit_curve(shares[worked], times[worked], trials.noise, tile)
            if curve is not None:
                known |= dict.fromkeys(group, curve)
        at = min(curve.shares[-1:] for curve in known.values())  # what was measured of all of them
        by_speed = sorted(sorted(known), key=lambda i: float(known[i](at)[0]))

        def likest(device: int) -> int:
            """The fastest with its memory, else the fastest."""
            return next((i for i in by_speed if trials.totals[i] == trials.totals[device]), by_speed[0])

        return tuple(known[i] if i in known else known[likest(i)] for i in range(trials.num_devices))

    def _same_speed_groups(self, busy_s: FloatArray) -> list[tuple[int, ...]]:
        """Devices of one memory that were as busy at equal shares; `busy_s` is (R, n)."""
        totals, shards = self.trials.totals, self.trials.shards
        tolerance = BUSY_TOLERANCE + SIGNIFICANT_DEVIATIONS * self.trials.noise

        def agreement(one: int, other: int) -> float:
            """The largest share with which both were as busy; 0 where they were not with any."""
            equal = (shards[:, one] == shards[:, other]) & (busy_s[:, one] > 0) & (busy_s[:, other] > 0)
            if totals[one] != totals[other] or not equal.any():
                return 0.0
            ratios, shares = np.log(busy_s[equal, one] / busy_s[equal, other]), shards[equal, one]
            agree = all(abs(np.median(ratios[shares == share])) < tolerance for share in np.unique(shares))
            return float(shares.max()) if agree else 0.0

        return grouped(range(self.trials.num_devices), agreement)

    # --- costs -----------------------------------------------------------------------------------

    def _with_costs(self, plain: Hypothesis, slowest_s: FloatArray, with_links: bool) -> Hypothesis:
        """The same with its costs, and with the host's seconds where these explain much."""
        trials, most_s = self.trials, plain.most_host_s_per_device
        costs, error = fit_costs(trials, slowest_s, with_links=with_links)
        best = replace(plain, costs=costs)
        if not trials.tells_busy or error <= len(trials.runs) * trials.noise**2:
            return best
        least = HOST_GAIN * error
        for share in HOST_SHARES:
            waiting_s = share * most_s * trials.counts.active_devices
            costs, error = fit_costs(trials, np.maximum(slowest_s, waiting_s), with_links=with_links)
            if error < least:
                best, least = replace(plain, costs=costs, host_s_per_device=share * most_s), error
        return best


def _ratios(hypothesis: Hypothesis) -> FloatArray:
    return np.array([curve.ratio for curve in hypothesis.curves])


def _likeliest(weighed: Iterable[Weighed]) -> Hypothesis:
    return max(weighed, key=lambda pair: pair[0])[1]


def _with_weights(weighed: Sequence[Weighed]) -> list[Hypothesis]:
    """The hypotheses with their posterior weights, normalised; those below `LEAST_WEIGHT` times the largest dropped."""
    logs = np.array([log_posterior for log_posterior, _ in weighed])
    weights = np.exp(logs - logs.max())
    weights[weights < LEAST_WEIGHT] = 0.0
    weights /= weights.sum()
    pairs = zip(weights, weighed, strict=True)
    return [replace(hypothesis, weight=float(weight)) for weight, (_, hypothesis) in pairs if weight]
