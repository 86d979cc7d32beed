"""Cards that are alike: what one of them does with a share, all do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.catalog import GpuModel


@dataclass(frozen=True, slots=True, kw_only=True)
class CardKind:
    """Cards of one model with as much held outside, and as much demanded free."""

    gpu: GpuModel
    occupied_bytes: int
    """Held by other programs on each, without our own CUDA context."""
    min_headroom_bytes: int
    devices: tuple[int, ...]
    """Which they are, in ascending order."""

    @property
    def count(self) -> int:
        return len(self.devices)


def kinds_of(hardware: VirtualHardware, min_headroom_bytes: Sequence[int]) -> tuple[CardKind, ...]:
    """The kinds of cards, in the order of their first.

    Worked: ``"2xT4,1xA10,1xT4"`` has T4 at 0, 1 and 3, and A10 at 2.
    """
    found: dict[tuple[GpuModel, int, int], list[int]] = {}
    each = zip(hardware.gpus, hardware.occupied_bytes, min_headroom_bytes, strict=True)
    for device, key in enumerate(each):
        found.setdefault(key, []).append(device)
    return tuple(
        CardKind(gpu=gpu, occupied_bytes=occupied, min_headroom_bytes=demand, devices=tuple(devices))
        for (gpu, occupied, demand), devices in found.items()
    )
