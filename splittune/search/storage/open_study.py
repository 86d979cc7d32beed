"""Where a search is kept: opening the study, and making sure that it is this search's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage

from splittune.errors import ConfigError
from splittune.search.storage.journal import JournalFile
from splittune.search.storage.lock import one_at_a_time

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

DEFAULT_STUDY_NAME = "splittune"
_SQLITE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
_SQLITE_URL = "sqlite:///"
_IDENTITY = "search"
# How long to wait for another program that has locked an SQLite file: a backup, or one that looks
# at the trials. A choice: longer than either takes.
SQLITE_PATIENCE_S = 15.0


@contextmanager
def open_study(
    storage: str | os.PathLike[str] | None, study_name: str | None, sampler: BaseSampler, identity: Mapping[str, Any]
) -> Iterator[optuna.Study]:
    """The study of this search, new or continued; its connections are closed afterwards.

    `storage` is None (kept in memory), an Optuna URL (anything with ``://``), a path that ends in
    .db, .sqlite or .sqlite3 (SQLite), or any other path (Optuna's journal file). Missing folders
    are made. `identity` says what is searched, in JSON types; it is written into a new study and
    must be found in an old one.

    A study in a file is this search's alone until it is closed, see `one_at_a_time`.

    Raises:
        ConfigError: the storage cannot be used, or no longer, or the study in it belongs to another
            search or is in use.
    """
    name = study_name or DEFAULT_STUDY_NAME
    with ExitStack() as stack:
        try:
            path = _path_of(storage)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(one_at_a_time(path, name))
            backend = _open_storage(storage, path)
            if isinstance(backend, _Database):
                stack.callback(backend.close)
            study = optuna.create_study(
                storage=backend, study_name=name, sampler=sampler, direction="maximize", load_if_exists=True
            )
            _check_identity(study, storage, identity)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  Optuna raises whatever comes of a wrong file
            raise ConfigError(
                f"storage {os.fspath(storage or '')!r} cannot be used: {_reason(error)}. Expected the path of a new "
                "file, or of one that an earlier search wrote, or an Optuna URL."
            ) from None  # what a program under Optuna raised says no more
        try:
            yield study
        except StorageInternalError as error:
            raise ConfigError(
                f"storage {os.fspath(storage or '')!r} failed in mid-search: {_reason(error)}. The trials written "
                "before are in it. Expected a file that can be written to: see whether its disk is full or "
                "another program has it locked, then start the search again, and it goes on from there."
            ) from None


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna logs errors only; its own verbosity is put back afterwards."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.ERROR))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def _path_of(storage: str | os.PathLike[str] | None) -> Path | None:
    """The file that a storage is; None for memory and for a database that a server keeps."""
    place = "" if storage is None else os.fspath(storage)
    if place.startswith(_SQLITE_URL):
        place = place.removeprefix(_SQLITE_URL).partition("?")[0]
        return Path(place) if place and place != ":memory:" else None
    return Path(place) if place and "://" not in place else None


def _open_storage(storage: str | os.PathLike[str] | None, path: Path | None) -> BaseStorage:
    if storage is None:
        return InMemoryStorage()
    url = os.fspath(storage)
    if path is None:
        return _Database(url)
    if "://" not in url:
        if path.suffix.lower() not in _SQLITE_SUFFIXES:
            return JournalStorage(JournalFile(path))
        url = f"{_SQLITE_URL}{path}"
    return _Database(url, engine_kwargs={"connect_args": {"timeout": SQLITE_PATIENCE_S}})


class _Database(RDBStorage):
    """Optuna's storage in a database, whose connections are closed.

    `close` does so, and so does opening a file that it cannot open.
    """

    def __init__(self, url: str, **options: Any) -> None:
        try:
            super().__init__(url, **options)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections of this thread, as far as opening came."""
        if hasattr(self, "scoped_session"):
            self.remove_session()
        if hasattr(self, "engine"):
            self.engine.dispose()


def _reason(error: BaseException) -> str:
    """What the lowest of its causes says, in one line: ``"database is locked"``."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _check_identity(study: optuna.Study, storage: str | os.PathLike[str] | None, identity: Mapping[str, Any]) -> None:
    stored = study.user_attrs.get(_IDENTITY)
    if stored is None and not study.get_trials(deepcopy=False):
        study.set_user_attr(_IDENTITY, dict(identity))
        return
    if stored == identity:
        return
    where = f"study {study.study_name!r} in {os.fspath(storage) if storage is not None else 'memory'!r}"
    if stored is None:
        raise ConfigError(f"{where} was not written by splittune. Give another study_name or storage.")
    differing = "; ".join(
        f"{key} is {stored.get(key)!r} there and {identity.get(key)!r} here"
        for key in sorted({*stored, *identity})
        if stored.get(key) != identity.get(key)
    )
    raise ConfigError(
        f"{where} belongs to another search: {differing}. Search with what it was begun with to resume it, or give "
        "another study_name or storage."
    )
