"""Step times of splits not yet tried, from the micro-steps, updates and busy times of those that were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from splittune.profiling.measurement import Measurement
from splittune.search.attempt import Attempt
from splittune.search.curves import Curve, fit_curve

Floats = NDArray[np.float64]

# Modelled clocks repeat exactly; a fit still needs something to weigh its errors by.
LEAST_NOISE = 0.001
# How far a split is believed to be off the model's form before trials say more, and how fast neighbours differ: by
# this much of a size (in logarithms) they share half of their deviation.
PRIOR_MISFIT, LENGTH = 0.02, 0.35
POOR_FIT = 0.05
# Kernels may work on tiles of so many samples; what that must explain, as a logarithm of likelihood, to be believed as much
# as that they do not.
TILES, PRIOR_OF_TILES = (4, 8, 16, 32), 2.0
# Without busy times cards whose memory differs may differ in speed, and nobody knows by how much.
UNLIKE_MISFIT = 0.1
# Without busy times: how fast GPU 0 may be beside the others, as the share of theirs that takes as long as its own; how
# little the least noise is held to tell between ratios, and how much like the others it is held to be.
GPU0_RATIOS = tuple(np.geomspace(1 / 3, 3, 7))
MIXING_NOISE, PRIOR_OF_RATIO = 0.03, 0.5
# A form believed less than this is forgotten.
LEAST_WEIGHT = 0.01
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

    t_i is card i's `Curve`, from its busy times; cards of a kind share one. It may have steps at tiles of several sizes. The
    host's thread needs g for each card. Where busy times are unknown one curve over the largest share stands for all, with
    GPU 0's share counted at each of several ratios. The forms that agree with the trials are averaged, and where they
    differ the prediction is in doubt. c, omega, h, u and r are fitted to whole steps
    by non-negative least squares on relative errors. What the form leaves is interpolated over (m, GPU 0's share, the
    largest other share), with a deviation that grows with the distance from what was measured: it vanishes where the
    form holds, and rules where it does not.

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
        self._forms = self._fit_forms()
        self._left = self._log_measured - self._log_form(self._steps, self._shards)[0]
        self._kinds = self._kinds_of_others()
        self._amplitude = max(PRIOR_MISFIT if len(self._kinds) < 2 else UNLIKE_MISFIT, self.misfit)
        self._points = _features(self._shards, self._kinds)
        covariance = self._amplitude**2 * _alikeness(self._points, self._points)
        covariance += (self.noise**2 + 1e-8) * np.eye(len(self._runs))
        self._inverse = np.linalg.inv(covariance)

    @property
    def misfit(self) -> float:
        """Root mean square of what the form leaves, relative; above `POOR_FIT` the form does not fit."""
        return float(np.sqrt((self._left**2).mean()))

    def doubts(self) -> tuple[str, ...]:
        """What the form could not explain, in a sentence; empty where it fitted."""
        bends = [form.weight * form.bend(self._shards) for form in self._forms]
        off = float(
            np.sqrt(((self._left + np.sum(bends, axis=0)) ** 2).mean())
        )  # curves that left their form count, too
        if off <= max(POOR_FIT, 3 * self.noise):
            return ()
        text = f"The time model did not fit: its form leaves {off:.0%} of the step times unexplained, so splits were "
        return (f"{text}compared by what was measured near them.",)

    @property
    def curves(self) -> tuple[Curve, ...]:
        """Each card's seconds for a share, as the likeliest form has them."""
        return max(self._forms, key=lambda form: form.weight).curves

    def predict(self, steps: Floats, shards: Floats) -> StepTimes:
        """For N splits: `steps` (N,), `shards` (N, n)."""
        form, doubt = self._log_form(steps, shards)
        near = self._amplitude**2 * _alikeness(_features(shards, self._kinds), self._points)
        log_s = form + near @ self._inverse @ self._left
        variance = self._amplitude**2 - np.einsum("ij,jk,ik->i", near, self._inverse, near)
        deviation = np.sqrt(np.maximum(variance, 0.0) + doubt**2)
        unseen = self._unseen(shards)
        if unseen.any():
            # as many cards as no trial had: what the model holds for constant may be each card's, so they get a chance
            hopeful = self._log_form(steps[unseen], shards[unseen], is_hopeful=True)[0]
            log_s[unseen] = (log_s[unseen] + hopeful) / 2
            deviation[unseen] += np.abs(form[unseen] - hopeful) / 2
        return StepTimes(log_s=log_s, deviation=deviation)

    def _log_form(self, steps: Floats, shards: Floats, *, is_hopeful: bool = False) -> tuple[Floats, Floats]:
        """Mean over the forms, and the doubt: in the curve of the slowest card, and in which form it is."""
        weights = np.array([form.weight for form in self._forms])
        logs = np.stack([np.log(form.step_s(steps, shards, is_hopeful=is_hopeful)) for form in self._forms])
        mean = weights @ logs
        variance = weights @ (logs - mean) ** 2
        doubt = weights @ np.stack([form.doubt(shards) for form in self._forms])
        return np.asarray(mean), np.asarray(np.sqrt(variance + doubt**2))

    # --- fitting -----------------------------------------------------------------------------------------------------

    def _fit_forms(self) -> list[_Form]:
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
        for ratio in GPU0_RATIOS if self._shards.shape[1] > 1 else (1.0,):
            ratios = np.array([ratio] + [1.0] * (self._shards.shape[1] - 1))
            # of a single size the curve may take all: what is constant falls out of the comparison
            curve = fit_curve((self._shards * ratios).max(axis=1), micro_steps, self.noise)
            assert curve is not None
            curves = (replace(curve, ratio=float(ratio)), *[curve] * (self._shards.shape[1] - 1))
            forms.append((-PRIOR_OF_RATIO * float(np.log(ratio)) ** 2, self._form_of(curves)))
        return self._weighed(forms)

    def _weighed(self, forms: Sequence[tuple[float, _Form]]) -> list[_Form]:
        """The forms, each with a logarithm of what it is believed beforehand, weighed by what of the trials they leave."""
        scores = []
        for prior, form in forms:
            left = np.log(form.step_s(self._steps, self._shards)) - self._log_measured + form.bend(self._shards)
            if self._tells_busy:
                curves = {id(curve): curve for curve in form.curves}.values()
                left = np.concatenate([left, *(curve.deviations for curve in curves)])
            scores.append(prior - float((left**2).sum()) / (2 * max(self.noise, MIXING_NOISE) ** 2))
        weights = np.exp(np.array(scores) - max(scores))
        weights[weights < LEAST_WEIGHT * weights.sum()] = 0.0
        weights /= weights.sum()
        pairs = zip(weights, forms, strict=True)
        return [replace(form, weight=float(weight)) for weight, (_, form) in pairs if weight]

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
        # a card that has had no share yet is hoped to be like one of its memory, or like the fastest
        totals = self._totals()
        known = {i: curve for i, curve in enumerate(fitted) if curve is not None}
        by_speed = sorted(known, key=lambda i: float(known[i](np.array([8.0]))[0]))
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

    def _form_of(self, curves: tuple[Curve, ...]) -> _Form:
        """Costs from whole steps, and from updates where a step has them apart; the host's time by trying some."""
        bare = _Form(curves, np.zeros(5), 1.0, self._tells_busy)
        active = (self._shards > 0).sum(axis=1)
        most = min(_typical_s(run) / count for run, count in zip(self._runs, active, strict=True))
        costs, left = self._costs_of(bare)
        best = replace(bare, costs=costs)
        if not self._tells_busy or left <= len(self._runs) * self.noise**2:
            return best
        least = HOST_GAIN * left  # waiting for the host must explain much of what is left, or there is none
        for share in HOST_SHARES:
            form = replace(bare, host_s=share * most)
            costs, left = self._costs_of(form)
            if left < least:
                best, least = replace(form, costs=costs), left
        return best

    def _costs_of(self, form: _Form) -> tuple[Floats, float]:
        """c, omega, h, u and r, and the squared relative error they leave."""
        measured = np.exp(self._log_measured)
        rest = np.maximum(measured - self._steps * form.slowest(self._shards), 0.0)
        rows = [_cost_rows(self._steps, self._shards) / measured[:, None]]
        targets = [rest / measured]
        for i, run in enumerate(self._runs):
            if run.update_time_s is not None and run.split.accumulation_steps >= 3:
                row = _cost_rows(self._steps[i : i + 1], self._shards[i : i + 1])
                row[:, :3] = 0.0
                rows.append(0.2 * row / run.update_time_s)
                targets.append(np.array([0.2]))
        costs, _ = nnls(np.concatenate(rows), np.concatenate(targets))
        predicted = self._steps * form.slowest(self._shards) + _cost_rows(self._steps, self._shards) @ costs
        return np.asarray(costs), float((np.log(predicted / measured) ** 2).sum())

    def _unseen(self, shards: Floats) -> NDArray[np.bool_]:
        seen = {int(count) for count in (self._shards > 0).sum(axis=1)}
        return ~np.isin((shards > 0).sum(axis=1), list(seen))


@dataclass(frozen=True, slots=True)
class _Form:
    """One set of curves and costs, and how much it is believed among the others."""

    curves: tuple[Curve, ...]
    costs: Floats
    weight: float
    tells_busy: bool
    host_s: float = 0.0
    """For each card taking part: one thread launches for all, and the slowest card may wait for it."""

    def busy_s(self, shards: Floats) -> Floats:
        """(N, n) shards to (N, n) seconds each card works."""
        return _looked_up(self.curves, shards)

    def slowest(self, shards: Floats) -> Floats:
        return np.asarray(np.maximum(self.busy_s(shards).max(axis=1), self.host_s * (shards > 0).sum(axis=1)))

    def step_s(self, steps: Floats, shards: Floats, *, is_hopeful: bool = False) -> Floats:
        costs, slowest = self.costs, self.slowest(shards)
        if is_hopeful:
            n = shards.shape[1]
            costs = np.array([0.0, costs[1], costs[0] / n + costs[2], 0.0, costs[3] / n + costs[4]])
            if not self.tells_busy:  # the curve holds what is constant
                slowest = slowest - self.curves[-1].floor_s * (1 - (shards > 0).sum(axis=1) / n)
        return np.asarray(np.maximum(steps * slowest + _cost_rows(steps, shards) @ costs, 1e-12))

    def doubt(self, shards: Floats) -> Floats:
        """(N,) the doubt in the curve of the slowest card."""
        slowest = self.busy_s(shards).argmax(axis=1)
        shares = shards[np.arange(len(shards)), slowest]
        doubts = np.zeros(len(shards))
        for curve in {id(curve): curve for curve in self.curves}.values():
            own = np.array([other is curve for other in self.curves])[slowest]
            doubts[own] = curve.doubt(shares[own])
        return doubts

    def bend(self, shards: Floats) -> Floats:
        """(N,) by how much the curve of the slowest card had to leave its form."""
        slowest = self.busy_s(shards).argmax(axis=1)
        bends = np.stack([curve.deviation(shards[:, i]) for i, curve in enumerate(self.curves)], axis=1)
        return np.asarray(bends[np.arange(len(shards)), slowest])


def _looked_up(curves: Sequence[Curve], shards: Floats) -> Floats:
    """(N, n) seconds: each card's curve of its shares, worked out once for each size, of which there are far fewer."""
    largest = int(shards.max(initial=0))
    if largest > 2 * len(shards):
        return np.stack([curve(shards[:, i]) for i, curve in enumerate(curves)], axis=1)
    sizes, whole = np.arange(largest + 1, dtype=float), shards.astype(int)
    seconds = np.empty_like(shards)
    for curve in {id(curve): curve for curve in curves}.values():
        own = [i for i, other in enumerate(curves) if other is curve]
        seconds[:, own] = curve(sizes)[whole[:, own]]
    return seconds


def _cost_rows(steps: Floats, shards: Floats) -> Floats:
    active = (shards > 0).sum(axis=1)
    return np.column_stack(
        [steps, steps * shards.sum(axis=1) * (active > 1), steps * active, np.ones_like(steps), active - 1.0]
    )


def _features(shards: Floats, kinds: Sequence[Sequence[int]]) -> Floats:
    others = [np.log1p(shards[:, kind].max(axis=1)) for kind in kinds]
    return np.column_stack([np.log1p(shards.sum(axis=1)), np.log1p(shards[:, 0]), *others])


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
