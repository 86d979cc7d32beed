"""Step times of splits not yet tried, from the micro-steps, updates and busy times of those that were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from splittune.profiling.measurement import Measurement
from splittune.search.attempts import Attempt
from splittune.search.models.curves import Curve, fit_curve
from splittune.search.models.hypotheses import Form, cost_rows

Floats = NDArray[np.float64]

# Modelled clocks repeat exactly; a fit still needs something to weigh its errors by.
LEAST_NOISE = 0.001
# How far a split is believed to be off the model's form before trials say more, and how fast
# neighbours differ: by this much of a size (in logarithms) they share half of their deviation.
PRIOR_MISFIT, LENGTH = 0.02, 0.35
POOR_FIT = 0.05
# Kernels may work on tiles of so many samples; what that must explain, as a logarithm of
# likelihood, to be believed as much as that they do not.
TILES, PRIOR_OF_TILES = (2, 4, 8, 16, 32), 2.0
# Without busy times cards whose memory differs may differ in speed, and nobody knows by how much.
UNLIKE_MISFIT = 0.1
# Without busy times: how fast GPU 0 may be beside the others, as the share of theirs that takes as
# long as its own; how little the least noise is held to tell between ratios, and how much like the
# others it is held to be.
GPU0_RATIOS = tuple(np.geomspace(1 / 3, 3, 7))
MIXING_NOISE, PRIOR_OF_RATIO = 0.03, 0.5
# About the likeliest of them, ratios that lie between.
FINER_RATIOS = (3 ** (1 / 6), 3 ** (1 / 12))
# A form believed less than this is forgotten.
LEAST_WEIGHT = 0.01
# For so many forms the best split is solved, where they are believed so much beside the likeliest.
MAX_HYPOTHESES, WORTH_BELIEVING = 2, 0.15
# The host's time for each card, as a share of the most that the trials leave for it.
HOST_SHARES, HOST_GAIN = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0), 0.5
# Cards of a kind are busy for the same time with the same share, to this and noise.
ALIKE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Predicted logarithms of seconds a step, (N,), and their standard deviations."""

    log_s: Floats
    deviation: Floats


class TimeModel:
    """Step time ``k x (c + omega m + h a + max(max_i t_i(s_i), g a)) + u + r (a - 1)``, over a cards taking part.

    t_i is card i's `Curve`, from its busy times; cards of a kind share one. It may have steps at
    tiles of several sizes. The host's thread needs g for each card. Where busy times are unknown
    one curve over the largest share stands for all, with GPU 0's share counted at each of several
    ratios. The forms that agree with the trials are averaged, and where they differ the prediction
    is in doubt. c, omega, h, u and r are fitted to whole steps by non-negative least squares on
    relative errors. What the form leaves is interpolated over (m, GPU 0's share, the largest other
    share), with a deviation that grows with the distance from what was measured: it vanishes where
    the form holds, and rules where it does not.

    Args:
        attempts: what was measured; those that ran count.
    """

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        self._runs = [a.measurement for a in attempts if a.measurement.throughput is not None]
        self.noise = max(LEAST_NOISE, float(np.median([_noise(run) for run in self._runs])))
        self._steps = np.array([run.split.accumulation_steps for run in self._runs], dtype=float)
        self._shards = np.array([run.split.shard_sizes for run in self._runs], dtype=float)
        self._log_measured = np.log(np.array([run.step_time_s for run in self._runs], dtype=float))
        self._tells_busy = all(run.device_busy_s is not None for run in self._runs)
        self._cost_rows = cost_rows(self._steps, self._shards)
        self._updates = self._rows_of_updates()
        self._forms = self._fit_forms()
        self._weights = np.array([form.weight for form in self._forms])
        self._left_of_each = self._log_measured - self._ask_forms(self._steps, self._shards)[0]
        self._kinds = self._kinds_of_others()
        self._amplitude = max(PRIOR_MISFIT if len(self._kinds) < 2 else UNLIKE_MISFIT, self.misfit)
        self._points = _features(self._shards, self._kinds)
        covariance = self._amplitude**2 * _alikeness(self._points, self._points)
        covariance += (self.noise**2 + 1e-8) * np.eye(len(self._runs))
        self._inverse = np.linalg.inv(covariance)

    @property
    def misfit(self) -> float:
        """Root mean square of what the form leaves, relative; above `POOR_FIT` the form does not fit."""
        return float(np.sqrt(((self._weights @ self._left_of_each) ** 2).mean()))

    def warnings(self) -> tuple[str, ...]:
        """What the form could not explain, in a sentence; empty where it fitted."""
        # curves that left their form count, too
        left = self._weights @ self._left_of_each + self._weights @ [self._bend(form) for form in self._forms]
        off = float(np.sqrt((left**2).mean()))
        if off <= max(POOR_FIT, 3 * self.noise):
            return ()
        text = f"The time model did not fit: its form leaves {off:.0%} of the step times unexplained, so splits were "
        return (f"{text}compared by what was measured near them.",)

    @property
    def curves(self) -> tuple[Curve, ...]:
        """Each card's seconds for a share, as the likeliest form has them."""
        return self.likely_curves[0]

    @property
    def likely_curves(self) -> list[tuple[Curve, ...]]:
        """Of the likeliest form, and of another that is believed, too."""
        forms = sorted(self._forms, key=lambda form: -form.weight)[:MAX_HYPOTHESES]
        return [form.curves for form in forms if form.weight >= WORTH_BELIEVING * forms[0].weight]

    def surprising_curves(self, growth: float, gain: float) -> list[Callable[[Floats], Floats]]:
        """Each card's, were another kernel to run that gains so much, from that much more than was measured on."""

        def surprising(curve: Curve) -> Callable[[Floats], Floats]:
            start = (1 + growth) * curve.shares.max() / curve.ratio
            return lambda shares: np.where(shares >= start, 1 - gain, 1.0) * curve(shares)

        return [surprising(curve) for curve in self.curves]

    def hopeful_curves(self, deviations: float) -> list[Callable[[Floats], Floats]]:
        """Each card's, were it faster by so many deviations wherever it was not measured."""

        def hopeful(curve: Curve) -> Callable[[Floats], Floats]:
            return lambda shares: curve(shares) * np.exp(-deviations * curve.doubt(shares))

        return [hopeful(curve) for curve in self.curves]

    def predict(self, steps: Floats, shards: Floats) -> StepTimes:
        """For N splits: `steps` (N,), `shards` (N, n)."""
        near = self._amplitude**2 * _alikeness(_features(shards, self._kinds), self._points)
        weights = near @ self._inverse
        logs, hopeful, doubts = self._ask_forms(steps, shards)
        form = self._weights @ logs
        logs += self._left_of_each @ weights.T
        log_s = np.asarray(self._weights @ logs)
        variance = self._amplitude**2 - np.einsum("ij,ij->i", weights, near)
        variance = np.maximum(variance, 0.0) + (self._weights @ doubts) ** 2 + self._weights @ (logs - log_s) ** 2
        # as many cards as no trial had: what the model holds for constant may be each card's, so
        # they get a chance
        better = (form - self._weights @ hopeful) / 2
        return StepTimes(log_s=log_s - better, deviation=np.sqrt(variance) + np.abs(better))

    def distance(self, shards: Floats) -> Floats:
        """(N,) how far each split is from those measured, as a difference of logarithms of shares.

        With busy times that of the slowest card, from the shares measured on its kind; without, of
        whichever is furthest.
        """
        if self._tells_busy:
            likeliest = max(self._forms, key=lambda form: form.weight)
            return likeliest.of_slowest(shards, likeliest.slowest(shards)[0], Curve.distance)
        apart = _features(shards, self._kinds)[:, None, 1:] - self._points[None, :, 1:]
        return np.asarray(np.abs(apart).max(axis=2).min(axis=1))

    def _ask_forms(self, steps: Floats, shards: Floats) -> tuple[Floats, Floats, Floats]:
        """(F, N) each: logarithms of what each form says, of what it hopes where no trial had as many cards, and its doubt."""
        rows = cost_rows(steps, shards)
        unseen = ~np.isin(rows[:, 4], self._cost_rows[:, 4])
        logs, hopeful, doubts = (np.empty((len(self._forms), len(steps))) for _ in range(3))
        for i, form in enumerate(self._forms):
            which, busy = form.slowest(shards)
            logs[i] = hopeful[i] = np.log(form.step_s(rows, busy))
            hopeful[i, unseen] = np.log(form.hopeful_step_s(rows[unseen], busy[unseen]))
            doubts[i] = form.of_slowest(shards, which, Curve.doubt)
        return logs, hopeful, doubts

    # --- fitting -----------------------------------------------------------------------------------------------------

    def _fit_forms(self) -> list[Form]:
        if self._tells_busy:
            plain = self._curves_of_busy_cards(1)
            if all(curve.is_well_known(self.noise) for curve in plain):
                return [self._form_of(plain)]
            tiled = [self._curves_of_busy_cards(tile) for tile in TILES if tile <= self._shards.max()]
            tiled = [curves for curves in tiled if any(curve.tile > 1 for curve in curves)]
            forms = [(0.0, self._form_of(plain)), *((-PRIOR_OF_TILES, self._form_of(curves)) for curves in tiled)]
            return self._weighed(forms)
        micro_steps = np.array([_typical_s(run) for run in self._runs])
        forms = []
        for alike in self._alike_gpu0():

            def form_of(ratio: float, alike: NDArray[np.bool_] = alike) -> tuple[float, Form]:
                prior = -PRIOR_OF_RATIO * float(np.log(ratio)) ** 2
                return prior, self._form_of(self._curves_with(np.where(alike, ratio, 1.0), micro_steps))

            own = [form_of(ratio) for ratio in (GPU0_RATIOS if not alike.all() else (1.0,))]
            for finer in FINER_RATIOS if not alike.all() else ():
                middle = max(own, key=lambda pair: pair[0] + self._score(pair[1]))[1].curves[0].ratio
                own += [form_of(middle / finer), form_of(middle * finer)]
            forms += own
        likeliest = max(forms, key=lambda pair: pair[0] + self._score(pair[1]))[1]
        for ratios in {tuple(curve.ratio for curve in likeliest.curves), (1.0,) * self._shards.shape[1]}:
            tiled = [
                self._curves_with(np.array(ratios), micro_steps, tile) for tile in TILES if tile <= self._shards.max()
            ]
            forms += [(-PRIOR_OF_TILES, self._form_of(curves)) for curves in tiled if curves[0].tile > 1]
        return self._weighed(forms)

    def _alike_gpu0(self) -> list[NDArray[np.bool_]]:
        """Which cards may be of GPU 0's speed, (n,) each: itself alone, or all of its memory, where there are others."""
        totals = np.array(self._totals())
        alone, same = np.arange(len(totals)) == 0, totals == totals[0]
        return [alone] if same.all() or (same == alone).all() else [alone, same]

    def _curves_with(self, ratios: Floats, micro_steps: Floats, tile: int = 1) -> tuple[Curve, ...]:
        """One curve for all cards, each of whose shares take as long as its ratio times as many on the others."""
        # of a single size the curve may take all: what is constant falls out of the comparison
        curve = fit_curve((self._shards * ratios).max(axis=1), micro_steps, self.noise, tile)
        assert curve is not None
        scaled = {ratio: replace(curve, ratio=float(ratio)) for ratio in set(ratios)}
        return tuple(scaled[ratio] for ratio in ratios)

    def _weighed(self, forms: Sequence[tuple[float, Form]]) -> list[Form]:
        """The forms, each with a logarithm of what it is believed beforehand, weighed by what of the trials they leave."""
        scores = [prior + self._score(form) for prior, form in forms]
        weights = np.exp(np.array(scores) - max(scores))
        weights[weights < LEAST_WEIGHT * weights.sum()] = 0.0
        weights /= weights.sum()
        pairs = zip(weights, forms, strict=True)
        return [replace(form, weight=float(weight)) for weight, (_, form) in pairs if weight]

    def _score(self, form: Form) -> float:
        """Logarithm of how likely the trials are if this is the form."""
        predicted = form.step_s(self._cost_rows, form.slowest(self._shards)[1])
        left = np.log(predicted) - self._log_measured + self._bend(form)
        if self._tells_busy:
            curves = {id(curve): curve for curve in form.curves}.values()
            left = np.concatenate([left, *(curve.deviations for curve in curves)])
        return -float((left**2).sum()) / (2 * max(self.noise, MIXING_NOISE) ** 2)

    def _bend(self, form: Form) -> Floats:
        """(R,) by how much the curve of the slowest card had to leave its form to meet each trial."""
        return form.of_slowest(self._shards, form.slowest(self._shards)[0], Curve.deviation)

    def _curves_of_busy_cards(self, tile: int) -> tuple[Curve, ...]:
        busy = np.array([run.device_busy_s for run in self._runs], dtype=float)
        fitted: list[Curve | None] = [None] * busy.shape[1]
        for group in self._groups(busy):
            shares = np.concatenate([self._shards[:, i] for i in group])
            times = np.concatenate([busy[:, i] for i in group])
            worked = (shares > 0) & (times > 0)
            curve = fit_curve(shares[worked], times[worked], self.noise, tile)
            for i in group:
                fitted[i] = curve
        # a card that has had no share yet is hoped to be like one of its memory, or like the
        # fastest
        totals = self._totals()
        known = {i: curve for i, curve in enumerate(fitted) if curve is not None}
        at = min(curve.shares[-1:] for curve in known.values())  # what was measured of all of them
        by_speed = sorted(known, key=lambda i: float(known[i](at)[0]))
        return tuple(
            known[min(by_speed, key=lambda other: (totals[other] != totals[i], by_speed.index(other)))]
            if curve is None
            else curve
            for i, curve in enumerate(fitted)
        )

    def _totals(self) -> list[int]:
        """Bytes of memory in all, of each card; 0 where unknown."""
        return [memory.total_bytes for memory in self._runs[0].memory] or [0] * self._shards.shape[1]

    def _kinds_of_others(self) -> list[list[int]]:
        """The cards beside GPU 0 that no prediction tells apart: all, but without busy times those of one size of memory."""
        others = range(1, self._shards.shape[1])
        totals = [0] * self._shards.shape[1] if self._tells_busy else self._totals()
        return [[i for i in others if totals[i] == total] for total in sorted({totals[i] for i in others})]

    def _groups(self, busy: Floats) -> list[list[int]]:
        """Cards in groups of one kind: of the same memory, and as busy as each other whenever their shares were alike."""
        groups: list[list[int]] = []
        totals = self._totals()

        def are_alike(one: int, other: int) -> bool:
            same = (self._shards[:, one] == self._shards[:, other]) & (self._shards[:, one] > 0)
            apart = np.abs(np.log(busy[same, one] / busy[same, other]))
            return (
                totals[one] == totals[other] and bool(same.any()) and float(np.median(apart)) < ALIKE + 3 * self.noise
            )

        for device in range(busy.shape[1]):
            home = next((group for group in groups if are_alike(group[0], device)), None)
            if home is None:
                groups.append([device])
            else:
                home.append(device)
        return groups

    def _form_of(self, curves: tuple[Curve, ...]) -> Form:
        """Costs from whole steps, and from updates where a step has them apart; the host's time by trying some."""
        active = (self._shards > 0).sum(axis=1)
        most = min(_typical_s(run) / count for run, count in zip(self._runs, active, strict=True))
        form = Form(curves=curves, costs=np.zeros(5), most_host_s=most, tells_busy=self._tells_busy)
        _, slowest = form.slowest(self._shards)
        costs, left = self._costs_beside(slowest)
        best = replace(form, costs=costs)
        if not self._tells_busy or left <= len(self._runs) * self.noise**2:
            return best
        least = HOST_GAIN * left  # waiting for the host must explain much of what is left, or there is none
        for share in HOST_SHARES:
            costs, left = self._costs_beside(np.maximum(slowest, share * most * active))
            if left < least:
                best, least = replace(form, costs=costs, host_s=share * most), left
        return best

    def _rows_of_updates(self) -> tuple[Floats, Floats]:
        """The rows that updates alone add to those of whole steps, a fifth as important, and what each of them makes."""
        known = [i for i, run in enumerate(self._runs) if run.update_time_s and run.split.accumulation_steps >= 3]
        seconds = np.array([self._runs[i].update_time_s for i in known], dtype=float)
        rows = self._cost_rows[known] * [0, 0, 0, 1, 1]
        return 0.2 * rows / seconds[:, None], np.full(len(known), 0.2)

    def _costs_beside(self, slowest: Floats) -> tuple[Floats, float]:
        """c, omega, h, u and r beside the slowest cards' seconds, and the squared relative error they leave."""
        measured = np.exp(self._log_measured)
        rows, (updates, targets) = self._cost_rows / measured[:, None], self._updates
        rest = np.maximum(measured - self._steps * slowest, 0.0) / measured
        costs, _ = nnls(np.concatenate([rows, updates]), np.concatenate([rest, targets]))
        predicted = self._steps * slowest / measured + rows @ costs
        return np.asarray(costs), float((np.log(predicted) ** 2).sum())


def _features(shards: Floats, kinds: Sequence[Sequence[int]]) -> Floats:
    """(N, 2 + kinds) logarithms of the micro-batch, and of the share of GPU 0 and of each kind, none so small that it can't matter."""
    least = shards.max(axis=1) / GPU0_RATIOS[-1]
    others = [np.log1p(np.maximum(shards[:, kind].max(axis=1), least)) for kind in kinds]
    return np.column_stack([np.log1p(shards.sum(axis=1)), np.log1p(np.maximum(shards[:, 0], least)), *others])


def _alikeness(some: Floats, others: Floats) -> Floats:
    squared = ((some[:, None, :] - others[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-squared / (2 * LENGTH**2)))


def _typical_s(run: Measurement) -> float:
    step = run.step_time_s
    assert step is not None
    if run.micro_step_time_s is None:
        return step / run.split.accumulation_steps
    return run.micro_step_time_s


def _noise(run: Measurement) -> float:
    """Relative standard error of the step time, from the spread of its samples."""
    times = np.array(run.whole_step_times_s or run.micro_step_times_s)
    if len(times) < 2:
        return 0.0
    return float(times.std(ddof=1) / times.mean() * 1.25 / np.sqrt(len(times)))
