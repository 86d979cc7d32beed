"""A sharded loader goes on where it was broken off: the rest of that epoch, and the epochs after it."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from splittune.errors import ConfigError
from splittune.ranks import ShardedLoader
from splittune.split import BatchSplit
from tests.ranks.loaders import SPLIT, Numbers, Stream, as_lists, put_together, shared_out, shuffled

ON_THREE = BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(4, 1, 3))


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    """As in a checkpoint, which torch reads without running code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}], ids=["no workers", "2"])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("own_generator", [True, False])
def test_a_shuffled_epoch_is_gone_on_with_on_other_ranks(
    options: dict[str, Any], epoch: int, own_generator: bool
) -> None:
    """Rank 0's state is enough for every rank, as many as there are then; workers had loaded ahead."""

    def make(seed: int) -> DataLoader[Any]:
        if own_generator:
            return shuffled(40, seed, **options)
        return DataLoader(range(40), batch_size=8, shuffle=True, **options)

    whole = shared_out(partial(make, 5), seed=7)
    expected = [put_together(*map(list, whole)) for _ in range(3)]
    loader = shared_out(partial(make, 5), seed=7)[0]
    for _ in range(epoch):
        list(loader)
    steps = iter(loader)
    next(steps), next(steps)
    state = saved_and_loaded(loader.state_dict())
    assert (state["epoch"], state["step"]) == (epoch, 2)
    later = shared_out(partial(make, 99), ON_THREE)
    for each in later:
        each.load_state_dict(state)
    assert put_together(*map(list, later)) == expected[epoch][2:]
    for rest in expected[epoch + 1 :]:
        assert put_together(*map(list, later)) == rest


def test_what_is_skipped_is_not_loaded() -> None:
    """Indices are drawn again, samples are not."""
    data = Numbers(24)
    loader = ShardedLoader(DataLoader(data, batch_size=8), SPLIT, rank=1, num_ranks=2)
    state = {**loader.state_dict(), "step": 2}
    loader.load_state_dict(state)
    assert len(list(loader)) == 1
    assert data.loaded == [17, 18, 19, 21, 22, 23]


def test_a_stream_is_read_up_to_there() -> None:
    """Its samples have no indices to skip; the order that it drew is drawn again."""
    with pytest.warns(UserWarning, match="read in full"):
        loader, again = (
            ShardedLoader(DataLoader(Stream(21), batch_size=8), SPLIT, rank=1, num_ranks=2, seed=4) for _ in range(2)
        )
    shares = iter(loader)
    next(shares)
    again.load_state_dict(saved_and_loaded(loader.state_dict()))
    assert [share.batch.tolist() for share in again] == [share.batch.tolist() for share in shares]


def test_the_state_says_the_epoch_and_the_steps_that_were_given() -> None:
    """Before, within and after an epoch; its last step belongs to it until the loop has ended."""
    loader = ShardedLoader(shuffled(), SPLIT, rank=0, num_ranks=2)

    def place() -> tuple[int, int]:
        return loader.state_dict()["epoch"], loader.state_dict()["step"]

    assert place() == (0, 0)
    assert [place() for _ in loader] == [(0, 1), (0, 2), (0, 3)]
    assert place() == (1, 0)


def test_saved_after_the_last_step_the_rest_of_the_epoch_is_empty() -> None:
    """The next epoch follows, as it would have."""
    loader, again = shuffled(), ShardedLoader(shuffled(seed=1), SPLIT, rank=0, num_ranks=2)
    sharded = ShardedLoader(loader, SPLIT, rank=0, num_ranks=2)
    shares = iter(sharded)
    for _ in range(3):
        next(shares)
    again.load_state_dict(sharded.state_dict())
    assert list(shares) == []
    assert list(again) == []
    assert [share.batch.tolist() for share in again] == [share.batch.tolist() for share in sharded]


def test_an_epoch_that_was_given_up_is_followed_by_the_next() -> None:
    """As on one device, where every iteration shuffles anew."""
    alone, ranks = shuffled(), shared_out(shuffled)
    next(iter(alone))
    for loader in ranks:
        next(iter(loader))
        assert loader.state_dict()["epoch"] == 0
    assert put_together(*map(list, ranks)) == as_lists(alone)
    assert ranks[0].state_dict()["epoch"] == 2


def test_an_iteration_under_way_counts_no_more_after_another_place_was_set() -> None:
    """Neither after set_epoch nor after a state was loaded."""
    loader = ShardedLoader(shuffled(), SPLIT, rank=0, num_ranks=2)
    state = loader.state_dict()
    for change in (lambda: loader.set_epoch(4), lambda: loader.load_state_dict(state)):
        under_way = iter(loader)
        next(under_way)
        change()
        place = loader.state_dict()["epoch"], loader.state_dict()["step"]
        assert len(list(under_way)) == 2
        assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == place


class Alternating(Sampler[int]):
    """Forwards in even epochs, backwards in odd ones."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(16) if self.epoch % 2 == 0 else range(15, -1, -1))

    def __len__(self) -> int:
        return 16


def test_set_epoch_is_passed_on() -> None:
    """To the user's sampler and data set; without it a sampler is told nothing, as on one device."""
    data, sampler = Numbers(16), Alternating()
    loader = ShardedLoader(DataLoader(data, batch_size=8, sampler=sampler), SPLIT, rank=0, num_ranks=2)
    assert [share.batch.tolist() for share in loader] == [[0, 4], [8, 12]]
    assert [share.batch.tolist() for share in loader] == [[0, 4], [8, 12]]
    loader.set_epoch(5)
    assert (data.epoch, sampler.epoch) == (5, 5)
    assert [share.batch.tolist() for share in loader] == [[15, 11], [7, 3]]


def test_set_epoch_decides_what_is_drawn() -> None:
    """An epoch can be had again; and a loop that sets what is set already changes nothing."""
    loader = ShardedLoader(DataLoader(range(21), batch_size=8, shuffle=True), SPLIT, rank=1, num_ranks=2)
    epochs = [[share.batch.tolist() for share in loader] for _ in range(3)]
    assert epochs[0] != epochs[1]
    loader.set_epoch(1)
    assert [share.batch.tolist() for share in loader] == epochs[1]
    loader.set_epoch(2)
    assert [share.batch.tolist() for share in loader] == epochs[2]


def test_a_loop_that_sets_the_epoch_goes_on_within_it() -> None:
    """The usual loop: the state is loaded, then the epoch set that it is from; another one begins at its start."""
    loader, again = (
        ShardedLoader(DataLoader(range(16), batch_size=8, sampler=Alternating()), SPLIT, rank=0, num_ranks=2)
        for _ in range(2)
    )
    loader.set_epoch(3)
    next(iter(loader))
    state = loader.state_dict()
    again.load_state_dict(state)
    again.set_epoch(3)
    assert [share.batch.tolist() for share in again] == [[7, 3]]
    again.load_state_dict(state)
    again.set_epoch(4)
    assert [share.batch.tolist() for share in again] == [[0, 4], [8, 12]]
    loader.set_epoch(3)
    assert [share.batch.tolist() for share in loader] == [[15, 11], [7, 3]]


def test_a_sampler_is_told_the_epoch_of_the_state() -> None:
    """So that a loop that finishes the epoch before it sets the next one finishes the right one."""
    sampler = Alternating()
    loader = ShardedLoader(DataLoader(range(16), 8, sampler=sampler), SPLIT, rank=0, num_ranks=2)
    loader.set_epoch(3)
    state = copy.deepcopy(loader.state_dict())
    sampler.epoch = 0
    loader.load_state_dict(state)
    assert sampler.epoch == 3


class Remembering(Sampler[int]):
    """Goes on from the last sample it gave, shuffled by generators of Python and NumPy; it has a state of its own."""

    def __init__(self, seed: int) -> None:
        self.of_python, self.of_numpy = random.Random(seed), np.random.default_rng(seed)
        self.first = 0

    def state_dict(self) -> dict[str, int]:
        return {"first": self.first}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["first"]

    def __iter__(self) -> Iterator[int]:
        order = [(self.first + index) % 16 for index in range(16)]
        self.of_python.shuffle(order)
        self.of_numpy.shuffle(order)
        self.first += 5
        return iter(order)


def test_generators_of_every_kind_and_states_of_samplers_are_kept() -> None:
    """Python's, NumPy's, and what a sampler says of itself."""

    def made(seed: int) -> ShardedLoader:
        return ShardedLoader(DataLoader(range(16), 8, sampler=Remembering(seed)), SPLIT, rank=1, num_ranks=2)

    loader, again = made(1), made(2)
    list(loader)
    shares = iter(loader)
    next(shares)
    again.load_state_dict(loader.state_dict())
    rest = [share.batch.tolist() for share in shares]
    assert [share.batch.tolist() for share in again] == rest
    assert [share.batch.tolist() for share in again] == [share.batch.tolist() for share in loader]


def without_step(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "step"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda state: [1], "no state of a sharded loader: got list"),
        (without_step, r"no state of a sharded loader: got \['are_workers_seeded'"),
        (
            lambda state: {**state, "global_batch_size": 4},
            "in batches of 4 samples, after 1 of them: expected batches of 8",
        ),
        (lambda state: {**state, "samples": "20"}, "in the middle of an epoch of 20 samples, and the data set has 21"),
        (lambda state: {**state, "step": -1}, "step is -1: expected an integer of at least 0"),
        (lambda state: {**state, "epoch": "0"}, "epoch is '0': expected an integer"),
        (
            lambda state: {**state, "order": {"generators": [], "samplers": []}},
            "state has 0 generators that keep a state: expected 1",
        ),
    ],
)
def test_a_state_of_another_loader_is_refused(change: Any, complaint: str) -> None:
    """Before anything is changed: the loader goes on as it was."""
    loader = ShardedLoader(shuffled(), SPLIT, rank=0, num_ranks=2)
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(ConfigError, match=complaint):
        loader.load_state_dict(change(before))
    assert str(loader.state_dict()) == str(before)


def test_between_epochs_a_data_set_may_have_grown() -> None:
    """Only the rest of an epoch needs the samples that it began with."""
    loader, longer = (ShardedLoader(shuffled(n), SPLIT, rank=0, num_ranks=2) for n in (21, 29))
    list(loader)
    longer.load_state_dict(loader.state_dict())
    assert len(list(islice(longer, 5))) == 4
