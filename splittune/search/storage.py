"""Where a search is kept: opening the study, and making sure that it is this search's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from splittune.errors import ConfigError

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

DEFAULT_STUDY_NAME = "splittune"
_SQLITE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
_IDENTITY = "search"


@contextmanager
def open_study(
    storage: str | os.PathLike[str] | None, study_name: str | None, sampler: BaseSampler, identity: Mapping[str, Any]
) -> Iterator[optuna.Study]:
    """The study of this search, new or continued; its connections are closed afterwards.

    `storage` is None (kept in memory), an Optuna URL (anything with ``://``), a path that ends in .db, .sqlite or
    .sqlite3 (SQLite), or any other path (Optuna's journal file). Missing folders are made. `identity` says what is
    searched, in JSON types; it is written into a new study and must be found in an old one.

    Raises:
        ConfigError: the study in the storage belongs to another search.
    """
    name = study_name or DEFAULT_STUDY_NAME
    try:
        backend = _open_storage(storage)
    except (
        OSError,
        ValueError,
        optuna.exceptions.OptunaError,
    ) as error:  # a folder, a file of another kind, a place not writable
        raise ConfigError(
            f"storage {os.fspath(storage or '')!r} cannot be used: {type(error).__name__}: {error}. Expected the path of a "
            "new file, or of one that an earlier search wrote, or an Optuna URL."
        ) from error
    try:
        study = optuna.create_study(
            storage=backend, study_name=name, sampler=sampler, direction="maximize", load_if_exists=True
        )
        _check_identity(study, storage, identity)
        yield study
    finally:
        if isinstance(backend, RDBStorage):
            backend.remove_session()
            backend.engine.dispose()


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna logs errors only; its own verbosity is put back afterwards."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.ERROR))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def _open_storage(storage: str | os.PathLike[str] | None) -> BaseStorage:
    if storage is None:
        return InMemoryStorage()
    place = os.fspath(storage)
    if "://" in place:
        return RDBStorage(place)
    path = Path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() in _SQLITE_SUFFIXES:
        return RDBStorage(f"sqlite:///{path}")
    return JournalStorage(JournalFileBackend(str(path)))


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
