"""One search at a time: two of one study would measure for each other and write in turn."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from splittune.errors import ConfigError

# What file systems that cannot lock answer. There the search goes on without a lock.
CANNOT_LOCK = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)

# The places locked by this process, with its id: locks of fcntl exclude other processes only. A
# fork copies the list and has none of the locks, hence the id. Locks of flock would be inherited: a
# data loader's worker that outlives a killed tuner for a moment would keep the next tuner out.
_held_by: dict[Path, int] = {}
_listed = threading.Lock()


@contextmanager
def one_at_a_time(storage: Path, study_name: str) -> Iterator[None]:
    """Have the study in the file `storage` for oneself; others in the same file are free.

    The lock is a small file beside it, which is gone afterwards. A process that is killed leaves
    the file and not the lock: the system releases it.

    Raises:
        ConfigError: another search has it.
        OSError: no file can be made there.
    """
    digest = hashlib.sha256(study_name.encode()).hexdigest()[:8]
    place = storage.resolve().with_name(f"{storage.name}.{digest}.lock")
    process = os.getpid()
    with _listed:
        if _held_by.get(place) == process:
            raise _in_use(storage, study_name, str(process))
        _held_by[place] = process
    try:
        handle = _locked(place, storage, study_name)
        try:
            yield
        finally:
            if os.getpid() == process:
                place.unlink(missing_ok=True)  # before release: nobody locks a file that is gone
            os.close(handle)
    finally:
        with _listed:
            _held_by.pop(place, None)


def _locked(place: Path, storage: Path, study_name: str) -> int:
    while True:
        handle = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(handle, place, storage, study_name)
            # Between opening and locking, its last holder may have removed it: then it is nobody's,
            # and made anew.
            if place.exists() and place.stat().st_ino == os.fstat(handle).st_ino:
                os.ftruncate(handle, 0)
                os.write(handle, str(os.getpid()).encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, place: Path, storage: Path, study_name: str) -> None:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise _in_use(storage, study_name, place.read_text(errors="replace").strip() or "unknown") from None
        if error.errno not in CANNOT_LOCK:
            raise


def _in_use(storage: Path, study_name: str, process: str) -> ConfigError:
    return ConfigError(
        f"another splittune is using study {study_name!r} in storage {str(storage)!r} (process {process}): "
        "expected one search at a time. Wait until it has ended, or give another storage."
    )
