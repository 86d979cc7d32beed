"""Where the loss is computed, as a part of the search: its trials, its config, and training under it."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from splittune import SplitConfig, autotune
from splittune.errors import ConfigError
from splittune.hardware import resolve_hardware
from splittune.report import TuneResult, trials_table

# Many classes and little else: what GPU 0 gathers is most of what it holds.
CARDS = "1xT400-4GB:occupied=3775MiB,3xT400-4GB"
CLASSES = 20_000


def job() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    inputs, targets = torch.randn(64, 8), torch.randint(0, CLASSES, (64,))
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES)), [(inputs, targets)]


@pytest.fixture(scope="module")
def result() -> TuneResult:
    model, loader = job()
    return autotune(model, loader, devices=CARDS, max_trials=12, loss_placement="either", progress=False)


def test_both_placements_are_searched_and_told(result: TuneResult) -> None:
    """Each trial says where its loss was computed, in the table too, and trials are numbered through."""
    placements = [trial.measurement.loss_placement for trial in result.trials]
    assert set(placements) == {"output", "replica"}
    assert [trial.number for trial in result.trials] == list(range(len(result.trials)))
    assert trials_table(result.trials)["loss_placement"].tolist() == placements


def test_the_better_placement_wins_and_is_recorded(result: TuneResult) -> None:
    """Without the gathered outputs fewer accumulation steps fit: the config says that the loss is in the replicas."""
    assert result.baseline is not None
    assert result.baseline.loss_placement == "output"
    assert result.best.loss_placement == result.config.loss_placement == "replica"
    assert result.speedup is not None
    assert result.speedup > 1
    assert result.best in [trial.measurement for trial in result.trials if trial.kind == "confirm"]


def test_training_under_it_is_as_planned_and_exact(result: TuneResult, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A loaded config with the loss function trains within its plan, with the gradient of one device."""
    result.config.save(tmp_path / "split.json")
    config = SplitConfig.load(tmp_path / "split.json")
    model, [batch] = job()
    alone = copy.deepcopy(model)
    functional.cross_entropy(alone(batch[0]), batch[1]).backward()
    hardware = resolve_hardware(CARDS)
    with hardware.metered():
        wrapped = config.wrap(model, functional.cross_entropy, hardware=hardware)
        for micro in config.micro_batches(batch, wrapped):
            (wrapped(*micro.batch) * micro.weight).backward()
        peaks = [memory.peak_reserved_bytes for memory in hardware.memory()]
    assert all(peak <= plan for peak, plan in zip(peaks, config.planned_peak_reserved_bytes, strict=True))
    for ours, theirs in itertools.zip_longest(model.parameters(), alone.parameters()):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()


def test_wrapping_without_the_loss_warns(result: TuneResult) -> None:
    """Outputs gathered after all are more than was planned."""
    with pytest.warns(
        UserWarning, match=r"tuned with the loss computed in the replicas.*config.wrap\(model, loss_fn\)"
    ):
        result.config.wrap(job()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result.config.wrap(job()[0], functional.cross_entropy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_fn": lambda model, batch: model(batch[0]).mean()}, "step_fn computes the loss"),
        ({"loss_placement": "everywhere"}, "loss_placement is 'everywhere': expected one of"),
    ],
)
def test_what_cannot_be_placed_is_refused(options: dict[str, object], message: str) -> None:
    """A step of the user's own has no loss to move; other words are no placement."""
    model, loader = job()
    with pytest.raises(ConfigError, match=message):
        autotune(model, loader, devices=CARDS, progress=False, **{"loss_placement": "replica", **options})  # type: ignore[arg-type]
