"""The trial that is on its way, in a file: what ranks that were started again know of the one that ended them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from splittune.config.files import write_atomically
from splittune.errors import ConfigError, RanksError

FORMAT = "splittune trial 1"


class TrialJournal:
    """Rank 0's note of the trial on its way, durable before the trial begins, and gone once it has ended.

    A note that is still there when the file is read again is a trial in which ranks were lost: it has crashed, and how
    often is kept until `remove`. Worked: ranks are killed in a trial of 2 x (8+8); started again, `num_crashes` of that
    trial is 1, so it is answered as crashed, and the search goes on.

    Args:
        path: the file; missing folders are made.

    Raises:
        ConfigError: it holds something else, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        known = self._read()
        self._crashes: dict[str, int] = known.get("crashes", {})
        begun = known.get("begun")
        if begun is not None:
            self._crashes[begun] = self._crashes.get(begun, 0) + 1
            self._write(None)

    @classmethod
    def beside(cls, storage: str | os.PathLike[str]) -> TrialJournal:
        """The journal of the search that is kept in the file `storage`."""
        return cls(f"{os.fspath(storage)}.trial")

    def num_crashes(self, trial: Mapping[str, Any]) -> int:
        """How often ranks were lost in this trial, given in JSON types."""
        return self._crashes.get(_key(trial), 0)

    @contextmanager
    def running(self, trial: Mapping[str, Any]) -> Iterator[None]:
        """Note the trial before it begins; what ends it otherwise than by losing a rank takes the note back."""
        self._write(_key(trial))
        try:
            yield
        except RanksError:
            raise
        except BaseException:
            self._write(None)
            raise
        self._write(None)

    def remove(self) -> None:
        """The search has ended: nothing is on its way any more."""
        self.path.unlink(missing_ok=True)

    def _write(self, begun: str | None) -> None:
        write_atomically(self.path, json.dumps({"format": FORMAT, "begun": begun, "crashes": self._crashes}) + "\n")

    def _read(self) -> dict[str, Any]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise self._unusable(f"{error}") from error
        try:
            known: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise self._unusable(f"no JSON, {error.msg}") from error
        if not isinstance(known, dict) or known.get("format") != FORMAT:
            raise self._unusable("another format")
        return known

    def _unusable(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.path} is no journal of a trial ({what}): expected what splittune wrote there, or no file. Remove "
            "it, or name another storage."
        )


def _key(trial: Mapping[str, Any]) -> str:
    return json.dumps(trial, sort_keys=True)
