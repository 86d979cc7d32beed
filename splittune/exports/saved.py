"""A config and its trials as `result.save` left them in a folder, read with suspicion."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

from splittune.errors import ConfigError
from splittune.exports.even import TriedSplit
from splittune.split import BatchSplit

CONFIG_FILE = "split.json"
TRIALS_FILE = "trials.csv"
_COLUMNS = (
    "kind",
    "outcome",
    "global_batch_size",
    "accumulation_steps",
    "shard_sizes",
    "throughput_samples_per_s",
)


def config_file_in(path: str | os.PathLike[str]) -> Path:
    """The config that `path` names: a folder's ``split.json``, or the file itself.

    Raises:
        ConfigError: a folder without one.
    """
    found = Path(path)
    if not found.is_dir():
        return found
    if (found / CONFIG_FILE).is_file():
        return found / CONFIG_FILE
    others = sorted(each.name for each in found.glob("*.json"))
    listed = f" It holds {', '.join(others[:5])}: name one of these files." if others else ""
    raise ConfigError(
        f"{found} has no {CONFIG_FILE}: expected a folder that result.save or `splittune tune --out` wrote.{listed}"
    )


def read_trials(path: Path) -> list[TriedSplit]:
    """The trials of a ``trials.csv``; none where there is no such file.

    Raises:
        ConfigError: a column is missing, a row is cut short or says what no trial can say; the message names the line.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}. Expected the table that `splittune tune` wrote.") from error
    advice = "The table may have been cut short or edited: restore it, or tune again."
    if text and not text.endswith("\n"):
        raise ConfigError(f"{path} is half-written: its last line does not end. {advice}")
    reader = csv.DictReader(io.StringIO(text))
    missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path} lacks the columns {', '.join(missing)}: expected {', '.join(_COLUMNS)}. {advice}")
    trials = []
    for row in reader:
        try:
            trials.append(_trial_of(row))
        except ValueError as error:  # noqa: PERF203  InvalidSplitError is one, too
            raise ConfigError(
                f"{path}, line {reader.line_num}: {error} Expected a whole row of a trial. {advice}"
            ) from error
    return trials


def _trial_of(row: dict[str, Any]) -> TriedSplit:
    if None in row or None in row.values():  # more cells than columns, or fewer
        raise ValueError("it has another number of cells than the table has columns.")
    throughput = row["throughput_samples_per_s"]
    return TriedSplit(
        split=BatchSplit(
            global_batch_size=int(row["global_batch_size"]),
            accumulation_steps=int(row["accumulation_steps"]),
            shard_sizes=tuple(int(share) for share in row["shard_sizes"].split("+")),
        ),
        kind=row["kind"],
        outcome=row["outcome"],
        throughput=float(throughput) if throughput else None,
    )
