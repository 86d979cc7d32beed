"""autotune(strategy=...): ranks on virtual cards, both strategies, and what real cards are told."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from splittune import ConfigError, DeviceError, SplitConfig, TuneResult, autotune
from splittune.report.console import show_result
from tests.planning.jobs import job
from tests.report.results import Screen
from tests.runners.modelled_ranks.jobs import products


def tuned(strategy: str, devices: str = "1xT4,1xA10", **options: Any) -> TuneResult:
    task = products(1024)
    given: dict[str, Any] = {"global_batch_size": 4096, "progress": False, "max_trials": 4, "strategy": strategy}
    return autotune(task.model, task.loader, devices=devices, **given | options)


def test_ranks_are_tuned_on_virtual_cards(tmp_path: Path) -> None:
    """The config says so, its explanation speaks of ranks, and the files are those of any search."""
    result = tuned("ddp")
    assert result.config.strategy == "ddp"
    assert result.best.split.shard_sizes[0] < result.best.split.shard_sizes[1]
    assert "gradient_as_bucket_view=True" in result.explanation
    for named in (r"The fullest card is GPU \d \(", r"The slowest rank is \d, (T4|A10): its", "The all-reduce of"):
        assert re.search(named, result.explanation), named
    result.save(tmp_path)
    assert SplitConfig.load(tmp_path / "split.json") == result.config
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "devices.csv",
        "explanation.txt",
        "report.html",
        "result.json",
        "split.json",
        "trials.csv",
    ]
    screen = Screen()
    show_result(result, screen.console)
    assert "Why: The fullest card is GPU 0 (T4)" in screen.text


def test_either_gives_the_faster_and_says_what_the_other_gives(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Of the two searches, each as by itself."""
    either, alone = tuned("either"), [tuned("dp"), tuned("ddp")]
    best = max(alone, key=lambda result: result.best.throughput or 0.0)
    assert either.config.strategy == best.config.strategy
    assert either.best == best.best
    assert f'this is "{best.config.strategy}".' in either.notes[-2]
    other = "dp" if best.config.strategy == "ddp" else "ddp"
    assert re.match(rf'"{best.config.strategy}" is [\d.]+ times as fast as "{other}" \(modelled\): ', either.notes[-1])
    assert all(note in caplog.text for note in either.notes[-2:])
    either.save(tmp_path)
    assert html.escape(either.notes[-1]) in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_thousand_cards_are_tuned_as_well() -> None:
    """With progress shown, which counts no splits then."""
    result = tuned("ddp", "512xT4,512xA10", global_batch_size=2**18, progress=True)
    assert len(result.config.devices) == 1024
    assert " x 512" in result.config.summary() or "512 x" in result.config.summary()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"strategy": "fsdp"}, ConfigError, "strategy is 'fsdp'"),
        ({"strategy": "ddp", "devices": "cpu"}, DeviceError, "cpu"),
        ({"strategy": "ddp", "isolation": "process"}, ConfigError, "isolation is 'process' with strategy"),
        ({"strategy": "ddp", "storage": "trials.jsonl"}, ConfigError, "storage is 'trials.jsonl' with strategy"),
        ({"strategy": "either", "timeout_s": 5.0}, ConfigError, "timeout_s is 5.0 with strategy"),
        ({"strategy": "either", "devices": "65xT4"}, DeviceError, "expected 1 to 64"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    """By name, before any trial."""
    task = job()
    given: dict[str, Any] = {"devices": "2xT4", "progress": False}
    with pytest.raises(error, match=words):
        autotune(task.model, task.loader, **given | options)


def test_real_cards_want_a_process_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is told how to start them."""
    monkeypatch.setattr("splittune.modelled_ddp.resolve_hardware", lambda *_, **__: object())
    task = job()
    with pytest.raises(ConfigError, match=r"expected a process for each card\. Start them, as with torchrun"):
        autotune(task.model, task.loader, strategy="ddp", devices="cuda:0,cuda:1", progress=False)
