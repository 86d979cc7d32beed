"""The cards of this machine, of whatever kind, as torch has them: CUDA's, ROCm's, XPU's or another backend's own."""

from __future__ import annotations

from typing import Any

import torch

_WITHOUT_CARDS = "cuda"  # what messages and numbers mean where there is no card at all
_SINGLE = ("mps",)  # one device that shares the host's memory: nothing to split over, and no streams to order


def kind_of_cards() -> str:
    """The device type of this machine's cards: ``"cuda"`` (ROCm's as well), ``"xpu"``, a backend's own name.

    "cuda" where there are none. torch has one kind of accelerator at a time.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type in _SINGLE or not torch.get_device_module(accelerator).is_available():
        return _WITHOUT_CARDS
    return str(accelerator.type)


def is_card(device: torch.device) -> bool:
    """True for a device of a kind that has cards, with streams and memory of their own, whether or not it is there."""
    if device.type == _WITHOUT_CARDS:
        return True
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type and device.type not in _SINGLE


def module_of(kind: torch.device | str) -> Any:
    """What torch offers for devices of that kind, under the names of ``torch.cuda``: that, ``torch.xpu`` and so on."""
    return torch.get_device_module(kind)


def count_cards() -> int:
    """Cards that this process may use; 0 where torch has none."""
    module = module_of(kind_of_cards())
    return int(module.device_count()) if module.is_available() else 0


def card(index: int) -> torch.device:
    """The card of that number."""
    return torch.device(kind_of_cards(), index)


def with_index(device: torch.device) -> torch.device:
    """A card as tensors report it: ``cuda``, the current one, does not compare equal to ``cuda:0``."""
    index: int | None = device.index  # torch's types leave the None out
    return torch.device(device.type, module_of(device).current_device()) if index is None else device


def all_cards() -> tuple[torch.device, ...]:
    """Every card that this process may use, by its number."""
    return tuple(card(index) for index in range(count_cards()))


def label_of(kind: str) -> str:
    """The kind in a message: ``"CUDA"``."""
    return kind.upper()
