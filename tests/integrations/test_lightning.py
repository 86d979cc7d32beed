"""Lightning's own Trainer under a config: gradients are one device's, on one process and on ranks; and tuning first."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from splittune import BatchSplit, ConfigError, SplitConfig
from splittune.hardware import resolve_hardware
from tests.integrations.launch import on_two_ranks, worst_error
from tests.ranks.cases import config_of

pl = pytest.importorskip("pytorch_lightning")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from splittune.integrations.lightning import OneProcessSplit, RankSplit, TuneBatchSplit, split_trainer_options
    from tests.integrations.lightning_job import EPOCHS, Module, fit, loader

# Lightning's own, of torch's pytrees and of loaders without workers.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.filterwarnings("ignore:.*LeafSpec.*")]

UNEVEN = BatchSplit(global_batch_size=12, accumulation_steps=2, shard_sizes=(1, 5))
IDLE = BatchSplit(global_batch_size=12, accumulation_steps=3, shard_sizes=(0, 4))
WHOLE = BatchSplit(global_batch_size=12, accumulation_steps=1, shard_sizes=(3, 9))
ALONE = BatchSplit(global_batch_size=12, accumulation_steps=3, shard_sizes=(4,))
# Of float32: sums in another order.
TOLERANCE = 1e-5


def one_process(split: BatchSplit) -> SplitConfig:
    cards = f"{split.num_devices}xRTX3090"
    return config_of(split.num_devices, "dp", split=split, virtual_spec=cards, devices=resolve_hardware(cards).devices)


@pytest.fixture(scope="module")
def truth() -> list[list[torch.Tensor]]:
    """The gradients of every step of plain Lightning, one device and no accumulation."""
    module, _ = fit({"accelerator": "cpu", "devices": 1})
    return module.gradients


@pytest.mark.parametrize("split", [UNEVEN, IDLE, ALONE], ids=str)
def test_one_process_trains_as_one_device(split: BatchSplit, truth: list[list[torch.Tensor]]) -> None:
    """Steps are counted as there, evaluation runs, and what is logged is averaged over the devices."""
    module, trainer = fit(split_trainer_options(one_process(split)))
    assert worst_error(module.gradients, truth) < TOLERANCE
    assert trainer.global_step == len(truth) == EPOCHS * 3
    assert "val_loss" in trainer.callback_metrics
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(module.losses[-1])
    assert "log" not in vars(module)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two ranks trained of every config, all in one launch."""
    folder = tmp_path_factory.mktemp("lightning")
    for name, split in {"uneven": UNEVEN, "idle": IDLE, "normed": WHOLE}.items():
        config_of(2, split=split).save(folder / f"{name}.json")
    return on_two_ranks("tests.integrations.lightning_job", folder)


@pytest.mark.parametrize("name", ["uneven", "idle"])
def test_two_ranks_train_as_one_device(name: str, ranks: list[Any], truth: list[list[torch.Tensor]]) -> None:
    """Under torchrun, gloo; a rank may have no sample at all."""
    for found in ranks:
        gradients, global_step, metrics = found[name]
        assert worst_error(gradients, truth) < TOLERANCE
        assert global_step == EPOCHS * 3
        assert "val_loss" in metrics


def test_batch_norm_over_ranks_is_one_devices(ranks: list[Any]) -> None:
    """With sync_batch_norm, in one micro-batch as one device has it."""
    expected, _ = fit({"accelerator": "cpu", "devices": 1}, Module(normed=True))
    for found in ranks:
        assert worst_error(found["normed"][0], expected.gradients) < TOLERANCE


def test_the_options_are_what_the_config_says() -> None:
    """For ranks as many devices, for one process one; Lightning puts in no sampler of its own."""
    options = split_trainer_options(config_of(2, split=UNEVEN))
    assert isinstance(options["strategy"], RankSplit)
    assert (options["devices"], options["accumulate_grad_batches"]) == (2, 2)
    assert options["use_distributed_sampler"] is False
    assert isinstance(split_trainer_options(one_process(UNEVEN))["strategy"], OneProcessSplit)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoLoaders(Module):
    def train_dataloader(self) -> Any:
        return [loader(), loader()]


@pytest.mark.parametrize(
    ("split", "more", "module", "message"),
    [
        (UNEVEN, {"accumulate_grad_batches": 1}, Module, "accumulate_grad_batches is 1: expected 2"),
        (WHOLE, {}, Manual, "optimizes manually"),
    ],
)
def test_what_would_train_another_batch_is_refused(
    split: BatchSplit, more: dict[str, Any], module: type[Module], message: str
) -> None:
    """Before the first step."""
    with pytest.raises(ConfigError, match=message):
        fit(split_trainer_options(one_process(split)) | more, module())


def test_a_loader_of_other_batches_is_refused() -> None:
    """As config.micro_batches refuses them: the batch is larger than what was tuned."""
    options = split_trainer_options(one_process(UNEVEN))
    trainer = pl.Trainer(**options, logger=False, barebones=True, max_epochs=1)
    with pytest.raises(ConfigError, match="a batch of 15 samples"):
        trainer.fit(Module(), loader(15), loader())


def test_several_loaders_are_refused() -> None:
    """Their batches would come side by side."""
    trainer = pl.Trainer(**split_trainer_options(one_process(UNEVEN)), logger=False, barebones=True, max_epochs=1)
    with pytest.raises(ConfigError, match="the training loader is a list"):
        trainer.fit(TwoLoaders(), val_dataloaders=loader())


@pytest.mark.parametrize("config", [one_process(UNEVEN), config_of(2, split=UNEVEN)], ids=["dp", "ddp"])
@pytest.mark.parametrize("given", [{"weight_fn": len}, {"loss_fn": torch.nn.functional.mse_loss, "weight_fn": len}])
def test_a_loss_beside_the_modules_is_refused(config: SplitConfig, given: dict[str, Any]) -> None:
    """The strategy would never call it: where to train a mean over tokens is said."""
    with pytest.raises(ConfigError, match=rf"the strategy is given {' and '.join(sorted(given))}: expected none"):
        split_trainer_options(config, **given)


def test_tuning_before_fit_trains_what_it_found(truth: list[list[torch.Tensor]], tmp_path: Path) -> None:
    """In the same fit, from the weights that the module had: the gradients are those of an untuned run."""
    tuning = TuneBatchSplit(save=str(tmp_path / "split"), max_trials=3, progress=False)
    strategy = OneProcessSplit(devices="1xRTX3090:occupied=8GiB,1xRTX3090")
    module, trainer = fit({"strategy": strategy, "accelerator": "cpu", "devices": 1, "callbacks": [tuning]})
    assert tuning.result is not None
    assert trainer.accumulate_grad_batches == tuning.result.config.split.accumulation_steps
    assert SplitConfig.load(tmp_path / "split" / "split.json") == tuning.result.config
    assert worst_error(module.gradients, truth) < TOLERANCE
    assert "log" not in vars(module)


def test_tuning_leaves_another_strategy_as_it_is(truth: list[list[torch.Tensor]]) -> None:
    """The fit goes on as it would have: same weights, same random numbers, same accumulation."""
    tuning = TuneBatchSplit(devices="2xRTX3090", max_trials=2, progress=False)
    torch.manual_seed(5)
    module, trainer = fit({"accelerator": "cpu", "devices": 1, "callbacks": [tuning]})
    assert tuning.result is not None
    assert trainer.accumulate_grad_batches == 1
    assert worst_error(module.gradients, truth) == 0


def test_a_strategy_without_a_config_says_who_finds_one() -> None:
    """Nothing is trained by a split that nobody chose."""
    with pytest.raises(ConfigError, match="TuneBatchSplit"):
        fit({"strategy": OneProcessSplit(devices="2xRTX3090"), "accelerator": "cpu", "devices": 1})


def test_the_loader_is_where_this_lightning_keeps_it() -> None:
    """The private place that TuneBatchSplit reads: it fails here when a release moves it."""
    source = pl.Trainer(logger=False, barebones=True).fit_loop._data_source
    source.instance = given = loader()
    assert source.dataloader() is given
