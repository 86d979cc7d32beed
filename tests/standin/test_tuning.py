"""The whole product on devices that stand in for cards: a search, what it emits, and what it leaves behind."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from splittune import BatchSplit, autotune, plan
from splittune.fakes import FakeTensorMode
from splittune.hardware import CudaHardware, resolve_hardware
from splittune.profiling import pacing
from splittune.profiling.measurement import Outcome
from splittune.runners.fake_copy import without_values
from splittune.training import TrainingTask
from splittune.units import MIB
from tests.standin import devices

pytestmark = pytest.mark.standin

CARDS = ["standin:0", "standin:1", "standin:2"]


@pytest.fixture
def short_warm_ups(monkeypatch):
    """There is nothing to warm up: no kernels are chosen, and no clock rises."""
    monkeypatch.setattr(pacing, "FIRST_WARM_UP_S", 0.05)
    monkeypatch.setattr(pacing, "WARM_UP_LIMIT_S", 0.05)


@pytest.fixture
def small_cards():
    """Some 40 MiB for this process on each, 48 on the first."""
    for index in range(len(CARDS)):
        devices.set_capacity(index, 100 * MIB, (52 if index == 0 else 60) * MIB)
    yield
    for index in range(len(CARDS)):
        devices.set_capacity(index, devices.CAPACITY_BYTES, devices.OUTSIDE_BYTES)


def test_a_search_finds_a_split_that_fits_and_leaves_everything_as_found(short_warm_ups, small_cards):
    """Too large a share fails on its card alone; what is emitted kept its headroom, and trains exactly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 4))
    batch = torch.randn(512, 64), torch.randint(4, (512,))
    found, states = (
        copy.deepcopy(model),
        [torch.get_rng_state(), *torch.get_device_module("standin").get_rng_state_all()],
    )
    standin = torch.get_device_module("standin")
    gc.collect()
    standin.empty_cache()  # of what other tests have left
    reserved = [standin.memory_reserved(card) for card in CARDS]
    result = autotune(model, [batch], devices=CARDS, max_trials=6, min_headroom_bytes=2 * MIB, progress=False)
    assert [standin.memory_reserved(card) for card in CARDS] == reserved
    assert result.best.outcome is Outcome.OK
    assert min(memory.headroom_bytes for memory in result.best.memory) >= 2 * MIB
    outcomes = {trial.measurement.outcome for trial in result.trials}
    assert outcomes <= {Outcome.OK, Outcome.NO_HEADROOM, Outcome.OUT_OF_MEMORY}
    assert len(result.best.split.shard_sizes) == 3
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name])
        assert tensor.device.type == "cpu"
    after = [torch.get_rng_state(), *torch.get_device_module("standin").get_rng_state_all()]
    assert all(torch.equal(one, other) for one, other in zip(states, after, strict=True))

    wrapped = result.config.wrap(model)
    for micro in result.config.micro_batches(batch, wrapped):
        inputs, targets = micro.batch
        loss = nn.functional.cross_entropy(wrapped(inputs), targets.to(wrapped.output_device)) * micro.weight
        loss.backward()
    nn.functional.cross_entropy(found(batch[0]), batch[1]).backward()
    for mine, wanted in zip(model.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), wanted.grad, rtol=1e-4, atol=1e-6)


def test_all_devices_are_resolved():
    """Without devices the hardware is every device there is; a number means one of them."""
    hardware = resolve_hardware(None)
    assert isinstance(hardware, CudaHardware)
    assert [device.torch_device for device in hardware.devices] == [f"standin:{index}" for index in range(4)]
    assert [device.torch_device for device in resolve_hardware("1,0").devices] == ["standin:1", "standin:0"]
    assert hardware.processes() is None
    assert hardware.memory()[0].outside_bytes == devices.OUTSIDE_BYTES


def test_a_plan_of_a_model_on_a_card_leaves_it_there():
    """It is copied without values, batch and optimizer as well, and the plan is that of the same job on the host."""
    standin, split = (
        torch.get_device_module("standin"),
        BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(4, 4)),
    )
    plans = []
    for place in ("cpu", CARDS[0]):
        model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 2)).to(place)
        batch = torch.randn(8, 8).to(place), torch.randint(2, (8,)).to(place)
        optimizer = torch.optim.Adam(model.parameters())
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        held = [*model.state_dict().values(), *optimizer.state[model[0].weight].values()]
        before, states = [tensor.clone() for tensor in held], standin.get_rng_state_all()
        task = TrainingTask(model, [batch], optimizer=optimizer)
        plans.append(plan(task, "2xT400-4GB", splits=[split], progress=False))
        assert plans[-1].needs_values is None
        assert all(str(tensor.device).startswith(place) for tensor in model.parameters())
        assert all(torch.equal(*each) for each in zip(before, held, strict=True))
        assert all(torch.equal(*each) for each in zip(states, standin.get_rng_state_all(), strict=True))
    assert plans[0] == plans[1]
    assert plans[1].measurements[0].outcome is Outcome.OK


def test_a_copy_without_values_asks_nothing_of_the_card():
    """Not a byte is allocated there, not even for a moment."""
    standin, card = torch.get_device_module("standin"), CARDS[0]
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 2)).to(card)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 8).to(card)).sum().backward()
    optimizer.step()
    held = standin.memory_stats(card)
    standin.reset_peak_memory_stats(card)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied = without_values(TrainingTask(model, [], optimizer=optimizer), mode)
    assert {tensor.device.type for tensor in copied.model.state_dict().values()} == {"cpu"}
    assert copied.optimizer.state[copied.model[0].weight]["exp_avg"].shape == (64, 8)
    after = standin.memory_stats(card)
    for figure in ("allocated_bytes.all.current", "reserved_bytes.all.current"):
        assert after[figure] == held[figure]
    assert after["allocated_bytes.all.peak"] == held["allocated_bytes.all.current"]


def test_a_planned_config_trains_on_real_cards():
    """Planned on virtual cards, it is wrapped over devices that are there, with a warning, and trains exactly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    batch = torch.randn(12, 8), torch.randint(4, (12,))
    alone = copy.deepcopy(model)
    (search,) = plan(TrainingTask(model, [batch]), "3xRTX3090", max_trials=3, progress=False).searches
    with pytest.warns(UserWarning, match="planned on virtual devices"):
        wrapped = search.result.config.wrap(model, devices=CARDS)
    for micro in search.result.config.micro_batches(batch, wrapped):
        inputs, targets = micro.batch
        loss = nn.functional.cross_entropy(wrapped(inputs), targets.to(wrapped.output_device)) * micro.weight
        loss.backward()
    nn.functional.cross_entropy(alone(batch[0]), batch[1]).backward()
    for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), wanted.grad, rtol=1e-4, atol=1e-6)
