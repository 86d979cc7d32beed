"""What a report is made from: the files that a search leaves in its folder, read with suspicion."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from splittune.config.files import read_text
from splittune.config.split_config import SplitConfig
from splittune.errors import ConfigError
from splittune.profiling.measurement import Outcome
from splittune.report.advice import AdviceRow, advice_of
from splittune.report.files import ADVICE_FILE, CONFIG_FILE, DEVICES_FILE, RESULT_FILE, TRIALS_FILE
from splittune.report.result_file import AGAIN, Found
from splittune.split import BatchSplit

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A row of ``trials.csv``, as far as a report shows it."""

    number: int
    kind: str
    outcome: Outcome
    accumulation_steps: int
    micro_batch_size: int
    gpu0_bsz: int
    shard_sizes: tuple[int, ...]
    loss_placement: str
    throughput: float | None
    step_time_s: float | None
    micro_step_time_s: float | None
    update_time_s: float | None
    relative_error: float | None
    is_modelled: bool
    least_headroom_bytes: int | None
    reason: str
    message: str

    @property
    def fits(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def shape(self) -> tuple[int, tuple[int, ...], str]:
        """What tells splits apart: accumulation steps, shards, and where the loss is computed."""
        return self.accumulation_steps, self.shard_sizes, self.loss_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyRow:
    """A row of ``devices.csv``, as far as a report shows it: what the trial's card did in a micro-step."""

    trial: int
    device: int
    device_name: str
    total_bytes: int | None
    busy_s: float | None
    copied_s: float | None = None
    """None for real cards, and in tables of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFiles:
    """A folder that a search has written; without a config where nothing fitted, or it was interrupted."""

    config: SplitConfig | None
    found: Found | None
    trials: tuple[TrialRow, ...]
    cards: tuple[BusyRow, ...]
    advice: tuple[AdviceRow, ...] = ()
    """What was tried beside the split; empty where nobody asked."""

    @property
    def is_modelled(self) -> bool:
        return self.config.is_modelled if self.config is not None else any(row.is_modelled for row in self.trials)


def read_search(folder: str | os.PathLike[str]) -> SearchFiles:
    """The files of a search, complete and of one search.

    Raises:
        ConfigError: a file is missing, half-written, of a newer schema or of another search than the others; the
            message names it.
    """
    place, tables = Path(folder), read_tables(folder)
    if not (place / CONFIG_FILE).is_file():
        if (place / RESULT_FILE).is_file() or not tables.trials:
            raise ConfigError(
                f"no {CONFIG_FILE} in {place}, with {len(tables.trials)} trials and {_with_result(place)}: expected "
                f"the folder as a search left it. {AGAIN}"
            )
        return tables
    config, found = SplitConfig.load(place / CONFIG_FILE), Found.load(place / RESULT_FILE)
    if found.best.split != config.split:
        raise ConfigError(
            f"{place / RESULT_FILE} is of the split {found.best.split}, and {CONFIG_FILE} of {config.split}: expected "
            f"files of one search. {AGAIN}"
        )
    if tables.trials and all(row.shape[:2] != _shape_of(config.split) for row in tables.trials):
        raise ConfigError(
            f"{place / TRIALS_FILE} has no trial of the split in {CONFIG_FILE}, {config.split}: expected files of one "
            f"search. {AGAIN}"
        )
    return replace(tables, config=config, found=found, advice=_read_advice(place / ADVICE_FILE))


def _read_advice(path: Path) -> tuple[AdviceRow, ...]:
    return rows_of(read_text(path, AGAIN), str(path), advice_of) if path.is_file() else ()


def read_tables(folder: str | os.PathLike[str]) -> SearchFiles:
    """The tables of a search alone.

    Raises:
        ConfigError: one is missing or half-written, or they are of two searches.
    """
    place = Path(folder)
    trials = rows_of(read_text(place / TRIALS_FILE, AGAIN), str(place / TRIALS_FILE), trial_of)
    cards = rows_of(read_text(place / DEVICES_FILE, AGAIN), str(place / DEVICES_FILE), busy_of)
    wanted = {(row.number, device) for row in trials for device in range(len(row.shard_sizes))}
    if {(card.trial, card.device) for card in cards} != wanted or len(cards) != len(wanted):
        raise ConfigError(
            f"{place / DEVICES_FILE} has {len(cards)} rows: expected {len(wanted)}, one for each trial of "
            f"{TRIALS_FILE} and each device. One of the two is half-written, or of another search. {AGAIN}"
        )
    return SearchFiles(config=None, found=None, trials=trials, cards=cards)


def _with_result(place: Path) -> str:
    return f"{'a' if (place / RESULT_FILE).is_file() else 'no'} {RESULT_FILE}"


def _shape_of(split: BatchSplit) -> tuple[int, tuple[int, ...]]:
    return split.accumulation_steps, split.shard_sizes


def table_of(text: str, name: str) -> list[dict[str, str]]:
    """The rows of a CSV, a cell for every heading; `name` stands in messages.

    Raises:
        ConfigError: it ends in the middle of a row.
    """
    rows = list(csv.reader(io.StringIO(text, newline="")))
    if not rows or not text.endswith("\n"):
        raise ConfigError(f"{name} is half-written: {len(rows)} lines, and the last one does not end. {AGAIN}")
    heading, *lines = rows
    for number, line in enumerate(lines, start=2):
        if len(line) != len(heading):
            raise ConfigError(
                f"{name}, line {number}: {len(line)} cells, expected {len(heading)}, one for each heading. {AGAIN}"
            )
    return [dict(zip(heading, line, strict=True)) for line in lines]


def rows_of(text: str, name: str, row_of: Callable[[Mapping[str, str]], _Value]) -> tuple[_Value, ...]:
    """The rows of a CSV as `row_of` reads their cells; `name` stands in messages.

    Raises:
        ConfigError: the file is half-written, or a cell is none of its column.
    """
    number = 1
    try:
        rows = []
        for number, cells in enumerate(table_of(text, name), start=2):  # noqa: B007  the message below names it
            rows.append(row_of(cells))
        return tuple(rows)
    except KeyError as error:
        raise ConfigError(
            f"{name} has no column {error}: expected those that this splittune writes. {AGAIN}"
        ) from error
    except (ValueError, IndexError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name}, line {number}: {error}. {AGAIN}") from error


def trial_of(cells: Mapping[str, str]) -> TrialRow:
    """A row of ``trials.csv``."""
    return TrialRow(
        number=int(cells["trial"]),
        kind=cells["kind"],
        outcome=Outcome(cells["outcome"]),
        accumulation_steps=int(cells["accumulation_steps"]),
        micro_batch_size=int(cells["micro_batch_size"]),
        gpu0_bsz=int(cells["gpu0_bsz"]),
        shard_sizes=tuple(int(size) for size in cells["shard_sizes"].split("+")),
        loss_placement=cells["loss_placement"],
        throughput=known(float, cells["throughput_samples_per_s"]),
        step_time_s=known(float, cells["step_time_s"]),
        micro_step_time_s=known(float, cells["micro_step_time_s"]),
        update_time_s=known(float, cells["update_time_s"]),
        relative_error=known(float, cells["relative_error"]),
        is_modelled=cells["is_modelled"] == "True",
        least_headroom_bytes=known(int, cells["least_headroom_bytes"]),
        reason=cells["reason"],
        message=cells["message"],
    )


def busy_of(cells: Mapping[str, str]) -> BusyRow:
    """A row of ``devices.csv``."""
    return BusyRow(
        trial=int(cells["trial"]),
        device=int(cells["device"]),
        device_name=cells["device_name"],
        total_bytes=known(int, cells["total_bytes"]),
        busy_s=known(float, cells["busy_s"]),
        copied_s=known(float, cells.get("copied_s", "")),
    )


def known(kind: Callable[[str], _Value], cell: str) -> _Value | None:
    """The cell's value; None of an empty one."""
    return kind(cell) if cell else None
