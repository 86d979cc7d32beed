"""What is asked of one GPU through pynvml, and the plain data that it answers with."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from splittune.errors import NvmlUnavailableError
from splittune.hardware.base import DeviceConditions
from splittune.units import format_bytes

# The bits of NVML's clock event reasons that slow a busy GPU down. Left out: idle (0x1), clocks
# that somebody set (0x2, 0x100), and GPUs that boost together (0x10), all of which are as they
# should be.
_THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlMemory:
    """One GPU's memory at an instant, all programs together, in bytes.

    Example: 24 GiB in all and 18 GiB free leaves ``used_bytes`` of 6 GiB.
    """

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        """Everything that is not free: total - free.

        Not NVML's own 'used', which holds the driver's reserve in one version of the call and not
        in the other.
        """
        return self.total_bytes - self.free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlProcess:
    """A program that holds memory on a GPU."""

    pid: int
    """As the driver counts processes: inside a container it may name nobody."""
    used_bytes: int | None
    """None where the driver does not tell, as in containers and under Windows."""

    def __str__(self) -> str:
        """``"process 4711: 1.50 GiB"``."""
        return f"process {self.pid}: {'unknown' if self.used_bytes is None else format_bytes(self.used_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlInstance:
    """A part of a card that MIG divides. Whatever the driver does not tell is None."""

    name: str | None
    """``"NVIDIA A100-SXM4-40GB MIG 1g.5gb"``: the card's, and the part's size."""
    uuid: str | None
    """``"MIG-..."``, as CUDA_VISIBLE_DEVICES takes it."""
    memory: NvmlMemory | None
    processes: tuple[NvmlProcess, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlDevice:
    """One GPU as the driver sees it, whatever this process may use of it."""

    name: str
    uuid: str
    """``"GPU-..."``: the same on every start, and what `Device.uuid` holds."""
    pci_bus_id: str
    memory: NvmlMemory | None
    """None where the driver keeps none of its own: on GPUs that share the host's memory."""
    processes: tuple[NvmlProcess, ...] | None
    """None where the driver does not tell."""
    instances: tuple[NvmlInstance, ...] | None = ()
    """Those that MIG has made of it; none where MIG is off.

    Only those this user may see; None where the driver does not tell.
    """


def find_handle(pynvml: Any, uuid: str | None, pci_bus_id: str | None) -> Any:
    """NVML's handle of a GPU or MIG instance, by UUID, else by PCI bus id.

    Raises:
        NvmlUnavailableError: NVML knows neither, or only the whole of a card of which this process
            has a part.
    """
    unknown = suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument)
    for spelling in _spellings(uuid):
        with unknown:
            handle = pynvml.nvmlDeviceGetHandleByUUID(spelling)
            _refuse_divided(pynvml, handle, spelling)
            return handle
    if pci_bus_id is not None:
        with unknown:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
            _refuse_divided(pynvml, handle, pci_bus_id)
            return handle
    raise NvmlUnavailableError(
        f"NVML knows no device with the UUID {uuid} or the PCI bus id {pci_bus_id}: expected one of those that "
        "`nvidia-smi -L` lists. Make that device visible here, inside a container too."
    )


def _spellings(uuid: str | None) -> tuple[str, ...]:
    if uuid is None:
        return ()
    return (uuid, f"MIG-{uuid.removeprefix('GPU-')}") if uuid.startswith("GPU-") else (uuid,)


def _refuse_divided(pynvml: Any, handle: Any, asked_for: str) -> None:
    """Refuse a card that MIG divides: this process sees a part, and the whole would mislead."""
    if _is_divided(pynvml, handle):
        raise NvmlUnavailableError(
            f"the GPU {asked_for} is divided by MIG and NVML does not find this process's part of it by UUID; "
            "expected an instance whose UUID `nvidia-smi -L` lists. Name it in CUDA_VISIBLE_DEVICES as MIG-<uuid>."
        )


def _is_divided(pynvml: Any, handle: Any) -> bool:
    try:
        mode, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # an instance, a card that cannot be divided, or a driver older than MIG
        return False
    return bool(mode == pynvml.NVML_DEVICE_MIG_ENABLE)


def read_memory(pynvml: Any, handle: Any) -> NvmlMemory:
    """Total and free memory now."""
    # Version 1 of the call, which every driver has: total and free are the same in both.
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return NvmlMemory(total_bytes=int(memory.total), free_bytes=int(memory.free))


def read_processes(pynvml: Any, handle: Any) -> tuple[NvmlProcess, ...] | None:
    """The programs that compute or draw, by pid; None where the driver does not tell."""
    running = _running(pynvml, handle, "nvmlDeviceGetComputeRunningProcesses")
    if running is None:
        return None
    # not every card draws
    running += _running(pynvml, handle, "nvmlDeviceGetGraphicsRunningProcesses") or []
    # a program that computes and draws stands in both lists, with the same figure
    used = {int(process.pid): process.usedGpuMemory for process in running}
    return tuple(
        NvmlProcess(pid=pid, used_bytes=None if used_bytes is None else int(used_bytes))
        for pid, used_bytes in sorted(used.items())
    )


def read_conditions(pynvml: Any, handle: Any) -> DeviceConditions:
    """Clock, temperature and what throttles now. A MIG instance has those of its card."""
    with suppress(pynvml.NVMLError):  # a card is nobody's instance
        handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    untold = _untold(pynvml)
    clock_mhz = temperature_c = None
    with suppress(*untold):
        clock_mhz = int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
    with suppress(*untold):
        temperature_c = int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
    return DeviceConditions(
        sm_clock_mhz=clock_mhz,
        temperature_c=temperature_c,
        throttle_reasons=_throttle_reasons(pynvml, handle),
    )


def describe(pynvml: Any, handle: Any) -> NvmlDevice:
    """Name, ids, memory, programs and MIG instances of a GPU."""
    memory = processes = instances = None
    with suppress(pynvml.NVMLError):  # one card without figures must not hide the others
        memory = read_memory(pynvml, handle)
    with suppress(pynvml.NVMLError):
        processes = read_processes(pynvml, handle)
    with suppress(pynvml.NVMLError):
        instances = _instances(pynvml, handle)
    return NvmlDevice(
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        pci_bus_id=_text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        memory=memory,
        processes=processes,
        instances=instances,
    )


def _instances(pynvml: Any, handle: Any) -> tuple[NvmlInstance, ...]:
    """The MIG instances of a card; they stand in numbered slots, some of which are free."""
    if not _is_divided(pynvml, handle):
        return ()
    found = []
    for slot in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        # free, or somebody else's
        with suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_NoPermission):
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot))
    return tuple(_describe_instance(pynvml, instance) for instance in found)


def _describe_instance(pynvml: Any, handle: Any) -> NvmlInstance:
    name = uuid = memory = processes = None
    with suppress(pynvml.NVMLError):
        name = _text(pynvml.nvmlDeviceGetName(handle))
    with suppress(pynvml.NVMLError):
        uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    with suppress(pynvml.NVMLError):
        memory = read_memory(pynvml, handle)
    with suppress(pynvml.NVMLError):
        processes = read_processes(pynvml, handle)
    return NvmlInstance(name=name, uuid=uuid, memory=memory, processes=processes)


def _running(pynvml: Any, handle: Any, name: str) -> list[Any] | None:
    """The list of programs that the call of this name gives; None where the driver does not tell.

    pynvml's own name means the newest version of the call, and an older driver has only the one
    before. Newer releases of pynvml answer to that with an exception that is no NVMLError, older
    ones do not know the version before.
    """
    unknown = [pynvml.NVMLError_FunctionNotFound]
    if hasattr(pynvml, "NVMLLibraryMismatchError"):
        unknown.append(pynvml.NVMLLibraryMismatchError)
    with suppress(*_untold(pynvml)):
        try:
            return list(getattr(pynvml, name)(handle))
        except tuple(unknown):
            if hasattr(pynvml, f"{name}_v2"):
                return list(getattr(pynvml, f"{name}_v2")(handle))
    return None


def _throttle_reasons(pynvml: Any, handle: Any) -> tuple[str, ...]:
    # the call was renamed: an older driver has the second name only, as has an older pynvml; a
    # later one the first
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        if hasattr(pynvml, name):
            with suppress(*_untold(pynvml)):
                bits = int(getattr(pynvml, name)(handle))
                return tuple(reason for bit, reason in _THROTTLE_REASONS.items() if bits & bit)
    return ()


def _untold(pynvml: Any) -> tuple[type[Exception], ...]:
    """NVML's ways of not telling one figure of a GPU.

    Whatever else it answers means that it can tell nothing more.
    """
    return (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_NoPermission,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_InvalidArgument,  # some figures that a MIG instance does not have
        pynvml.NVMLError_NoData,
    )


def _text(value: str | bytes) -> str:
    """Older releases of nvidia-ml-py return bytes."""
    return value.decode() if isinstance(value, bytes) else value
