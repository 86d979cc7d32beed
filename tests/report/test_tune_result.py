"""TuneResult: the speedup, and the files it is saved in."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from splittune import ConfigError
from splittune.config import SplitConfig
from splittune.hardware.base import Device, DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report import TuneResult, save_tables
from splittune.search import Trial
from splittune.split import BatchSplit
from splittune.units import MIB

SPLIT = BatchSplit(global_batch_size=300, accumulation_steps=1, shard_sizes=(100, 200))
EVEN = BatchSplit(global_batch_size=300, accumulation_steps=1, shard_sizes=(150, 150))
DEVICES = tuple(Device(index=index, name=f"card {index}", torch_device="cpu", total_bytes=1000) for index in range(2))


def ran(split: BatchSplit, step_time_s: float) -> Measurement:
    return Measurement(split=split, outcome=Outcome.OK, whole_step_times_s=(step_time_s,))


BEST, BASELINE = ran(SPLIT, 1.0), ran(EVEN, 1.25)
TRIALS = tuple(
    Trial(number=number, kind="confirm", measurement=measurement, reason="once more")
    for number, measurement in enumerate((BASELINE, BEST))
)


def result(baseline: Measurement | None = BASELINE) -> TuneResult:
    config = SplitConfig(
        split=SPLIT,
        devices=DEVICES,
        min_headroom_bytes=(0, 0),
        is_modelled=True,
        virtual_spec="2xcard",
        throughput=300.0,
    )
    return TuneResult(best=BEST, baseline=baseline, trials=TRIALS, config=config, stopped="max_trials")


def test_speedup_is_best_over_baseline() -> None:
    """300 samples/s over 240 is 1.25."""
    assert result().speedup == 1.25


def test_without_a_baseline_there_is_no_speedup() -> None:
    """Where no even split fitted there is nothing to compare with: None, not 0 or infinity."""
    assert result(baseline=None).speedup is None


def test_the_explanation_is_one_paragraph() -> None:
    """The result says in words how full the cards are, and admits what was not recorded."""
    memory = tuple(
        DeviceMemory(
            device=index, total_bytes=1000 * MIB, outside_bytes=0, peak_allocated_bytes=peak, peak_reserved_bytes=peak
        )
        for index, peak in enumerate((700 * MIB, 400 * MIB))
    )
    explained = replace(result(), best=replace(BEST, memory=memory)).explanation
    assert "GPU 0 is the fullest card, with 300.0 MiB left free" in explained
    assert "1.25 times the samples per second (modelled)" in explained
    assert "not recorded" in result().explanation


def test_the_explanation_ends_with_what_else_is_known() -> None:
    """Notes and then warnings follow: the file has what the console leaves out."""
    whole = replace(result(), warnings=("The memory model did not fit.",), notes=("The loader is slow.",))
    assert whole.explanation.endswith(" The loader is slow. The memory model did not fit.")


def test_save_writes_its_files(tmp_path: Path) -> None:
    """The config, one row a trial, and one row a trial and device, in a folder that is made."""
    saved = result()
    folder = saved.save(tmp_path / "runs" / "split")
    assert folder == tmp_path / "runs" / "split"
    written = {"split.json", "trials.csv", "devices.csv", "explanation.txt", "result.json", "report.html"}
    assert {path.name for path in folder.iterdir()} == written
    assert SplitConfig.load(folder / "split.json") == saved.config
    with (folder / "trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["kind"], row["is_modelled"], row["throughput_samples_per_s"]) for row in rows] == [
        ("confirm", "True", "240.0"),
        ("confirm", "True", "300.0"),
    ]
    with (folder / "devices.csv").open(newline="") as file:
        assert [row["device_name"] for row in csv.DictReader(file)] == ["card 0", "card 1"] * 2


def test_saving_again_replaces_the_files(tmp_path: Path) -> None:
    """A second result in the same folder is the one that is found there."""
    result().save(tmp_path)
    save_tables(tmp_path, TRIALS[:1], DEVICES, is_modelled=True)
    assert (tmp_path / "trials.csv").read_text().count("\n") == 2
    result().save(tmp_path)
    assert (tmp_path / "trials.csv").read_text().count("\n") == 3


def test_the_tables_of_no_trial_have_their_headings(tmp_path: Path) -> None:
    """A search that was stopped before its first trial leaves tables without rows, which can be read all the same."""
    save_tables(tmp_path, iter(()), DEVICES, is_modelled=False)
    assert (tmp_path / "trials.csv").read_text().startswith("trial,kind,outcome")
    assert (tmp_path / "devices.csv").read_text().count("\n") == 1


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    """Where a file stands in the way, the error says which path and what to do."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot write .*file/split\.json.*Choose another path"):
        result().save(tmp_path / "file")
