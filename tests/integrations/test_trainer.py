"""Transformers' own Trainer under a config: gradients are one device's, on one process and on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from splittune import BatchSplit, ConfigError, SplitConfig
from splittune.exports import TOOLS
from splittune.hardware import resolve_hardware
from tests.integrations.launch import on_two_ranks, worst_error
from tests.ranks.cases import config_of

transformers = pytest.importorskip("transformers")

from splittune.integrations.transformers import SplitTrainerMixin, check_trainer  # noqa: E402  it needs transformers
from tests.integrations import trainer_job  # noqa: E402  so does this

pytestmark = pytest.mark.filterwarnings("default")  # of the libraries' own

UNEVEN = BatchSplit(global_batch_size=12, accumulation_steps=2, shard_sizes=(1, 5))
IDLE = BatchSplit(global_batch_size=12, accumulation_steps=3, shard_sizes=(0, 4))
ALONE = BatchSplit(global_batch_size=12, accumulation_steps=3, shard_sizes=(4,))
KINDS = ("tokens", "samples")
# Of float32: sums in another order.
TOLERANCE = 1e-5


def one_process(split: BatchSplit) -> SplitConfig:
    cards = f"{split.num_devices}xRTX3090"
    return config_of(split.num_devices, "dp", split=split, virtual_spec=cards, devices=resolve_hardware(cards).devices)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[torch.Tensor]]]:
    """The gradients of every step of the plain Trainer, one device and no accumulation."""
    folder = tmp_path_factory.mktemp("plain")
    return {kind: trainer_job.train(None, kind, folder) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [UNEVEN, IDLE, ALONE], ids=str)
def test_one_process_trains_as_one_device(
    split: BatchSplit, kind: str, truth: dict[str, list[list[torch.Tensor]]], tmp_path: Path
) -> None:
    """Where the loss is a mean over tokens, of which samples have unequal numbers, and where it is one over samples."""
    found = trainer_job.train(one_process(split), kind, tmp_path)
    assert worst_error(found, truth[kind]) < TOLERANCE


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two ranks trained of every config and kind of loss, all in one launch."""
    folder = tmp_path_factory.mktemp("trainer")
    for name, split in {"uneven": UNEVEN, "idle": IDLE}.items():
        config_of(2, split=split).save(folder / f"{name}.json")
    return on_two_ranks("tests.integrations.trainer_job", folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["uneven", "idle"])
def test_two_ranks_train_as_one_device(
    name: str, kind: str, ranks: list[Any], truth: dict[str, list[list[torch.Tensor]]]
) -> None:
    """Under torchrun, gloo; a rank may have no sample at all."""
    for found in ranks:
        assert worst_error(found[name, kind], truth[kind]) < TOLERANCE


@pytest.mark.parametrize("name", ["uneven", "idle"])
def test_the_lines_for_accelerate_train_as_one_device(name: str, ranks: list[Any]) -> None:
    """Those of the export, for the winner's own shares, with the real Accelerator."""
    model, loader = trainer_job.weighed_parts()
    optimizer = trainer_job.KeepingSGD(model.parameters())
    for inputs, targets in loader:
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks:
        assert worst_error(found[name, "accelerate"], optimizer.gradients) < TOLERANCE


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    plain = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "gradient_accumulation_steps": 2}
    return {"model": trainer_job.model_of("tokens"), "args": transformers.TrainingArguments(**plain | more)}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4: expected 2"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is True: expected False"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is set"),
    ],
)
def test_what_would_train_another_batch_is_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    """When the Trainer is made."""
    with pytest.raises(ConfigError, match=message):
        SplitTrainerMixin(**arguments(tmp_path, **more), split_config=one_process(UNEVEN))


def test_a_rank_that_averages_alone_is_refused(tmp_path: Path) -> None:
    """Its tokens are not the step's."""
    with pytest.raises(ConfigError, match="average_tokens_across_devices is False"):
        SplitTrainerMixin(
            **arguments(tmp_path, average_tokens_across_devices=False), split_config=config_of(2, split=UNEVEN)
        )


def test_a_loss_that_counts_something_else_is_refused(tmp_path: Path) -> None:
    """Words that are not known."""
    with pytest.raises(ConfigError, match="loss_counts is 'words'"):
        SplitTrainerMixin(**arguments(tmp_path), split_config=one_process(UNEVEN), loss_counts="words")  # type: ignore[arg-type]


def test_the_trainer_says_the_batch_that_it_trains(tmp_path: Path) -> None:
    """What it logs and counts samples by is the config's batch, whatever stands in per_device_train_batch_size."""
    made = arguments(tmp_path, per_device_train_batch_size=3)
    trainer = SplitTrainerMixin(**made, split_config=one_process(UNEVEN))
    assert trainer.get_total_train_batch_size(made["args"]) == 12


def test_resuming_needs_its_data_in_order(tmp_path: Path) -> None:
    """The Trainer would skip batches in a loader that it builds itself."""
    trainer = SplitTrainerMixin(**arguments(tmp_path), split_config=one_process(UNEVEN))
    with pytest.raises(ConfigError, match="ignore_data_skip"):
        trainer.train(resume_from_checkpoint=True)


def test_the_trainer_is_inside_what_the_mixin_was_written_for() -> None:
    """The private parts that it uses: it fails here when a release changes one."""
    check_trainer(transformers.Trainer)


class Narrower(transformers.Trainer):  # type: ignore[misc]  it is Any to mypy
    def _wrap_model(self, model: Any, training: bool = True) -> Any: ...


class Reordered(transformers.Trainer):  # type: ignore[misc]  it is Any to mypy
    def _get_num_items_in_batch(self, device: Any, batch_samples: Any) -> Any: ...


class Missing(transformers.Trainer):  # type: ignore[misc]  it is Any to mypy
    get_batch_samples = None


class ReadsElsewhere(transformers.Trainer):  # type: ignore[misc]  it is Any to mypy
    def get_train_dataloader(self) -> Any:
        return self._get_dataloader(self.train_dataset, "Training", self.batch_of_args)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (Narrower, r"Trainer\._wrap_model takes \(model, training\), not \(model, training, dataloader\)"),
        (Reordered, r"Trainer\._get_num_items_in_batch takes \(device, batch_samples\)"),
        (Missing, r"Trainer\.get_batch_samples is missing"),
        (ReadsElsewhere, r"Trainer\.get_train_dataloader does not read _train_batch_size"),
    ],
)
def test_a_trainer_with_other_inner_parts_is_refused(
    trainer: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is made, with the release that is here, the one that was tried, and what to do."""
    monkeypatch.setattr("splittune.integrations.transformers.Trainer", trainer)
    here, tried = transformers.__version__, TOOLS["transformers"].tried_with
    with pytest.raises(ConfigError, match=message) as raised:
        SplitTrainerMixin(**arguments(tmp_path), split_config=one_process(UNEVEN))
    assert f"in Transformers {here}: expected what {tried} has" in str(raised.value)
    assert f"pip install 'transformers=={tried}'" in str(raised.value)


def test_a_count_of_cards_that_is_kept_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the Trainer would put nn.DataParallel around a model that is on all cards already."""
    made = arguments(tmp_path)
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", property(lambda _: 4))
    with pytest.raises(ConfigError, match=r"TrainingArguments\.n_gpu is 4 after _n_gpu was set to 1"):
        SplitTrainerMixin(**made, split_config=one_process(UNEVEN))
