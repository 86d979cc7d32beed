"""What a launch keeps between two starts of its ranks: who ended how, and whether a trial was finished since."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from splittune.errors import WorkerError
from splittune.runners.ranks.journal import TrialJournal
from splittune.runners.worker.link import words_of_ending
from splittune.runners.worker.runner import MAX_ENDS_IN_A_ROW

_FILE = "attempts.jsonl"
_ERRORS = "error{rank}.txt"
EXIT_TOO_LONG = 1
"""With which faulthandler ends a process that took longer than it may."""


class Attempts:
    """The lines that a launcher and its ranks add to one file, each whole or not at all.

    Worked: ``{"finished": true}`` and then ``{"ended": 1, "code": -9}``: a trial was run, and in the next rank 1 was
    killed. Three ends without a finished trial between them are the end of it all.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / _FILE

    def note_end(self, rank: int, code: int) -> None:
        """A rank ended with this exit code, a negative signal's number included; the launcher's to say."""
        self._add({"ended": rank, "code": code})

    def note_finished(self) -> None:
        """A trial was run to its end, well or not."""
        self._add({"finished": True})

    def note_error(self, rank: int, text: str) -> None:
        """What a rank that ends by itself has to say."""
        (self._folder / _ERRORS.format(rank=rank)).write_text(text, encoding="utf-8", errors="backslashreplace")

    def last_end(self, limit_name: str) -> str:
        """How the ranks ended last, in words; "" where they have not.

        `limit_name` is what bounds the time of a trial.
        """
        ends = [line for line in self._lines() if "ended" in line]
        if not ends:
            return ""
        rank, code = ends[-1]["ended"], ends[-1]["code"]
        if code == EXIT_TOO_LONG:
            return (
                f"rank {rank} was ended where a trial took longer than it may ({limit_name}): what each rank was doing "
                "stands on standard error. One hung, or needs a longer limit"
            )
        said = self._folder / _ERRORS.format(rank=rank)
        if code > 0 and said.exists():
            return f"rank {rank} raised {said.read_text(encoding='utf-8').rstrip('.')}"
        return words_of_ending(f"rank {rank}", code)

    def check_progress(self, limit_name: str) -> None:
        """That trials are finished between two ends.

        Raises:
            WorkerError: the ranks ended three times in a row, and no trial was finished between.
        """
        in_a_row = 0
        for line in self._lines():
            in_a_row = 0 if "finished" in line else in_a_row + 1
        if in_a_row >= MAX_ENDS_IN_A_ROW:
            raise WorkerError(
                f"the ranks ended {in_a_row} times in a row without finishing a trial, at last so: "
                f"{self.last_end(limit_name)}. The trials before that are kept where --storage names a file. Run one "
                "training step by hand, or tune one process with --strategy dp, to see what is wrong."
            )

    def _lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines() if line]

    def _add(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


class NotingJournal(TrialJournal):
    """The journal of the trial on its way, which tells the launcher of every one that was run to its end."""

    def __init__(self, path: str | os.PathLike[str], attempts: Attempts) -> None:
        super().__init__(path)
        self._attempts = attempts

    @contextmanager
    def running(self, trial: Mapping[str, Any]) -> Iterator[None]:
        with super().running(trial):
            yield
        self._attempts.note_finished()
