"""BatchNorm of several devices at once, each with its own thread in forward and backward, in order."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from splittune.cards import module_of
from splittune.parallel import BalancedDataParallel, accumulate
from tests.parallel.models import assert_same
from tests.parallel.normed import NORMS, images, make, one_device, state_after
from tests.standin import devices

pytestmark = pytest.mark.standin

HOME = torch.device("standin", 0)
standin = module_of(HOME) if devices.is_registered() else None


def wrapped(model: nn.Module, shards: tuple[int, ...]) -> BalancedDataParallel:
    names = [f"standin:{index}" for index in range(len(shards))]
    return BalancedDataParallel(module=model, shard_sizes=shards, device_ids=names, sync_batch_norm=True)


def on_the_host(state):
    return {name: tensor.cpu() for name, tensor in state.items()}


def step_of(wrapper, batch, sizes):
    parts = accumulate(wrapper, batch.requires_grad_().split(sizes))
    return on_the_host(state_after(wrapper.module, batch, ((wrapper, part) for part in parts)))


@pytest.mark.parametrize("shards", [(5, 3), (0, 7, 1), (2, 3, 2, 1)])
@pytest.mark.parametrize("name", sorted(NORMS))
def test_a_step_is_that_of_one_device_and_in_order(name, shards):
    """Nothing is read before it was written, or reused while it is read, in either direction."""
    model, batch, sizes = make(name), images(13), [8, 5]
    expected = one_device(copy.deepcopy(model), batch, sizes)
    wrapper, batch = wrapped(model.to(HOME), shards), batch.detach().to(HOME)
    with devices.order_checked() as reports:
        got = step_of(wrapper, batch, sizes)
    assert reports == []
    assert_same(got, expected, 1e-12)


# torch's, of a node whose gradients come from another device: it compares the numbers of the two devices' streams
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_on_streams_of_the_callers_own():
    """The replicas' threads are given the caller's streams, and the exchange runs on them too."""
    model, batch = make("two in a row"), images(8)
    expected = one_device(copy.deepcopy(model), batch, [8])
    wrapper, batch = wrapped(model.to(HOME), (2, 3, 3)), batch.detach().to(HOME)
    own = [standin.Stream(torch.device("standin", index)) for index in range(3)]
    with devices.order_checked() as reports, ExitStack() as streams:
        for stream in own:
            stream.wait_stream(standin.current_stream(stream.device))
            streams.enter_context(standin.stream(stream))
        got = step_of(wrapper, batch, [8])
    assert reports == []
    assert_same(got, expected, 1e-12)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_device_that_is_behind_changes_nothing(slow):
    """The others wait for its statistics on their streams."""
    model, batch = make("called twice"), images(9)
    expected = one_device(copy.deepcopy(model), batch, [9])
    wrapper, batch = wrapped(model.to(HOME), (2, 3, 4)), batch.detach().to(HOME)
    devices.set_delay(slow, 1e-3)
    try:
        got = step_of(wrapper, batch, [9])
    finally:
        devices.set_delay(slow, 0)
    assert_same(got, expected, 1e-12)
