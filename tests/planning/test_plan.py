"""plan(): splits foretold or searched, machine by machine, and what is refused before any work."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from splittune import BatchSplit, ConfigError, DeviceError, TrainingTask, autotune, plan
from splittune.profiling.measurement import Outcome
from tests.planning.jobs import FULL, SMALL, job, too_large


def test_given_splits_are_foretold_in_their_order() -> None:
    """On each machine; one that does not fit has no times, and says which card lacks how much."""
    splits = [
        BatchSplit(global_batch_size=16, accumulation_steps=2, shard_sizes=(3, 5)),
        BatchSplit(global_batch_size=2**22, accumulation_steps=1, shard_sizes=(2**21, 2**21)),
    ]
    found = plan(job(), ["2xT400-4GB", "2xA100-80GB"], splits=splits, progress=False).measurements
    assert [each.split for each in found] == splits * 2
    assert [each.outcome for each in found] == [Outcome.OK, Outcome.OUT_OF_MEMORY, Outcome.OK, Outcome.OK]
    assert found[1].throughput is None
    assert "Virtual GPU 0 (T400-4GB)" in found[1].message
    assert found[2].throughput is not None


def test_given_splits_of_a_step_that_changes_with_its_size_are_run_in_full(caplog: pytest.LogCaptureFixture) -> None:
    """Many splits are played from tapes, which show nothing of it; the largest is run in full and does."""

    def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        outputs = model(batch[0])
        return (outputs.exp() if len(outputs) >= 1000 else outputs).square().mean()

    sizes = (4, 600, 800, 1000)
    splits = [BatchSplit(global_batch_size=2 * each, accumulation_steps=1, shard_sizes=(each, each)) for each in sizes]
    found = plan(job(step_fn=step), "2xT400-4GB", splits=splits, progress=False).measurements
    assert "each split is run in full" in caplog.text
    alone = [plan(job(step_fn=step), "2xT400-4GB", splits=[each], progress=False).measurements[0] for each in splits]
    assert list(found) == alone


def test_each_batch_size_is_searched_on_each_machine() -> None:
    """The best split of a pair is the one that a search on real tensors finds."""
    found = plan(job(), ["2xT400-4GB", "3xRTX3090"], global_batch_sizes=[16, 48], progress=False)
    pairs = [(each.devices, each.global_batch_size) for each in found.searches]
    assert pairs == [("2xT400-4GB", 16), ("2xT400-4GB", 48), ("3xRTX3090", 16), ("3xRTX3090", 48)]
    first = found.searches[0].result
    task = job()
    alone = autotune(task.model, task.loader, devices="2xT400-4GB", progress=False)
    assert first is not None
    assert first.best.split == alone.best.split
    assert first.config.is_modelled
    assert found.needs_values is None


def test_a_machine_on_which_nothing_fits_is_a_row() -> None:
    """What is lacking is said; other machines are planned all the same."""
    small, whole = plan(too_large(), [FULL, "1xT400-4GB"], progress=False).searches
    assert small.result is None
    assert small.global_batch_size == whole.global_batch_size == 4
    assert {trial.measurement.outcome for trial in small.trials} == {Outcome.OUT_OF_MEMORY}
    assert "GPU" in small.lacking or "device" in small.lacking
    assert whole.result is not None


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"devices": "4xRTX3091"}, DeviceError, "RTX3090"),
        ({"devices": []}, ConfigError, r"devices is \[\]: expected a list of at least one entry"),
        ({"global_batch_sizes": []}, ConfigError, "global_batch_sizes is"),
        ({"global_batch_sizes": 64}, ConfigError, "global_batch_sizes is 64"),
        ({"splits": []}, ConfigError, "splits is"),
        ({"splits": [(2, 2)]}, ConfigError, "expected BatchSplits alone"),
        ({"devices": ["2xT400-4GB", "nonsense"]}, DeviceError, "nonsense"),
        ({"global_batch_sizes": [16, 0]}, ConfigError, r"global_batch_sizes\[1\] is 0"),
        ({"global_batch_sizes": [16, "x"]}, ConfigError, r"global_batch_sizes\[1\] is 'x'"),
        (
            {"splits": [BatchSplit(global_batch_size=4, accumulation_steps=1, shard_sizes=(2, 1, 1))]},
            ConfigError,
            "is for 3 cards",
        ),
        ({"splits": [], "global_batch_sizes": [4]}, ConfigError, "expected one of them"),
        ({"devices": ["2xT400-4GB", 3]}, ConfigError, "devices holds 3: expected machines as text"),
        ({"devices": ["2xT400-4GB", "2xt400-4gb"]}, ConfigError, "devices names 2xT400-4GB twice"),
        ({"global_batch_sizes": [16, 8, 16]}, ConfigError, "global_batch_sizes names 16 twice"),
        ({"devices": "cuda:0,cuda:1"}, (ConfigError, DeviceError), "cuda"),
        ({"max_trials": 0}, ConfigError, "max_trials is 0"),
        ({"min_headroom_bytes": [1, 2, 3]}, ConfigError, "3 numbers for 2 devices"),
        ({"task": nn.Linear(1, 1)}, ConfigError, r"task is a Linear: expected a TrainingTask, as in plan\("),
    ],
)
def test_what_cannot_be_used_is_refused_before_any_work(
    given: dict[str, Any], error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list with one bad entry costs no trial."""
    for module in ("plan", "sweep"):
        monkeypatch.setattr(sys.modules[f"splittune.planning.{module}"], "ShapeRunner", None)
    with pytest.raises(error, match=words):
        plan(**({"task": job(), "devices": "2xT400-4GB", "progress": False} | given))


def test_a_folder_that_cannot_be_written_to_is_found_out_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage below a file is refused."""
    monkeypatch.setattr(sys.modules["splittune.planning.sweep"], "ShapeRunner", None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file is a file: expected a folder to write to"):
        plan(job(), "2xT400-4GB", storage=tmp_path / "file" / "plan.json", **SMALL)


class Loader:
    """Raises when it is read."""

    def __iter__(self) -> Iterator[Any]:
        raise ZeroDivisionError("a bug of the user's own")


def test_an_exception_of_the_users_own_is_raised_as_it_is() -> None:
    """Of the loader, with the line that raised it."""
    task = job()
    task.loader = Loader()
    with pytest.raises(ZeroDivisionError, match="of the user's own") as caught:
        plan(task, "2xT400-4GB", **SMALL)
    assert caught.traceback[-1].name == "__iter__"


def test_an_operation_without_a_fake_kernel_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The plan says which one and in which line, says it once, and goes on with real tensors."""
    library = torch.library.Library("splittune_tests", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: 2 * x, "CPU")
    task = job(num_samples=4)
    model = task.model

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        outputs = model(torch.ops.splittune_tests.doubled(inputs))
        return nn.functional.cross_entropy(outputs, targets.to(outputs.device))

    task = TrainingTask(model, task.loader, step_fn=step)
    found = plan(task, "2xT400-4GB", global_batch_sizes=[4, 8], **SMALL)
    library._destroy()
    assert found.needs_values is not None
    assert "splittune_tests.doubled" in found.needs_values
    assert "test_plan.py" in found.needs_values
    assert "torch.ops.splittune_tests.doubled(inputs)" in found.needs_values
    assert [search.result is not None for search in found.searches] == [True, True]
    assert [search.needs_values for search in found.searches] == [found.needs_values] * 2
    assert sum("real tensors" in record.getMessage() for record in caplog.records) == 1


def test_the_largest_micro_batch_of_real_tensors_is_a_lower_bound() -> None:
    """Where values are needed, no size is tried that nobody asked for."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(model(inputs), targets)
        return loss if loss.item() > 0 else 2 * loss

    task = job(num_samples=4)
    (search,) = plan(TrainingTask(task.model, task.loader, step_fn=step), "2xT400-4GB", **SMALL).searches
    assert search.largest is not None
    assert not search.largest.is_measured
    assert search.largest.num_samples == max(
        trial.measurement.split.micro_batch_size for trial in search.trials if trial.measurement.outcome is Outcome.OK
    )


def test_progress_says_what_is_planned_of_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    """A line on standard error for each machine and batch size, which says that it is modelled."""
    plan(job(), ["2xT400-4GB", "1xRTX3090"], global_batch_sizes=[4, 8], max_trials=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if " of 4: " in line]
    names = ["2xT400-4GB, batch 4", "2xT400-4GB, batch 8", "1xRTX3090, batch 4", "1xRTX3090, batch 8"]
    assert [line.partition(": ")[0] for line in lines] == [f"{number} of 4" for number in (1, 2, 3, 4)]
    for line, name in zip(lines, names, strict=True):
        assert name in line
        assert "samples/s (modelled) as" in line


def test_what_is_said_of_a_job_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A sweep logs each kind of message once, not for every machine and batch size; another one logs it anew."""
    for _ in range(2):
        plan(job(), ["2xT400-4GB", "1xRTX3090"], global_batch_sizes=[4, 8], **SMALL)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("training needs a loader of batch size" in message for message in messages) == 2


def test_a_plan_keeps_nothing_of_the_job() -> None:
    """A model that is thrown away afterwards is gone, with what it holds."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    batch = torch.randn(12, 8), torch.randint(4, (12,))
    gone = [weakref.ref(parameter) for parameter in model.parameters()]
    plan(TrainingTask(model, [batch]), "3xRTX3090", max_trials=3, progress=False)
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
