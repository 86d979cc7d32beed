"""The devices of a wrapper, by number, name or as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from splittune.checks import as_int
from splittune.errors import DeviceError

DeviceLike = int | str | torch.device


def as_device(device: DeviceLike) -> torch.device:
    """A CUDA ordinal or anything torch takes for a device, as tensors report it."""
    index = as_int(device)
    return torch.device("cuda", index) if index is not None else _as_reported(torch.device(device))


def _as_reported(device: torch.device) -> torch.device:
    """As tensors report it: ``cuda``, the current card, does not compare equal to ``cuda:0``."""
    if device.type == "cpu":
        return torch.device("cpu")  # there is one
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def resolve_devices(device_ids: Sequence[DeviceLike] | None, module: nn.Module) -> tuple[torch.device, ...]:
    """The devices named; all CUDA devices for None, or the module's own where there is no CUDA.

    Raises:
        DeviceError: none is named.
    """
    if device_ids is not None:
        devices = tuple(as_device(device) for device in device_ids)
        if not devices:
            raise DeviceError("device_ids is empty: expected at least one device, e.g. device_ids=[0, 1].")
        return devices
    if torch.cuda.is_available():
        return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    first = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    return (first,)
