"""What a step pays beside the devices' own work, fitted to what trials took."""

from __future__ import annotations

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
    outputs of no device take time to come to GPU 0.

    Worked: an update takes 650 ms with two devices, and 12 ms with GPU 0 alone: 638 ms of it are the further device's.
    In 284 micro-steps of 174 ms those 12 ms are in the noise, and by whole steps all 650 may be the update's own.
    """
    step_s, micro_s, update_s = np.exp(trials.log_step_s), trials.micro_step_s, trials.update_s
    links = _kinds_of_link(trials) if with_links else np.zeros((1, trials.num_devices))
    matrix = np.column_stack([trials.counts.matrix, trials.counts.samples @ links.T])
    rows = matrix / step_s[:, None]
    # a micro-step pays for neither update nor reduce, and an update for nothing else: without their own times few
    # trials do not tell these apart
    in_update = np.array([0, 0, 1, 1, *[0] * len(links)])
    of_micro_step, of_update = matrix / trials.steps[:, None] * (1 - in_update), matrix * in_update
    weights = PART_WEIGHT * trials.tells_micro_steps / micro_s
    of_updates = PART_WEIGHT * trials.tells_updates / update_s
    left_of_steps = np.maximum(step_s - trials.steps * slowest_s, 0.0) / step_s
    left_of_micro_steps = np.maximum(micro_s - slowest_s, 0.0) * weights
    costs = non_negative(
        np.concatenate([rows, of_micro_step * weights[:, None], of_update * of_updates[:, None]]),
        np.concatenate([left_of_steps, left_of_micro_steps, update_s * of_updates]),
    )
    predicted = trials.steps * slowest_s / step_s + rows @ costs
    c, h, u, r, *of_links = costs.tolist()
    gathered_s = tuple((np.array(of_links) @ links).tolist())
    fitted = StepCosts(
        per_micro_step_s=c, per_device_s=h, per_step_s=u, per_reduce_s=r, per_gathered_sample_s=gathered_s
    )
    return fitted, float((np.log(predicted) ** 2).sum())


def _kinds_of_link(trials: StepTrials) -> FloatArray:
    """(K, n) 1 for the devices of each of K kinds, 0 for the others; GPU 0 is of none.

    Without busy times nothing tells a slow link from a slow device: one kind is that of all, GPU 0 included.
    """
    totals = np.array(trials.totals)
    if not trials.tells_busy:
        return np.ones((1, len(totals)))
    kinds = np.unique(totals[1:])[:, None]
    return np.asarray((totals == kinds) & (np.arange(len(totals)) > 0), dtype=float)
