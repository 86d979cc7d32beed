"""Hypotheses where no trial says how long each device worked: a single curve, and a ratio for each kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize, minimize_scalar

from splittune.search.arrays import FloatArray
from splittune.search.choices import BELIEVED, PENALTY
from splittune.search.models.curves import MOST_IN_TILES, PLAIN, Work, fit_curve
from splittune.search.models.hypotheses import Hypothesis
from splittune.search.models.kinds import kind_alone
from splittune.search.models.least_squares import non_negative
from splittune.search.models.step_trials import MOST_OVERHEAD, StepTrials
from splittune.search.models.weighing import Weighed, likeliest, sizes_of_tiles, weigh

# How many samples of one kind of device take as long as one of another: where the likeliest are sought. A choice,
# evenly spaced in logarithms: the fastest cards in use have some ten times the speed of the slowest, and the ratios go
# to twice that.
SPEED_RATIOS = tuple(np.geomspace(1 / 19, 19, 17))
# Between the neighbours of the likeliest one it is then sought with so many tries. A choice: a thousandth is left.
MOST_RATIOS = 16
# Steps of the chain of ratios, and of how many one is kept. A choice: with twice as many no more problems without busy
# times were searched well, in half as much time again.
NUM_STEPS, KEPT_OF = 300, 10
# A step multiplies the ratio of one kind: the logarithm has one of these standard deviations. A choice: small ones to
# be exact, large ones to cross what is unlikely between two that are likely.
RATIO_STEPS = (0.05, 0.2, 0.7)
# So often it exchanges the ratios of two kinds instead. A choice: which of two is the slow one is then soon found.
SWAPS = 0.3
# So often it changes the tile instead. A choice: there are few.
RETILED = 0.2
# Such parts of the work may be in tiles. A choice: all kernels, or half of them.
TILE_PARTS = (0.5, MOST_IN_TILES)
# With so many samples devices may have half of their best rate. There is a hypothesis for each that is no more than the
# largest share. A choice, evenly spaced in logarithms. More of them: each proposal takes longer.
HALF_RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
# What GPU 0 works for each sample of the micro-batch, in samples of a device of ratio 1. There is a
# hypothesis for each. A choice: less than the first is nearly a larger ratio of GPU 0; with the last it takes longer
# than another of ratio 1 does with all samples.
GPU0_PARTS = tuple(np.geomspace(0.03, 1.5, 6))
# Beside each of them every kind's ratio is sought anew, at so many times the likeliest without. A choice: what seemed
# slow may be GPU 0's own work, and up to three times as fast.
RATIO_CHANGES = tuple(np.geomspace(1 / 3, 3, 9))
# What is sought between these is known to about this, in logarithms. A choice: less decides nothing.
PRECISION = 0.01
# What is constant in a micro-step is tried at these parts of the shortest one of a kind alone. A choice: the likeliest
# is where ratios are sought from, so denser parts save few tries.
FLOORS = tuple(np.linspace(0.0, 0.9, 10))
# What further devices take is what a line leaves, whose knee is at one of these quantiles of the shares. A choice: the
# curve that is fitted afterwards finds its own. More of them: each proposal takes longer.
KNEES = (0.2, 0.4, 0.6, 0.8)
# The loss is told from the devices' own work by more than so many trials for each number of the line with it. A choice:
# fewer are explained by any one number more. Larger: the loss is told later.
TRIALS_A_NUMBER = 3


@dataclass(frozen=True, slots=True)
class WholeSteps:
    """Hypotheses of these trials: a single curve for all devices, over the most work that one has.

    A step takes as long as its slowest device, so it tells of one and bounds the others: many ratios explain the same
    trials. The likeliest are sought, and from there Markov chain Monte Carlo draws from the posterior: the Metropolis
    algorithm passes what the trials make likely as often as they do. Worked: whenever one of six devices had 4 samples
    a step took as long, and no trial gave both of two slow ones 3. That all six are slow explains this as well as that
    two are, so both are drawn, and splits that would tell them apart are in doubt. The same trials have the same ones
    drawn.
    """

    trials: StepTrials

    def forms(self) -> list[Weighed]:
        """The likeliest ratios and tile; those with work of GPU 0, without a tile and with each; and half rates."""
        sought = self._sought()
        _, without_tile = likeliest(sought)
        ratios = _ratios(without_tile)
        tiled = []
        for works in self._tiles():
            own = [
                self._at(each, work=work)
                for work in works
                for each in (ratios, np.ones_like(ratios), *self._ratios_alone(work))
            ]
            tiled.append(likeliest(own))
        beside = [without_tile, *(form for _, form in tiled)]
        with_work = [pair for form in beside for pair in self._with_work_of_gpu0(_ratios(form), _work(form))]
        return [likeliest([*sought, *tiled]), *with_work, *self._with_half_rates(ratios)]

    def fitted(self, forms: Sequence[Hypothesis]) -> list[Weighed]:
        """Their ratios, tiles, and parts of GPU 0's work, with the curves that fit these trials best."""
        return [self._at(_ratios(form), form.gpu0_per_sample_s / form.curves[0].slope_s, _work(form)) for form in forms]

    def hypotheses(self, fitted: list[Weighed]) -> list[Weighed]:
        """What is drawn from the first of these forms on, and the others.

        However many they are, those with work of GPU 0 are together as likely as the likeliest of them, and so are
        those with half rates: it makes none likelier that more parts or rates were tried than there are forms without.
        """
        (log, plain), *others = fitted
        found = self._drawn(_ratios(plain), _work(plain), log)
        for has_half_rate in (False, True):
            alike = [pair for pair in others if (_work(pair[1]).half_rate > 0) == has_half_rate]
            logs = np.array([log for log, _ in alike])
            more = float(np.logaddexp.reduce(logs) - logs.max(initial=-np.inf)) if alike else 0.0
            found += [(log - more, own) for log, own in alike]
        return found

    def _sought(self) -> list[Weighed]:
        """Ratios of each kind, sought one kind after the other, each beside the others' likeliest.

        From equal ones, and where there are several kinds once more, from the likeliest so far or those that each kind
        alone tells.
        """
        equal, kinds = np.ones(self.trials.num_devices), self._kinds_and_the_rest()
        weighed = [self._at(ratios) for ratios in (equal, *self._ratios_alone())]
        for again in (False, True)[: len(kinds)]:
            ratios = _ratios(likeliest(weighed)[1]) if again else equal
            for kind in kinds:
                own = self._at_ratios_of(kind, ratios)
                weighed += own
                ratios = _ratios(likeliest(own)[1])
        return weighed

    def _at_ratios_of(self, kind: NDArray[np.bool_], others: FloatArray) -> list[Weighed]:
        """One hypothesis for each ratio of the devices `kind`, (n,), beside the ratios of the `others`, (n,)."""

        def at(ratio: float) -> Weighed:
            return self._at(np.where(kind, ratio, others))

        weighed = [at(ratio) for ratio in SPEED_RATIOS]
        middle, step = np.log(_ratios(likeliest(weighed)[1])[kind][0]), np.log(SPEED_RATIOS[1] / SPEED_RATIOS[0])
        found = minimize_scalar(
            lambda log_ratio: -at(float(np.exp(log_ratio)))[0],
            bounds=(middle - step, middle + step),
            method="bounded",
            options={"maxiter": MOST_RATIOS},
        )
        return [*weighed, at(float(np.exp(found.x)))]

    def _drawn(self, ratios: FloatArray, work: Work, log_posterior: float) -> list[Weighed]:
        """A chain of `NUM_STEPS` from these ratios, (n,), and this tile, one of `KEPT_OF` kept.

        Together they are as likely as `log_posterior` says, each as much as any other.
        """
        kinds, (now, hypothesis), drawn = self._kinds_and_the_rest(), self._at(ratios, work=work), []
        rng = np.random.default_rng(0)  # what is drawn depends on the trials alone
        all_works = [PLAIN, *(work for works in self._tiles() for work in works)]
        for step in range(1, NUM_STEPS + 1):
            other_ratios, other_work = ratios, work
            if not kinds or rng.random() < RETILED:
                other_work = all_works[rng.integers(len(all_works))]
            else:
                other_ratios = self._changed(ratios, kinds, rng)
            log_tried, other = self._at(other_ratios, work=other_work)
            if np.log(rng.random()) < log_tried - now:
                ratios, work, now, hypothesis = other_ratios, other_work, log_tried, other
            if step % KEPT_OF == 0:
                drawn.append(hypothesis)
        return [(log_posterior - float(np.log(len(drawn))), hypothesis) for hypothesis in drawn]

    @staticmethod
    def _changed(ratios: FloatArray, kinds: list[NDArray[np.bool_]], rng: np.random.Generator) -> FloatArray:
        """One kind's ratio changed, or those of two exchanged."""
        one, other = kinds[rng.integers(len(kinds))], kinds[rng.integers(len(kinds))]
        if rng.random() < SWAPS and not (one & other).any():
            return np.where(one, ratios[other][0], np.where(other, ratios[one][0], ratios))
        return np.where(one, np.exp(rng.normal(0.0, rng.choice(RATIO_STEPS))), 1.0) * ratios

    def _ratios_alone(self, work: Work = PLAIN) -> list[FloatArray]:
        """Ratios, (n,), by what each kind took alone: one for each of `FLOORS`; none where not two of them were.

        Of a micro-step alone, t, a part c is constant, so a sample takes ``(t - c) / s``, where s samples fill a tile
        up. Nothing tells c: worked, 20 ms and 35 ms for 10 samples are a ratio of 1.75 with a c of 0, and of 2.5 with
        10 ms; if the 35 ms were for 1 sample, 17.5 and 25, and with tiles of 5 samples 3.5 and 5. It is 1 for a kind
        that was not alone.
        """
        trials, kinds = self.trials, np.array(self.trials.kinds)
        alone = np.array([kind_alone(shards, trials.kinds) for shards in trials.shards.tolist()], dtype=float)
        largest = trials.shards.max(axis=1)
        filled = work.of(largest)
        times, sizes = np.full((2, trials.num_devices), np.nan)
        told = set(alone[~np.isnan(alone)].tolist())
        for kind in told:
            row = np.where(alone == kind, largest, 0.0).argmax()
            times[kinds == kind], sizes[kinds == kind] = trials.micro_step_s[row], filled[row]
        if len(told) < 2:
            return []
        samples_s = [(times - part * np.nanmin(times)) / sizes for part in FLOORS]
        return [np.nan_to_num(seconds / np.nanmin(seconds), nan=1.0) for seconds in samples_s]

    def _with_work_of_gpu0(self, ratios: FloatArray, work: Work) -> list[Weighed]:
        """Where GPU 0 works on every sample of the micro-batch while the others work, beside ratios sought from these.

        Of shares in proportion nothing tells such work from slow devices. Worked: 2 samples on each of 3 others take
        36 ms where each takes 18 ms, and where GPU 0 takes 6 ms for each of all 6. Part and ratios of the likeliest are
        sought further, by Powell's method.
        """
        if self.trials.num_devices == 1:
            return []
        kinds, weighed = self._kinds_of_unknown_speed(), []
        for part in GPU0_PARTS:
            found = self._at(ratios, part, work)
            for kind in kinds:
                others = _ratios(found[1])
                tried = [self._at(np.where(kind, change * others, others), part, work) for change in RATIO_CHANGES]
                found = likeliest(tried)
            weighed.append(found)
        place = int(np.argmax([log for log, _ in weighed]))
        best, masks = _ratios(weighed[place][1]), np.array(kinds, dtype=float)

        def near(logs: FloatArray) -> Weighed:
            return self._at(best * np.exp(logs[1:] @ masks), GPU0_PARTS[place] * float(np.exp(logs[0])), work)

        def unlikely(logs: FloatArray) -> float:
            return -near(logs)[0]

        changes = np.log([GPU0_PARTS[1] / GPU0_PARTS[0], *[RATIO_CHANGES[1] / RATIO_CHANGES[0]] * len(kinds)])
        likeliest_near = minimize(
            unlikely,
            np.zeros(len(changes)),
            method="Powell",
            bounds=Bounds(-changes, changes),
            tol=PRECISION,
            options={"maxiter": 2},
        )
        return [*weighed, near(likeliest_near.x)]

    def _with_half_rates(self, ratios: FloatArray) -> list[Weighed]:
        """The likeliest at each of `HALF_RATES`, at these ratios, (n,), or at those that kinds have alone with it.

        Without, a slow device with few samples works as long on each as a fast one with many; with it, longer. Worked:
        a fast card takes 16 ms for 2 samples and 58 ms for 16, a slow one twice that. Without a half rate 2 samples of
        the slow one are as much as 4 of the fast one, which take 22 ms; they take 32.
        """
        if not self._kinds_of_unknown_speed():
            return []
        works = [Work(half_rate=rate) for rate in HALF_RATES if rate <= self.trials.shards.max()]
        tried = [[self._at(each, work=work) for each in (ratios, *self._ratios_alone(work))] for work in works]
        return [likeliest(own) for own in tried]

    def _tiles(self) -> list[list[Work]]:
        """Of each size, with each part in tiles: those that a share filled, and the next larger one.

        With that more samples may take no longer. Worked: after shares of 1 to 3 the largest is 4. If it is one,
        3 samples take as long as 1.
        """
        sizes = sizes_of_tiles(2 * self.trials.shards.max() - 1)
        return [[Work(size, part) for part in TILE_PARTS] for size in sizes]

    @staticmethod
    def _log_prior(ratios: FloatArray) -> float:
        """Of ratios, (n,), one of each size: their logarithms are standard normal, for devices mostly are alike."""
        return -sum(float(np.log(ratio)) ** 2 for ratio in set(ratios.tolist())) / 2

    def _at(self, ratios: FloatArray, gpu0_part: float = 0.0, work: Work = PLAIN) -> Weighed:
        """With a single curve for all, at these ratios, (n,), so much of `GPU0_PARTS`, and this tile.

        The curve is of what other costs leave of a micro-step.
        """
        num_more = float(gpu0_part > 0) + (work.half_rate > 0) + 2 * (work.tiled > 0)
        prior = self._log_prior(ratios) - PENALTY * num_more
        trials = self.trials
        scaled = work.of(trials.shards) * ratios
        scaled[:, 0] += gpu0_part * trials.shards.sum(axis=1)
        shares = scaled.max(axis=1)
        # of a single size the curve may take all: what is constant falls out of the comparison
        curve = fit_curve(shares, trials.micro_step_s - self._beside_s(shares), trials.noise)
        at_ratio = {ratio: replace(curve, ratio=float(ratio), work=work) for ratio in set(ratios.tolist())}
        curves = tuple(at_ratio[ratio] for ratio in ratios.tolist())
        return weigh(trials, curves, prior, gpu0_per_sample_s=gpu0_part * curve.slope_s)

    def _beside_s(self, shares: FloatArray) -> FloatArray:
        """(R,) seconds of a micro-step that are no device's own work: what further devices, updates and the loss take.

        They are what a straight line leaves, or one with the best of a few knees or with the loss, where that is
        believed, as in `fit_curve`. Worked: a single device takes 20 ms for up to 100 samples and 34 ms for 170, and so
        do seven. By a straight line one sample takes less than 100: if one on each of seven took as long as 100 on one,
        the further devices take the rest. By one with a knee they take nothing. Where whole steps alone were timed each
        micro-step has a part of the update's. The loss takes time for each sample of the micro-batch, on GPU 0 while
        the others wait: without it what 36 samples on six devices take longer than 6 on one would be their own work.
        """
        trials, micro_s = self.trials, self.trials.micro_step_s
        further, updates = trials.counts.active_devices - 1.0, (1 - trials.tells_micro_steps) / trials.steps
        steady = [column for column in (further, updates) if np.ptp(column) > 0]
        beside = np.column_stack([*steady, trials.shards.sum(axis=1)])

        def told(knee: float, num_beside: int) -> tuple[float, FloatArray]:
            """The squared relative error, and the seconds of the first columns of `beside`."""
            own = beside[:, :num_beside]
            matrix = np.column_stack([np.ones_like(shares), np.maximum(shares, knee), own]) / micro_s[:, None]
            solution = non_negative(matrix, np.ones_like(shares))
            return float(((matrix @ solution - 1.0) ** 2).sum()), own @ solution[2:]

        without, with_loss = len(steady), len(steady) + 1
        error, beside_s = told(0.0, without)
        if error > len(shares) * trials.noise**2:
            quantiles = np.interp(KNEES, np.linspace(0.0, 1.0, len(shares)), np.sort(shares))
            knees = [knee for knee in sorted(set(quantiles.tolist())) if knee < shares.max()]
            one_more, two_more = [told(knee, without) for knee in knees], []
            if len(shares) > TRIALS_A_NUMBER * (2 + with_loss):
                one_more.append(told(0.0, with_loss))
                two_more = [told(knee, with_loss) for knee in knees]
            for tried in (one_more, two_more):
                less, other_s = min(tried, key=lambda pair: pair[0], default=(error, beside_s))
                if less < BELIEVED * error:
                    error, beside_s = less, other_s
        return np.asarray(np.minimum(beside_s, MOST_OVERHEAD * micro_s))

    def _kinds_and_the_rest(self) -> list[NDArray[np.bool_]]:
        """Those of `_kinds_of_unknown_speed`, and where there are several the devices of none of them.

        Worked: that the commonest kind is fast is one change of its ratio, and of all others' that they are slow.
        """
        kinds = self._kinds_of_unknown_speed()
        rest = ~np.any(kinds, axis=0) if len(kinds) > 1 else np.zeros(self.trials.num_devices, dtype=bool)
        return [*kinds, rest] if rest.any() else kinds

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


def _ratios(hypothesis: Hypothesis) -> FloatArray:
    return np.array([curve.ratio for curve in hypothesis.curves])


def _work(hypothesis: Hypothesis) -> Work:
    return hypothesis.curves[0].work
