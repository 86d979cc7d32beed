"""A plan saved, drawn, and trained with."""

from __future__ import annotations

import copy
import csv
import logging
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from splittune import BatchSplit, ConfigError, Plan, SplitConfig, plan
from tests.planning.jobs import FULL, SMALL, job, too_large


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(job(), ["2xRTX3090", "1xT400-4GB"], global_batch_sizes=[16, 48], **SMALL)


def rows_in(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "capacity.csv").read_text().splitlines()))


def test_everything_is_saved(planned: Plan, tmp_path: Path) -> None:
    """A table, a picture, and a config for each row, which the table names and `SplitConfig.load` reads."""
    assert planned.save(tmp_path / "made" / "here") == tmp_path / "made" / "here"
    rows = rows_in(tmp_path / "made" / "here")
    names = [
        "split-2xRTX3090-16.json",
        "split-2xRTX3090-48.json",
        "split-1xT400-4GB-16.json",
        "split-1xT400-4GB-48.json",
    ]
    assert [row["config"] for row in rows] == names
    files = {path.name for path in (tmp_path / "made" / "here").iterdir()}
    assert files == {"capacity.csv", "capacity.png", "modules.csv", "report.html", *names}
    for row, search in zip(rows, planned.searches, strict=True):
        config = SplitConfig.load(tmp_path / "made" / "here" / row["config"])
        assert search.result is not None
        assert config == search.result.config
        assert "+".join(map(str, config.split.shard_sizes)) == row["shard_sizes"]
        assert row["is_modelled"] == "True"


def test_the_same_plan_gives_the_same_bytes(planned: Plan, tmp_path: Path) -> None:
    """Planned once more, table and picture are those of the first time."""
    again = plan(job(), ["2xRTX3090", "1xT400-4GB"], global_batch_sizes=[16, 48], **SMALL)
    for found, name in ((planned, "first"), (again, "second")):
        found.save(tmp_path / name)
    for name in ("capacity.csv", "capacity.png"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_a_row_tells_what_its_search_found(planned: Plan, tmp_path: Path) -> None:
    """Best split, even split, memory of every card and its parts, and the largest micro-batch."""
    planned.save(tmp_path)
    row, search = rows_in(tmp_path)[1], planned.searches[1]
    assert search.result is not None
    assert search.largest is not None
    best, even = search.result.best, search.result.baseline
    assert even is not None
    assert float(row["throughput_samples_per_s"]) == best.throughput
    assert float(row["even_step_time_s"]) == even.step_time_s
    assert float(row["speedup_over_even"]) == search.result.speedup
    for column, figures in (
        ("peak_reserved_bytes", [memory.peak_reserved_bytes for memory in best.memory]),
        ("headroom_bytes", [memory.headroom_bytes for memory in best.memory]),
    ):
        assert [int(figure) for figure in row[column].split(";")] == figures
    parts = [row[name].split(";") for name in ("share_bytes", "whole_batch_bytes", "fixed_bytes")]
    sums = [sum(map(int, of_card)) for of_card in zip(*parts, strict=True)]
    assert sums == [int(peak) for peak in row["peak_allocated_bytes"].split(";")]
    assert int(row["largest_micro_batch_size"]) == search.largest.num_samples
    least = min(best.memory, key=lambda memory: memory.headroom_bytes)
    assert row["limiting_device"] == str(least.device)
    assert f"GPU {least.device}" in row["why"]


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not() -> None:
    """Foretold by themselves, the one fits and one 2 % larger does not."""
    task = job(width=2**14)
    for search in plan(task, ["2xT400-4GB", "1xRTX3070"], **SMALL).searches:
        assert search.largest is not None
        assert search.largest.is_measured
        size, shards = search.largest.num_samples, search.largest.split.shard_sizes
        more = tuple(shard + shard // 50 + 1 for shard in shards)
        splits = [
            BatchSplit(global_batch_size=size, accumulation_steps=1, shard_sizes=shards),
            BatchSplit(global_batch_size=sum(more), accumulation_steps=1, shard_sizes=more),
        ]
        found = plan(task, search.devices, splits=splits, progress=False)
        assert [row.fits for row in found.rows] == [True, False]


def test_what_does_not_fit_is_a_row_without_figures(tmp_path: Path) -> None:
    """It has no split and no times, and says which card lacked how much; it has no config."""
    plan(too_large(), [FULL, "1xT400-4GB"], **SMALL).save(tmp_path)
    lacking, whole = rows_in(tmp_path)
    assert (lacking["fits"], lacking["even_fits"], lacking["outcome"]) == ("False", "False", "out_of_memory")
    assert (lacking["shard_sizes"], lacking["throughput_samples_per_s"], lacking["config"]) == ("", "", "")
    assert (lacking["limiting_device"], lacking["limiting_device_name"]) == ("0", "T400-4GB")
    assert "GiB" in lacking["message"] or "MiB" in lacking["message"]
    assert whole["fits"] == "True"
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["split-1xT400-4GB-4.json"]


def test_given_splits_are_rows_in_their_order(tmp_path: Path) -> None:
    """Of each machine: what they take, and of one that does not fit what it lacks; nothing is put beside them."""
    splits = [
        BatchSplit(global_batch_size=16, accumulation_steps=2, shard_sizes=(3, 5)),
        BatchSplit(global_batch_size=2**22, accumulation_steps=1, shard_sizes=(2**21, 2**21)),
    ]
    found = plan(job(), ["2xT400-4GB", "2xA100-80GB"], splits=splits, progress=False)
    found.save(tmp_path)
    rows = rows_in(tmp_path)
    assert [(row["devices"], row["shard_sizes"], row["fits"]) for row in rows] == [
        ("2xT400-4GB", "3+5", "True"),
        ("2xT400-4GB", "2097152+2097152", "False"),
        ("2xA100-80GB", "3+5", "True"),
        ("2xA100-80GB", "2097152+2097152", "True"),
    ]
    assert "T400-4GB" in rows[1]["message"]
    assert {row["even_fits"] for row in rows} == {row["largest_micro_batch_size"] for row in rows} == {""}
    assert len(found.plot().axes) == 4


def test_without_matplotlib_everything_else_is_written(
    planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The install command is said, a picture of an earlier plan does not stay, and `plot` refuses with the same."""
    planned.save(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level(logging.WARNING):
        planned.save(tmp_path)
    assert 'capacity.png is not drawn. Pictures need matplotlib: pip install "splittune[report]"' in caplog.text
    assert len(rows_in(tmp_path)) == 4
    assert len(list(tmp_path.glob("*.json"))) == 4
    assert not (tmp_path / "capacity.png").exists()
    with pytest.raises(ConfigError, match=r'pip install "splittune\[report\]"'):
        planned.plot()


def test_an_unwritable_folder_is_said(planned: Plan, tmp_path: Path) -> None:
    """Below a file nothing can be saved, and the reason is given."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        planned.save(tmp_path / "file")


def test_a_planned_config_trains_on_other_cards() -> None:
    """Planned for one kind of card it is wrapped over those that are named, and gives the whole batch's gradient."""
    task = job(num_samples=48)
    (search,) = plan(task, "2xT400-4GB", **SMALL).searches
    assert search.result is not None
    model, config, batch = task.model, search.result.config, task.loader[0]  # type: ignore[index]
    alone = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        wrapped = config.wrap(model, devices="2xRTX3090")
    assert "device 0 was T400-4GB" in str(said[0].message)
    for micro in config.micro_batches(batch, wrapped):
        inputs, targets = micro.batch
        loss = nn.functional.cross_entropy(wrapped(inputs), targets.to(wrapped.output_device)) * micro.weight
        loss.backward()
    nn.functional.cross_entropy(alone(batch[0]), batch[1]).backward()
    for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)
