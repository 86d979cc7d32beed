from __future__ import annotations

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution, IntDistribution

from splittune.search import suggest_split
from splittune.search.samplers.parameters import distributions_of, params_of, share_names, split_of
from splittune.split import BatchSplit, SplitSpace
from tests.search.spaces import spaces, undominated


@given(space=spaces())
def test_parameters_read_back_as_the_split_they_are_of(space: SplitSpace) -> None:
    """Of every split that can be the best the parameters are within their distributions, and give it back."""
    distributions = distributions_of(space)
    for split in undominated(space):
        params = params_of(space, split)
        assert params.keys() == distributions.keys()
        assert all(distributions[name].low <= value <= distributions[name].high for name, value in params.items())
        assert split_of(space, params) == split


@given(global_batch_size=st.integers(1, 100_000), num_devices=st.integers(1, 9), data=st.data())
def test_parameters_of_large_splits_read_back_too(
    global_batch_size: int, num_devices: int, data: st.DataObject
) -> None:
    """However large the batch, rounding shares to floats and back loses no sample, with shares of every card."""
    space = SplitSpace(global_batch_size=global_batch_size, num_devices=num_devices, shares="each")
    cuts = data.draw(
        st.lists(st.integers(0, global_batch_size), min_size=num_devices - 1, max_size=num_devices - 1).map(sorted)
    )
    shards = tuple(b - a for a, b in zip([0, *cuts], [*cuts, global_batch_size], strict=True))
    split = BatchSplit(global_batch_size=global_batch_size, accumulation_steps=1, shard_sizes=shards)
    assert split_of(space, params_of(space, split)) == split


@given(space=spaces(), data=st.data())
def test_any_values_are_a_legal_split(space: SplitSpace, data: st.DataObject) -> None:
    """Whatever a sampler draws within the distributions is a split of the space that can be the best."""
    params: dict[str, int | float] = {}
    for name, distribution in distributions_of(space).items():
        if isinstance(distribution, IntDistribution):
            params[name] = data.draw(st.integers(distribution.low, distribution.high))
        else:
            params[name] = data.draw(st.floats(0, 1))
    split = split_of(space, params)
    assert split in space
    assert split in undominated(space)
    assert split.accumulation_steps <= params["accumulation_steps"]


def test_the_parameters_are_steps_and_shares() -> None:
    """Steps go from 1 to the most that leave all their share, in logarithms; one card has no share to choose."""
    space = SplitSpace(global_batch_size=64, num_devices=4, min_shard_size=2)
    assert distributions_of(space) == {
        "accumulation_steps": IntDistribution(1, 8, log=True),
        "gpu0_share": FloatDistribution(0.0, 1.0),
    }
    each = SplitSpace(global_batch_size=64, num_devices=3, shares="each")
    assert share_names(each) == ("share_0", "share_1", "share_2")
    assert share_names(SplitSpace(global_batch_size=64, num_devices=1, shares="each")) == ()


def test_a_share_is_of_the_micro_batch() -> None:
    """The worked example: 4 of 64 samples are a share of 1 / 16."""
    space = SplitSpace(global_batch_size=64, num_devices=4)
    split = BatchSplit(global_batch_size=64, accumulation_steps=1, shard_sizes=(4, 20, 20, 20))
    assert params_of(space, split) == {"accumulation_steps": 1, "gpu0_share": 4 / 64}


@pytest.mark.parametrize("shares", ["gpu0", "each"])
def test_a_trial_of_ones_own_suggests_a_split(shares: str) -> None:
    """`suggest_split` asks an Optuna trial for the parameters and turns them into the split."""
    space = SplitSpace(global_batch_size=64, num_devices=3, shares=shares)  # type: ignore[arg-type]
    names = share_names(space)
    fixed = {"accumulation_steps": 5, **dict(zip(names, (0.2, 0.3, 0.5), strict=False))}
    trial = optuna.trial.FixedTrial(fixed)
    split = suggest_split(trial, space)  # type: ignore[arg-type]
    assert split == split_of(space, fixed)
    assert split.accumulation_steps == 5
    assert trial.params == fixed
