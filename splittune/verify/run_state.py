"""How far a run has come, what was read of the devices' memory, and whether it ran out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from splittune.hardware import DeviceMemory, Hardware
from splittune.hardware.oom import is_out_of_memory, is_sticky
from splittune.verify.result import Lack

Phase = Literal["training", "evaluation"]


@dataclass(slots=True)
class RunState:
    """Filled in while a run goes on, so that one that ends early has left what is known of it."""

    where: str = ""
    """What runs now: ``"step 3"``, ``"the evaluation after step 3"``."""
    phase: Phase = "training"
    losses: list[float] = field(default_factory=list)
    num_evaluations: int = 0
    fullest: tuple[DeviceMemory, ...] = ()
    """Of every device the reading with the least headroom so far."""
    reserved_in: dict[Phase, list[int | None]] = field(default_factory=dict)
    """For each phase and device: the peak reserved that this phase was the first to reach."""

    def read(self, memory: tuple[DeviceMemory, ...]) -> None:
        """Take in the devices' memory. Peaks only grow: the phase that ended last raised them."""
        if not self.fullest:
            self.fullest = memory
            self.reserved_in = {"training": [0] * len(memory), "evaluation": [None] * len(memory)}
        for index, each in enumerate(memory):
            if each.peak_reserved_bytes > max(peaks[index] or 0 for peaks in self.reserved_in.values()):
                self.reserved_in[self.phase][index] = each.peak_reserved_bytes
        pairs = zip(self.fullest, memory, strict=True)
        self.fullest = tuple(min(pair, key=lambda one: one.headroom_bytes) for pair in pairs)


def run_metered(hardware: Hardware, act: Callable[[], None], state: RunState) -> Lack | None:
    """Run `act` on empty devices with the meter on, and return what it lacked; None if nothing.

    Running out of memory is a result. Every other exception passes through, an error that spoils
    the devices for this process too, even where it speaks of memory.
    """
    hardware.recover()
    with hardware.metered():
        try:
            act()
        except Exception as error:
            if is_sticky(error) or not is_out_of_memory(error, hardware.free_bytes):
                raise
            message = next(iter(str(error).splitlines()), type(error).__name__)
            state.read(hardware.memory())
            return Lack(where=state.where, device=hardware.locate(error), message=message)
    return None
