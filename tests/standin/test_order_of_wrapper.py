"""The wrapper's engines under the check of order: nothing is read before it was written, or reused while it is read."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from splittune.cards import module_of
from splittune.parallel import BalancedDataParallel
from tests.parallel.models import MODELS, assert_same, gradients, loss_of, mlp, train, vectors, whole_batch
from tests.standin import devices

pytestmark = pytest.mark.standin

HOME = torch.device("standin", 0)
standin = module_of(HOME) if devices.is_registered() else None


def wrapped(model: nn.Module, *shard_sizes: int, **options) -> BalancedDataParallel:
    names = [f"standin:{index}" for index in range(len(shard_sizes))]
    return BalancedDataParallel(module=model, shard_sizes=shard_sizes, device_ids=names, **options)


@pytest.mark.parametrize("shards", [(5, 3), (0, 4, 4), (2, 3, 2, 1)])
@pytest.mark.parametrize("engine", ["window", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_windows_are_in_order(name, engine, shards):
    """Windows of several micro-batches, optimizer steps between them, on the devices' default streams."""
    torch.manual_seed(0)
    build, draw_inputs = MODELS[name]
    model, batch = build().to(HOME), draw_inputs(16).to(HOME)
    expected = whole_batch(model, batch)
    wrapper = wrapped(model, *shards, engine=engine)
    with devices.order_checked() as reports:
        assert_same(train(wrapper, batch, [8, 6, 2]), expected, tolerance=5e-5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-3)
        train(wrapper, batch, [8, 8])
        with wrapper.no_sync():
            loss_of(wrapper(batch[:8])).backward()
        loss_of(wrapper(batch[8:])).backward()
        wrapper.zero_grad()
    assert reports == []


# torch's, of a node whose gradients come from another device: it compares the numbers of the two devices' streams
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("engine", ["window", "torch"])
@pytest.mark.parametrize("home", ["cpu", "standin:0", "standin:2"])
def test_a_callers_own_streams_are_in_order(engine, home):
    """Called, differentiated and stepped on streams of the caller's own; batches of any device get their gradients."""
    torch.manual_seed(0)
    model, batch = mlp().to(HOME), vectors(16).to(home).requires_grad_()
    # of a copy: autograd's thread may free a graph late, and with it what belongs to the streams before
    expected = whole_batch(copy.deepcopy(model), batch.detach().to(HOME))
    wrapper = wrapped(model, 2, 3, 2, 1, engine=engine)
    sides = [standin.Stream(torch.device("standin", index)) for index in range(4)]
    with devices.order_checked() as reports:
        for side in sides:
            side.wait_stream(standin.current_stream(side.device))
        before = [standin.current_stream(side.device) for side in sides]
        try:
            for side in sides:
                standin.set_stream(side)
            for _ in range(3):
                got = train(wrapper, batch, [8, 8])
            got = {name: None if grad is None else grad.cpu() for name, grad in got.items()}
            assert batch.grad.cpu().isfinite().all()
        finally:
            for stream in before:
                standin.set_stream(stream)
        for side in sides:
            side.synchronize()
        model.zero_grad()
    assert reports == []
    assert_same(got, {name: grad.cpu() for name, grad in expected.items()}, tolerance=5e-5)


def test_statistics_of_replicas_are_in_order():
    """BatchNorm's buffers travel out and home, also where the first device has no samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), mlp()).to(HOME)
    wrapper = wrapped(model, 0, 4, 4)
    batch = vectors(16).to(HOME)
    with devices.order_checked() as reports:
        for _ in range(2):
            train(wrapper, batch, [8, 8])
        model.eval()
        with torch.no_grad():
            wrapper(batch[:8])
    assert reports == []
    assert all(grad is None or grad.isfinite().all() for grad in gradients(model).values())
