"""The tables: one row a trial, one a trial and device, documented columns, the same bytes for the same trials."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.errors import ConfigError
from splittune.hardware.base import Device, DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report import TrialRecord, devices_table, save_csv, trials_table
from splittune.split import BatchSplit
from splittune.units import GIB

SPLIT = BatchSplit(global_batch_size=128, accumulation_steps=2, shard_sizes=(5, 20, 20, 19))


@dataclass(frozen=True)
class Trial:
    number: int
    measurement: Measurement
    kind: str = "search"
    reason: str = "first guess"


def memory(device: int, reserved_gib: float) -> DeviceMemory:
    return DeviceMemory(
        device=device,
        total_bytes=24 * GIB,
        outside_bytes=GIB,
        peak_allocated_bytes=int(reserved_gib * GIB) - 1,
        peak_reserved_bytes=int(reserved_gib * GIB),
        micro_step_peak_bytes=int(reserved_gib * GIB) - 1 if device else None,
    )


RAN = Trial(
    0,
    Measurement(
        split=SPLIT,
        outcome=Outcome.OK,
        micro_step_times_s=(0.1, 0.1, 0.2),
        update_times_s=(0.02,),
        memory=tuple(memory(device, reserved) for device, reserved in enumerate((20, 21.5, 21, 20))),
        device_busy_s=(0.05, 0.1, 0.1, 0.09),
        device_copied_s=(0.02, 0.025, 0.025, 0.02),
    ),
)
CONFIRMED = Trial(
    1,
    Measurement(split=SPLIT, outcome=Outcome.OK, whole_step_times_s=(0.25, 0.25, 0.25)),
    kind="confirm",
    reason="the best, in whole steps",
)
RAN_OUT = Trial(
    2, Measurement(split=SPLIT, outcome=Outcome.OUT_OF_MEMORY, message='device 0: "tried"\r\n  to take 2 GiB,\nhad 1')
)
TRIALS = [RAN, CONFIRMED, RAN_OUT]
DEVICES = tuple(Device(index=i, name=f"card {i}", torch_device="cpu", total_bytes=24 * GIB) for i in range(4))


def documented(function: Any) -> list[list[str]]:
    """The rows of the table in a docstring: column, unit, meaning."""
    rows = [line.strip() for line in function.__doc__.splitlines() if line.strip().startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(), newline="")))


# trials


def test_one_row_a_trial_with_what_was_measured() -> None:
    """A trial that ran shows its split, its medians, how many samples they rest on, and the fullest device."""
    row = trials_table(TRIALS, is_modelled=True).iloc[0].to_dict()
    assert pd.isna(row.pop("planned_step_time_s"))
    assert row == {
        "trial": 0,
        "kind": "search",
        "outcome": "ok",
        "global_batch_size": 128,
        "accumulation_steps": 2,
        "micro_batch_size": 64,
        "gpu0_bsz": 5,
        "shard_sizes": "5+20+20+19",
        "loss_placement": "output",
        "throughput_samples_per_s": 128 / 0.22,
        "step_time_s": 0.22,
        "micro_step_time_s": 0.1,
        "update_time_s": 0.02,
        "num_micro_steps_timed": 3,
        "num_updates_timed": 1,
        "num_whole_steps_timed": 0,
        "relative_error": RAN.measurement.relative_error,
        "is_noisy": True,
        "is_modelled": True,
        "least_headroom_bytes": int(1.5 * GIB),
        "least_headroom_device": 1,
        "num_alloc_retries": 0,
        "reason": "first guess",
        "notes": "",
        "message": "",
    }


def test_absent_is_an_empty_cell(tmp_path: Path) -> None:
    """What a failed trial did not measure is empty: no 0, no nan, no inf; integers stay integers beside it."""
    rows = read(save_csv(trials_table(TRIALS), tmp_path / "trials.csv"))
    empty = {name for name, cell in rows[2].items() if cell == ""}
    assert empty == {
        "throughput_samples_per_s",
        "step_time_s",
        "planned_step_time_s",
        "micro_step_time_s",
        "update_time_s",
        "relative_error",
        "is_noisy",
        "notes",
        "is_modelled",
        "least_headroom_bytes",
        "least_headroom_device",
    }
    assert rows[0]["least_headroom_bytes"] == "1610612736"
    assert rows[1]["micro_step_time_s"] == ""


def test_a_message_stays_in_one_line(tmp_path: Path) -> None:
    """Line breaks and quotes in a message neither break the row nor get lost."""
    path = save_csv(trials_table(TRIALS), tmp_path / "trials.csv")
    assert len(path.read_text().splitlines()) == 1 + len(TRIALS)
    assert read(path)[2]["message"] == 'device 0: "tried" to take 2 GiB, had 1'


def test_any_object_with_the_attributes_is_a_trial() -> None:
    """A table asks for four attributes, not for a class."""
    record: TrialRecord = RAN
    assert trials_table(iter([record]))["trial"].tolist() == [0]


# devices


def test_one_row_a_trial_and_device() -> None:
    """Every trial has a row for each device, with its shard and memory."""
    frame = devices_table(TRIALS, devices=DEVICES)
    assert len(frame) == 3 * 4
    row = frame.iloc[1].to_dict()
    planned = ("planned_peak_allocated_bytes", "planned_peak_reserved_bytes")
    parts = ("share_bytes", "whole_batch_bytes", "fixed_bytes", "parameter_bytes", "optimizer_bytes", "gradient_bytes")
    for name in (
        *planned,
        *parts,
        "update_peak_bytes",
        "single_step_peak_bytes",
        "resting_bytes",
        "before_backward_bytes",
    ):
        assert pd.isna(row.pop(name))
    assert row.pop("reserve_bytes") == 1
    assert row == {
        "trial": 0,
        "device": 1,
        "device_name": "card 1",
        "shard_size": 20,
        "total_bytes": 24 * GIB,
        "outside_bytes": GIB,
        "peak_allocated_bytes": int(21.5 * GIB) - 1,
        "peak_reserved_bytes": int(21.5 * GIB),
        "headroom_bytes": int(1.5 * GIB),
        "micro_step_peak_bytes": int(21.5 * GIB) - 1,
        "busy_s": 0.1,
        "copied_s": 0.025,
        "outcome": "ok",
    }


def test_a_trial_without_memory_readings_keeps_its_rows(tmp_path: Path) -> None:
    """Where memory was not read, the shards still stand there and the readings are empty cells."""
    rows = read(save_csv(devices_table([RAN_OUT]), tmp_path / "devices.csv"))
    assert [row["shard_size"] for row in rows] == ["5", "20", "20", "19"]
    assert {row["outcome"] for row in rows} == {"out_of_memory"}
    assert {row[name] for row in rows for name in ("device_name", "total_bytes", "headroom_bytes", "busy_s")} == {""}


# both


@pytest.mark.parametrize("table", [trials_table, devices_table])
def test_the_docstring_lists_exactly_the_columns(table: Any) -> None:
    """The documented table has every column in order; a unit in a name is the unit that is documented."""
    header, _, *rows = documented(table)
    assert header == ["column", "unit", "meaning"]
    assert [row[0].strip("`") for row in rows] == list(table([]).columns) == list(table(TRIALS).columns)
    assert all(len(row) == 3 and row[2] for row in rows)
    for column, unit, _ in rows:
        suffix = re.search(r"_(bytes|samples_per_s|s)`$", column)
        if suffix:
            assert unit == {"bytes": "bytes", "samples_per_s": "samples/s", "s": "s"}[suffix[1]]


@pytest.mark.parametrize("table", [trials_table, devices_table])
def test_no_trial_gives_an_empty_table_with_its_columns(table: Any, tmp_path: Path) -> None:
    """A search that was stopped before its first trial still writes a readable file."""
    path = save_csv(table([]), tmp_path / "empty.csv")
    assert path.read_text() == ",".join(table(TRIALS).columns) + "\n"


@pytest.mark.parametrize("table", [trials_table, devices_table])
def test_the_same_trials_give_the_same_bytes(table: Any, tmp_path: Path) -> None:
    """Written twice, the files are equal byte for byte, with plain line ends."""
    first = save_csv(table(TRIALS), tmp_path / "first.csv").read_bytes()
    assert save_csv(table(TRIALS), tmp_path / "second.csv").read_bytes() == first
    assert b"\r" not in first
    assert first.endswith(b"\n")


@given(time=st.floats(min_value=1e-300, max_value=1e300))
def test_floats_are_written_so_that_they_read_back_equal(time: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A time is written in the digits of its repr, whatever its size."""
    trial = Trial(0, Measurement(split=SPLIT, outcome=Outcome.OK, whole_step_times_s=(time,)))
    path = save_csv(trials_table([trial, RAN_OUT]), tmp_path_factory.getbasetemp() / "floats.csv")
    assert read(path)[0]["step_time_s"] == repr(time)


def test_bytes_beyond_floats_are_written_exactly(tmp_path: Path) -> None:
    """Integers never pass through floats, not even beside an empty cell."""
    large = 2**60 + 1
    reading = DeviceMemory(device=0, total_bytes=large, outside_bytes=0, peak_allocated_bytes=0, peak_reserved_bytes=0)
    split = BatchSplit(global_batch_size=1, accumulation_steps=1, shard_sizes=(1,))
    trials = [
        Trial(0, Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY, memory=(reading,))),
        Trial(1, Measurement(split=split, outcome=Outcome.CRASHED)),
    ]
    rows = read(save_csv(devices_table(trials), tmp_path / "devices.csv"))
    assert [row["total_bytes"] for row in rows] == [str(large), ""]


def test_a_csv_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """An unwritable place is a ConfigError with the system's reason, and leaves nothing behind."""
    with pytest.raises(ConfigError, match="cannot write"):
        save_csv(trials_table(TRIALS), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_text_that_no_file_can_hold_is_escaped(tmp_path: Path) -> None:
    """A message with half a surrogate pair, from a file name say, does not cost the whole table."""
    trial = Trial(0, Measurement(split=SPLIT, outcome=Outcome.CRASHED, message="no \udc80"), reason="ü")
    row = read(save_csv(trials_table([trial]), tmp_path / "trials.csv"))[0]
    assert (row["message"], row["reason"]) == ("no \\udc80", "ü")
