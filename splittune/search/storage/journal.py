"""Optuna's journal file, kept whole: a line is written to its end or not at all."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages.journal import JournalFileBackend

from splittune.search.storage.lock import CANNOT_LOCK

# Every line of a journal begins so, the first one, too.
_BEGINNING = b'{"op_code":'


class JournalFile(JournalFileBackend):
    """A journal on which a crash, a full disk or Ctrl-C in the middle of a line leaves no trace.

    Optuna's own would write on behind half a line, and the next search could read no trial any
    more. Its lock, a link beside the file, stays when its holder is killed, and the next one waits
    half a minute for it; this one is the system's, on the file itself.

    Raises:
        ValueError: the file is no journal; it is not touched.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _locked(path) as handle:
            _check_beginning(handle)
        super().__init__(str(path))

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        try:
            yield from super().read_logs(log_number_from)
        except OSError as error:
            raise StorageInternalError(f"cannot read {self._path}: {error}") from error

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        try:
            with _locked(self._path) as handle:
                _append(handle, lines)
        except OSError as error:
            raise StorageInternalError(f"cannot write {self._path}: {error}") from error


def _append(handle: int, lines: bytes) -> None:
    """All of `lines`, on the disk; or, where that fails or is interrupted, none of them."""
    size = _size_in_whole_lines(handle)
    try:
        written = 0
        while written < len(lines):
            written += os.write(handle, lines[written:])
        os.fsync(handle)
    except BaseException:
        os.ftruncate(handle, size)
        raise


def _check_beginning(handle: int) -> None:
    """Refuse any other file: the next write would spoil it."""
    beginning = os.pread(handle, len(_BEGINNING), 0)
    if not _BEGINNING.startswith(beginning):
        raise ValueError(f"it begins with {beginning!r}: expected a journal, whose lines begin with {_BEGINNING!r}")


def _size_in_whole_lines(handle: int) -> int:
    """The journal's size, once the half line of a process that was killed is taken off its end."""
    size = os.lseek(handle, 0, os.SEEK_END)
    if size and os.pread(handle, 1, size - 1) != b"\n":
        size = os.pread(handle, size, 0).rfind(b"\n") + 1
        os.ftruncate(handle, size)
    return size


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file for reading and writing, made if missing, while no other process appends to it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:  # a file system that cannot lock
            if error.errno not in CANNOT_LOCK:
                raise
        yield handle
    finally:
        os.close(handle)
