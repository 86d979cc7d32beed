"""What a config does: the wrapped model to train with, and the micro-batches of each step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from splittune.config.data import ConfigData, names_of
from splittune.config.in_ranks import shard_for_rank, trains_by_rank, wrap_rank
from splittune.config.micro_batches import MicroBatch, cut_batch
from splittune.config.other_devices import warn_of_other_devices
from splittune.config.shares import cut_share
from splittune.errors import ConfigError, DeviceError
from splittune.hardware.resolve import resolve_hardware
from splittune.parallel.accumulate import accumulate
from splittune.ranks.agreement import ARRIVAL_TIMEOUT_S
from splittune.ranks.share import RankShare

if TYPE_CHECKING:
    from torch import nn

    from splittune.exports import Export, TriedSplit
    from splittune.hardware.base import Hardware
    from splittune.parallel.base import SplitModule
    from splittune.parallel.data_parallel import Engine
    from splittune.parallel.replica_loss import LossFunction, WeightFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig(ConfigData):
    """What the tuner emits: a measured split, saved as JSON, loaded, trained with. Its fields are `ConfigData`'s.

    Worked: 64 samples as 4 micro-batches of 16, shards 1 + 5 + 5 + 5. `micro_batches` cuts a loader's batch of 64
    into 4 parts of weight 0.25; a last batch of 20 into 2 of 10, weight 0.5 each; a batch of 65 is refused.

    Raises:
        ConfigError: a value of the wrong type or range, or a count other than one a device; every field is checked.
    """

    def wrap(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None = None,
        *,
        weight_fn: WeightFunction | None = None,
        engine: Engine = "window",
        sync_batch_norm: bool = False,
        devices: str | Sequence[str | int | torch.device] | None = None,
        hardware: Hardware | None = None,
        ddp_options: Mapping[str, Any] | None = None,
        timeout_s: float = ARRIVAL_TIMEOUT_S,
    ) -> SplitModule:
        """The module to train with: `model` on its devices, every micro-batch spread as it was tuned.

        With `loss_fn`, each device computes the loss of its own part: ``loss = wrapped(inputs,
        targets)``, and GPU 0 holds no outputs of the others. `weight_fn(targets)` counts tokens
        where the loss is a mean over tokens. `engine` "torch" copies parameters at every
        micro-batch, as nn.DataParallel does: a way out where windows do not fit the job. With
        `sync_batch_norm` BatchNorm normalises by the whole micro-batch, as on one device, rather
        than by each device's own part; the devices then wait for one another at each such layer.

        `devices` None takes those the config was tuned on, virtual ones included; to train on real cards what was
        planned on virtual ones, name them: ``wrap(model, devices=["cuda:0", "cuda:1"])``, 'GPU 0' first. `hardware`
        takes a `Hardware` that is at hand instead. Other devices than the tuned ones are used, with a `UserWarning`
        that says what differs: speed and memory were not measured there.

        Under ``torch.no_grad()`` the module takes `eval_batch_size` samples at once where that is known, shared as the
        tuned shards are: ``DataLoader(validation_set, batch_size=config.eval_batch_size)``.

        Where `strategy` is "ddp" it is this rank's DistributedDataParallel, on this rank's device: see
        `DistributedSplit`, whose options are `ddp_options`, ``{"gradient_as_bucket_view": True}`` say. All ranks call
        this together, and compare what they have first. `devices` may name this rank's, "cuda" for the card of its
        local rank. `engine`, `hardware` and `eval_batch_size` are for one process. With `sync_batch_norm` the model's
        own BatchNorm layers are changed, see `synchronised_batch_norm`: with ranks nobody makes replicas of them.

        Raises:
            ConfigError: another number of devices than shards, or both `devices` and `hardware`; BatchNorm that cannot
                be synchronised; with ranks, on all of them: they differ, their number or backend is another than the
                devices need, the model is wrapped already, or one has not come within `timeout_s`.
            DeviceError: a device that is missing, repeated or unknown.
        """
        if trains_by_rank(self.strategy, self.split.num_devices):
            if hardware is not None:
                raise ConfigError("got hardware= in a process group: expected devices=, this rank's, or neither.")
            return wrap_rank(
                self,
                model,
                loss_fn,
                weight_fn,
                sync_batch_norm=sync_batch_norm,
                devices=devices,
                ddp_options=ddp_options or {},
                timeout_s=timeout_s,
            )
        if ddp_options:
            raise ConfigError(
                f"got ddp_options={ddp_options!r} for strategy='dp', which is no DistributedDataParallel: expected "
                'none. Leave them out, or train in ranks, dataclasses.replace(config, strategy="ddp").'
            )
        hardware = self.resolve(devices, hardware)
        warn_of_other_devices(self, hardware.devices, is_modelled=hardware.is_modelled)
        if loss_fn is None and self.loss_placement == "replica":
            warnings.warn(
                "this config was tuned with the loss computed in the replicas, and is wrapped without loss_fn: outputs "
                "will be gathered on GPU 0, which may lack the memory. Use config.wrap(model, loss_fn).",
                stacklevel=2,
            )
        return hardware.wrap(
            model,
            self.split,
            loss_fn=loss_fn,
            weight_fn=weight_fn,
            engine=engine,
            eval_batch_size=self.eval_batch_size,
            sync_batch_norm=sync_batch_norm,
        )

    def resolve(
        self, devices: str | Sequence[str | int | torch.device] | None = None, hardware: Hardware | None = None
    ) -> Hardware:
        """The hardware to train on, with a device for each shard: the tuned devices unless told otherwise, see `wrap`.

        Raises:
            ConfigError: another number of devices than shards, or both `devices` and `hardware`.
            DeviceError: a device that is missing, repeated or unknown.
        """
        if hardware is None:
            hardware = self._hardware_named(devices)
        elif devices is not None:
            raise ConfigError(f"got devices={devices!r} and hardware= as well: expected at most one of them.")
        num_given, num_shards = len(hardware.devices), self.split.num_devices
        if num_given != num_shards:
            raise ConfigError(
                f"number of devices: got {num_given} ({names_of(hardware.devices)}), expected {num_shards}, one for "
                f"each shard of {self.split}. Name {num_shards} devices, or tune for {num_given}."
            )
        return hardware

    def shard(self, loader: Any, *, seed: int | None = None, timeout_s: float = ARRIVAL_TIMEOUT_S) -> Any:
        """What to iterate instead of `loader`: this rank's part of every global batch, as `micro_batches` takes it.

        The user's loader and its batch size stay those of one device: `ShardedLoader` says who gets which samples. All
        ranks call this together, and compare what they have first. Where one process trains, on any number of devices,
        that is `loader` itself, so that one script serves both. `seed` None is the config's.

        Raises:
            ConfigError: on all ranks: the loader cannot be sharded, ranks differ in data set, batch size or seed, or
                one has not come within `timeout_s`.
        """
        if not trains_by_rank(self.strategy, self.split.num_devices):
            return loader
        return shard_for_rank(self, loader, seed=self.seed if seed is None else seed, timeout_s=timeout_s)

    def micro_batches(self, batch: Any, model: SplitModule | None = None) -> Iterator[MicroBatch]:
        """`batch`, as the loader nests it, cut along dimension 0 into the micro-batches of one optimizer step.

        A full batch has `split.accumulation_steps` of them, of `split.micro_batch_sizes`. A short
        one (the loader's last) takes the fewest whose sizes, differing by at most one, exceed no
        tuned micro-batch. Weights sum to 1. Given the wrapped `model`, all but the last are yielded
        inside its `no_sync`: parameters and gradients then travel once a step instead of once a
        micro-batch, and weights are those of its `weight_fn` where it has one. Worked: tuned for 64
        in 4 steps, a batch of 20 gives ceil(20 / 16) = 2 micro-batches of 10.

        With ranks the batch is what a sharded loader gives, and the micro-batches are this rank's: as many on every
        rank, of weight n * W / N for n of the N samples of the global batch and W ranks. Where it has no sample in one
        it runs a stand-in of weight 0, so that all ranks meet in every collective of the forward and backward.

        Raises:
            ConfigError: at the call, before anything is yielded: no sample, more samples than the config was tuned
                for, no tensor, or tensors whose sizes differ; with ranks, no share of a batch.
        """
        if isinstance(batch, RankShare):
            return cut_share(batch, self.split, model)
        if self.strategy == "ddp":
            raise ConfigError(
                f"got a batch ({type(batch).__name__}) for strategy='ddp', where each rank has a share: expected what "
                "config.shard(loader) gives. Iterate that instead of the loader."
            )
        if model is None:
            return cut_batch(batch, self.split)
        return accumulate(model, cut_batch(batch, self.split, model.weight_of, listed=model.lists_samples))

    def export(self, to: str, *, trials: Iterable[TriedSplit] = (), config_path: str = "split.json") -> Export:
        """What the tool `to` reads of this config: ``config.export("deepspeed").save("ds_config.json")``.

        `to` is "torchrun", "lightning", "accelerate", "transformers", "deepspeed", "composer" or "torchtitan". One that
        knows only equal shares gets the config's own split where that is even, else the fastest even one among the
        `trials`, which `TuneResult.export` passes. `config_path` is where scripts load this config from.

        Raises:
            ConfigError: an unknown tool, or one that cannot express the config: no even split was measured.
        """
        from splittune.exports import export_config  # stands beside this module, and reads its data

        return export_config(self, to, trials=trials, config_path=config_path)

    def _hardware_named(self, devices: str | Sequence[str | int | torch.device] | None) -> Hardware:
        if devices is not None:
            return resolve_hardware(devices)
        if self.is_modelled and self.virtual_spec is None:
            raise ConfigError(
                "this config was planned on virtual devices and does not say how to make them: virtual_spec is None. "
                'Name the devices to train on: wrap(model, devices=["cuda:0", ...]).'
            )
        try:
            return resolve_hardware(self.virtual_spec or [device.torch_device for device in self.devices])
        except DeviceError as error:
            raise DeviceError(
                f"the devices this config was tuned on ({names_of(self.devices)}) cannot be had here: {error} "
                'Name those to train on: wrap(model, devices=["cuda:0", ...]).'
            ) from error
