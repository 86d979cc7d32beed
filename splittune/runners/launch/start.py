"""One store for each start of the ranks, though every launcher counts the starts for itself."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from torch.distributed.distributed_c10d import PrefixStore, Store

# How often a rank looks whether the others have come, in seconds. A choice: a start takes seconds by itself.
_LOOKS_EVERY_S = 0.02


def store_of_start(store: Store, rank: int, world_size: int, *, timeout_s: float) -> Store:
    """Of the launcher's `store` the part that the ranks of this start have alike, and no other start has.

    A launcher gives every start the same store, in which the keys of ended ranks are still there. Torch puts the count
    of starts before them, but each machine's launcher counts its own failures alone: where a rank is killed on one, the
    ranks of another are started again with the count that they had. So the ranks tell each other that they are there.
    Each but rank 0 leaves a word that nobody else has, rank 0 answers it with a name, and goes on once all have read
    it. A word of an ended rank may be answered as well, and is never read. All ranks have to call it.

    Raises:
        TimeoutError: somebody has not come within `timeout_s`.
    """
    store, end = _below_counts(store), time.monotonic() + timeout_s
    starts = PrefixStore("splittune/starts", store)
    name = _give(starts, world_size, end) if rank == 0 else _take(starts, rank, end)
    return PrefixStore(f"splittune/start/{name}", store)


def _below_counts(store: Store) -> Store:
    """Without what torch puts before every key."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _give(store: Store, world_size: int, end: float) -> str:
    name = uuid.uuid4().hex
    answered: dict[int, str] = {}

    def has_read(rank: int) -> bool:
        if not store.check([f"here/{rank}"]):
            return False
        word = store.get(f"here/{rank}").decode()
        if answered.get(rank) != word:
            answered[rank] = word
            store.set(f"name/{word}", name)
        # a word that was read in an earlier start was read with another name
        return store.check([f"read/{word}"]) and store.get(f"read/{word}").decode() == name

    for rank in range(1, world_size):
        _wait_until(lambda rank=rank: has_read(rank), end, f"rank {rank}")  # type: ignore[misc]
    return name


def _take(store: Store, rank: int, end: float) -> str:
    word = uuid.uuid4().hex
    store.set(f"here/{rank}", word)
    _wait_until(lambda: store.check([f"name/{word}"]), end, "rank 0")
    name = store.get(f"name/{word}").decode()
    store.set(f"read/{word}", name)
    return name


def _wait_until(has_come: Callable[[], bool], end: float, who: str) -> None:
    """Look again and again: a store's own wait would let no signal end this process."""
    while not has_come():
        if time.monotonic() > end:
            raise TimeoutError(f"{who} has not come in time")
        time.sleep(_LOOKS_EVERY_S)
