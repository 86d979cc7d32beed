"""The devices around a trial: our memory, what other programs hold, and what slows devices down."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from splittune.hardware.base import Hardware
from splittune.profiling.holders import Holders
from splittune.units import MIB, format_bytes

logger = logging.getLogger(__name__)

# What stays allocated after a trial counts above so many bytes: torch keeps a little for itself, a
# generator's state say. A choice.
LEFT_TOLERANCE_BYTES = 16 * MIB
# And above this part of what was allocated before the first trial. A choice.
LEFT_TOLERANCE = 0.01
# Changes outside count from so many bytes on: our own context grows by some tens of MiB when a
# kernel is loaded late, and other programs are never quite still. A choice.
OUTSIDE_TOLERANCE_BYTES = 128 * MIB
# No reason to measure again: a device under full load runs at its power cap, in training as well.
USUAL_REASONS = frozenset({"power cap"})


class DeviceWatch:
    """Compares the devices around each trial, and says in sentences what is not as it should be.

    Modelled devices are made anew for every trial, have no neighbours and no heat: there is nothing
    to watch.

    Args:
        hardware: the devices.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._baseline_bytes: list[int] | None = None
        self._holders: Holders | None = None
        self._outside_bytes: tuple[int, ...] | None = None
        self._context_has_settled = False

    def before_trial(self) -> tuple[str, ...]:
        """Call it before each trial: what other programs took or gave back since the one before.

        Trials with such a change between them do not compare well.
        """
        if self._hardware.is_modelled:
            return ()
        if self._baseline_bytes is None:
            self._baseline_bytes, self._holders = list(self._hardware.allocated_bytes()), Holders()
        changes = self._changes_outside("since the trial before")
        for change in changes:
            logger.warning("%s Trials measured earlier had other memory to work with.", change)
        return changes

    def throttling(self) -> tuple[tuple[str, ...], bool]:
        """Call it as the timed steps end: what slows devices down, and whether to measure again."""
        conditions = () if self._hardware.is_modelled else self._hardware.conditions() or ()
        reasons = [(index, reason) for index, each in enumerate(conditions) for reason in each.throttle_reasons]
        notes = tuple(f"Device {index} was throttled: {reason}." for index, reason in reasons)
        return notes, any(reason not in USUAL_REASONS for _, reason in reasons)

    def changes_during_trial(self, *, ran_through: bool) -> tuple[str, ...]:
        """Call it once the devices are recovered: what other programs took or gave back meanwhile.

        Growth counts from the first trial on that has `ran_through`: until then our own CUDA
        context is growing.
        """
        if self._hardware.is_modelled:
            return ()
        changes = self._changes_outside("during the trial")
        self._context_has_settled = self._context_has_settled or ran_through
        return changes

    def leftovers(self) -> tuple[str, ...]:
        """Call it after each trial: what stays allocated beyond what was there before the first.

        It is told once, after one more recovery, with what holds it. Later trials are compared with
        what is held now.
        """
        if self._hardware.is_modelled or self._baseline_bytes is None or not self._left(self._baseline_bytes):
            return ()
        self._hardware.recover(thoroughly=True)
        notes = []
        for index, left_bytes in self._left(self._baseline_bytes):
            device = self._hardware.devices[index]
            note = f"{format_bytes(left_bytes)} more than before the first trial stay allocated on device {index}."
            holders = self._holders.describe(torch.device(device.torch_device)) if self._holders is not None else ""
            logger.warning(
                "%s Trials from here on have that much less. It holds: %s. Drop what keeps it between steps.",
                note,
                holders,
            )
            self._baseline_bytes[index] += left_bytes
            notes.append(note)
        return tuple(notes)

    def _left(self, baseline_bytes: Sequence[int]) -> list[tuple[int, int]]:
        """Devices that hold more than they did, and how much."""
        pairs = enumerate(zip(self._hardware.allocated_bytes(), baseline_bytes, strict=True))
        return [
            (index, held - before)
            for index, (held, before) in pairs
            if held - before > max(LEFT_TOLERANCE_BYTES, LEFT_TOLERANCE * before)
        ]

    def _changes_outside(self, when: str) -> tuple[str, ...]:
        before, now = self._outside_bytes, tuple(memory.outside_bytes for memory in self._hardware.memory())
        self._outside_bytes = now
        if before is None:
            return ()
        changes = []
        for index, (was, held) in enumerate(zip(before, now, strict=True)):
            if held - was > OUTSIDE_TOLERANCE_BYTES and self._context_has_settled:
                changes.append(f"Other programs took {format_bytes(held - was)} on device {index} {when}.")
            elif was - held > OUTSIDE_TOLERANCE_BYTES:
                changes.append(f"Other programs gave back {format_bytes(was - held)} on device {index} {when}.")
        return tuple(changes)
