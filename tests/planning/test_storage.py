"""Finished rows: read back equal, found again for the same job alone, and never spoilt."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from splittune import BatchSplit, ConfigError, Measurement, Plan, TrainingTask, plan
from splittune.planning.storage import FinishedRows, digest_of
from splittune.runners.shapes import ShapeRunner
from tests.planning.jobs import FULL, SMALL, job, too_large

MACHINE = "2xT400-4GB"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The global batch sizes of the splits that were really run."""
    ran: list[int] = []
    measure = ShapeRunner.measure

    def counted(self: ShapeRunner, split: BatchSplit, *rest: Any, **options: Any) -> Measurement:
        ran.append(split.global_batch_size)
        return measure(self, split, *rest, **options)

    monkeypatch.setattr(ShapeRunner, "measure", counted)
    return ran


def sizes_planned(task: TrainingTask, storage: Path, searched: list[int], **options: Any) -> Plan:
    searched.clear()
    return plan(task, **{"devices": MACHINE, "global_batch_sizes": [16, 48]} | SMALL | options, storage=storage)


def test_what_is_kept_is_read_back_equal(tmp_path: Path) -> None:
    """A row that fits and one that does not: trials, result and config."""
    found = plan(too_large(), [FULL, "1xT400-4GB"], **SMALL)
    rows = FinishedRows(tmp_path / "plan.json")
    for number, search in enumerate(found.searches):
        rows.put({"number": number}, search)
    again = FinishedRows(tmp_path / "plan.json")
    assert [again.get({"number": number}) for number in range(3)] == [*found.searches, None]


def test_a_finished_plan_is_not_searched_again(tmp_path: Path, searched: list[int]) -> None:
    """The same call gives the same plan, at the price of one small step that tells the job."""
    storage = tmp_path / "plan.json"
    first = sizes_planned(job(), storage, searched)
    assert {16, 48} <= set(searched)
    again = sizes_planned(job(), storage, searched)
    assert searched == [2]
    assert again == first
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_an_interrupted_plan_goes_on(tmp_path: Path, searched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second search keeps the first; the next call gives what an uninterrupted one gives."""
    storage = tmp_path / "plan.json"
    sweep = sys.modules["splittune.planning.sweep"]
    tune: Callable[..., Any] = sweep.tune
    num_searches = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal num_searches
        num_searches += 1
        if num_searches == 2:
            raise KeyboardInterrupt
        return tune(*arguments)

    monkeypatch.setattr(sweep, "tune", interrupted)
    with pytest.raises(KeyboardInterrupt) as ended:
        sizes_planned(job(), storage, searched)
    if sys.version_info >= (3, 11):
        (note,) = ended.value.__notes__
        assert f"1 of 2 searches were finished. They are kept in {str(storage)!r}: the same call goes on" in note
    found = sizes_planned(job(), storage, searched)
    assert 16 not in searched
    assert 48 in searched
    whole = plan(job(), MACHINE, global_batch_sizes=[16, 48], **SMALL)
    assert [search.result.best for search in found.searches if search.result] == [
        search.result.best for search in whole.searches if search.result
    ]
    found.save(tmp_path / "resumed")
    whole.save(tmp_path / "whole")
    csv = [(tmp_path / name / "capacity.csv").read_bytes() for name in ("resumed", "whole")]
    assert csv[0] == csv[1]


def deeper() -> TrainingTask:
    """As many parameters of the same shapes, and one operation more."""
    task = job()
    task.model = nn.Sequential(*task.model, nn.Tanh())
    return task


def with_a_loss() -> TrainingTask:
    return job(loss_fn=nn.functional.multi_margin_loss)


def with_sgd() -> TrainingTask:
    return job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))


@pytest.fixture(scope="module")
def first_plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """A storage with one row, and the plan that it is of."""
    storage = tmp_path_factory.mktemp("first") / "plan.json"
    return storage, plan(job(), MACHINE, global_batch_sizes=[16], storage=storage, **SMALL)


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        (lambda: job(width=264), {}),
        (deeper, {}),
        (with_a_loss, {}),
        (with_sgd, {}),
        (lambda: job(autocast_dtype=torch.bfloat16), {}),
        (job, {"min_headroom_bytes": 2**28}),
        (job, {"max_trials": 2}),
        (job, {"devices": "2xRTX3090"}),
    ],
    ids=["width", "operation", "loss", "optimizer", "autocast", "headroom", "trials", "machine"],
)
def test_another_job_is_not_answered_from_the_storage(
    changed: Callable[[], TrainingTask],
    options: dict[str, Any],
    first_plan: tuple[Path, Plan],
    tmp_path: Path,
    searched: list[int],
) -> None:
    """Whatever changes memory, time or the search is another row, in the same file; the first job's rows stay."""
    storage, kept = Path(shutil.copy(first_plan[0], tmp_path)), first_plan[1]
    sizes_planned(changed(), storage, searched, global_batch_sizes=[16], **options)
    assert 16 in searched
    assert sizes_planned(job(), storage, searched, global_batch_sizes=[16]) == kept
    assert searched == [2]


def test_a_learning_rate_changes_no_row(tmp_path: Path, searched: list[int]) -> None:
    """What neither memory nor time depends on is no other job."""
    rates: Sequence[float] = (0.1, 0.2)
    for rate in rates:
        task = job(optimizer=lambda parameters, rate=rate: torch.optim.SGD(parameters, lr=rate))
        sizes_planned(task, tmp_path / "plan.json", searched, global_batch_sizes=[16])
    assert searched == [2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("trials,of,another,kind\n", "it is no JSON"),
        ('{"format": "splittune plan 0", "rows": {}}', "does not say that it is 'splittune plan 2'"),
        ("[]", "does not say"),
    ],
)
def test_another_file_is_refused_and_left_alone(text: str, reason: str, tmp_path: Path) -> None:
    """What is no storage of a plan is not overwritten."""
    place = tmp_path / "trials.csv"
    place.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        plan(job(), MACHINE, storage=place, **SMALL)
    assert place.read_text() == text


def test_two_plans_at_once_are_refused(tmp_path: Path) -> None:
    """A file is one plan's at a time."""
    rows = FinishedRows(tmp_path / "plan.json")
    with (
        rows.alone(),
        pytest.raises(ConfigError, match="one search at a time"),
        FinishedRows(tmp_path / "plan.json").alone(),
    ):
        pass


def test_the_order_of_names_does_not_count() -> None:
    """An identity is what it says, however it is written."""
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})
