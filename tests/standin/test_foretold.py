"""A search on devices that stand in for cards has beside it what a plan for such cards foretells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splittune import BatchSplit, TrainingTask, autotune
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import driver_names
from splittune.profiling import pacing
from splittune.runners.in_process import InProcessRunner
from splittune.units import GIB, MIB
from tests.standin import devices

pytestmark = pytest.mark.standin

CARDS = ["standin:0", "standin:1"]


@pytest.fixture
def known_cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """They pass for T400s of which others hold all but 64 MiB, and have nothing to warm up."""
    monkeypatch.setattr(pacing, "FIRST_WARM_UP_S", 0.05)
    monkeypatch.setattr(pacing, "WARM_UP_LIMIT_S", 0.05)
    monkeypatch.setitem(driver_names._BY_DRIVER, "Stand-in", "T400-4GB")
    for index in range(len(CARDS)):
        devices.set_capacity(index, 4 * GIB, 4 * GIB - 64 * MIB)
    yield
    for index in range(len(CARDS)):
        devices.set_capacity(index, devices.CAPACITY_BYTES, devices.OUTSIDE_BYTES)


def job() -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 4)).to(CARDS[0])
    return model, [(torch.randn(256, 64), torch.randint(4, (256,)))]


def searched(**parts: Any) -> Any:
    model, loader = job()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = autotune(model, loader, devices=CARDS, max_trials=4, min_headroom_bytes=MIB, progress=False, **parts)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert str(tensor.device) == CARDS[0]
    return result


@pytest.mark.parametrize("shards", [(128, 128), (64, 192), (48, 80)])
def test_peaks_are_foretold_to_the_byte(known_cards: None, shards: tuple[int, ...]) -> None:
    """What live tensors take at the peak in forward and backward, on each card."""
    split = BatchSplit(global_batch_size=256, accumulation_steps=256 // sum(shards), shard_sizes=shards)
    runner = InProcessRunner(TrainingTask(*job()), resolve_hardware(CARDS))
    try:
        cards = runner.open(["output"]).cards
        measured = runner.profiler(min_headroom_bytes=(0, 0), loss_placement="output").measure(split)
        foretold = runner.foretell(cards.devices, measured.memory, [(split, "output")], budget_s=60.0)
    finally:
        runner.close()
    (planned,) = foretold.planned
    assert [each.micro_step_peak_bytes for each in planned.memory] == [
        each.micro_step_peak_bytes for each in measured.memory
    ]
    assert [each.outside_bytes for each in planned.memory] == [each.outside_bytes for each in measured.memory]


def test_a_search_is_foretold_beside_what_it_measured(known_cards: None, tmp_path: Path) -> None:
    """Best and baseline, in the tables and in words; the model stays where and what it is."""
    result = searched()
    assert result.foretold is not None
    assert result.foretold.why == ""
    for measured in (result.best, result.baseline):
        planned = result.foretold.of(measured)
        assert planned is not None
        assert planned.step_time_s > 0
        assert [each.device for each in planned.memory] == [each.device for each in measured.memory]
    result.save(tmp_path)
    planned_peaks = pd.read_csv(tmp_path / "devices.csv")["planned_peak_allocated_bytes"]
    assert planned_peaks.notna().sum() >= 2 * len(CARDS)
    assert "The plan for these cards foretold (modelled)" in result.explanation


def test_a_step_that_reads_values_costs_the_plan_and_not_the_result(known_cards: None) -> None:
    """The line is named, and the split is there."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = functional.cross_entropy(model(batch[0]), batch[1].to(model.output_device))
        return loss if loss.item() < 100 else loss * 0

    result = searched(step_fn=step)
    assert result.best.throughput > 0
    assert result.foretold.planned == ()
    assert "needs values: test_foretold.py" in result.foretold.why


def test_a_step_that_names_its_card_is_foretold(known_cards: None) -> None:
    """Batches that it sends there itself stay on the host meanwhile."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch[0].to(CARDS[0]), batch[1].to(device=torch.device(CARDS[0]))
        weights = torch.ones(4, device="standin")
        return functional.cross_entropy(model(inputs), targets.standin(), weight=weights)

    result = searched(step_fn=step)
    assert result.foretold.why == ""
    assert result.foretold.of(result.best).step_time_s > 0


def test_a_step_with_an_autocast_of_its_own_is_not_foretold_in_float32(known_cards: None) -> None:
    """The host's copy would not heed it; what to do is said."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("standin", dtype=torch.bfloat16):
            return functional.cross_entropy(model(batch[0]), batch[1].to(CARDS[0]))

    why = searched(step_fn=step).foretold.why
    assert why == "the step turns autocast on for standin itself: give autocast_dtype= instead, and it is foretold"


def test_cards_that_nobody_published_figures_of_are_named(known_cards: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are called."""
    monkeypatch.delitem(driver_names._BY_DRIVER, "Stand-in")
    assert searched().foretold.why == "GPU 0 is a Stand-in of 4.00 GiB, which is not in the catalog of GPUs"
