"""A config's unequal shares inside Transformers' Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from splittune.config import SplitConfig
from splittune.errors import ConfigError
from splittune.exports import TOOLS
from splittune.integrations.steps import MicroBatchLoader, MicroStep, warn_of_other_card
from splittune.ranks.batch_norm import standing_in

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError("Transformers is not installed: pip install 'splittune[transformers]'") from error

if TYPE_CHECKING:
    from splittune.parallel.base import SplitModule

__all__ = ["SplitTrainerMixin"]

LossCounts = Literal["auto", "tokens", "samples"]

# What Transformers' losses leave out.
_IGNORED = -100

# The Trainer's methods that the mix-in overrides or calls, with the parameters that it gives them.
_METHODS = {
    "_wrap_model": ("model", "training", "dataloader"),
    "_get_num_items_in_batch": ("batch_samples", "device"),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "get_total_train_batch_size": ("args",),
    "get_train_dataloader": (),
    "training_step": ("model", "inputs", "num_items_in_batch"),
}
# What the mix-in sets, and which of the Trainer's methods has to read it: else it would be set for nobody.
_READ_IN = {
    "_train_batch_size": "get_train_dataloader",
    "prepare": "_get_dataloader",
    "current_gradient_accumulation_steps": "training_step",
    "model_accepts_loss_kwargs": "training_step",
}


class _Unprepared:
    """In place of an accelerator while a loader is made: it is handed back as it is."""

    @staticmethod
    def prepare(loader: Any) -> Any:
        return loader


class SplitTrainerMixin(Trainer):
    """A Trainer that trains the shares of a config, on one process or on ranks, with one device's gradients.

    ``class SplitTrainer(SplitTrainerMixin, MyTrainer): ...``, or the mix-in by itself. The arguments keep
    ``gradient_accumulation_steps`` as the config has it; ``per_device_train_batch_size`` says nothing any more, for
    the loader is made of the config's global batches. With "ddp" start it with torchrun, a process for each device.
    Losses that the Trainer divides by the tokens of the step are exact for any lengths; others are to be means over
    samples. `resume_from_checkpoint` needs ``ignore_data_skip=True``.

    Args:
        split_config: what to train; its global batch is what one optimizer step takes.
        split_devices: as `devices` of `SplitConfig.wrap`, for "dp".
        loss_counts: "tokens" where the model divides its loss by the Trainer's ``num_items_in_batch``, "samples" where
            it is a mean over samples. "auto": tokens where its forward calls ``self.loss_function``, where the Trainer
            has a ``compute_loss_func`` or smooths labels.

    Raises:
        ConfigError: arguments that would train another batch, or a Transformers whose Trainer has other inner parts.
    """

    def __init__(
        self,
        *args: Any,
        split_config: SplitConfig,
        split_devices: Any = None,
        loss_counts: LossCounts = "auto",
        **kwargs: Any,
    ) -> None:
        check_trainer(Trainer)
        super().__init__(*args, **kwargs)
        self.split_config, self._split_devices = split_config, split_devices
        self._micro_batches: MicroBatchLoader | None = None
        self._step: MicroStep | None = None
        self._split: SplitModule | None = None
        if loss_counts not in get_args(LossCounts):
            raise ConfigError(f"loss_counts is {loss_counts!r}: expected one of {get_args(LossCounts)}.")
        own = self.compute_loss_func is not None or self.label_smoother is not None
        if loss_counts == "samples" or (loss_counts == "auto" and not own and not _calls_loss_function(self.model)):
            self.model_accepts_loss_kwargs = False  # it would get num_items_in_batch, and not divide by it
        self._check_arguments()
        if split_config.strategy == "dp":
            self.args._n_gpu = 1  # the wrapper runs the other cards: the Trainer is not to put nn.DataParallel around
            if self.args.n_gpu != 1:
                raise _other_release(f"TrainingArguments.n_gpu is {self.args.n_gpu} after _n_gpu was set to 1")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint and not self.args.ignore_data_skip:
            raise ConfigError(
                "resume_from_checkpoint without ignore_data_skip: expected it, for to skip batches the Trainer builds "
                "the loader anew, without its shares. Use TrainingArguments(ignore_data_skip=True)."
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """This process's micro-batches of the Trainer's own loader, which is made for global batches."""
        accelerator, batch_size = self.accelerator, self._train_batch_size
        self.accelerator, self._train_batch_size = _Unprepared(), self.split_config.split.global_batch_size
        try:
            loader = super().get_train_dataloader()
        finally:
            self.accelerator, self._train_batch_size = accelerator, batch_size
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._micro_batches = MicroBatchLoader(self.split_config, self.split_config.shard(loader, seed=seed))
        return self._micro_batches

    def get_total_train_batch_size(self, args: Any) -> int:
        return self.split_config.split.global_batch_size

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The step's micro-batches, and its tokens; those of a stand-in do not count."""
        assert self._micro_batches is not None  # it gives the batches
        batches = list(islice(epoch_iterator, num_batches))
        if self.model_accepts_loss_kwargs or self.compute_loss_func is not None:
            for batch, step in zip(batches, self._micro_batches.upcoming, strict=True):
                if not step.weight and isinstance(batch.get("labels"), Tensor):
                    batch["labels"] = torch.full_like(batch["labels"], _IGNORED)
        return batches, self._get_num_items_in_batch(batches, device)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The Trainer's, of a loss that counts as its samples do, or as its tokens where it counts those."""
        assert self._micro_batches is not None  # it gave the batch
        self._step = self._micro_batches.next_step()
        self.current_gradient_accumulation_steps = 1  # the weight is the whole factor
        with ExitStack() as stack:
            if self._split is not None and not self._step.is_last:
                stack.enter_context(self._split.no_sync())
            if not self._step.weight:
                stack.enter_context(standing_in(self.model))
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self._step is None or not torch.is_grad_enabled():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        found: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if num_items_in_batch is not None:
            return found
        return (found[0] * self._step.weight, found[1]) if return_outputs else found * self._step.weight

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if self.split_config.strategy == "ddp" or not training:
            if training:
                warn_of_other_card(self.split_config, self.args.device, self.args.process_index)
            wrapped: nn.Module = super()._wrap_model(model, training=training, dataloader=dataloader)
            return wrapped
        plain: Any = self.model
        self._split = self.split_config.wrap(plain, devices=self._split_devices)
        return self._split

    def _check_arguments(self) -> None:
        config, args = self.split_config, self.args
        tuned = config.split.accumulation_steps
        if args.gradient_accumulation_steps != tuned:
            raise ConfigError(
                f"gradient_accumulation_steps is {args.gradient_accumulation_steps}: expected {tuned}, as this config "
                f"was tuned ({config.split}). Set TrainingArguments(gradient_accumulation_steps={tuned})."
            )
        if args.auto_find_batch_size:
            raise ConfigError("auto_find_batch_size is True: expected False, for it changes the batch that is trained.")
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigError(
                "the Trainer uses DeepSpeed or FSDP: expected DistributedDataParallel or one process, for which shares "
                "are tuned. For DeepSpeed, `splittune export --to deepspeed` has the fastest even split."
            )
        if config.strategy == "ddp" and not args.average_tokens_across_devices:
            raise ConfigError(
                "average_tokens_across_devices is False: expected True, for ranks with unequal shares have unequal "
                "tokens."
            )
        if config.strategy == "dp" and args.world_size > 1:
            raise ConfigError(
                f"this config is for one process, and this is one of {args.world_size}: expected python train.py, "
                'without torchrun, or dataclasses.replace(config, strategy="ddp").'
            )
        if config.strategy == "dp" and self.label_smoother is not None:
            raise ConfigError(
                "label_smoothing_factor is set, with one process for all cards: expected 0, for the Trainer smooths "
                "the gathered outputs without their shares. Train in ranks."
            )


def check_trainer(trainer: Any) -> None:
    """Whether the class `trainer`, ``transformers.Trainer``, is inside what this mix-in was written for.

    Much of that is private, and a later release may change it without a word: then shares would be trained wrongly.

    Raises:
        ConfigError: a method is missing, takes other parameters, or reads no longer what the mix-in sets.
    """
    for name, expected in _METHODS.items():
        method = getattr(trainer, name, None)
        if method is None:
            raise _other_release(f"Trainer.{name} is missing")
        taken = tuple(inspect.signature(method).parameters)[1:]
        if taken[: len(expected)] != expected:
            raise _other_release(f"Trainer.{name} takes ({', '.join(taken)}), not ({', '.join(expected)})")
    for name, reader in _READ_IN.items():
        code = getattr(inspect.unwrap(getattr(trainer, reader, None) or _nothing), "__code__", None)
        if code is None or name not in code.co_names:
            raise _other_release(f"Trainer.{reader} does not read {name}")


def _other_release(what: str) -> ConfigError:
    tried = TOOLS["transformers"].tried_with
    return ConfigError(
        f"{what} in Transformers {version('transformers')}: expected what {tried} has, with which this mix-in was "
        f"tried. Use that one (pip install 'transformers=={tried}'), a newer splittune, or a loop of your own with "
        "config.wrap and config.micro_batches."
    )


def _nothing() -> None: ...


def _calls_loss_function(model: Any) -> bool:
    """Whether the model's forward leaves its loss to ``self.loss_function``, which divides by the items of the step."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
    return "loss_function" in inspect.unwrap(type(base).forward).__code__.co_names
