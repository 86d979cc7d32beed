"""What no split can help: the input pipeline, launches and links, what other programs hold, the update."""

from __future__ import annotations

from splittune.advice.case import Case
from splittune.profiling.measurement import Measurement
from splittune.report.advice import AdviceRow, How
from splittune.training.loader_rate import describe_slow_loader
from splittune.units import format_bytes

# Of a micro-step in which the busiest card works: below, something else than the cards sets the pace. A choice;
# doubled, every job would be called so.
IDLE_PART = 0.5
# Of a step: an update that takes more is said. A choice.
LARGE_UPDATE = 0.25


def limits_of(case: Case) -> tuple[AdviceRow, ...]:
    """A row for each that holds here, from the search's own trials; mostly none."""
    timed = _timed(case)
    found = (_loader(case), None if timed is None else _waiting(case, timed), _base_load(case),
             None if timed is None else _update(case, timed))  # fmt: skip
    return tuple(row for row in found if row is not None)


def _timed(case: Case) -> Measurement | None:
    """The search's latest trial of the best split with its parts timed apart."""
    runs = [trial.measurement for trial in case.result.trials]
    return next(
        (
            run
            for run in reversed(runs)
            if run.split == case.split
            and run.loss_placement == case.best.loss_placement
            and run.micro_step_time_s
            and run.update_time_s
        ),
        None,
    )


def _loader(case: Case) -> AdviceRow | None:
    rate, needed = case.trials.loader_samples_per_s, case.best.throughput
    said = None if rate is None or needed is None else describe_slow_loader(case.trials.loader_advice, rate, needed)
    if said is None:
        return None
    return AdviceRow(remedy="the input pipeline", how=How.MEASURED, finding=said, is_limit=True)


def _waiting(case: Case, timed: Measurement) -> AdviceRow | None:
    busy, micro_step_s = timed.device_busy_s, timed.micro_step_time_s
    if busy is None or not micro_step_s or max(busy) >= IDLE_PART * micro_step_s:
        return None
    kind = " (modelled)" if case.is_modelled else ""
    others = ", and with several cards copies over the link" if len(case.devices) > 1 else ""
    finding = (
        f"The busiest card works in {max(busy) / micro_step_s:.0%} of a micro-step{kind}: the rest is the host's work, "
        f"launches above all{others}. No split makes that less; larger micro-batches, torch.compile, or a process for "
        "each card do."
    )
    return AdviceRow(remedy="launches and links", how=case.how, finding=finding, is_limit=True)


def _base_load(case: Case) -> AdviceRow | None:
    diagnosis = case.result.diagnosis
    if not diagnosis.is_mostly_others or diagnosis.fullest is None or not case.memory:
        return None
    memory = case.memory[diagnosis.fullest]
    finding = (
        f"Of GPU {memory.device}'s {format_bytes(memory.total_bytes)} {format_bytes(memory.outside_bytes)} are held "
        "outside this job: no split frees them."
    )
    return AdviceRow(remedy="memory held by others", how=case.how, finding=finding, is_limit=True)


def _update(case: Case, timed: Measurement) -> AdviceRow | None:
    update_s, step_s = timed.update_time_s, timed.step_time_s
    if update_s is None or step_s is None or update_s < LARGE_UPDATE * step_s:
        return None
    kind = " (modelled)" if case.is_modelled else ""
    finding = (
        f"The update, with the parameters' copies and the gradients' way home, takes {update_s / step_s:.0%} of a "
        f"step{kind}, whatever the split: only a larger global batch, or a faster update, makes it matter less."
    )
    return AdviceRow(remedy="the optimizer's update", how=case.how, finding=finding, is_limit=True)
