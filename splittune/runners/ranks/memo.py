"""What ranks answered, in a file: a search over virtual cards that was stopped goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from splittune.config.files import check_writable
from splittune.errors import ConfigError
from splittune.profiling.measurement import Measurement
from splittune.runners.ranks.orders import Answer
from splittune.search.storage.lock import one_at_a_time

FORMAT = "splittune ranks 1"


class AnswerMemo:
    """The answers to finished trials, a line of JSON each, added as they come and on the disk before the next begins.

    A modelled clock repeats itself, so a trial that was run is not run again, and a search that goes on is to the last
    digit the one that was never stopped. A last line that was cut short is left out. Each line names its search, so
    other jobs and cards may have theirs in the same file.

    Args:
        path: the file; missing folders are made.
        search: what tells this search from others: the job, the cards, the versions.

    Raises:
        ConfigError: it holds something else, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], search: str) -> None:
        self._path, self._search = Path(path), search
        if "://" in os.fspath(path):
            raise ConfigError(
                f"storage is {os.fspath(path)!r}: expected the path of a file, in which ranks on virtual cards keep "
                "their trials."
            )
        check_writable(self._path.parent)
        self._known: dict[str, list[Answer]] = {}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the file for oneself, as it is now.

        Raises:
            ConfigError: another search has it, or it holds something else.
        """
        with one_at_a_time(self._path, self._search):
            self._known = dict(self._read())
            yield

    def get(self, trial: Mapping[str, Any]) -> list[Answer] | None:
        """What the ranks answered, by rank; None where they have not yet. The trial is given in JSON types."""
        return self._known.get(json.dumps(trial, sort_keys=True))

    def add(self, trial: Mapping[str, Any], answers: Sequence[Answer]) -> None:
        """Keep what the ranks answered.

        Raises:
            ConfigError: it cannot be written.
        """
        key = json.dumps(trial, sort_keys=True)
        self._known[key] = list(answers)
        line = {"format": FORMAT, "search": self._search, "trial": key, "answers": [_plain(each) for each in answers]}
        try:
            with self._path.open("a+b") as file:
                file.seek(0, os.SEEK_END)
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # a line that was cut short
                        file.write(b"\n")
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(
                f"cannot write {self._path}: {error.strerror or error}. Expected a file in a folder that may be "
                "written to, and room for it. Trials before that are kept."
            ) from error

    def _read(self) -> Iterator[tuple[str, list[Answer]]]:
        if not self._path.exists():
            return
        for number, line in enumerate(self._path.read_bytes().split(b"\n"), start=1):
            try:
                entry = json.loads(line) if line else None
            except ValueError:
                entry = None
                if number == 1:
                    raise self._of_another_kind() from None
            if entry is None:
                continue
            if not isinstance(entry, dict) or entry.get("format") != FORMAT:
                raise self._of_another_kind()
            if entry["search"] == self._search:
                yield entry["trial"], [_answer(each) for each in entry["answers"]]

    def _of_another_kind(self) -> ConfigError:
        return ConfigError(
            f"{self._path} holds no trials of ranks on virtual cards: expected what splittune wrote there, or no file. "
            "Name another storage."
        )


def _plain(answer: Answer) -> dict[str, Any]:
    measured = None if answer.measurement is None else answer.measurement.to_dict()
    return asdict(replace(answer, measurement=None)) | {"measurement": measured}


def _answer(data: Mapping[str, Any]) -> Answer:
    measured = data["measurement"]
    return Answer(**{**data, "measurement": None if measured is None else Measurement.from_dict(measured)})
