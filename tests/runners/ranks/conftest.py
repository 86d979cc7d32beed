"""The two ranks that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.pool import Pool, pool_of


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two processes of one gloo group."""
    with pool_of(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks
