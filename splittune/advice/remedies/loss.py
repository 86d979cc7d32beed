"""The loss in the replicas: each card computes it of its own share."""

from __future__ import annotations

from splittune.advice.case import Case, Finding, Remedy, tried
from splittune.advice.job import Change


def _in_replicas(case: Case) -> Finding | None:
    is_searched = case.options.loss_placement != "output"
    if len(case.devices) == 1 or is_searched:
        return None
    steps = case.split.accumulation_steps
    return tried(case, case.trials.around([case.split], "replica", Change(), most_steps=steps))


LOSS_IN_REPLICAS = Remedy(
    name="the loss in the replicas",
    cost='Tune with loss_placement="replica"; the loop calls config.wrap(model, loss_fn), which returns the loss.',
    look=_in_replicas,
)
