"""Databases that tests open for themselves, as Optuna's own users do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from optuna.storages import RDBStorage


@pytest.fixture
def database() -> Iterator[Callable[[str], RDBStorage]]:
    """Opens the database of a URL; its connections are closed when the test is over."""
    opened: list[RDBStorage] = []

    def open_url(url: str) -> RDBStorage:
        opened.append(RDBStorage(url))
        return opened[-1]

    yield open_url
    for storage in opened:
        storage.remove_session()
        storage.engine.dispose()
