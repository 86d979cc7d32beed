"""A sharded loader gives the batches of one device, with whatever its loader does: workers, shuffling, collating."""

from __future__ import annotations

import multiprocessing
import random
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, default_collate

from splittune.config.shares import cut_share
from splittune.ranks import ShardedLoader
from splittune.split import BatchSplit
from tests.ranks.loaders import (
    SPLIT,
    Numbers,
    Seeds,
    as_lists,
    own_samples,
    put_together,
    seeded,
    shared_out,
    shuffled,
)


def test_docstring_example() -> None:
    """13 samples in batches of 8: rank 0 gets 2, then one and a stand-in; rank 1 gets 6, then 4."""
    first, second = map(list, shared_out(lambda: DataLoader(range(13), batch_size=8)))
    assert [share.batch.tolist() for share in first] == [[0, 4], [8, 8]]
    assert [share.batch.tolist() for share in second] == [[1, 2, 3, 5, 6, 7], [9, 10, 11, 12]]
    assert [share.sizes for share in first] == [(1, 1), (1, 0)]
    assert [share.sizes for share in second] == [(3, 3), (2, 2)]
    assert [(share.micro_batch_sizes, share.num_samples) for share in first] == [((4, 4), 8), ((3, 2), 5)]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}, {"drop_last": True}],
    ids=["no workers", "2 workers", "2 that stay", "drop_last"],
)
def test_a_generator_of_the_users_gives_what_it_gives_on_one_device(options: dict[str, Any]) -> None:
    """Epoch after epoch, though a loader draws its workers' seeds from it too: not where they stay."""
    alone, ranks = shuffled(**options), shared_out(partial(shuffled, **options))
    for _ in range(3):
        assert put_together(*map(list, ranks)) == as_lists(alone)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_a_generator_epochs_are_those_of_their_seed(num_workers: int) -> None:
    """As on one device that seeds torch with seed + epoch; what ranks draw themselves changes nothing."""
    make = partial(DataLoader, range(21), batch_size=8, shuffle=True, num_workers=num_workers)
    ranks = shared_out(make, seed=11)
    for epoch in range(2):
        found = []
        for number, loader in enumerate(ranks):
            torch.manual_seed(100 + number)
            found.append(list(loader))
            assert torch.equal(torch.get_rng_state(), seeded(100 + number).get_state())
        torch.manual_seed(11 + epoch)
        assert put_together(*found) == as_lists(make())


def test_the_users_loader_is_only_read() -> None:
    """None of its attributes is replaced, and it can be iterated over afterwards."""
    loader = shuffled()
    before = dict(vars(loader))
    sharded = ShardedLoader(loader, SPLIT, rank=1, num_ranks=2)
    assert len(list(sharded)) == 3
    assert vars(loader) == before
    assert {sample for batch in as_lists(loader) for sample in batch} == {*range(21)}


def test_samples_are_loaded_by_one_rank_only() -> None:
    """But for the stand-in, which is loaded through the same data set and collated with the rank's own."""
    data = [Numbers(13), Numbers(13)]
    made = iter(data)
    for loader in shared_out(lambda: DataLoader(next(made), batch_size=8)):
        list(loader)
    assert data[0].loaded == [0, 4, 8, 8]
    assert sorted(data[0].loaded[:-1] + data[1].loaded) == list(range(13))


def test_a_rank_without_any_sample_gets_one_that_stands_in() -> None:
    """A real one, of the same global batch, whatever its share."""
    split = BatchSplit(global_batch_size=4, accumulation_steps=2, shard_sizes=(0, 2))
    idle, busy = map(list, shared_out(lambda: DataLoader(range(6), batch_size=4), split))
    assert [share.batch.tolist() for share in idle] == [[0], [4]]
    assert [share.sizes for share in idle] == [(0, 0), (0,)]
    assert [own_samples(share) for share in busy] == [[[0, 1], [2, 3]], [[4, 5]]]


def test_a_users_collate_function_gets_the_share() -> None:
    """One that pads to the longest sample pads to the longest of the share."""
    lengths = [1, 2, 3, 9, 5, 6, 7, 8]

    def padded(samples: list[int]) -> Tensor:
        return pad_sequence([torch.ones(length) for length in samples], batch_first=True)

    first, second = (next(iter(each)) for each in shared_out(partial(DataLoader, lengths, 8, collate_fn=padded)))
    assert first.batch.shape == (2, 5)
    assert second.batch.shape == (6, 9)


def test_a_users_batch_sampler_decides_the_batches() -> None:
    """Torch's around a sampler, or any list of lists; none larger than the config's."""
    of_torch = BatchSampler(SequentialSampler(range(21)), 8, drop_last=True)
    assert put_together(*map(list, shared_out(partial(DataLoader, range(21), batch_sampler=of_torch)))) == [
        list(range(8)),
        list(range(8, 16)),
    ]
    listed = [[3, 1], [0, 2, 4, 5, 6, 7, 8, 9], [10]]
    ranks = shared_out(partial(DataLoader, range(21), batch_sampler=listed))
    assert put_together(*map(list, ranks)) == listed
    assert [len(loader) for loader in ranks] == [3, 3]


def noted(worker: int) -> None:
    random.seed(worker)


def test_the_loader_of_a_rank_has_the_users_options() -> None:
    """All of them: what loads the data is set up as on one device."""
    loader = DataLoader(
        range(16),
        batch_size=8,
        num_workers=2,
        collate_fn=list,
        pin_memory=True,
        timeout=30,
        worker_init_fn=noted,
        multiprocessing_context="spawn",
        prefetch_factor=3,
        persistent_workers=True,
        in_order=False,
    )
    inner = ShardedLoader(loader, SPLIT, rank=0, num_ranks=2)._inner
    assert inner.collate_fn([1, 2]).batch == [1, 2]  # the user's, by way of `Telling`
    for name in ("num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor"):
        assert getattr(inner, name) == getattr(loader, name)
    assert inner.persistent_workers
    assert inner.multiprocessing_context is multiprocessing.get_context("spawn")
    assert inner.in_order  # or ranks would run different batches in one step
    everything = {name for name in vars(loader) if not name.startswith("_")}
    assert everything == {name for name in vars(inner) if not name.startswith("_")}


def test_workers_of_each_rank_are_seeded_differently() -> None:
    """Rank 0's as one device's; and anew every epoch."""
    make = partial(DataLoader, Seeds(), batch_size=8, num_workers=2, generator=None)
    first, second = shared_out(make, seed=3)
    of_first, of_second = ([{*share.batch.tolist()} for share in loader] for loader in (first, second))
    torch.manual_seed(3)
    assert of_first == [{*batch.tolist()} for batch in make()]
    assert not set.union(*of_first) & set.union(*of_second)
    assert not set.union(*of_first) & set.union(*({*share.batch.tolist()} for share in first))


def test_it_has_what_users_ask_of_a_loader() -> None:
    """Its length, the data set, the size of the global batch."""
    loader = shuffled(drop_last=True)
    sharded = ShardedLoader(loader, SPLIT, rank=1, num_ranks=2)
    assert len(sharded) == len(list(sharded)) == 2
    assert sharded.dataset is loader.dataset
    assert sharded.sampler is loader.sampler
    assert sharded.batch_sampler is loader.batch_sampler
    assert (sharded.batch_size, sharded.drop_last, sharded.num_workers) == (8, True, 0)


def test_two_iterations_at_once_do_not_disturb_each_other() -> None:
    """Each has the batches of an epoch of its own."""
    rank0, rank1 = shared_out(lambda: DataLoader(range(21), batch_size=8))
    inner = [[list(rank0), list(rank1)] for _ in zip(rank0, rank1, strict=True)]
    assert [put_together(*each) for each in inner] == [as_lists(DataLoader(range(21), batch_size=8))] * 3
    outer = [(share, list(rank1)) for share in rank1]
    assert [share.batch.tolist() for share, _ in outer] == [share.batch.tolist() for share in outer[0][1]]


def test_pinned_batches_are_pinned_as_on_one_device() -> None:
    """Without a card torch warns of it, once for the loader; the share is whole."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*", category=UserWarning)
        (share, *_) = ShardedLoader(shuffled(pin_memory=True), SPLIT, rank=0, num_ranks=2)
    assert share.sizes == (1, 1)


def test_a_sample_of_many_parts_is_collated_as_always() -> None:
    """Dicts and pairs: what torch's own function makes of them."""
    data = [({"x": torch.full((2,), float(n)), "name": str(n)}, n) for n in range(8)]
    share = next(iter(ShardedLoader(DataLoader(data, batch_size=8), SPLIT, rank=0, num_ranks=2)))
    expected = default_collate([data[0], data[4]])
    assert torch.equal(share.batch[0]["x"], expected[0]["x"])
    assert share.batch[0]["name"] == ["0", "4"]
    assert share.batch[1].tolist() == [0, 4]


def test_what_ranks_must_agree_on_is_said_in_words() -> None:
    """Alike where they are started alike; and which it is where they are not."""
    (first, second), other = shared_out(shuffled), shared_out(partial(shuffled, 22, seed=6), seed=1)[0]
    assert first.facts() == second.facts()
    assert first.facts()["samples in the data set"] == "21"
    unlike = {name for name, value in other.facts().items() if value != first.facts()[name]}
    assert unlike == {"samples in the data set", "seed", "state of the samplers"}
    next(iter(first))
    assert first.facts()["epoch and step"] == "0 and 1"


def test_a_generator_that_only_seeds_workers_may_differ() -> None:
    """Where samples are taken in order, or a sampler has a generator of its own."""
    first, second = (
        ShardedLoader(DataLoader(range(8), batch_size=8, generator=seeded(seed)), SPLIT, rank=0, num_ranks=2)
        for seed in (1, 2)
    )
    assert first.facts() == second.facts()


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Three channels, and a height of their own."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 8, 8 + index % 3), float(index)), index


def listed(samples: list[tuple[torch.Tensor, int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """As detection has it: a list of images, and a tensor of labels."""
    return [image for image, _ in samples], torch.tensor([label for _, label in samples])


@pytest.mark.parametrize("shards", [(1, 2, 2), (1, 3, 4), (2, 0, 3), (3, 3, 3)])
def test_listed_images_are_a_ranks_own_whatever_their_number(shards: tuple[int, ...]) -> None:
    """A single image, or as many as they have channels, is no batch of channels."""
    split = BatchSplit(global_batch_size=3 * sum(shards), accumulation_steps=3, shard_sizes=shards)
    for rank in range(3):
        loader = DataLoader(Images(), batch_size=split.global_batch_size, collate_fn=listed)
        for share in ShardedLoader(loader, split, rank=rank, num_ranks=3):
            for micro, size in zip(cut_share(share, split, None), share.sizes, strict=True):
                images, labels = micro.batch
                assert len(images) == len(labels) == max(size, 1)
                assert [int(image[0, 0, 0]) for image in images] == labels.tolist()
