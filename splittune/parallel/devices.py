"""The devices of a wrapper, by number, name or as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from splittune.cards import all_cards, card, is_card, with_index
from splittune.checks import as_int
from splittune.errors import DeviceError

DeviceLike = int | str | torch.device


def as_device(device: DeviceLike) -> torch.device:
    """A card's number or anything torch takes for a device, as tensors report it."""
    index = as_int(device)
    return card(index) if index is not None else _as_reported(torch.device(device))


def _as_reported(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return torch.device("cpu")  # there is one
    return with_index(device) if is_card(device) else device


def resolve_devices(device_ids: Sequence[DeviceLike] | None, module: nn.Module) -> tuple[torch.device, ...]:
    """The devices named; all cards for None, or the module's own where there is none.

    Raises:
        DeviceError: none is named.
    """
    if device_ids is not None:
        devices = tuple(as_device(device) for device in device_ids)
        if not devices:
            raise DeviceError("device_ids is empty: expected at least one device, e.g. device_ids=[0, 1].")
        return devices
    if cards := all_cards():
        return cards
    first = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    return (first,)
