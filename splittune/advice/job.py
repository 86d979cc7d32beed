"""The job of a search, to be run again with one thing changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from splittune.hardware import Hardware, resolve_hardware
from splittune.hardware.base import Device
from splittune.hardware.virtual import VirtualHardware
from splittune.runners.base import Runner
from splittune.runners.in_process import InProcessRunner
from splittune.runners.worker.runner import JobSource, WorkerRunner
from splittune.training import TrainingTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What differs from the search; without arguments nothing does."""

    order: tuple[int, ...] = ()
    """The search's cards that take part, GPU 0 first; empty for all as they were."""
    is_unoccupied: bool = False
    """Whether no other program holds memory: on virtual cards."""
    autocast_dtype: torch.dtype | None = None
    """Autocast to this one; None as the job has it."""


class Job(Protocol):
    """Makes runners of the job under a change, each of its own, to be opened and closed."""

    task: TrainingTask | None
    """None where only another process builds it."""

    def runner(self, change: Change) -> Runner:
        """Opening it raises ConfigError where this job cannot be changed so."""
        ...


class TaskJob:
    """A task at hand, on hardware at hand: trials run in this process."""

    def __init__(self, task: TrainingTask, hardware: Hardware) -> None:
        self.task: TrainingTask | None = task
        self._hardware = hardware

    @property
    def hardware(self) -> Hardware:
        return self._hardware

    def runner(self, change: Change) -> Runner:
        assert self.task is not None, "it was given"
        dtype = change.autocast_dtype
        task = self.task if dtype is None else replace(self.task, autocast_dtype=dtype)
        return InProcessRunner(task, changed_cards(self._hardware, change))


class SourceJob:
    """A job that a worker builds; this process touches no device."""

    task: TrainingTask | None = None

    def __init__(
        self,
        source: JobSource,
        devices: Sequence[Device],
        virtual_spec: str | None,
        *,
        global_batch_size: int | None,
        trial_timeout_s: float,
    ) -> None:
        self._source, self._devices, self._spec = source, tuple(devices), virtual_spec
        self._global_batch_size, self._trial_timeout_s = global_batch_size, trial_timeout_s

    def runner(self, change: Change) -> Runner:
        return WorkerRunner(
            self._source,
            self._named(change),
            autocast_dtype=change.autocast_dtype,
            global_batch_size=self._global_batch_size,
            trial_timeout_s=self._trial_timeout_s,
        )

    def _named(self, change: Change) -> str | list[str] | None:
        if self._spec is None:
            return [self._devices[index].torch_device for index in change.order or range(len(self._devices))]
        cards = changed_cards(resolve_hardware(self._spec), change)
        return cards.spec


def changed_cards(hardware: Hardware, change: Change) -> Hardware:
    """The cards of `hardware` as `change` has them; `hardware` itself where it leaves them alone."""
    order = change.order or tuple(range(len(hardware.devices)))
    if isinstance(hardware, VirtualHardware):
        held = (0,) * len(order) if change.is_unoccupied else tuple(hardware.occupied_bytes[index] for index in order)
        return VirtualHardware([hardware.gpus[index] for index in order], occupied_bytes=held)
    if order == tuple(range(len(hardware.devices))):
        return hardware
    return resolve_hardware([hardware.devices[index].torch_device for index in order])
