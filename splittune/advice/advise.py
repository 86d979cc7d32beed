"""advise(): the remedies of a finished search, each tried or called a rule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from splittune.advice.case import Case, Finding, Remedy
from splittune.advice.job import Job
from splittune.advice.limits import limits_of
from splittune.advice.remedies import REMEDIES
from splittune.advice.trials import MIN_TRIALS, Budget, BudgetSpentError, Trials
from splittune.errors import ConfigError, NoFeasibleSplitError
from splittune.hardware import is_out_of_memory, is_sticky
from splittune.options import SearchOptions
from splittune.report import TuneResult
from splittune.report.advice import AdviceRow, How, gain_text, sorted_rows, split_cells

logger = logging.getLogger(__name__)

# Of a search on real cards whose trials were all read back from a storage, or took no time. A choice.
LEAST_S = 60.0
# Loggers that say of every opened job what was inferred of it, and how its batches differ.
_SAID_BY = ("splittune.training.task", "splittune.options")


def advise(
    result: TuneResult,
    job: Job,
    options: SearchOptions,
    *,
    say: Callable[[str], None] = logger.info,
    remedies: Sequence[Remedy] = REMEDIES,
    budget: Budget | None = None,
) -> TuneResult:
    """`result` with `TuneResult.advice`: what was tried of `remedies`, what it brought, and what no split can help.

    Trials are run as the search's were, and leave the job as it was found. They take about as long as the search, on
    virtual cards as many trials: what is not reached then is called not tried. A remedy that runs out of memory, or
    raises, costs its own row. Ctrl-C ends the trials and keeps the rows so far.

    Args:
        result: of a search in one process, `strategy="dp"`.
        job: the same job on the same cards.
        options: those of the search.
        say: is told of every remedy as it is begun and done.
        remedies: in the order in which they are tried.
        budget: None for as much as the search took.

    Raises:
        ConfigError: the search was one over ranks.
    """
    if result.config.strategy != "dp":
        raise ConfigError(
            f'advice was asked for with strategy="{result.config.strategy}": expected "dp", a search in one process. '
            "Leave advice out."
        )
    trials = Trials(job=job, options=replace(options, storage=None), budget=budget or budget_of(result))
    case = Case(result=result, job=job, trials=trials)
    rows: list[AdviceRow] = []
    why_ended = ""
    num_tried = sum(remedy.takes_trials for remedy in remedies)
    for number, remedy in enumerate(remedies, start=1):
        if remedy.takes_trials and not why_ended:
            say(f"advice {number} of {num_tried}: {remedy.name}")
        before = trials.budget.num_trials
        try:
            with _said_before():
                finding = _ended(why_ended) if why_ended and remedy.takes_trials else remedy.look(case)
        except KeyboardInterrupt:
            finding = _ended("It was interrupted.")
            why_ended = "Interrupted before its turn."
        except BudgetSpentError as spent:
            finding = Finding(how=How.NOT_TRIED, said=f"Left out: {spent}.")
        except Exception as error:  # noqa: BLE001  a remedy that fails costs its own row
            finding = _failed(error)
            if is_sticky(error):
                why_ended = "After a CUDA error this process cannot use its devices any more."
        if finding is None:
            continue
        row = _row_of(remedy, finding, result, num_trials=trials.budget.num_trials - before)
        rows.append(row)
        if row.num_trials:
            say(f"  {remedy.name}: {gain_text(row)}")
    return replace(result, advice=sorted_rows([*limits_of(case), *rows]))


def _ended(why: str) -> Finding:
    return Finding(how=How.NOT_TRIED, said=why)


@contextmanager
def _said_before() -> Iterator[None]:
    """Leave out what the search has said of the same job already."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in _SAID_BY}
    for each in levels:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in levels.items():
            each.setLevel(level)


def budget_of(result: TuneResult) -> Budget:
    """As much as the search took: of virtual cards in trials, so that the same search gives the same advice."""
    if result.config.is_modelled:
        return Budget(max_trials=max(MIN_TRIALS, len(result.trials)))
    took_s = sum(trial.elapsed_s or 0.0 for trial in result.trials if not trial.is_resumed)
    return Budget(max_s=max(LEAST_S, took_s))


def _failed(error: Exception) -> Finding:
    """Why a remedy has no figure."""
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ConfigError):
        return Finding(how=How.NOT_TRIED, said=said)
    if isinstance(error, NoFeasibleSplitError) or is_out_of_memory(error):
        return Finding(how=How.FAILED, said=f"No split fits with it: {said}")
    return Finding(how=How.FAILED, said=f"It raised {type(error).__name__}: {said}")


def _row_of(remedy: Remedy, finding: Finding, result: TuneResult, *, num_trials: int) -> AdviceRow:
    run, before = finding.measurement, result.best.throughput
    row = AdviceRow(remedy=remedy.name, how=finding.how, finding=finding.said, cost=remedy.cost, num_trials=num_trials)
    if run is None or run.throughput is None:
        return row
    gain = None if before is None else run.throughput / before
    return replace(row, gain=gain, throughput=run.throughput, **split_cells(run.split))
