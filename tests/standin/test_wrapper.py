"""BalancedDataParallel on two to four devices that are not the CPU: threads of autograd's, device guards, streams."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from splittune.parallel import BalancedDataParallel
from tests.parallel.models import MODELS, Call, assert_same, mlp, train, vectors, whole_batch

pytestmark = pytest.mark.standin


@pytest.mark.parametrize("shards", [(5, 3), (0, 4, 4), (2, 3, 2, 1), (3, 0, 0, 5)])
@pytest.mark.parametrize("engine", ["window", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_one_devices(name, engine, shards):
    """Whatever the model, the engine and the shares, with short micro-batches among them."""
    torch.manual_seed(0)
    build, draw_inputs = MODELS[name]
    model, batch = build().to("standin:0"), draw_inputs(16).to("standin:0")
    expected = whole_batch(model, batch)
    devices = [f"standin:{index}" for index in range(len(shards))]
    wrapped = BalancedDataParallel(module=model, shard_sizes=shards, device_ids=devices, engine=engine)
    for _ in range(2):
        assert_same(train(wrapped, batch, [8, 6, 2]), expected, tolerance=5e-5)


def test_backward_has_a_thread_for_each_device():
    """Every replica's backward runs in autograd's thread of its device, and no two devices share one."""
    seen: dict[torch.device, set[int]] = {}

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx, grad: Tensor) -> Tensor:
            seen.setdefault(grad.device, set()).add(threading.get_ident())
            assert torch.accelerator.current_device_index() == grad.device.index
            return grad

    def forward(module: Call, x: Tensor) -> Tensor:
        return Watched.apply(x * module.scale)

    devices = [f"standin:{index}" for index in range(4)]
    wrapped = BalancedDataParallel(module=Call(forward).to(devices[0]), shard_sizes=(1, 1, 1, 1), device_ids=devices)
    for _ in range(2):
        wrapped(torch.ones(4, device=devices[0])).sum().backward()
    assert set(seen) == {torch.device(device) for device in devices}
    threads = [thread for own in seen.values() for thread in own]
    assert len(threads) == len(set(threads)) == 4
    assert threading.get_ident() not in threads


def test_statistics_advance_without_gpu0():
    """With gpu0_bsz=0 BatchNorm's running statistics are those of the first device that had samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), mlp()).to("standin:0")
    batch = vectors(8).to("standin:0")
    alone = nn.BatchNorm1d(6).to("standin:0")
    alone(batch[:4])
    BalancedDataParallel(0, model, ["standin:0", "standin:1", "standin:2"])(batch)
    torch.testing.assert_close(model[0].state_dict(), alone.state_dict())
