"""How a command on ranks ended, once all of them have found it alike: else it is a surprise, and is tried again."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore, Store

from splittune.config.files import write_atomically
from splittune.errors import ConfigError
from splittune.ranks.agreement import store_of
from splittune.ranks.group import is_grouped
from splittune.runners.launch.place import Place

# Seconds that a rank which raised waits for the others to raise the same. They were told within a trial's agreement, or
# not at all. A choice; doubled, a fault that only one rank has costs as much more.
SAME_OUTCOME_S = 5.0
_FILE = "verdict.json"


def is_everybodys(place: Place, code: int, kind: str) -> bool:
    """Whether every rank of the launch ended with this exit code, by an error of the same kind.

    All get the same answer: the first that knows it settles it for the others, who may wait a moment longer.
    """
    if place.world_size == 1:
        return True
    if not is_grouped():
        return False
    try:
        store = PrefixStore("splittune/outcome", store_of(None))
        word = "alike" if _are_alike(store, place, json.dumps([code, kind])) else "unlike"
        return bool(store.compare_set("settled", "", word) == b"alike")
    except (RuntimeError, ConfigError):  # the store is gone, and its host with it
        return False


def _are_alike(store: Store, place: Place, mine: str) -> bool:
    store.set(str(place.rank), mine)
    deadline = time.monotonic() + SAME_OUTCOME_S
    try:
        for rank in range(place.world_size):
            store.wait([str(rank)], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
            if store.get(str(rank)).decode() != mine:
                return False
    except RuntimeError:  # somebody has not come
        return False
    return True


def let_the_cause_end() -> None:
    """Of a rank that has lost another: that one may still live, and what it says is the reason that counts.

    The launcher blames whoever ends first, and then ends this process too.
    """
    time.sleep(SAME_OUTCOME_S)


def write_verdict(place: Place, code: int) -> None:
    """Have the launch end with this exit code, whatever its processes' own are. Rank 0 says it."""
    if place.folder is not None and place.is_first:
        write_atomically(place.folder / _FILE, json.dumps(code))


def read_verdict(folder: Path) -> int | None:
    """The exit code that rank 0 left; None where it left none."""
    path = folder / _FILE
    return int(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
