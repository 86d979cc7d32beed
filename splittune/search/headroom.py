"""What every device must keep free: the caller gives one number for all or one for each."""

from __future__ import annotations

from collections.abc import Sequence

from splittune.checks import checked_int
from splittune.errors import ConfigError


def headroom_demands(min_headroom_bytes: int | Sequence[int], num_devices: int) -> tuple[int, ...]:
    """The bytes that each device must keep free: 5 for 3 devices is (5, 5, 5), and (1, 2, 3) stays.

    Raises:
        ConfigError: a demand is no integer of at least 0, or there are not as many as devices.
    """
    if not isinstance(min_headroom_bytes, Sequence):
        return (checked_int("min_headroom_bytes", min_headroom_bytes, at_least=0),) * num_devices
    if len(min_headroom_bytes) != num_devices:
        raise ConfigError(
            f"min_headroom_bytes has {len(min_headroom_bytes)} numbers for {num_devices} devices: give one for each "
            "device, or a single number for all."
        )
    return tuple(
        checked_int(f"min_headroom_bytes[{device}]", demand, at_least=0)
        for device, demand in enumerate(min_headroom_bytes)
    )
