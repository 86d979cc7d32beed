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
from splittune.parallel.replica_loss import ReplicaLoss
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


class ByName(nn.Module):
    """Fed with a dict, as transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.net(x)
        return output


X, Y = torch.randn(16, 8), torch.arange(16) % 3
BATCHES = {
    "dict, loss_fn": ({"x": X, "label": Y}, functional.cross_entropy),
    "dict": ({"x": X, "label": Y}, None),
    "(dict, y)": (({"x": X}, Y), None),
    "(dict, y), loss_fn": (({"x": X, "id": Y}, Y), functional.cross_entropy),
}


@pytest.mark.parametrize("placement", ["replica", "either"])
@pytest.mark.parametrize("form", BATCHES)
def test_inputs_in_a_dict_can_be_searched_too(form: str, placement: str) -> None:
    """Dict batches and (dict, y) run with the loss in the replicas, and nothing is left out."""
    batch, loss_fn = BATCHES[form]
    options: dict[str, object] = {"loss_placement": placement, "max_trials": 2, "progress": False}
    tuned = autotune(ByName(), [batch], loss_fn=loss_fn, devices="2xT4", **options)  # type: ignore[arg-type]
    assert "replica" in {trial.measurement.loss_placement for trial in tuned.trials}


def test_a_placement_that_cannot_be_is_left_out_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """With "either", a step of the user's own is searched with the loss where it is, with all trials."""
    model, loader = job()
    tuned = autotune(
        model,
        loader,
        step_fn=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        devices="2xRTX3090",
        max_trials=3,
        loss_placement="either",
        progress=False,
    )
    assert sum(trial.kind != "confirm" for trial in tuned.trials) == 3
    assert {trial.measurement.loss_placement for trial in tuned.trials} == {"output"}
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("of loss_placement=\"either\", 'replica' is left out: the loss cannot be placed")


class WantsItsTargets(ByName):
    """Returns (logits, loss), and no loss unless it is given its targets."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        logits = self.net(x)
        return logits, None if targets is None else functional.cross_entropy(logits, targets)


def test_a_model_that_computes_its_loss_from_targets_is_given_them(caplog: pytest.LogCaptureFixture) -> None:
    """(x, y) batches for a model of (logits, loss) just work; "either" leaves the replicas out,
    where the loss is already."""
    with caplog.at_level("INFO", logger="splittune"):
        tuned = autotune(
            WantsItsTargets(), [(X, Y)], devices="2xT4", max_trials=3, loss_placement="either", progress=False
        )
    assert {trial.measurement.loss_placement for trial in tuned.trials} == {"output"}
    assert "WantsItsTargets.forward(x, targets=...) is given the targets as targets=" in caplog.text
    assert "'replica' is left out: the loss cannot be placed in the replicas: batches hold no targets" in caplog.text


def test_a_placement_that_fails_in_its_trials_is_left_out_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What shows only when it runs costs that placement's search, not the other one's; alone it is raised."""

    def refuse(*_: object) -> None:
        raise ConfigError("this loss cannot be copied.")

    def tune(placement: str) -> TuneResult:
        options: dict[str, object] = {"loss_placement": placement, "max_trials": 1, "progress": False}
        return autotune(ByName(), [(X, Y)], devices="2xT4", **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ReplicaLoss, "on", refuse)
    assert tune("either").best.loss_placement == "output"
    assert "'replica' is left out: this loss cannot be copied." in caplog.text
    with pytest.raises(ConfigError, match="this loss cannot be copied"):
        tune("replica")


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
