"""One hypothesis of what a step costs: a curve for each device, and what a step pays besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from splittune.search.arrays import FloatArray
from splittune.search.models.curves import Curve

# Seconds a step takes at least: its logarithm is taken.
LEAST_STEP_S = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a step pays besides the devices' own work, in seconds; none is negative."""

    per_micro_step_s: float = 0.0
    """c, for each of the k micro-steps."""
    per_device_s: float = 0.0
    """h, for each device beside the first that takes part in a micro-step."""
    per_step_s: float = 0.0
    """u, once a step: the update."""
    per_reduce_s: float = 0.0
    """r, once a step for each device beside the first."""
    per_gathered_sample_s: tuple[float, ...] = ()
    """lambda_i, for each sample whose outputs come from device i: (n,).

    Its output goes over a link to GPU 0, and there into the loss, for which all wait: GPU 0's own pay for that alone.
    Where busy times are not known it is the same for all devices.
    """

    def of(self, counts: StepCounts) -> FloatArray:
        """(N,) seconds of a step."""
        shared = self.per_micro_step_s, self.per_device_s, self.per_step_s, self.per_reduce_s
        seconds, links = counts.matrix @ np.array(shared), self.per_gathered_sample_s
        return np.asarray(seconds + counts.samples @ np.array(links) if links else seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """How often a step of each of N splits pays for each of `StepCosts`.

    Worked: 3 accumulation steps of 4 + 6 samples are a row of 3 micro-steps, 3 micro-steps of
    further devices, 1 step and 1 reduce, and 12 + 18 samples.
    """

    matrix: FloatArray
    """(N, 4), columns in the order of the first fields of `StepCosts`."""
    samples: FloatArray
    """(N, n) samples of a step on each device."""

    @classmethod
    def of(cls, steps: FloatArray, shards: FloatArray) -> StepCounts:
        """Of N splits: `steps` (N,), `shards` (N, n)."""
        further = (shards > 0).sum(axis=1) - 1.0
        matrix = np.column_stack([steps, steps * further, np.ones_like(steps), further])
        return cls(matrix=matrix, samples=steps[:, None] * shards)

    @property
    def micro_steps(self) -> FloatArray:
        """(N,) k, the accumulation steps."""
        return self.matrix[:, 0]

    @property
    def active_devices(self) -> FloatArray:
        """(N,) a, the devices that have a share."""
        return self.matrix[:, 3] + 1

    @property
    def linked_devices(self) -> FloatArray:
        """(N,) the devices beside GPU 0 that have a share: parameters, gradients and outputs go over their links."""
        return np.asarray((self.samples[:, 1:] > 0).sum(axis=1))

    def where(self, chosen: NDArray[np.bool_] | Sequence[int]) -> StepCounts:
        """Of these splits alone."""
        return StepCounts(matrix=self.matrix[chosen], samples=self.samples[chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """Seconds a step, as the formula of `TimeModel` says."""

    curves: tuple[Curve, ...]
    """t_i, one for each device."""
    costs: StepCosts = StepCosts()
    """c, h, u, r and lambda_i."""
    host_s_per_device: float = 0.0
    """g: one thread launches for all devices taking part, and the slowest may wait for it."""
    most_host_s_per_device: float = 0.0
    """The largest g with which no trial would have taken longer than it did."""
    gpu0_per_sample_s: float = 0.0
    """e, what GPU 0 works for each sample of the micro-batch while the others work: on outputs, say."""
    tells_busy: bool = True
    """Whether curves are of busy times; else they include what is constant in a micro-step."""
    weight: float = 1.0
    """Its posterior probability among the hypotheses."""

    def slowest(self, shards: FloatArray) -> tuple[NDArray[np.int64], FloatArray]:
        """(N,) which device works longest on its share, and its seconds."""
        largest = int(shards.max(initial=0))
        are_sizes_fewer = largest <= 2 * len(shards)  # then each curve is worked out once a size
        sizes, whole = np.arange(largest + 1, dtype=float)[:, None], shards.astype(int)
        seconds, ratios = np.empty_like(shards), self._ratios
        for form, own in self._devices_by_form():
            if are_sizes_fewer:
                different = list(dict.fromkeys(ratios[i] for i in own))
                columns = [different.index(ratios[i]) for i in own]
                seconds[:, own] = form.at(different)(sizes)[whole[:, own], columns]
            else:
                seconds[:, own] = form.at([ratios[i] for i in own])(shards[:, own])
        seconds[:, 0] += self.gpu0_per_sample_s * shards.sum(axis=1)
        which = seconds.argmax(axis=1)
        return which, seconds[np.arange(len(shards)), which]

    def step_s(self, counts: StepCounts, slowest_s: FloatArray) -> FloatArray:
        """(N,) seconds a step, from the slowest devices' seconds a micro-step."""
        working_s = np.maximum(slowest_s, self.host_s_per_device * counts.active_devices)
        return np.asarray(np.maximum(counts.micro_steps * working_s + self.costs.of(counts), LEAST_STEP_S))

    def optimistic_step_s(self, counts: StepCounts, slowest_s: FloatArray) -> FloatArray:
        """(N,) seconds if what seems constant is each further device's: fewer devices then pay less.

        Of an update it is parameters that go out and gradients that come home over a link, slower by far than the
        memory in which the optimizer works. Worked: an update of 7 s on two devices may take a single one none.
        """
        steps, active, n = counts.micro_steps, counts.active_devices, len(self.curves)
        working_s = np.maximum(slowest_s, self.host_s_per_device * active)
        if not self.tells_busy:
            working_s = working_s - self.curves[-1].floor_s * (1 - active / n)
        others = max(n - 1, 1)
        costs = replace(
            self.costs,
            per_micro_step_s=0.0,
            per_device_s=self.costs.per_micro_step_s / others + self.costs.per_device_s,
            per_step_s=0.0,
            per_reduce_s=self.costs.per_step_s / others + self.costs.per_reduce_s,
        )
        seconds = steps * working_s + costs.of(counts)
        if not self.tells_busy:
            # at the best all of it is the devices' own
            return np.asarray(np.maximum(seconds, self.step_s(counts, slowest_s) * active / n))
        # or what no device's own work explains is the host's, for one device after the other
        waiting_s = np.maximum(slowest_s, self.most_host_s_per_device * active)
        seconds = np.minimum(seconds, steps * waiting_s + costs.per_step_s + costs.per_reduce_s * (active - 1))
        return np.asarray(np.maximum(seconds, LEAST_STEP_S))

    def of_slowest(
        self, shards: FloatArray, which: NDArray[np.int64], ask: Callable[[Curve, FloatArray], FloatArray]
    ) -> FloatArray:
        """(N,) what the slowest device's curve says of its share: `ask` is a method of `Curve`."""
        shares, ratios = shards[np.arange(len(shards)), which], np.array(self._ratios)
        answers = np.zeros(len(shards))
        for form, devices in self._devices_by_form():
            own = (which[:, None] == devices).any(axis=1)
            answers[own] = ask(form.at(ratios[which[own]]), shares[own])
        return answers

    @property
    def _ratios(self) -> list[float]:
        return [float(curve.ratio) for curve in self.curves]

    def _devices_by_form(self) -> list[tuple[Curve, list[int]]]:
        """The curve of one device for each group whose curves differ in their ratio alone, and the group."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, one in enumerate(self.curves):
            form = one.floor_s, one.slope_s, one.knee, id(one.works), id(one.deviations), one.work
            groups.setdefault(form, []).append(i)
        return [(self.curves[own[0]], own) for own in groups.values()]
