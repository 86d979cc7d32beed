"""The store that the ranks of a start share, whatever their launchers count, and none of another start."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from splittune.runners.launch.start import store_of_start
from tests.processes import DEADLINE_S


@pytest.fixture
def host() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S))


def at(host: TCPStore, count: int) -> Store:
    """A rank's own view of the store, as torch makes it under a launcher that has counted so many starts."""
    return PrefixStore(f"/worker/attempt_{count}", TCPStore("127.0.0.1", host.port, is_master=False))


def started(host: TCPStore, counts: tuple[int, ...]) -> list[Store]:
    """The store of each rank; rank r's launcher has counted ``counts[r]`` starts."""
    size = len(counts)
    with ThreadPoolExecutor(size) as threads:
        found: list[Future[Store]] = [
            threads.submit(store_of_start, at(host, count), rank, size, timeout_s=DEADLINE_S)
            for rank, count in enumerate(counts)
        ]
        return [each.result() for each in found]


@pytest.mark.parametrize("counts", [(0,), (0, 0), (1, 1, 0, 0), (0, 2, 1, 2)])
def test_ranks_of_a_start_share_a_store_whatever_their_launchers_count(host: TCPStore, counts: tuple[int, ...]) -> None:
    """And what an earlier start has left in its own is not there."""
    earlier = started(host, (0,) * len(counts))
    earlier[0].set("address", "of an ended rank")
    now = started(host, counts)
    assert not any(store.check(["address"]) for store in now)
    now[-1].set("address", "new")
    assert [store.get("address") for store in now] == [b"new"] * len(counts)


def test_words_of_ended_ranks_are_no_ranks(host: TCPStore) -> None:
    """Rank 1 left its word and ended before it was answered: rank 0 does not take it for the one that is to come."""
    with pytest.raises(TimeoutError, match="rank 0 has not come"):
        store_of_start(at(host, 0), 1, 2, timeout_s=0.1)
    with pytest.raises(TimeoutError, match="rank 1 has not come"):
        store_of_start(at(host, 1), 0, 2, timeout_s=0.1)
    one, other = started(host, (1, 0))
    one.set("key", "value")
    assert other.get("key") == b"value"
