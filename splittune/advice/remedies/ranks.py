"""DistributedDataParallel in place of one process."""

from __future__ import annotations

from dataclasses import replace

from splittune.advice.case import Case, Finding, Remedy, rule, tried
from splittune.advice.job import TaskJob
from splittune.hardware.virtual import VirtualHardware
from splittune.modelled_ddp import tune_ranks
from splittune.report.progress import SilentCallback
from splittune.runners.modelled_ranks.one_card import OneCardTrials


def _ranks(case: Case) -> Finding | None:
    if len(case.devices) == 1:
        return None
    job = case.job
    if not isinstance(job, TaskJob) or not isinstance(job.hardware, VirtualHardware) or job.task is None:
        return rule(
            "A process for each card launches its kernels by itself, keeps its outputs, and adds gradients up during "
            "the backward; mostly faster, the more so for models of many small operations. `splittune tune --strategy "
            "ddp` measures it."
        )
    options = replace(case.options, timeout_s=None, loss_placement="output")
    tuned = tune_ranks(OneCardTrials(job.task, job.hardware), job.hardware, options, SilentCallback()).result
    case.trials.budget.count_apart(len(tuned.trials))
    return tried(case, tuned.best, "By a search of its own, over a rank for each card.")


DDP = Remedy(
    name="a process for each card (DistributedDataParallel)",
    cost='The script is started with torchrun, and each rank has its part of the loader: tune with strategy="ddp".',
    look=_ranks,
)
