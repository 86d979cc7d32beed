"""What the tuner asks of hardware: devices, their memory, a clock, and a wrapper for a split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from splittune.units import format_bytes

if TYPE_CHECKING:
    from torch import nn, optim

    from splittune.parallel.base import SplitModule
    from splittune.split import BatchSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device a split may use.

    `index` counts the devices of this job, not torch's or NVML's: 0 is 'GPU 0'.
    """

    index: int
    name: str
    torch_device: str
    """Where its tensors really live, ``"cuda:1"`` say; ``"cpu"`` for every virtual GPU."""
    total_bytes: int
    uuid: str | None = None
    """``"GPU-..."``, as NVML spells it; None where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of one device over one trial, all in bytes.

    Example: 24 GiB in all, 1 GiB outside, 20 GiB peak reserved leaves ``headroom_bytes`` of 3 GiB.
    """

    device: int
    """Index within the job: 0 is 'GPU 0'."""
    total_bytes: int
    outside_bytes: int
    """Held by others than this process's allocator: other programs, the CUDA context, libraries."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    micro_step_peak_bytes: int | None = None
    """Peak allocated during forward and backward alone."""
    update_peak_bytes: int | None = None
    """Peak allocated during the optimizer's update alone."""
    single_step_peak_bytes: int | None = None
    """Peak allocated in forward and backward of a step with one such micro-batch.

    No gradients of earlier micro-batches are held then.
    """
    resting_bytes: int | None = None
    """Most allocated just before a forward: parameters, gradients, optimizer state; no batch size changes these.

    And the last output, which the loop keeps until the next one is there: that grows with the micro-batch.
    """
    before_backward_bytes: int | None = None
    """Most allocated just before a backward: what rests and the activations of the micro-batch.

    On GPU 0 outputs of the whole micro-batch are among them. It tells what a sample takes where
    another part of the step, the update say, holds the peak.
    """

    def __post_init__(self) -> None:
        for field in ("device", "total_bytes", "outside_bytes", "peak_allocated_bytes", "peak_reserved_bytes"):
            value = getattr(self, field)
            if value < 0:
                raise ValueError(f"DeviceMemory.{field} is {value}: expected at least 0.")

    @property
    def headroom_bytes(self) -> int:
        """Left at the peak: total - outside - peak reserved. Negative if it would not have fit."""
        return self.total_bytes - self.outside_bytes - self.peak_reserved_bytes

    @property
    def batch_peak_bytes(self) -> int:
        """Peak allocated in forward and backward; of the whole trial where that is not known."""
        return self.peak_allocated_bytes if self.micro_step_peak_bytes is None else self.micro_step_peak_bytes

    def describe_lack(self, min_headroom_bytes: int) -> str:
        """The arithmetic of a headroom that is too small, for messages."""
        return (
            f"device {self.device}: {format_bytes(self.total_bytes)} in all - {format_bytes(self.outside_bytes)} held "
            f"outside - {format_bytes(self.peak_reserved_bytes)} at the peak = {format_bytes(self.headroom_bytes)} "
            f"left, {format_bytes(min_headroom_bytes)} demanded"
        )


def largest_readings(readings: Iterable[Sequence[DeviceMemory]]) -> tuple[DeviceMemory, ...]:
    """Several readings of the same devices as one: the largest of every figure.

    These are outside, allocated and reserved bytes; the rest is that of the first reading. Where a
    reading is empty, so is this.
    """
    return tuple(
        replace(
            of_device[0],
            outside_bytes=max(memory.outside_bytes for memory in of_device),
            peak_allocated_bytes=max(memory.peak_allocated_bytes for memory in of_device),
            peak_reserved_bytes=max(memory.peak_reserved_bytes for memory in of_device),
        )
        for of_device in zip(*readings, strict=False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConditions:
    """How one device ran at an instant; None, or no reason, where its driver does not tell.

    Example: 1695 MHz at 64 °C and ``("power cap",)``: it would run faster, did it not draw all the
    power it may.
    """

    sm_clock_mhz: int | None = None
    """The clock of its processors, in MHz."""
    temperature_c: int | None = None
    """In degrees Celsius."""
    throttle_reasons: tuple[str, ...] = ()
    """What slows it down, in plain words.

    "power cap", "hardware slowdown", "software thermal slowdown", "hardware thermal slowdown" or
    "power brake". Idling and clocks that somebody set are none.
    """


class Hardware(Protocol):
    """The devices a job runs on. `CudaHardware` and `VirtualHardware` are its two implementations.

    The profiler drives it so: ``with metered():`` wrap the model for a split, then for each phase
    `reset_peaks`, run, `memory`; `clock` around what is timed; `recover` after every trial, and
    `allocated_bytes` to see that it did.
    """

    @property
    def devices(self) -> tuple[Device, ...]: ...

    @property
    def is_modelled(self) -> bool:
        """Whether times come from a model, not a clock: whatever is printed must then say so."""
        ...

    @property
    def spec(self) -> str | None:
        """Virtual devices as ``devices=`` takes them, to make them again; None for real ones."""
        ...

    def wrap(self, model: nn.Module, split: BatchSplit, **options: Any) -> SplitModule:
        """The module to train with: `model` moved to device 0 and wrapped for this split.

        `options` go to the wrapper: `loss_fn`, `weight_fn`, `engine`, `eval_batch_size`, `sync_batch_norm`.
        """
        ...

    def metered(self) -> AbstractContextManager[None]:
        """Turn accounting on. Outside, a virtual wrapper trains too, and counts nothing."""
        ...

    def adopt(self, module: nn.Module) -> None:
        """Have a further module of the job (a discriminator) count where training has it, virtually device 0."""
        ...

    def prepare_optimizer(self, optimizer: optim.Optimizer) -> None:
        """Have `optimizer` run as it would on these devices; undone with its state's snapshot."""
        ...

    def clock(self) -> float:
        """Seconds, read once every device has finished its work."""
        ...

    def busy_s(self) -> tuple[float, ...] | None:
        """Seconds each device has worked so far, ever growing.

        Of a virtual device its kernels' own; of a card also the gaps between them, while the host
        launches the next. None where what ran since the last call is unknown.
        """
        ...

    def copied_s(self) -> tuple[float, ...] | None:
        """Seconds for which each device stood still for copies so far, ever growing; None where that is not known.

        Apart from `busy_s`: what is in neither, it waited for the host or for other devices.
        """
        ...

    def reset_peaks(self) -> None:
        """Start the peaks anew from what is held now."""
        ...

    def memory(self) -> tuple[DeviceMemory, ...]:
        """Peaks since the last `reset_peaks`, with what others hold now."""
        ...

    def allocated_bytes(self) -> tuple[int, ...]:
        """What this process's tensors hold on each device now."""
        ...

    def free_bytes(self) -> tuple[int, ...] | None:
        """What each device's driver can still give, of which torch's cache is no part.

        None where nobody can tell.
        """
        ...

    def num_alloc_retries(self) -> tuple[int, ...]:
        """How often each device's allocator handed its cache back and tried again, ever growing."""
        ...

    def conditions(self) -> tuple[DeviceConditions, ...] | None:
        """Clock, temperature and what slows each device down now; None where nobody can tell."""
        ...

    def locate(self, error: BaseException) -> int | None:
        """The device an out-of-memory error is about; None where its message does not tell."""
        ...

    def recover(self, *, thoroughly: bool = False) -> None:
        """Wait for a failed backward's threads, collect garbage and hand cached memory back, on every device.

        Call it outside any except block, whose error holds a failed step's frames. `thoroughly`
        also ends what libraries keep for the next call, at the price of their making it again.
        """
        ...
