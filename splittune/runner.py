"""Where a job's trials run: what the tuner knows of the job beforehand, and trials in the tuner's own process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import nn

from splittune.hardware import Device, DeviceMemory, Hardware
from splittune.hardware.oom import is_sticky
from splittune.interrupts import held_back
from splittune.profiling.measurement import LossPlacement, Measurement
from splittune.profiling.profiler import Profiler, finish_backward
from splittune.split import BatchSplit
from splittune.training import SampleBatch, Snapshot, TrainingTask, read_batches
from splittune.training.loader_rate import measure_loader_rate, what_to_set


class Cards(Protocol):
    """The devices as the tuner sees them; any `Hardware` is one."""

    @property
    def devices(self) -> tuple[Device, ...]: ...

    @property
    def is_modelled(self) -> bool: ...

    @property
    def spec(self) -> str | None: ...

    def metered(self) -> AbstractContextManager[None]: ...

    def memory(self) -> tuple[DeviceMemory, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCards:
    """`Cards` as they were before the first trial, in plain data: asking them touches no device."""

    devices: tuple[Device, ...]
    is_modelled: bool
    spec: str | None
    memory_before: tuple[DeviceMemory, ...]

    @classmethod
    def of(cls, hardware: Cards) -> KnownCards:
        with hardware.metered():
            memory = hardware.memory()
        return cls(devices=hardware.devices, is_modelled=hardware.is_modelled, spec=hardware.spec, memory_before=memory)

    def metered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def memory(self) -> tuple[DeviceMemory, ...]:
        """With what others held before the first trial."""
        return self.memory_before


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the tuner knows of a job before its first trial: plain data, wherever the job itself is."""

    title: str
    """``"ByteGPT of 812800 parameters in torch.bfloat16"``: tells this job's trials from another one's."""
    loader_batch_size: int
    global_batch_size: int | None
    """Samples behind one optimizer step, where the task has it otherwise than its loader."""
    has_batch_norm: bool
    cards: KnownCards
    loader_samples_per_s: float | None = None
    """What the loader gives by itself; None on virtual devices, whose time is no clock's, and where it cannot be told."""
    loader_advice: str = ""
    """What would make it faster."""

    @classmethod
    def of(cls, task: TrainingTask, samples: SampleBatch, hardware: Cards) -> Job:
        num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
        autocast = "" if task.autocast_dtype is None else f" in {task.autocast_dtype}"
        return cls(
            title=f"{type(task.model).__name__} of {num_parameters} parameters{autocast}",
            loader_batch_size=samples.loader_batch_size,
            global_batch_size=task.global_batch_size,
            has_batch_norm=any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.model.modules()),
            cards=KnownCards.of(hardware),
            loader_samples_per_s=None if hardware.is_modelled else measure_loader_rate(task.loader),
            loader_advice=what_to_set(task.loader),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads them back equal."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Job:
        cards = dict(data["cards"])
        cards["devices"] = tuple(Device(**device) for device in cards["devices"])
        cards["memory_before"] = tuple(DeviceMemory(**memory) for memory in cards["memory_before"])
        return cls(**{**data, "cards": KnownCards(**cards)})


class SplitProfiler(Protocol):
    """Measures splits of one job: `Profiler`, or one that asks a worker."""

    def measure(self, split: BatchSplit) -> Measurement: ...

    def measure_whole_steps(self, split: BatchSplit) -> Measurement: ...


class Runner(Protocol):
    """Runs a job's trials. `open` it once, `close` it in any case, also where `open` raised."""

    def open(self, placements: Sequence[LossPlacement]) -> Job:
        """Have the job and its devices ready for trials with these loss placements.

        Raises:
            ConfigError, DeviceError: the job or the devices cannot be used.
        """
        ...

    def profiler(self, *, min_headroom_bytes: Sequence[int], loss_placement: LossPlacement) -> SplitProfiler:
        """What measures splits, with these demands."""
        ...

    def close(self) -> None:
        """Leave job and devices as they were found."""
        ...


def free_leftovers(hardware: Hardware) -> None:
    """Free what a step left on the devices, one that failed too. Call it outside any except block."""
    finish_backward()
    hardware.recover()


class LocalRunner:
    """Runs the trials of a task at hand in this process, on hardware at hand."""

    def __init__(self, task: TrainingTask, hardware: Hardware) -> None:
        self._task, self._hardware = task, hardware
        self._snapshot: Snapshot | None = None
        self._samples: SampleBatch | None = None
        self._is_grad_enabled = True

    def keep(self) -> None:
        """Keep the job as it is now, for `close` to put back."""
        self._is_grad_enabled = torch.is_grad_enabled()
        with held_back():  # it takes the gradients off the model
            self._snapshot = self._task.snapshot()

    def open(self, placements: Sequence[LossPlacement]) -> Job:
        self.keep()
        self._samples = read_batches(self._task.loader)
        if "replica" in placements:
            self._task.loss_in_replica(self._samples.batch)  # says so now if it cannot be
        return Job.of(self._task, self._samples, self._hardware)

    def profiler(self, *, min_headroom_bytes: Sequence[int], loss_placement: LossPlacement) -> Profiler:
        assert self._snapshot is not None, "open() comes first"
        assert self._samples is not None, "open() did not fail"
        return Profiler(
            self._task,
            self._hardware,
            self._samples,
            self._snapshot,
            min_headroom_bytes=min_headroom_bytes,
            loss_placement=loss_placement,
        )

    def close(self) -> None:
        """Leave job and devices as they were found; Ctrl-C waits until that is done.

        After a CUDA error that spoils the devices for this process nothing is asked of them: what lives there is lost, and
        asking would raise anew and hide that error. What lives on the host is put back all the same.
        """
        if self._snapshot is None:
            return
        on_its_way = sys.exc_info()[1]  # where this is called in a `finally`
        is_usable = on_its_way is None or not is_sticky(on_its_way)
        with held_back():
            try:
                if is_usable:
                    free_leftovers(self._hardware)
            except RuntimeError as error:  # a kernel's own error may show only now
                is_usable = not is_sticky(error)
                raise
            finally:
                # Ctrl-C between torch.no_grad()'s own lines leaves gradients off for the whole thread
                torch.set_grad_enabled(self._is_grad_enabled)
                self._snapshot.restore(on_host_only=not is_usable)
                self._snapshot.restore_gradients(on_host_only=not is_usable)
