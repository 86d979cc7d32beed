"""What the tuner asks of whatever runs its trials, and what it knows of a job before the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import nn

from splittune.hardware import Device, DeviceMemory
from splittune.profiling.measurement import LossPlacement, Measurement
from splittune.split import BatchSplit
from splittune.training import SampleBatch, TrainingTask
from splittune.training.loader_rate import measure_loader_rate, what_to_set
from splittune.training.module_memory import ModuleMemory, parameters_by_module


class DeviceView(Protocol):
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
class DeviceSnapshot:
    """`DeviceView` as they were before the first trial, in plain data: asking them touches no device."""

    devices: tuple[Device, ...]
    is_modelled: bool
    spec: str | None
    memory_before: tuple[DeviceMemory, ...]
    nodes: tuple[str, ...] = ()
    """The machine of each rank; empty where one process runs the job."""

    @classmethod
    def of(cls, hardware: DeviceView) -> DeviceSnapshot:
        with hardware.metered():
            memory = hardware.memory()
        return cls(devices=hardware.devices, is_modelled=hardware.is_modelled, spec=hardware.spec, memory_before=memory)

    def metered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def memory(self) -> tuple[DeviceMemory, ...]:
        """With what others held before the first trial."""
        return self.memory_before


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What the tuner knows of a job before its first trial: plain data, wherever the job itself is."""

    title: str
    """``"ByteGPT of 812800 parameters in torch.bfloat16"``: tells this job's trials from another one's."""
    loader_batch_size: int
    global_batch_size: int | None
    """Samples behind one optimizer step, where the task has it otherwise than its loader."""
    has_batch_norm: bool
    cards: DeviceSnapshot
    loader_samples_per_s: float | None = None
    """What the loader gives by itself; None on virtual devices, whose time is no clock's, and where
    it cannot be told."""
    loader_advice: str = ""
    """What would make it faster."""
    no_replica_loss: str | None = None
    """Why the loss cannot be placed in the replicas, though either placement was asked for; None where it can."""
    parameter_bytes: int | None = None
    """Of the model's parameters and buffers."""
    gradient_bytes: int | None = None
    """Of the parameters that are trained."""
    modules: tuple[ModuleMemory, ...] = ()
    """What the model's modules hold, most first."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The machine of each rank; empty where one process runs the job."""
        return self.cards.nodes

    @classmethod
    def of(cls, task: TrainingTask, samples: SampleBatch, hardware: DeviceView) -> JobFacts:
        num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
        autocast = "" if task.autocast_dtype is None else f" in {task.autocast_dtype}"
        if task.grad_scaler is not None and task.grad_scaler.is_enabled():
            autocast += " with a gradient scaler"
        return cls(
            title=f"{type(task.model).__name__} of {num_parameters} parameters{autocast}",
            loader_batch_size=samples.loader_batch_size,
            global_batch_size=task.global_batch_size,
            has_batch_norm=any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.model.modules()),
            cards=DeviceSnapshot.of(hardware),
            loader_samples_per_s=None if hardware.is_modelled else measure_loader_rate(task.loader),
            loader_advice=what_to_set(task.loader),
            parameter_bytes=sum(one.nbytes for one in (*task.model.parameters(), *task.model.buffers())),
            gradient_bytes=sum(one.nbytes for one in task.model.parameters() if one.requires_grad),
            modules=parameters_by_module(task.model),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads them back equal."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JobFacts:
        cards = dict(data["cards"])
        cards["devices"] = tuple(Device(**device) for device in cards["devices"])
        cards["memory_before"] = tuple(DeviceMemory(**memory) for memory in cards["memory_before"])
        modules = tuple(ModuleMemory(**module) for module in data.get("modules", ()))
        cards["nodes"] = tuple(cards.get("nodes", ()))
        return cls(**{**data, "cards": DeviceSnapshot(**cards), "modules": modules})


class SplitProfiler(Protocol):
    """Measures splits of one job: `Profiler`, or one that asks a worker."""

    def measure(self, split: BatchSplit) -> Measurement: ...

    def measure_whole_steps(self, split: BatchSplit) -> Measurement: ...


class Runner(Protocol):
    """Runs a job's trials. `open` it once, `close` it in any case, also where `open` raised."""

    def open(self, placements: Sequence[LossPlacement]) -> JobFacts:
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
