"""One way to explain step times: a curve for each card, and what else a step costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splittune.search.models.curves import Curve

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Seconds a step, ``k x (c + omega m + h a + max(max_i t_i(s_i), g a)) + u + r (a - 1)``: see `TimeModel`.

    N splits are `cost_rows` of them, (N, 5), and what `slowest` says of their shards.
    """

    curves: tuple[Curve, ...]
    """t_i, one for each card."""
    costs: Floats
    """c, omega, h, u and r."""
    host_s: float = 0.0
    """g, for each card taking part: one thread launches for all, and the slowest card may wait for it."""
    most_host_s: float = 0.0
    """What g is at most, by the trials."""
    tells_busy: bool = True
    """Whether the curves are of busy times; else they hold what is constant in whole micro-steps, too."""
    weight: float = 1.0
    """How much it is believed among others."""

    def slowest(self, shards: Floats) -> tuple[NDArray[np.int64], Floats]:
        """(N,) which card works longest on its share, and for how many seconds."""
        largest = int(shards.max(initial=0))
        are_sizes_fewer = largest <= 2 * len(shards)  # then the curves are worked out once for each
        sizes, whole = np.arange(largest + 1, dtype=float), shards.astype(int)
        seconds = np.empty_like(shards)
        for curve, own in self._cards_of_each():
            seconds[:, own] = curve(sizes)[whole[:, own]] if are_sizes_fewer else curve(shards[:, own])
        which = seconds.argmax(axis=1)
        return which, seconds[np.arange(len(shards)), which]

    def step_s(self, rows: Floats, busy: Floats) -> Floats:
        """(N,) seconds."""
        steps, active = rows[:, 0], rows[:, 4] + 1
        return np.asarray(np.maximum(steps * np.maximum(busy, self.host_s * active) + rows @ self.costs, 1e-12))

    def hopeful_step_s(self, rows: Floats, busy: Floats) -> Floats:
        """(N,) seconds if what it holds for constant is each card's, so that fewer cards cost less of it."""
        steps, active, n = rows[:, 0], rows[:, 4] + 1, len(self.curves)
        slowest = np.maximum(busy, self.host_s * active)
        if not self.tells_busy:
            slowest = slowest - self.curves[-1].floor_s * (1 - active / n)
        c, omega, h, u, r = self.costs
        hopeful = steps * slowest + rows @ np.array([0.0, omega, c / n + h, 0.0, u / n + r])
        if self.tells_busy:  # or what is not a card's own work is the host's, for one card after the other
            hopeful = np.minimum(hopeful, steps * np.maximum(busy, self.most_host_s * active) + (u / n + r) * active)
        return np.asarray(np.maximum(hopeful, 1e-12))

    def of_slowest(self, shards: Floats, which: NDArray[np.int64], ask: Callable[[Curve, Floats], Floats]) -> Floats:
        """(N,) what the curve of the slowest card says of its share."""
        shares = shards[np.arange(len(shards)), which]
        answers = np.zeros(len(shards))
        for curve, cards in self._cards_of_each():
            own = np.isin(which, cards)
            answers[own] = ask(curve, shares[own])
        return answers

    def _cards_of_each(self) -> Sequence[tuple[Curve, list[int]]]:
        different = {id(curve): curve for curve in self.curves}.values()
        return [(curve, [i for i, other in enumerate(self.curves) if other is curve]) for curve in different]


def cost_rows(steps: Floats, shards: Floats) -> Floats:
    """(N, 5): what c, omega, h, u and r are multiplied by."""
    active = (shards > 0).sum(axis=1)
    return np.column_stack(
        [steps, steps * shards.sum(axis=1) * (active > 1), steps * active, np.ones_like(steps), active - 1.0]
    )
