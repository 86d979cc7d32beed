"""Half precision: bfloat16 by autocast."""

from __future__ import annotations

import torch

from splittune.advice.case import Case, Finding, Remedy, tried
from splittune.advice.job import Change


def _bfloat16(case: Case) -> Finding | None:
    if case.task is not None:
        is_half = all(parameter.dtype.itemsize <= 2 for parameter in case.task.model.parameters())
        if case.task.autocast_dtype is not None or is_half:
            return None
    change, steps = Change(autocast_dtype=torch.bfloat16), case.split.accumulation_steps
    measurement = case.trials.around([case.split], case.best.loss_placement, change, most_steps=steps)
    return tried(case, measurement, "NVIDIA's cards have it from Ampere on (RTX 30, A100); older ones have float16.")


BFLOAT16 = Remedy(
    name="bfloat16, by autocast",
    cost="8 bits of precision in matrix products: compare the loss of a short run. Put forward and loss under "
    'torch.autocast("cuda", dtype=torch.bfloat16), and tune with autocast_dtype=torch.bfloat16.',
    look=_bfloat16,
)
