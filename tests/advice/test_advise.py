"""advise(): every remedy has its row, whatever becomes of it, and the job is as it was found."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.jobs.workloads import mlp
from splittune import ConfigError, TuneResult, autotune
from splittune.advice import SourceJob, TaskJob, advise
from splittune.advice.case import Case, Finding, Remedy, rule
from splittune.advice.job import Change
from splittune.advice.remedies import REMEDIES
from splittune.advice.remedies.cards import FEWER_CARDS, OTHER_GPU0
from splittune.advice.remedies.rules import OPTIMIZER
from splittune.advice.trials import Budget, Trials
from splittune.demo import byte_gpt
from splittune.hardware import resolve_hardware
from splittune.options import SearchOptions
from splittune.report.advice import AdviceRow, How, advice_of, advice_table
from splittune.report.page.source import read_search, rows_of
from splittune.report.tables import csv_text
from splittune.training import TrainingTask
from tests.training.state import state_of

# Another program leaves 2 MiB of GPU 0: too little for the small GPT at the fewest steps.
TIGHT = "1xT400-4GB:occupied=3820MiB,1xT400-4GB"


@pytest.fixture(scope="module")
def task() -> TrainingTask:
    return byte_gpt(16, context=16, width=32, num_layers=1)


@pytest.fixture(scope="module")
def found(task: TrainingTask) -> TuneResult:
    return autotune(task.model, task.loader, devices=TIGHT, max_trials=3, progress=False)


@pytest.fixture(scope="module")
def advised(task: TrainingTask, found: TuneResult) -> TuneResult:
    """With a limit of trials that reaches every remedy."""
    return advise(found, job_of(task), SearchOptions(), budget=Budget(max_trials=100))


def job_of(task: TrainingTask, devices: str = TIGHT) -> TaskJob:
    return TaskJob(task, resolve_hardware(devices))


def raising(error: BaseException, name: str = "a remedy") -> Remedy:
    def look(_: Case) -> Finding | None:
        raise error

    return Remedy(name=name, cost="", look=look)


RULE = Remedy(name="a rule", cost="", look=lambda _: rule("so it is"), takes_trials=False)


def row_of(result: TuneResult, remedy: Remedy) -> AdviceRow:
    return next(row for row in result.advice if row.remedy == remedy.name)


def test_every_gain_is_of_trials_that_ran(advised: TuneResult) -> None:
    """A gain is the samples/s with the remedy over the best split's, and rows without trials have none."""
    best = advised.best.throughput or 0.0
    tried = [row for row in advised.advice if row.gain is not None]
    assert len(tried) >= 6
    for row in tried:
        assert row.num_trials > 0
        assert row.how is How.MODELLED
        assert row.gain == pytest.approx((row.throughput or 0.0) / best)
        assert "modelled" in row.finding
    assert all(row.num_trials == 0 for row in advised.advice if row.how in (How.RULE, How.NOT_TRIED))


def test_the_card_with_room_is_better_as_gpu_0(advised: TuneResult) -> None:
    """With 2 MiB left on GPU 0 the empty card in its place is faster, unless all samples fit on one card anyway: then
    it is as fast as the other."""
    row = row_of(advised, OTHER_GPU0)
    assert row.is_worth_it or (row.gain == pytest.approx(1) and max(advised.best.split.shard_sizes) == 16)


def test_memory_held_by_others_is_called_a_limit(advised: TuneResult) -> None:
    """It says that no split frees them, and all limits stand before all remedies."""
    held = next(row for row in advised.advice if row.remedy == "memory held by others")
    assert held.is_limit
    assert "no split frees them" in held.finding
    are_limits = [row.is_limit for row in advised.advice]
    assert are_limits == sorted(are_limits, reverse=True)


def test_rows_are_sorted_by_gain(advised: TuneResult) -> None:
    """What gains most stands first, after the limits."""
    gains = [row.gain for row in advised.advice if row.gain is not None]
    assert gains == sorted(gains, reverse=True)


def test_the_same_search_gives_the_same_advice(task: TrainingTask, found: TuneResult) -> None:
    """On virtual cards the limit is one of trials, not of time."""
    remedies = [remedy for remedy in REMEDIES if not remedy.takes_trials] + [FEWER_CARDS]
    one, two = (advise(found, job_of(task), SearchOptions(), remedies=remedies).advice for _ in range(2))
    assert one == two


def test_a_table_is_read_back_equal(advised: TuneResult) -> None:
    """advice.csv holds every row."""
    assert rows_of(csv_text(advice_table(advised.advice)), "advice.csv", advice_of) == advised.advice


def test_saved_with_the_result_and_shown_in_its_report(advised: TuneResult, found: TuneResult, tmp_path: Path) -> None:
    """advice.csv and a table in report.html; a result without advice leaves no stale one."""
    advised.save(tmp_path)
    assert read_search(tmp_path).advice == advised.advice
    assert "What else would help" in (tmp_path / "report.html").read_text()
    found.save(tmp_path)
    assert not (tmp_path / "advice.csv").exists()
    assert "What else would help" not in (tmp_path / "report.html").read_text()


def test_the_job_is_as_it_was_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients, optimizer state, random numbers and autocast of the task are what they were.

    Meanwhile a terminal shows which remedy is tried.
    """
    monkeypatch.setenv("FORCE_COLOR", "1")
    job = mlp()._asdict()
    model, optimizer = job["model"], torch.optim.AdamW(job["model"].parameters())
    x, y = next(iter(job["loader"]))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    job = job | {"optimizer": optimizer}
    before = state_of(model, optimizer, job["loader"])
    result = autotune(**job, devices="2xT400-4GB", max_trials=2, advise=True)
    assert "\nadvice 1 of " in capsys.readouterr().err
    assert sum(row.num_trials for row in result.advice) > 0
    assert state_of(model, optimizer, job["loader"]) == before


@pytest.mark.parametrize("is_fused", [False, True])
def test_what_an_optimizer_has_already_is_not_advised(task: TrainingTask, found: TuneResult, is_fused: bool) -> None:
    """One that is fused is not told to be; the sentences are whole either way."""
    optimizer = torch.optim.AdamW(task.model.parameters(), fused=is_fused)
    slow = replace(found.best, update_times_s=(1.0,), micro_step_times_s=(1.0,), whole_step_times_s=())
    looked_at = replace(found, best=slow, trials=())
    job = job_of(replace(task, optimizer=optimizer))
    said = advise(looked_at, job, SearchOptions(), remedies=[OPTIMIZER]).advice[-1].finding
    assert ("fused=True" in said) != is_fused
    assert f"at most. {'ZeroRedundancyOptimizer' if is_fused else 'fused=True (Adam'}" in said


@pytest.mark.parametrize("error", [ValueError("the user's own"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_remedy_that_raises_costs_its_own_row(task: TrainingTask, found: TuneResult, error: Exception) -> None:
    """The row says why, and the next remedy is looked at."""
    rows = advise(found, job_of(task), SearchOptions(), remedies=[raising(error), RULE]).advice
    failed = next(row for row in rows if row.remedy == "a remedy")
    assert failed.how is How.FAILED
    assert str(error) in failed.finding
    assert rows[-1].how is How.RULE or rows[-2].how is How.RULE


def test_ctrl_c_keeps_the_rows_so_far(task: TrainingTask, found: TuneResult) -> None:
    """What was interrupted, and what comes after and takes trials, is called not tried; rules are still said."""
    remedies = [RULE, raising(KeyboardInterrupt()), replace(FEWER_CARDS, name="later"), replace(RULE, name="last")]
    rows = {row.remedy: row for row in advise(found, job_of(task), SearchOptions(), remedies=remedies).advice}
    assert rows["a rule"].how is rows["last"].how is How.RULE
    assert rows["a remedy"].how is rows["later"].how is How.NOT_TRIED
    assert "nterrupted" in rows["later"].finding


def test_what_the_budget_does_not_reach_is_called_not_tried(task: TrainingTask, found: TuneResult) -> None:
    """No trial begins once the time of the search is over."""
    spent = Budget(max_s=1.0, clock=iter([0.0, *[2.0] * 100]).__next__)
    result = advise(found, job_of(task), SearchOptions(), remedies=[FEWER_CARDS], budget=spent)
    row = row_of(result, FEWER_CARDS)
    assert row.how is How.NOT_TRIED
    assert "as much time as the search took is over (1 s)" in row.finding
    assert row.num_trials == 0


def test_a_job_in_a_process_of_its_own_is_changed_there(found: TuneResult, tmp_path: Path) -> None:
    """The worker that builds it casts to bfloat16, and so the figure is that of the same trial in this process."""
    file = tmp_path / "job.py"
    file.write_text("from splittune.demo import byte_gpt\ndef make():\n    return byte_gpt(16, 16, 32, 1)\n")
    file.write_text(
        "from splittune.demo import byte_gpt\n"
        "def make():\n    return byte_gpt(16, context=16, width=32, num_layers=1)\n"
    )
    cards = (found.config.devices, found.config.virtual_spec)
    job = SourceJob(f"{file}:make", *cards, global_batch_size=None, trial_timeout_s=60.0)
    change = Change(autocast_dtype=torch.bfloat16)
    here = byte_gpt(16, context=16, width=32, num_layers=1)
    there, at_hand = (
        Trials(job=each, options=SearchOptions(), budget=Budget(max_trials=1)).at(found.best.split, "output", change)
        for each in (job, job_of(here))
    )
    assert there.throughput == at_hand.throughput
    assert there.throughput != found.best.throughput


def test_cards_that_are_alike_are_not_rotated(task: TrainingTask) -> None:
    """Another of the same kind would do the same, which takes no trial to know."""
    alike = autotune(task.model, task.loader, devices="2xT400-4GB", max_trials=1, progress=False)
    row = row_of(advise(alike, job_of(task, "2xT400-4GB"), SearchOptions(), remedies=[OTHER_GPU0]), OTHER_GPU0)
    assert (row.how, row.num_trials) == (How.NOT_TRIED, 0)


def test_a_search_over_ranks_is_refused(task: TrainingTask, found: TuneResult) -> None:
    """By `advise`, and by `autotune` before it searches."""
    ranks = replace(found, config=replace(found.config, strategy="ddp"))
    with pytest.raises(ConfigError, match='expected "dp"'):
        advise(ranks, job_of(task), SearchOptions())
    with pytest.raises(ConfigError, match='expected "dp"'):
        autotune(task.model, task.loader, devices=TIGHT, strategy="ddp", advise=True)


def test_what_the_search_said_is_not_said_again(
    task: TrainingTask, found: TuneResult, caplog: pytest.LogCaptureFixture
) -> None:
    """That the loss was inferred, say; the loggers' levels are then what they were."""
    logger = logging.getLogger("splittune.training.task")
    with caplog.at_level(logging.INFO):
        before = logger.level
        advise(found, job_of(replace(task)), SearchOptions(), remedies=[FEWER_CARDS], say=lambda _: None)
    assert logger.level == before
    assert not caplog.records
