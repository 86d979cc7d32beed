"""Finished rows of a plan in a file, so that an interrupted one goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from splittune.config import SplitConfig
from splittune.config.files import check_writable, write_atomically
from splittune.config.schema import config_to_text, fields_from_text
from splittune.errors import ConfigError
from splittune.hardware.base import Device
from splittune.planning.result import PlannedSearch
from splittune.profiling.measurement import Measurement
from splittune.report import TuneResult
from splittune.report.capacity.row import LargestMicroBatch
from splittune.report.state_parts import ModelBytes
from splittune.search import Trial
from splittune.search.storage.lock import one_at_a_time
from splittune.split import BatchSplit
from splittune.training.module_memory import ModuleMemory

# Raised with every change of what is written: rows of another format are refused.
FORMAT = "splittune plan 2"


class FinishedRows:
    """The rows in a JSON file, each under the digest of what identifies it.

    Another job, machine, option or version is another digest, so its rows are never taken for this one's; they stay in
    the file.

    Raises:
        ConfigError: the file is there and holds something else, or its folder cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        check_writable(self._path.parent)
        self._rows: dict[str, Any] = _read(self._path)

    def __len__(self) -> int:
        return len(self._rows)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the file for oneself, as it is now: two plans at once would overwrite each other's rows.

        Raises:
            ConfigError: another plan has it.
        """
        with one_at_a_time(self._path, FORMAT):
            self._rows = _read(self._path)
            yield

    def get(self, identity: Mapping[str, Any]) -> PlannedSearch | None:
        """The row that was kept under this identity."""
        stored = self._rows.get(digest_of(identity))
        if stored is None:
            return None
        try:
            return _from_dict(stored)
        except (KeyError, TypeError, ValueError) as error:
            raise _unusable(self._path, f"a row of it cannot be read: {type(error).__name__}: {error}") from error

    def row(self, identity: Mapping[str, Any], search: Callable[[], PlannedSearch]) -> PlannedSearch:
        """The row that was kept under this identity, or the one that `search` finds, kept from now on."""
        kept = self.get(identity)
        if kept is None:
            kept = search()
            self.put(identity, kept)
        return kept

    def put(self, identity: Mapping[str, Any], row: PlannedSearch) -> None:
        """Keep a finished row, on the disk before this returns."""
        self._rows[digest_of(identity)] = _to_dict(row)
        write_atomically(self._path, json.dumps({"format": FORMAT, "rows": self._rows}, separators=(",", ":")) + "\n")


def digest_of(identity: Mapping[str, Any]) -> str:
    """SHA-256 of what identifies a row, in JSON types; the order of its names does not count."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, str(getattr(error, "strerror", None) or error)) from error
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _unusable(path, f"it is no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("rows"), dict):
        raise _unusable(path, f"it does not say that it is {FORMAT!r}")
    rows: dict[str, Any] = content["rows"]
    return rows


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"storage {os.fspath(path)!r} cannot be used: {reason}. Expected the path of a new file, or of one that an "
        "earlier plan wrote. Remove it or give another."
    )


def _to_dict(row: PlannedSearch) -> dict[str, Any]:
    return {
        "devices": row.devices,
        "cards": [asdict(card) for card in row.cards],
        "global_batch_size": row.global_batch_size,
        "strategy": row.strategy,
        "lacking": row.lacking,
        "needs_values": row.needs_values,
        "largest": None if row.largest is None else asdict(row.largest),
        "trials": [_trial_to_dict(trial) for trial in row.trials],
        "result": None if row.result is None else _result_to_dict(row.result),
    }


def _from_dict(data: Mapping[str, Any]) -> PlannedSearch:
    trials = tuple(_trial_from_dict(trial) for trial in data["trials"])
    return PlannedSearch(
        devices=data["devices"],
        cards=tuple(Device(**card) for card in data["cards"]),
        global_batch_size=data["global_batch_size"],
        strategy=data["strategy"],
        lacking=data["lacking"],
        needs_values=data["needs_values"],
        largest=_largest_from_dict(data["largest"]),
        trials=trials,
        result=None if data["result"] is None else _result_from_dict(data["result"], trials),
    )


def _largest_from_dict(data: Mapping[str, Any] | None) -> LargestMicroBatch | None:
    if data is None:
        return None
    return LargestMicroBatch(split=BatchSplit(**data["split"]), is_measured=data["is_measured"])


def _trial_to_dict(trial: Trial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "kind": trial.kind,
        "reason": trial.reason,
        "measurement": trial.measurement.to_dict(),
    }


def _trial_from_dict(data: Mapping[str, Any]) -> Trial:
    return Trial(
        number=data["number"],
        kind=data["kind"],
        reason=data["reason"],
        measurement=Measurement.from_dict(data["measurement"]),
        is_resumed=True,
    )


def _result_to_dict(result: TuneResult) -> dict[str, Any]:
    return {
        "best": result.best.to_dict(),
        "baseline": None if result.baseline is None else result.baseline.to_dict(),
        "config": config_to_text(result.config),
        "stopped": result.stopped,
        "warnings": list(result.warnings),
        "notes": list(result.notes),
        "job": result.job,
        "model": None if result.model is None else asdict(result.model),
        "modules": [asdict(module) for module in result.modules],
    }


def _result_from_dict(data: Mapping[str, Any], trials: Sequence[Trial]) -> TuneResult:
    baseline, model = data["baseline"], data.get("model")  # absent where an earlier version wrote it, as are the last
    return TuneResult(
        best=Measurement.from_dict(data["best"]),
        baseline=None if baseline is None else Measurement.from_dict(baseline),
        trials=tuple(trials),
        config=SplitConfig(**fields_from_text(data["config"])),
        stopped=data["stopped"],
        warnings=tuple(data["warnings"]),
        notes=tuple(data["notes"]),
        job=data.get("job", ""),
        model=None if model is None else ModelBytes(**model),
        modules=tuple(ModuleMemory(**module) for module in data.get("modules", ())),
    )
