"""A config's unequal shares inside Lightning, on one process and on ranks, and a callback that tunes before `fit`.

For the package `pytorch_lightning`: `lightning.pytorch` has a second copy of all classes, and takes none of these.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from splittune.config import SplitConfig
from splittune.errors import ConfigError
from splittune.hardware import resolve_hardware
from splittune.integrations.steps import MicroBatchLoader, MicroStep, warn_of_other_card
from splittune.parallel.base import SplitModule
from splittune.ranks.batch_norm import check_synchronisable, standing_in, synchronised_batch_norm
from splittune.report import TuneResult
from splittune.tuner import autotune

try:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
except ImportError as error:
    raise ImportError(
        "Lightning is not installed, or not one that splittune knows: pip install 'splittune[lightning]'"
    ) from error

__all__ = ["OneProcessSplit", "RankSplit", "TuneBatchSplit", "split_strategy", "split_trainer_options"]


def split_trainer_options(config: SplitConfig, **strategy_options: Any) -> dict[str, Any]:
    """What ``Trainer(**split_trainer_options(config), max_epochs=...)`` needs to train the config's shares.

    The loader keeps the global batch, and `training_step` returns the plain mean loss of the batch that it is given: a
    micro-batch. `strategy_options` are those of `split_strategy`. Worked: 64 = 2 x (8 + 24) with "ddp" gives 2 devices,
    ``accumulate_grad_batches=2`` and ``use_distributed_sampler=False``.
    """
    numbers = [torch.device(device.torch_device) for device in config.devices]
    cards = [device.index or 0 for device in numbers if device.type == "cuda"]
    on_cards = len(cards) == len(numbers)
    devices: int | list[int] = cards if on_cards else len(numbers)
    if config.strategy == "dp":
        devices = cards[:1] if on_cards else 1
    return {
        "strategy": split_strategy(config, **strategy_options),
        "accelerator": "gpu" if on_cards else "auto" if torch.cuda.is_available() else "cpu",
        "devices": devices,
        "accumulate_grad_batches": config.split.accumulation_steps,
        "use_distributed_sampler": False,
    }


def split_strategy(config: SplitConfig, **options: Any) -> Strategy:
    """The strategy that trains `config`: `OneProcessSplit` for "dp", `RankSplit` for "ddp", with their options.

    Raises:
        ConfigError: `loss_fn` or `weight_fn` among them: the loss is the module's own, a mean over samples.
    """
    return OneProcessSplit(config, **options) if config.strategy == "dp" else RankSplit(config, **options)


def _refuse_losses(options: Mapping[str, Any]) -> None:
    given = [name for name in ("loss_fn", "weight_fn") if options.get(name) is not None]
    if given:
        raise ConfigError(
            f"the strategy is given {' and '.join(given)}: expected none, for `training_step` computes the loss, and a "
            "strategy weighs it by samples. For a mean over tokens use config.wrap(model, loss_fn, weight_fn=...) in a "
            "loop of your own, or Transformers' Trainer with SplitTrainerMixin."
        )


class _Splitting(Strategy):
    """What both strategies do: micro-batches in place of batches, and their weights in the backward pass."""

    config: SplitConfig | None
    _step: MicroStep | None = None

    def process_dataloader(self, dataloader: object) -> object:
        """In training the loader of this process's micro-batches; what evaluates is left as it is."""
        module = self.lightning_module
        if module is None or not module.trainer.training:
            return super().process_dataloader(dataloader)
        config = self._checked_config(module.trainer, dataloader)
        return MicroBatchLoader(config, config.shard(dataloader))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None  # it trains
        loader = self.lightning_module.trainer.train_dataloader
        if not isinstance(loader, MicroBatchLoader):
            raise ConfigError(
                f"the training loader is a {type(loader).__name__}: expected a single DataLoader of global batches, "
                "which the strategy cuts into micro-batches."
            )
        self._step = loader.next_step()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's, of the loss as it counts: Lightning has divided it by the accumulation steps already."""
        assert self._step is not None  # a batch has started
        assert self.config is not None  # it cut the batch
        factor = self._step.weight * self.config.split.accumulation_steps
        return super().backward(closure_loss * factor, optimizer, *args, **kwargs)

    def _checked_config(self, trainer: Trainer, dataloader: object) -> SplitConfig:
        if self.config is None:
            raise ConfigError(
                "the strategy has no config, and nothing has tuned one: expected split_strategy(config), or "
                "Trainer(callbacks=[TuneBatchSplit()])."
            )
        tuned = self.config.split.accumulation_steps
        if trainer.accumulate_grad_batches != tuned:
            raise ConfigError(
                f"accumulate_grad_batches is {trainer.accumulate_grad_batches}: expected {tuned}, as this config was "
                f"tuned ({self.config.split}). Use Trainer(**split_trainer_options(config))."
            )
        module = self.lightning_module
        if module is not None and not module.automatic_optimization:
            raise ConfigError(
                "the module optimizes manually: expected automatic_optimization=True, for the strategy weighs what "
                "Lightning back-propagates. In a loop of your own use config.wrap and config.micro_batches."
            )
        sampler = getattr(dataloader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            raise ConfigError(
                "the training loader has a DistributedSampler, which gives every rank an equal part: expected the "
                "loader of one device. Use Trainer(use_distributed_sampler=False), as split_trainer_options has it."
            )
        return self.config


class RankSplit(_Splitting, DDPStrategy):
    """Lightning's DDPStrategy for a config of "ddp": every rank trains its own share of each micro-batch.

    The gradients are those of one device for the whole batch, where the loss is a mean over samples: torch averages
    those of W ranks, and a rank's loss counts n * W / N for its n samples of N. Lightning makes the processes, or
    torchrun does. With `sync_batch_norm` BatchNorm normalises by the samples of all ranks; Lightning's own
    ``sync_batchnorm=True`` also counts the samples that stand in where a rank has none.

    Raises:
        ConfigError: `loss_fn` or `weight_fn` is given. When it fits: another number of ranks than shares, a loader that
            cannot be shared out, manual optimization, or another accumulation than the config's.
    """

    def __init__(self, config: SplitConfig, *, sync_batch_norm: bool = False, **options: Any) -> None:
        _refuse_losses(options)
        super().__init__(**options)
        self.config, self._syncs = config, sync_batch_norm

    def configure_ddp(self) -> None:
        assert isinstance(self.model, nn.Module)
        assert self.config is not None  # it was made with one
        warn_of_other_card(self.config, self.root_device, self.global_rank)
        if self._syncs:
            check_synchronisable(self.model)
            synchronised_batch_norm(self.model)
        super().configure_ddp()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._step is not None  # a batch has started
        with ExitStack() as stack:
            if not self._step.weight:
                stack.enter_context(standing_in(self.lightning_module))
            return super().training_step(*args, **kwargs)


class _TrainingStep(nn.Module):
    """A module whose forward is the training step of another, which can be run in replicas.

    It gives the step's output, and what the step logged by name: numbers, which the wrapper averages by samples as it
    does losses. `options` has the arguments that they were logged with.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.options: dict[str, dict[str, Any]] = {}

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        logged: dict[str, Any] = {}

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            if isinstance(value, Tensor):
                logged[name] = value.detach().float().mean()
            elif isinstance(value, int | float):
                logged[name] = float(value)
            else:
                return  # a torchmetrics object counts in its replica alone
            self.options[name] = dict(zip(_LOG_OPTIONS, args, strict=False)) | options

        # Lightning's own tables of what is logged know one device and one thread
        object.__setattr__(self.module, "log", log)
        try:
            return self.module.training_step(*args, **kwargs), logged
        finally:
            object.__delattr__(self.module, "log")


# What `log` takes by position after name and value.
_LOG_OPTIONS = tuple(inspect.signature(LightningModule.log).parameters)[3:]


class OneProcessSplit(_Splitting, SingleDeviceStrategy):
    """A strategy for a config of "dp": one process runs the training step on every device's share.

    `training_step` runs in a replica on each device, at the same time; its losses are averaged by samples, and must
    be means over samples. So are the numbers that it logs; torchmetrics objects that it logs are left out. Evaluation
    runs on the first device. Batches stay on the host until each device is sent its part.

    Args:
        config: what to train; None where a `TuneBatchSplit` among the callbacks finds it.
        devices: as those of `SplitConfig.wrap`, or of `autotune` without a config.
        wrap_options: the other options of `SplitConfig.wrap`.

    Raises:
        ConfigError: `loss_fn` or `weight_fn` is given. When it fits: no config, a loader of other batches, manual
            optimization, or another accumulation than the config's.
    """

    def __init__(self, config: SplitConfig | None = None, *, devices: Any = None, **wrap_options: Any) -> None:
        _refuse_losses(wrap_options)
        self.hardware = resolve_hardware(devices) if config is None else config.resolve(devices)
        super().__init__(device=torch.device(self.hardware.devices[0].torch_device))
        self.config, self._wrap_options = config, wrap_options
        self._split: SplitModule | None = None
        self._training_step: _TrainingStep | None = None
        self._without_sync = ExitStack()

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.training and self.config is not None:
            self.adopt(self.config)

    def adopt(self, config: SplitConfig) -> None:
        """Train by `config`, for these devices, from the next step on."""
        assert self.lightning_module is not None  # it is connected
        self.config = config
        self._training_step = _TrainingStep(self.lightning_module)
        self._split = config.wrap(self._training_step, hardware=self.hardware, **self._wrap_options)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        module = self.lightning_module
        if module is not None and module.trainer.training:
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._split is not None  # it was set up
        assert self._training_step is not None
        assert self.lightning_module is not None
        assert self._step is not None  # a batch has started
        self._without_sync.close()  # of a step whose loss was None
        if not self._step.is_last:
            self._without_sync.enter_context(self._split.no_sync())
        with self.precision_plugin.train_step_context():
            output, logged = self._split(*args, **kwargs)
        for name, value in logged.items():
            self.lightning_module.log(name, value, **self._training_step.options[name])
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        finally:
            self._without_sync.close()

    def teardown(self) -> None:
        self._without_sync.close()
        self._split = None
        super().teardown()


class TuneBatchSplit(Callback):
    """Tunes before `fit`, as Lightning's Tuner does, and leaves module, optimizer and random numbers as found.

    ``Trainer(strategy=OneProcessSplit(devices=...), callbacks=[TuneBatchSplit()], use_distributed_sampler=False)``
    then trains the shares that it found, in that `fit`. With another strategy the fit goes on as it would have, and
    `result` has what to train with: ``split_trainer_options(tuner.result.config)``.

    Args:
        save: the folder for `TuneResult.save`; None to save nothing.
        devices: those of `autotune`; None for the strategy's, or all CUDA devices.
        tune_options: further options of `autotune`: `max_trials`, `min_headroom_bytes`, `seed`.

    Raises:
        ConfigError: as it fits: ranks, manual optimization, several optimizers or loaders.
        NoFeasibleSplitError: nothing fits.
    """

    def __init__(self, *, save: str | None = None, devices: Any = None, **tune_options: Any) -> None:
        super().__init__()
        self.save, self.devices, self.tune_options = save, devices, tune_options
        self.result: TuneResult | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.result is not None:
            return
        strategy = trainer.strategy
        devices = self.devices
        if isinstance(strategy, OneProcessSplit) and devices is None:
            devices = strategy.hardware.spec or [device.torch_device for device in strategy.hardware.devices]
        self._check(trainer, pl_module)
        options = {"autocast_dtype": _autocast_of(trainer.precision), **self.tune_options}
        takes_index = len(inspect.signature(pl_module.training_step).parameters) > 1

        def loss_of(model: nn.Module, batch: Any) -> Tensor:
            output, _ = model(batch, 0) if takes_index else model(batch)
            loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
            return loss

        self.result = autotune(
            _TrainingStep(pl_module),
            _train_loader(trainer),
            step_fn=loss_of,
            optimizer=trainer.optimizers[0],
            devices=devices,
            **options,
        )
        if self.save is not None:
            self.result.save(self.save)
        if isinstance(strategy, OneProcessSplit):
            trainer.accumulate_grad_batches = self.result.config.split.accumulation_steps
            strategy.adopt(self.result.config)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.world_size > 1:
            raise ConfigError(
                f"the Trainer has {trainer.world_size} ranks: expected one process, tuning inside a distributed job is "
                "not there yet. Tune in a run of its own, and train with split_trainer_options(config)."
            )
        if not module.automatic_optimization or len(trainer.optimizers) != 1:
            raise ConfigError(
                f"the module has {len(trainer.optimizers)} optimizers, automatic_optimization="
                f"{module.automatic_optimization}: expected one that Lightning steps itself. Use autotune with a "
                "step_fn of your own."
            )


def _autocast_of(precision: str | int) -> torch.dtype | None:
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(precision))


def _train_loader(trainer: Trainer) -> Any:
    """The training loader that this fit is going to have: Lightning has no public way to ask before the loop begins."""
    source: Any = getattr(trainer.fit_loop, "_data_source", None)
    if not hasattr(source, "dataloader"):
        raise ConfigError(
            f"Lightning {version('pytorch-lightning')} keeps its training loader elsewhere than the releases that are "
            "known: expected 2.6. Tune before the Trainer: splittune.autotune(...)."
        )
    loader = source.dataloader()
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"the training loader is a {type(loader).__name__}: expected a single DataLoader.")
    return loader
