"""What a config does: the wrapped model to train with, and the micro-batches of each step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from splittune.config.data import ConfigData, names_of
from splittune.config.micro_batches import MicroBatch, cut_batch
from splittune.errors import ConfigError, DeviceError
from splittune.hardware.base import Device
from splittune.hardware.resolve import resolve_hardware
from splittune.parallel.accumulate import accumulate
from splittune.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

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

        Raises:
            ConfigError: another number of devices than shards, or both `devices` and `hardware`; BatchNorm that cannot
                be synchronised.
            DeviceError: a device that is missing, repeated or unknown.
        """
        hardware = self.resolve(devices, hardware)
        self._warn_of_other_devices(hardware)
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

    def micro_batches(self, batch: Any, model: SplitModule | None = None) -> Iterator[MicroBatch]:
        """`batch`, as the loader nests it, cut along dimension 0 into the micro-batches of one optimizer step.

        A full batch has `split.accumulation_steps` of them, of `split.micro_batch_sizes`. A short
        one (the loader's last) takes the fewest whose sizes, differing by at most one, exceed no
        tuned micro-batch. Weights sum to 1. Given the wrapped `model`, all but the last are yielded
        inside its `no_sync`: parameters and gradients then travel once a step instead of once a
        micro-batch, and weights are those of its `weight_fn` where it has one. Worked: tuned for 64
        in 4 steps, a batch of 20 gives ceil(20 / 16) = 2 micro-batches of 10.

        Raises:
            ConfigError: at the call, before anything is yielded: no sample, more samples than the config was tuned
                for, no tensor, or tensors whose sizes differ.
        """
        if model is None:
            return cut_batch(batch, self.split)
        return accumulate(model, cut_batch(batch, self.split, model.weight_of, listed=model.lists_samples))

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

    def _warn_of_other_devices(self, hardware: Hardware) -> None:
        if self.is_modelled and not hardware.is_modelled:
            here = names_of(hardware.devices)
            what = f"planned on virtual devices ({names_of(self.devices)}), and not measured on {here}"
        else:
            pairs = zip(self.devices, hardware.devices, strict=True)
            others = [(tuned, here) for tuned, here in pairs if _card(tuned) != _card(here)]
            if not others:
                return
            listed = "; ".join(f"device {tuned.index} was {_card(tuned)}, is {_card(here)}" for tuned, here in others)
            what = f"tuned on other devices than these: {listed}"
        warnings.warn(
            f"this config was {what}. It trains the same, but may be slower here or run out of memory: "
            "tune again on these devices to be sure.",
            UserWarning,
            stacklevel=3,
        )


def _card(device: Device) -> str:
    return f"{device.name} of {format_bytes(device.total_bytes)} ({device.total_bytes} bytes)"
