"""Micro-batches of any size from a few of the loader's batches, and loaders that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from splittune.errors import ConfigError
from splittune.training import SampleBatch, read_batches
from splittune.training.batches import NUM_BATCHES_READ


class Pair(NamedTuple):
    ids: Tensor
    mask: Tensor


def tokens(batch_size: int, length: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + batch_size).unsqueeze(1).expand(batch_size, length)


def nested(num_samples: int) -> Any:
    """A batch of samples 0 to `num_samples`, in which every leaf says which sample it belongs to."""
    row = torch.arange(num_samples)
    return {
        "pair": Pair(row.unsqueeze(1).repeat(1, 3), row > 0),
        "names": [f"sample {index}" for index in range(num_samples)],
        "rest": [row.float(), (row.short(), torch.tensor(0.5))],
        "task": "classify",
    }


# the size


@given(batch_size=st.integers(2, 9), num_samples=st.integers(1, 40))
def test_a_micro_batch_of_any_size_is_made(batch_size: int, num_samples: int) -> None:
    """Any number of samples is made by starting over again, every leaf alike, nested as the loader's batch is."""
    made = read_batches([nested(batch_size)]).micro_batch(num_samples)
    expected = [index % batch_size for index in range(num_samples)]
    assert isinstance(made["pair"], Pair)
    assert made["pair"].ids[:, 2].tolist() == expected
    assert made["pair"].mask.tolist() == [index > 0 for index in expected]
    assert made["names"] == [f"sample {index}" for index in expected]
    assert made["rest"][0].tolist() == expected
    assert made["rest"][1][0].dtype == torch.int16
    assert made["rest"][1][1].item() == 0.5
    assert made["task"] == "classify"


def test_a_smaller_micro_batch_is_a_batch_of_its_own() -> None:
    """One of the loader's own size is the loader's; virtual cards count what a smaller one holds, not what it is of."""
    batch = torch.arange(12.0).reshape(6, 2)
    samples = read_batches([batch])
    assert samples.micro_batch(6) is batch
    made = samples.micro_batch(4)
    assert made.tolist() == batch[:4].tolist()
    assert made.untyped_storage().nbytes() == made.nbytes


# which batch


def test_the_most_expensive_batch_is_tiled() -> None:
    """Of the batches read, trials run on the one with most elements a sample, so that a long sequence is not missed."""
    samples = read_batches([tokens(8, 5), tokens(8, 30, first=100), tokens(8, 7)])
    assert (samples.batch_size, samples.loader_batch_size) == (8, 8)
    assert samples.micro_batch(20).shape == (20, 30)
    assert samples.micro_batch(2)[:, 0].tolist() == [100, 101]


def test_a_short_batch_of_long_samples_is_the_most_expensive() -> None:
    """The last batch, with fewer samples, is tiled if its samples are the longest; the loader's size is the largest."""
    samples = read_batches([tokens(8, 5), tokens(3, 9)])
    assert (samples.batch_size, samples.loader_batch_size) == (3, 8)
    assert samples.micro_batch(8).shape == (8, 9)


def test_of_equally_expensive_batches_the_larger_is_kept() -> None:
    """Where all samples cost the same, the largest batch is kept, and the first of its size."""
    samples = read_batches([tokens(3, 5), tokens(8, 5, first=50), tokens(8, 5, first=90)])
    assert samples.batch_size == 8
    assert samples.batch[0, 0] == 50


def test_cost_is_counted_over_all_tensors() -> None:
    """Inputs and targets count together: a batch of long targets is expensive as well."""
    samples = read_batches([(tokens(4, 8), tokens(4, 1)), (tokens(4, 6), tokens(4, 9))])
    assert samples.batch[1].shape == (4, 9)


def test_only_a_few_batches_are_read() -> None:
    """An endless loader is read for a moment only."""
    given_out = []

    class Endless(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            while True:
                given_out.append(1)
                yield torch.zeros(2)

    read_batches(DataLoader(Endless(), batch_size=4))
    assert len(given_out) == 4 * NUM_BATCHES_READ


# any loader that can be iterated over again


class ByIndex:
    """The old protocol of iteration: an index from 0 until IndexError."""

    def __getitem__(self, index: int) -> Tensor:
        if index == 2:
            raise IndexError
        return torch.zeros(5, 1)


@pytest.mark.parametrize(
    "loader",
    [
        [torch.zeros(5, 1)],
        (torch.zeros(5, 1), torch.zeros(2, 1)),
        DataLoader(TensorDataset(torch.zeros(12, 1)), batch_size=5),
        ByIndex(),
    ],
    ids=["list", "tuple", "DataLoader", "by index"],
)
def test_whatever_can_be_iterated_over_again_is_a_loader(loader: Any) -> None:
    """A DataLoader, a list of batches or anything of the kind gives its batches, and its batch size."""
    samples = read_batches(loader)
    assert isinstance(samples, SampleBatch)
    assert samples.loader_batch_size == 5


def test_a_loader_is_only_iterated() -> None:
    """Reading leaves a list of batches as it was, to the very tensors."""
    batches = [torch.randn(3, 2), torch.randn(3, 2)]
    before = [(batch, batch.clone()) for batch in batches]
    read_batches(batches).micro_batch(7).zero_()
    assert all(now is then and torch.equal(now, values) for now, (then, values) in zip(batches, before, strict=True))


# loaders that cannot be used


@pytest.mark.parametrize(
    ("loader", "kind"),
    [(iter([torch.zeros(2)]), "list_iterator"), ((batch for batch in [torch.zeros(2)]), "generator")],
)
def test_an_iterator_is_refused_and_not_consumed(loader: Any, kind: str) -> None:
    """What can be read once only is refused before a batch is taken away from training."""
    with pytest.raises(ConfigError, match=rf"{kind}, an iterator.*Pass that instead"):
        read_batches(loader)
    assert len(list(loader)) == 1


def test_the_iterator_of_a_dataloader_is_refused() -> None:
    """The slip of passing iter(loader) is refused as well."""
    iterator = iter(DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2))
    with pytest.raises(ConfigError, match="Expected what can be iterated over again"):
        read_batches(iterator)
    assert len(list(iterator)) == 2


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        ([], r"the loader is empty: expected at least one batch.*drop_last"),
        (DataLoader(TensorDataset(torch.zeros(3, 1)), batch_size=4, drop_last=True), r"the loader is empty"),
        ([torch.zeros(0, 3)], r"batch 0 of the loader has 0 samples"),
        ([torch.zeros(2, 3), torch.zeros(0, 3)], r"batch 1 of the loader has 0 samples"),
        ([{"names": ["a", "b"]}], r"batch 0 of the loader: a batch with no tensor.*as_tensor"),
        ([torch.zeros(2), [3, 4]], r"batch 1 of the loader: a batch with no tensor"),
        ([torch.tensor(3.0)], r"batch 0 of the loader: .*no dimension 0.*shape \(\)"),
        ([(torch.zeros(4, 2), torch.zeros(3))], r"batch 0 of the loader: .*\[0\] has 4, \[1\] has 3"),
        (3, r"loader is a int, which cannot be iterated"),
        (None, r"loader is a NoneType, which cannot be iterated"),
    ],
    ids=[
        "empty",
        "drop_last",
        "no sample",
        "no sample later",
        "no tensor",
        "no tensor later",
        "a number",
        "targets differ",
        "int",
        "none",
    ],
)
def test_a_loader_that_cannot_be_used_is_refused(loader: Any, match: str) -> None:
    """An empty loader, an empty batch, one without tensors or of different sizes: refused, by the batch's number."""
    with pytest.raises(ConfigError, match=match):
        read_batches(loader)


def test_the_errors_of_a_loader_pass_through() -> None:
    """What the user's own data set raises is not mistaken for a loader of the wrong kind."""

    class Broken(Dataset[Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            raise TypeError("a bug of the user's own")

    class BrokenLoader:
        def __iter__(self) -> Iterator[Tensor]:
            raise TypeError("a bug of the user's own")

    for loader in (DataLoader(Broken(), batch_size=2), BrokenLoader()):
        with pytest.raises(TypeError, match="a bug of the user's own"):
            read_batches(loader)


# samples in lists


def images(num_samples: int) -> tuple[list[Tensor]]:
    return ([torch.full((3, 4, 4), float(index)) for index in range(num_samples)],)


@pytest.mark.parametrize("sampled", [False, True])
def test_the_loaders_batch_size_tells_samples_from_channels(sampled: bool) -> None:
    """Lists of 16 images of 3 channels are batches of 16, a short one of 5 too; micro-batches are lists of images."""
    sampler: dict[str, Any] = {"batch_size": 16}
    if sampled:
        sampler = {"batch_sampler": BatchSampler(SequentialSampler(range(21)), batch_size=16, drop_last=False)}
    loader = DataLoader(range(21), collate_fn=lambda items: images(len(items)), **sampler)  # type: ignore[arg-type, var-annotated]
    samples = read_batches(loader)
    assert (samples.loader_batch_size, samples.are_listed) == (16, True)
    for num_samples in (3, 5, 16, 20):
        (made,) = samples.micro_batch(num_samples)
        assert [int(image[0, 0, 0]) for image in made] == [index % samples.batch_size for index in range(num_samples)]


def test_without_a_batch_size_tensors_alike_are_stacked() -> None:
    """A plain list of batches says nothing: two inputs of 5 samples are no batch of two."""
    left, right = torch.zeros(5, 8), torch.ones(5, 8)
    assert read_batches([([left, right],)]).loader_batch_size == 5


def test_a_repeated_batch_counts_its_items_again() -> None:
    """Twice the samples hold twice the tokens."""
    samples = read_batches([{"x": torch.zeros(4, 2), "num_items_in_batch": torch.tensor(40)}])
    assert samples.micro_batch(8)["num_items_in_batch"] == 80


def test_what_is_picked_out_of_a_pinned_batch_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the loader's own batches are; there is nothing to pin here, so torch's two calls are stood in for."""
    pinned: list[torch.Tensor] = []
    loader = [(torch.randn(4, 2), torch.randn(4, 1))]
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    samples = read_batches(loader)
    samples.micro_batch(6)
    assert not pinned
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: any(tensor is own for own in loader[0]))
    inputs, targets = samples.micro_batch(6)
    assert [id(tensor) for tensor in pinned] == [id(inputs), id(targets)]
