"""More accumulation: smaller micro-batches, which leave more free."""

from __future__ import annotations

from splittune.advice.case import Case, Finding, Remedy, tried
from splittune.profiling.measurement import Measurement
from splittune.split import BatchSplit
from splittune.units import format_bytes


def _more_steps(case: Case) -> Finding | None:
    size, steps = case.split.global_batch_size, 2 * case.split.accumulation_steps
    if steps > size:
        return None
    halved = BatchSplit.even(global_batch_size=size, accumulation_steps=steps, num_devices=case.split.num_devices)
    measurement = case.trials.at(halved, case.best.loss_placement)
    return tried(case, measurement, _left(case.best, measurement))


def _left(best: Measurement, halved: Measurement) -> str:
    """What the fullest card has left, before and after."""
    if not best.memory or not halved.memory:
        return ""
    before, after = (min(memory.headroom_bytes for memory in run.memory) for run in (best, halved))
    return f"The fullest card has {format_bytes(after)} left instead of {format_bytes(before)}."


MORE_STEPS = Remedy(
    name="twice the accumulation steps",
    cost="Speed, for memory: gradients are the same.",
    look=_more_steps,
)
