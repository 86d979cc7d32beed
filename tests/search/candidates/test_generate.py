from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from splittune.search.candidates.generate import candidates, neighbours
from splittune.split import SplitSpace
from tests.search.problem import split


def test_gpu0_has_what_surely_fits_and_what_may_and_some_between() -> None:
    """Of 12 bytes a sample takes 1 to 4: 3 samples surely fit, 12 at best, and 3, 4 and 6 by 13/4, 10/4 and 7/4 bytes.
    The other device, as fast, has the rest of 64."""

    def needed(steps: Any, shards: Any, sizes: Any) -> Any:
        return SimpleNamespace(least=shards * [1, 0], most=shards * [4, 0])

    space = SplitSpace(global_batch_size=64, num_devices=2, shares="each")
    as_fast: Any = SimpleNamespace(curves=[lambda shares: shares] * 2, gpu0_per_sample_s=0.0)
    memory: Any = SimpleNamespace(needed=needed)
    table = candidates(space, [as_fast], memory, np.array([12.0, 12.0]), ())
    assert set(table.where(table.steps == 1).shards[:, 0]) == {0, 3, 4, 6, 12}


def test_neighbours_move_one_sample_or_a_quarter_or_exchange_shares() -> None:
    """(8, 4) has four: (7, 5), (6, 6), (4, 8) and (9, 3); a device that must have a share keeps it."""
    found = neighbours(split(12, 1, 8, 4), 0)
    assert found.splits() == [split(12, 1, *shards) for shards in ((4, 8), (6, 6), (7, 5), (9, 3))]
    assert neighbours(split(3, 1, 2, 1), 1).splits() == [split(3, 1, 1, 2)]
    assert len(neighbours(split(1, 1, 1), 0)) == 0


@given(shards=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any), least=st.integers(0, 1))
def test_neighbours_keep_the_batch_and_the_least_share(shards: list[int], least: int) -> None:
    """For any split: as many samples in as many steps, none below the least that had it, and never itself."""
    shards = [share + least for share in shards]
    one = split(3 * sum(shards), 3, *shards)
    for other in neighbours(one, least).splits():
        assert other != one
        assert (other.accumulation_steps, other.micro_batch_size) == (3, sum(shards))
        assert min(other.shard_sizes) >= least
