"""The loader of micro-batches that trainers iterate: what it yields, what each counts, and how many there are."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from splittune import BatchSplit, ConfigError
from splittune.integrations.steps import MicroBatchLoader
from splittune.ranks.loader import ShardedLoader
from tests.ranks.cases import config_of


def loader_of(num_samples: int, batch_size: int, *, drop_last: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=batch_size, drop_last=drop_last)


@given(data=st.data())
def test_every_sample_is_yielded_and_counts_as_on_one_device(data: st.DataObject) -> None:
    """For any split, batch and number of ranks: each sample on one rank, weights that sum to ranks, steps that end."""
    num_ranks = data.draw(st.integers(1, 3))
    batch = data.draw(st.integers(1, 12))
    steps = data.draw(st.integers(1, batch))
    largest = -(-batch // steps)
    cuts = sorted(data.draw(st.lists(st.integers(0, largest), min_size=num_ranks - 1, max_size=num_ranks - 1)))
    shares = tuple(b - a for a, b in zip([0, *cuts], [*cuts, largest], strict=True))
    split = BatchSplit(global_batch_size=batch, accumulation_steps=steps, shard_sizes=shares)
    num_samples, drop_last = data.draw(st.integers(1, 30)), data.draw(st.booleans())
    config = config_of(num_ranks, split=split)
    seen: list[int] = []
    lengths, ends, weights = set(), set(), 0.0
    for rank in range(num_ranks):
        plain = loader_of(num_samples, batch, drop_last=drop_last)
        loader = MicroBatchLoader(config, ShardedLoader(plain, split, rank=rank, num_ranks=num_ranks))
        steps_of_rank = []
        for micro in loader:
            step = loader.next_step()
            steps_of_rank.append(step)
            seen += micro[0].tolist() if step.weight else []
        assert len(steps_of_rank) == len(loader)
        lengths.add(len(loader))
        ends.add(tuple(step.is_last for step in steps_of_rank))
        weights += sum(step.weight for step in steps_of_rank)
    trained = num_samples // batch * batch if drop_last else num_samples
    assert sorted(seen) == list(range(trained))
    assert len(lengths) == len(ends) == 1
    assert weights == pytest.approx(num_ranks * sum(ends.pop()))


def test_batches_may_be_taken_ahead() -> None:
    """Steps come in the order of training, however many batches were taken before."""
    config = config_of(1, "dp", split=BatchSplit(global_batch_size=4, accumulation_steps=2, shard_sizes=(2,)))
    loader = MicroBatchLoader(config, loader_of(6, 4))
    taken = list(loader)
    assert [len(batch[0]) for batch in taken] == [2, 2, 2]
    assert [step.weight for step in loader.upcoming] == [0.5, 0.5, 1.0]
    assert [loader.next_step().is_last for _ in taken] == [False, True, True]
    with pytest.raises(ConfigError, match="the loader did not give"):
        loader.next_step()


def test_a_new_epoch_forgets_what_was_taken() -> None:
    """An epoch that was given up leaves no step behind."""
    config = config_of(1, "dp", split=BatchSplit(global_batch_size=4, accumulation_steps=2, shard_sizes=(2,)))
    loader = MicroBatchLoader(config, loader_of(8, 4))
    next(iter(loader))
    next(iter(loader))
    assert len(loader.upcoming) == 1


def test_a_short_batch_before_the_last_is_refused() -> None:
    """Trainers step their optimizer every so many micro-batches."""
    split = BatchSplit(global_batch_size=4, accumulation_steps=2, shard_sizes=(2,))

    class Varying(BatchSampler):
        def __iter__(self) -> Any:
            yield from ([0, 1], [2, 3, 4, 5])

    data = TensorDataset(torch.arange(6))
    plain = DataLoader(data, batch_sampler=Varying(range(6), 4, drop_last=False))
    loader = MicroBatchLoader(config_of(1, "dp", split=split), plain)
    with pytest.raises(ConfigError, match=r"fewer than 2 micro-batches came before the epoch's last"):
        list(loader)


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("lightning", "pytorch_lightning", "lightning"), ("transformers", "transformers", "transformers")],
)
def test_a_tool_that_is_not_installed_is_said(
    module: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command that installs it; splittune itself needs none of them."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"splittune.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"not installed.*pip install 'splittune\[{extra}\]'"):
        importlib.import_module(f"splittune.integrations.{module}")


def test_splittune_imports_no_trainer() -> None:
    """They take seconds to import, and most people have one of them at most."""
    code = "import sys, splittune.exports as _; print(sorted({'pytorch_lightning', 'transformers'} & {*sys.modules}))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(6))


def test_a_length_that_nobody_knows_is_none() -> None:
    """As of the loader itself: TypeError, which trainers take for unknown."""
    config = config_of(1, "dp", split=BatchSplit(global_batch_size=4, accumulation_steps=2, shard_sizes=(2,)))
    loader = MicroBatchLoader(config, DataLoader(Stream(), batch_size=4))
    with pytest.raises(TypeError):
        len(loader)
    assert len(list(loader)) == 3


def test_trainers_reach_the_loader_behind_but_not_its_state() -> None:
    """Its data set, say; where it is would be ahead of what was trained."""
    config = config_of(1, "dp", split=BatchSplit(global_batch_size=4, accumulation_steps=2, shard_sizes=(2,)))
    sharded = ShardedLoader(loader_of(8, 4), config.split, rank=0, num_ranks=1)
    loader = MicroBatchLoader(config, sharded)
    assert loader.dataset is sharded.dataset
    assert loader.num_workers == 0
    assert not hasattr(loader, "state_dict")
    loader.set_epoch(3)
    assert sharded.state_dict()["epoch"] == 3
