"""How much one hypothesis of step times is believed: with the costs that fit it best, by what the trials took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import itemgetter

import numpy as np

from splittune.search.arrays import FloatArray
from splittune.search.choices import BELIEVED, MOST_COLD, SIGNIFICANT, TOLERANCE
from splittune.search.models.cost_fit import fit_costs
from splittune.search.models.curves import Curve
from splittune.search.models.hypotheses import Hypothesis
from splittune.search.models.step_trials import StepTrials

Weighed = tuple[float, Hypothesis]  # a log posterior, but for a constant, and its hypothesis

# Kernels may work on tiles of so many samples: powers of two, as tiles of matrix products are. A
# choice; 2 was added while drawn problems were searched. Each size is one more hypothesis.
TILES = (2, 4, 8, 16, 32)
# Hypotheses are compared as if the noise were at least this: none is exactly true, so small
# residuals must not decide. A choice. Larger, and more hypotheses are averaged.
MIXING_NOISE = 0.03
# Degrees of freedom of Student's distribution, by which residuals are weighed. A choice: where all hypotheses are off
# by more than `MIXING_NOISE`, they are compared by how much more. Larger: then the least wrong one is believed alone.
FREEDOM = 4.0
# The host's seconds for each device are tried at these parts of the most that the trials allow, and then at such parts
# more and less than what fits best so far. A choice: to a fortieth, for where devices begin to wait decides the split.
HOST_PARTS = (0.2, 0.4, 0.6, 0.8, 1.0)
HOST_NEARER = (0.1, 0.05, 0.025)


def sizes_of_tiles(most: float) -> list[int]:
    """Those of `TILES` that are no more than `most` samples."""
    return [size for size in TILES if size <= most]


def likeliest(weighed: Iterable[Weighed]) -> Weighed:
    """The one with the largest posterior."""
    return max(weighed, key=lambda pair: pair[0])


def weigh(
    trials: StepTrials,
    curves: tuple[Curve, ...],
    log_prior: float = 0.0,
    *,
    gpu0_per_sample_s: float = 0.0,
    with_links: bool = True,
) -> Weighed:
    """The hypothesis of these curves, (n,), with the costs that fit them best, and its log posterior.

    By Student's distribution of R relative residuals r, in units s of noise and no less than `MIXING_NOISE`:
    ``-(4 + R) / 2 log(1 + sum(r^2 / s^2) / 4)``. Worked: of 8 trials, each off by one unit,
    ``-6 log 3 = -6.6``; of two that are each off by 10 or by 11 units the second is less likely by
    ``6 log(243 / 201) = 1.1``, and not by the 84 that normal residuals would make it.

    Args:
        trials: what was measured.
        curves: of each device.
        log_prior: of these curves.
        gpu0_per_sample_s: what GPU 0 works for each sample of the micro-batch while the others work.
        with_links: whether outputs take time to come to GPU 0.
    """
    plain = Hypothesis(
        curves=curves,
        most_host_s_per_device=float((trials.micro_step_s / trials.counts.active_devices).min()),
        gpu0_per_sample_s=gpu0_per_sample_s,
        tells_busy=trials.tells_busy,
    )
    which, slowest_s = plain.slowest(trials.shards)
    told = _with_costs(trials, plain, slowest_s, with_links)
    residual = np.log(told.step_s(trials.counts, slowest_s)) - trials.log_step_s
    residual = residual + told.of_slowest(trials.shards, which, Curve.deviation)
    if trials.tells_busy:
        different = {id(curve): curve for curve in curves}.values()
        residual = np.concatenate([residual, *(curve.deviations for curve in different)])
    squares = float((residual**2).sum()) / max(trials.noise, MIXING_NOISE) ** 2
    return log_prior - (FREEDOM + len(residual)) / 2 * float(np.log1p(squares / FREEDOM)), told


def _with_costs(trials: StepTrials, plain: Hypothesis, slowest_s: FloatArray, with_links: bool) -> Hypothesis:
    """The same with its costs, and where busy times are known with the host's seconds that explain much."""

    def at(host_s: float) -> tuple[Hypothesis, float]:
        working_s = np.maximum(slowest_s, host_s * trials.counts.active_devices)
        costs, error = fit_costs(trials, working_s, with_links=with_links)
        return replace(plain, costs=costs, host_s_per_device=host_s), error

    best, error = at(0.0)
    if not trials.tells_busy or error <= len(trials.runs) * trials.noise**2:
        return best
    most_host_s = plain.most_host_s_per_device
    clearly_longer_s = (1 + TOLERANCE + SIGNIFICANT * trials.noise) * slowest_s
    clearly_longer_s[0] *= 1 + MOST_COLD  # it was the first

    def tried(host_s: float) -> tuple[Hypothesis, float]:
        waited = host_s * trials.counts.active_devices > clearly_longer_s
        return at(host_s) if waited.any() else (plain, np.inf)  # that one waited may be noise

    found = min((tried(part * most_host_s) for part in HOST_PARTS), key=itemgetter(1), default=(plain, np.inf))
    for step in HOST_NEARER if np.isfinite(found[1]) else ():
        near = (found[0].host_s_per_device + sign * step * most_host_s for sign in (-1, 1))
        found = min(found, *(tried(host_s) for host_s in near if host_s <= most_host_s), key=itemgetter(1))
    return found[0] if found[1] < BELIEVED * error else best
