"""What is said where a config trains on other devices than it was tuned on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from splittune.config.data import ConfigData, names_of
from splittune.hardware.base import Device
from splittune.units import format_bytes


def warn_of_other_devices(
    config: ConfigData, present: Sequence[Device], *, is_modelled: bool, first: int = 0, stacklevel: int = 3
) -> None:
    """A `UserWarning` where the devices `present` are others than those of `config` from the `first` on."""
    tuned_on = config.devices[first : first + len(present)]
    if config.is_modelled and not is_modelled:
        what = f"planned on virtual devices ({names_of(config.devices)}), and not measured on {names_of(present)}"
    else:
        others = [(tuned, here) for tuned, here in zip(tuned_on, present, strict=True) if _card(tuned) != _card(here)]
        if not others:
            return
        listed = "; ".join(f"device {tuned.index} was {_card(tuned)}, is {_card(here)}" for tuned, here in others)
        what = f"tuned on other devices than these: {listed}"
    warnings.warn(
        f"this config was {what}. It trains the same, but may be slower here or run out of memory: "
        "tune again on these devices to be sure.",
        UserWarning,
        stacklevel=stacklevel,
    )


def _card(device: Device) -> str:
    return f"{device.name} of {format_bytes(device.total_bytes)} ({device.total_bytes} bytes)"
