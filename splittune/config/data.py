"""What a config says: the best split, where it was measured, and its JSON; plain data, which an export reads."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from reprlib import repr as short_repr
from typing import Literal, TypeVar, get_args

import torch

from splittune.checks import check_str, checked_int, positive_or_none
from splittune.config.files import write_atomically
from splittune.config.schema import config_to_text, fields_from_text
from splittune.errors import ConfigError
from splittune.hardware.base import Device
from splittune.profiling.measurement import LossPlacement
from splittune.split import BatchSplit
from splittune.units import format_time

_Config = TypeVar("_Config", bound="ConfigData")

Strategy = Literal["dp", "ddp"]

# Characters of a message about a broken file; what quotes thousands of entries is cut in the middle.
_MAX_MESSAGE = 1000


def current_versions() -> dict[str, str]:
    """What a config was tuned with: the versions of splittune, torch and Python."""
    try:
        splittune_version = metadata.version("splittune")
    except metadata.PackageNotFoundError:  # imported from a source tree that is not installed
        splittune_version = "not installed"
    return {"splittune": splittune_version, "torch": str(torch.__version__), "python": platform.python_version()}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigData:
    """A measured split and the devices it was measured on, saved as JSON and loaded. `SplitConfig` trains with it.

    Worked: 64 samples as 4 micro-batches of 16, shards 1 + 5 + 5 + 5, on four cards of 24 GiB.

    Raises:
        ConfigError: a value of the wrong type or range, or a count other than one a device; every field is checked.
    """

    split: BatchSplit
    devices: tuple[Device, ...]
    """The devices of the measurement, in the order of the shards."""
    min_headroom_bytes: tuple[int, ...]
    """What every device had to keep free, one a device."""
    planned_peak_reserved_bytes: tuple[int, ...] = ()
    """The peak torch's allocator is expected to hold, one a device; empty where it was not measured."""
    virtual_spec: str | None = None
    """Virtual devices as `devices=` takes them, ``"1xRTX3090:occupied=8GiB,3xRTX3090"``; None for real ones."""
    is_modelled: bool
    """True where throughput and times come from a model of the devices, not from a clock."""
    throughput: float | None = None
    """Measured samples per second; None where not measured."""
    step_time_s: float | None = None
    """Measured seconds of one optimizer step; None where not measured."""
    loss_placement: LossPlacement = "output"
    """Where the loss was computed when this was measured: "replica" wants ``wrap(model, loss_fn)``."""
    eval_batch_size: int | None = None
    """Samples that the wrapped model takes at once under ``torch.no_grad()``; None where that was not measured."""
    strategy: Strategy = "dp"
    """"dp": one process trains on all devices. "ddp": a process for each, rank i has share i, as under torchrun."""
    seed: int = 0
    versions: dict[str, str] = field(default_factory=current_versions, hash=False)
    created: str = field(default_factory=_now)
    """ISO 8601 date and time."""

    def __post_init__(self) -> None:
        if not isinstance(self.split, BatchSplit):
            raise ConfigError(f"split is {short_repr(self.split)}: expected a BatchSplit.")
        for name in ("devices", "min_headroom_bytes", "planned_peak_reserved_bytes"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                raise ConfigError(f"{name} is {short_repr(value)}: expected a tuple with one entry a device.")
            object.__setattr__(self, name, tuple(value))
        self._check_devices()
        self._check_per_device("min_headroom_bytes", may_be_empty=False)
        self._check_per_device("planned_peak_reserved_bytes", may_be_empty=True)
        for name in ("throughput", "step_time_s"):
            object.__setattr__(self, name, positive_or_none(name, getattr(self, name)))
        object.__setattr__(self, "seed", checked_int("seed", self.seed, at_least=0))
        if self.eval_batch_size is not None:
            size = checked_int("eval_batch_size", self.eval_batch_size, at_least=1)
            object.__setattr__(self, "eval_batch_size", size)
        if self.loss_placement not in get_args(LossPlacement):
            raise ConfigError(f"loss_placement is {self.loss_placement!r}: expected one of {get_args(LossPlacement)}.")
        if self.strategy not in get_args(Strategy):
            raise ConfigError(f"strategy is {short_repr(self.strategy)}: expected one of {get_args(Strategy)}.")
        self._check_origin()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the config as JSON, whole or not at all, and return the path; missing folders are made.

        Raises:
            ConfigError: it cannot be written there.
        """
        return write_atomically(path, config_to_text(self))

    @classmethod
    def load(cls: type[_Config], path: str | os.PathLike[str]) -> _Config:
        """The config that `save` wrote, equal to the one saved. Nothing but JSON is ever read.

        Raises:
            ConfigError: no such file, truncated, of a newer schema, a field missing, unknown or out of range, shards
                that do not sum. The message names the file and the field.
        """
        name = os.fspath(path)
        try:
            text = Path(path).read_bytes().decode("utf-8")
        except OSError as error:
            hint = "This is a folder: name the file in it." if Path(path).is_dir() else "Is the path right?"
            raise ConfigError(
                f"cannot read {name}: {error.strerror or error}. Expected the JSON file that SplitConfig.save or "
                f"autotune's result.save wrote. {hint}"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{name} is no UTF-8 text: {error}. Expected the JSON that SplitConfig.save writes."
            ) from error
        try:
            return cls(**fields_from_text(text))
        except ValueError as error:  # ConfigError, InvalidSplitError, and Python's refusal of integers of 4,300 digits
            said = str(error)
            if len(said) > _MAX_MESSAGE:  # a value of thousands of entries, quoted
                said = f"{said[: _MAX_MESSAGE // 2]} ... {said[-_MAX_MESSAGE // 2 :]}"
            raise ConfigError(
                f"{name}: {said} Failing that, restore the file as it was saved, or tune again."
            ) from error

    def summary(self) -> str:
        """One line: the split, the devices, and what was measured, 'modelled' where it was."""
        ranks = ", a rank for each" if self.strategy == "ddp" else ""
        parts = [f"{self.split} on {self.virtual_spec or names_of(self.devices)}{ranks}"]
        if self.throughput is not None:
            parts.append(f"{self.throughput:.1f} samples/s")
        if self.step_time_s is not None:
            parts.append(f"{format_time(self.step_time_s)} a step")
        return ", ".join(parts) + (" (modelled)" if self.is_modelled else "")

    def __str__(self) -> str:
        return self.summary()

    def _check_devices(self) -> None:
        if len(self.devices) != self.split.num_devices:
            raise ConfigError(f"{len(self.devices)} devices for {self.split.num_devices} shards: expected one a shard.")
        for index, device in enumerate(self.devices):
            what = f"devices[{index}]"
            if not isinstance(device, Device):
                raise ConfigError(f"{what} is {short_repr(device)}: expected a Device.")
            if checked_int(f"{what}.index", device.index, at_least=0) != index:
                raise ConfigError(f"{what}.index is {device.index}: expected {index}, its place in the list.")
            check_str(f"{what}.name", device.name)
            check_str(f"{what}.torch_device", device.torch_device)
            checked_int(f"{what}.total_bytes", device.total_bytes, at_least=1)
            if device.uuid is not None:
                check_str(f"{what}.uuid", device.uuid)

    def _check_per_device(self, name: str, *, may_be_empty: bool) -> None:
        values: tuple[int, ...] = getattr(self, name)
        if len(values) != self.split.num_devices and not (may_be_empty and not values):
            raise ConfigError(
                f"{name} has {len(values)} entries for {self.split.num_devices} devices: expected one a device."
            )
        checked = tuple(checked_int(f"{name}[{index}]", value, at_least=0) for index, value in enumerate(values))
        object.__setattr__(self, name, checked)

    def _check_origin(self) -> None:
        """Whether what says where the config comes from can be believed."""
        if not isinstance(self.is_modelled, bool):
            raise ConfigError(f"is_modelled is {short_repr(self.is_modelled)}: expected True or False.")
        if self.virtual_spec is not None:
            check_str("virtual_spec", self.virtual_spec)
            if not self.is_modelled:
                raise ConfigError(
                    f"virtual_spec is {self.virtual_spec!r} and is_modelled is False: expected is_modelled True for "
                    "virtual devices, or virtual_spec None for real ones."
                )
        if not isinstance(self.versions, dict):
            raise ConfigError(f"versions is {short_repr(self.versions)}: expected names to version strings.")
        for package, version in self.versions.items():
            check_str("a name in versions", package)
            check_str(f"versions[{package!r}]", version)
        object.__setattr__(self, "versions", dict(self.versions))
        check_str("created", self.created)
        try:
            datetime.fromisoformat(self.created)
        except ValueError:
            raise ConfigError(
                f"created is {short_repr(self.created)}: expected an ISO 8601 date such as 2026-01-31T12:00:00+00:00."
            ) from None


def names_of(devices: Sequence[Device]) -> str:
    """``"RTX3090, RTX3090, T4"``: the devices' names, in the order of the shards."""
    return ", ".join(device.name for device in devices)
