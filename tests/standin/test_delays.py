"""Devices that are slow: nobody waits for one who does not ask, and whoever asks finds it done."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from splittune.cards import module_of
from splittune.hardware import CudaHardware
from splittune.parallel import BalancedDataParallel
from splittune.split import BatchSplit
from tests.parallel.models import assert_same, mlp, train, vectors, whole_batch
from tests.standin import devices

pytestmark = pytest.mark.standin

CARDS = [torch.device("standin", index) for index in range(3)]
standin = module_of(CARDS[0]) if devices.is_registered() else None
LONG_CYCLES = 10**15  # nobody could wait for it


@pytest.fixture(autouse=True)
def _no_delay_afterwards():
    yield
    devices.forget_delays()


def test_the_host_runs_ahead_of_a_busy_device():
    """Work, copies to another device and its work are asked for at once; events tell that they are not done."""
    standin.set_device(1)
    standin._sleep(LONG_CYCLES)
    standin.set_device(0)
    x = torch.ones(8, device=CARDS[1]) + 1
    y = x.to(CARDS[2], non_blocking=True) * 3
    done = standin.current_stream(CARDS[2]).record_event()
    assert not done.query()
    assert not standin.current_stream(CARDS[1]).query()
    assert standin.current_stream(CARDS[0]).query()
    devices.forget_delays()
    assert standin.current_stream(CARDS[1]).query()
    assert y.sum().item() == 48


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("engine", ["window", "torch"])
def test_gradients_do_not_depend_on_which_device_is_slow(engine, slow):
    """Whichever is late, nothing is read before it is there, and outputs on the host have arrived."""
    torch.manual_seed(0)
    model, batch = mlp().to(CARDS[0]), vectors(12).to(CARDS[0])
    expected = whole_batch(copy.deepcopy(model), batch)
    wrapped = BalancedDataParallel(module=model, shard_sizes=(2, 1, 3), device_ids=CARDS, engine=engine)
    to_host = BalancedDataParallel(module=model, shard_sizes=(2, 1, 3), device_ids=CARDS, output_device="cpu")
    devices.set_delay(slow, 1e-3)
    with devices.order_checked() as reports:
        assert_same(train(wrapped, batch, [6, 6]), expected, tolerance=5e-5)
        output = to_host(batch[:6])
        assert output.isfinite().all()
        devices.set_delay(slow, 0)
    assert reports == []
    torch.testing.assert_close(output, model(batch[:6]).cpu())


def test_a_slow_device_is_seen_by_the_gauge():
    """What one device takes longer stands in its busy time, and in no other's."""
    hardware = CudaHardware(CARDS)
    split = BatchSplit.even(global_batch_size=9, accumulation_steps=1, num_devices=3)
    wrapped = hardware.wrap(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), split)
    devices.set_delay(1, 0.05)
    with hardware.metered():
        for _ in range(2):  # the first learns which parameter comes last
            before = hardware.busy_s()
            wrapped(torch.ones(9, 4)).sum().backward()
            after = hardware.busy_s()
        assert before is not None
        assert after is not None
        busy = [b - a for a, b in zip(before, after, strict=True)]
    assert busy[1] > 4 * 0.05
    assert busy[1] > max(busy[0], busy[2])
