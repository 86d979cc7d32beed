"""How a run under a config went, beside what the config planned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from splittune.config.split_config import SplitConfig
from splittune.hardware.base import Device, DeviceMemory
from splittune.report.page.memory import CardMemory, pieces_of
from splittune.report.page.notebook import memory_output
from splittune.report.page.tables import table
from splittune.units import MIB, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """Memory that ran out."""

    where: str
    """``"step 3"``, ``"the evaluation after step 3"``."""
    device: int | None
    """Index within the job; None where the error does not tell."""
    message: str
    """The error's first line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How training under a config went, beside what the config planned.

    Worked: planned were 40 MiB on GPU 0, with 5 MiB to stay free. Training took 42 MiB of the
    46 MiB there are, so 4 MiB stayed free: not verified, and ``suggested_min_headroom_bytes`` is
    5 + (42 - 40) = 7 MiB.
    """

    config: SplitConfig
    """The config that was verified; with its `eval_batch_size` where that was measured."""
    devices: tuple[Device, ...]
    """Where it was verified."""
    memory: tuple[DeviceMemory, ...]
    """Of every device the reading with the least headroom, over the whole run.

    Peaks are those from its start on.
    """
    training_peak_reserved_bytes: tuple[int, ...]
    """For each device the most that its allocator held in training steps."""
    evaluation_peak_reserved_bytes: tuple[int | None, ...]
    """The same of evaluations; None for a device where they took no more than training before."""
    losses: tuple[float, ...]
    """Of every finished step, the mean over its samples."""
    num_evaluations: int
    is_modelled: bool = False
    """True for virtual devices, whose memory is accounted."""
    lack: Lack | None = None
    """Where memory ran out; None where it did not."""
    notes: tuple[str, ...] = ()
    """What else the user should know, a plain sentence each."""

    @property
    def is_verified(self) -> bool:
        """No device ran out of memory, and each kept its `min_headroom_bytes`."""
        return self.lack is None and not any(self._lacking_bytes)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """For each device how it kept to the plan.

        ``"as planned"``, ``"2.0 MiB more than planned, still 4.0 MiB free"``, or what it lacked.
        """
        return tuple(self._verdict_on(index) for index in range(len(self.memory)))

    @property
    def suggested_min_headroom_bytes(self) -> int | None:
        """What to tune again with, rounded up to MiB; None if verified.

        It is what was demanded and what was taken beyond the plan. Of a device that ran out only
        this much is known: it wants more than all that the plan left free.
        """
        if self.is_verified:
            return None
        demands = [self._headroom_wanted_on(index) for index in range(len(self.memory))]
        return math.ceil(max(demands) / MIB) * MIB

    @property
    def summary(self) -> str:
        """One plain sentence or two: verified, or what went wrong and what to do."""
        if self.is_verified:
            counts = ((len(self.losses), "step"), (self.num_evaluations, "evaluation"))
            what_ran = " and ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in counts if count)
            return f"Verified: {what_ran} ran, and every device kept its headroom."
        if self.lack is not None:
            on = "" if self.lack.device is None else f", on GPU {self.lack.device}"
            wrong = f"out of memory at {self.lack.where}{on}"
        else:
            lacks = [
                f"GPU {index} lacks {format_bytes(lacking)} of the {format_bytes(demanded)} that must stay free"
                for index, (lacking, demanded) in enumerate(
                    zip(self._lacking_bytes, self.config.min_headroom_bytes, strict=True)
                )
                if lacking
            ]
            wrong = ", ".join(lacks)
        suggested = self.suggested_min_headroom_bytes or 0
        return (
            f"Not verified: {wrong}. Tune again with {format_bytes(suggested)} or more kept free "
            f"(--min-headroom-bytes {suggested})."
        )

    def _repr_html_(self) -> str:
        planned = self.config.planned_peak_reserved_bytes or (None,) * len(self.memory)
        cards = [
            CardMemory(
                device=device, memory=memory, samples=samples, demanded_bytes=demanded, parts=pieces_of(memory, None)
            )
            for device, memory, samples, demanded in zip(
                self.devices, self.memory, self.config.split.shard_sizes, self.config.min_headroom_bytes, strict=True
            )
        ]
        heads = [("card", ""), ("planned peak", "n"), ("in training", "n"), ("in evaluation", "n"), ("verdict", "")]
        rows = [
            (
                [
                    f"GPU {device.index}, {device.name}",
                    "not measured" if plan is None else format_bytes(plan),
                    format_bytes(training),
                    "" if evaluation is None else format_bytes(evaluation),
                    verdict,
                ],
                False,
            )
            for device, plan, training, evaluation, verdict in zip(
                self.devices,
                planned,
                self.training_peak_reserved_bytes,
                self.evaluation_peak_reserved_bytes,
                self.verdicts,
                strict=True,
            )
        ]
        title = "Verified" if self.is_verified else "Not verified"
        beneath = table("What torch's allocator held at its peak.", heads, rows)
        return memory_output(title, self.summary, cards, beneath, is_modelled=self.is_modelled)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.summary)

    @property
    def _lacking_bytes(self) -> tuple[int, ...]:
        pairs = zip(self.config.min_headroom_bytes, self.memory, strict=True)
        return tuple(max(0, demanded - memory.headroom_bytes) for demanded, memory in pairs)

    def _headroom_wanted_on(self, index: int) -> int:
        memory, demanded = self.memory[index], self.config.min_headroom_bytes[index]
        excess = self._excess_bytes(index)
        wanted = demanded + max(excess or 0, self._lacking_bytes[index])
        if self.lack is None or self.lack.device not in (None, index):
            return wanted
        left_by_plan = 0 if excess is None else memory.headroom_bytes + excess
        return max(wanted, left_by_plan) + MIB

    def _excess_bytes(self, index: int) -> int | None:
        """Beyond the plan; None where nothing was planned."""
        planned = self.config.planned_peak_reserved_bytes
        return self.memory[index].peak_reserved_bytes - planned[index] if planned else None

    def _verdict_on(self, index: int) -> str:
        memory, demanded = self.memory[index], self.config.min_headroom_bytes[index]
        if self.lack is not None and self.lack.device == index:
            return f"out of memory at {self.lack.where}"
        left = format_bytes(memory.headroom_bytes)
        if self._lacking_bytes[index]:
            return f"too little headroom: {left} left, {format_bytes(demanded)} demanded"
        excess = self._excess_bytes(index)
        if excess is None:
            return f"{left} free"
        return "as planned" if excess <= 0 else f"{format_bytes(excess)} more than planned, still {left} free"
