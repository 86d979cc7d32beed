"""What a step pays beside the devices' own work, fitted to what trials took."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from splittune.search.arrays import FloatArray
from splittune.search.models.hypotheses import StepCosts
from splittune.search.models.least_squares import non_negative
from splittune.search.models.step_trials import StepTrials

# The relative errors of a micro-step's own time and of an update's count so much beside that of a whole step. A choice:
# enough to tell apart what whole steps leave open, and too little to outweigh them.
PART_WEIGHT = 0.1


def fit_costs(trials: StepTrials, slowest_s: FloatArray, *, with_links: bool) -> tuple[StepCosts, float]:
    """The costs that explain best what the slowest devices' seconds, (R,), leave, and the squared relative error.

    Non-negative least squares on the relative errors of whole steps, of micro-steps and of updates. Without links
    outputs take no time, neither to come to GPU 0 nor there.

    Worked: an update takes 650 ms with two devices, and 12 ms with GPU 0 alone: 638 ms of it are the further device's.
    In 284 micro-steps of 174 ms those 12 ms are in the noise, and by whole steps all 650 may be the update's own.
    """
    rows = _rows(trials, with_links)
    worked = trials.steps * slowest_s * rows.per_step_s
    left_of_steps = np.maximum(1.0 - worked, 0.0)
    left_of_micro_steps = np.maximum(trials.micro_step_s - slowest_s, 0.0) * rows.weights
    costs = non_negative(rows.matrix, np.concatenate([left_of_steps, left_of_micro_steps, rows.updates]))
    predicted = worked + rows.matrix[: len(worked)] @ costs
    c, h, u, r, *of_links = costs.tolist()
    gathered_s = tuple((np.array(of_links) @ rows.links).tolist())
    fitted = StepCosts(
        per_micro_step_s=c, per_device_s=h, per_step_s=u, per_reduce_s=r, per_gathered_sample_s=gathered_s
    )
    return fitted, float((np.log(predicted) ** 2).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """What of the least squares is the same whatever the devices' curves."""

    matrix: FloatArray
    """(3 R, 4 + K) how often steps, micro-steps and updates pay for each cost, in parts of their own seconds."""
    per_step_s: FloatArray
    """(R,) 1 over the seconds of a step."""
    weights: FloatArray
    """(R,) what a second of a micro-step counts."""
    updates: FloatArray
    """(R,) what updates took, relative."""
    links: FloatArray
    """(K, n), as `_kinds_of_link` says."""


@lru_cache(maxsize=2)
def _rows(trials: StepTrials, with_links: bool) -> _Rows:
    links = _kinds_of_link(trials) if with_links else np.zeros((1, trials.num_devices))
    matrix = np.column_stack([trials.counts.matrix, trials.counts.samples @ links.T])
    per_step_s = np.exp(-trials.log_step_s)
    # a micro-step pays for neither update nor reduce, and an update for nothing else: without their own times few
    # trials do not tell these apart
    in_update = np.array([0, 0, 1, 1, *[0] * len(links)])
    of_micro_step, of_update = matrix / trials.steps[:, None] * (1 - in_update), matrix * in_update
    weights = PART_WEIGHT * trials.tells_micro_steps / trials.micro_step_s
    of_updates = PART_WEIGHT * trials.tells_updates / trials.update_s
    relative = matrix * per_step_s[:, None], of_micro_step * weights[:, None], of_update * of_updates[:, None]
    return _Rows(
        matrix=np.concatenate(relative),
        per_step_s=per_step_s,
        weights=weights,
        updates=trials.update_s * of_updates,
        links=links,
    )


def _kinds_of_link(trials: StepTrials) -> FloatArray:
    """(K, n) 1 for the devices of each of K kinds, 0 for the others; GPU 0, whose outputs go over no link, is the last.

    Without busy times nothing tells a slow link from a slow device: one kind is that of all, GPU 0 included.
    """
    totals = np.array(trials.totals)
    if not trials.tells_busy:
        return np.ones((1, len(totals)))
    is_gpu0, kinds = np.arange(len(totals)) == 0, np.unique(totals[1:])[:, None]
    return np.concatenate([(totals == kinds) & ~is_gpu0, is_gpu0[None]]).astype(float)
