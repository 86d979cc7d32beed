"""plan(): splits foretold or searched, machine by machine, and what is refused before any work."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from splittune import BatchSplit, ConfigError, DeviceError, TrainingTask, autotune, plan
from splittune.profiling.measurement import Outcome


def job(num_samples: int = 16) -> TrainingTask:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return TrainingTask(model, [(torch.randn(num_samples, 64), torch.randint(8, (num_samples,)))])


def test_given_splits_are_foretold_in_their_order() -> None:
    """On each machine; one that does not fit has no times, and says which card lacks how much."""
    splits = [
        BatchSplit(global_batch_size=16, accumulation_steps=2, shard_sizes=(3, 5)),
        BatchSplit(global_batch_size=2**23, accumulation_steps=1, shard_sizes=(2**22, 2**22)),
    ]
    found = plan(job(), ["2xT400-4GB", "2xA100-80GB"], splits=splits, progress=False).measurements
    assert [each.split for each in found] == splits * 2
    assert [each.outcome for each in found] == [Outcome.OK, Outcome.OUT_OF_MEMORY, Outcome.OK, Outcome.OK]
    assert found[1].throughput is None
    assert "Virtual GPU 0 (T400-4GB)" in found[1].message
    assert found[2].throughput is not None


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
    machines = ["1xT400-4GB:occupied=3800MiB", "1xT400-4GB"]
    task = TrainingTask(nn.Linear(4096, 4096), [(torch.ones(4, 4096),) * 2])
    small, whole = plan(task, machines, progress=False).searches
    assert small.result is None
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
