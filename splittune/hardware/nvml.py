"""What the NVIDIA driver knows of each GPU's memory, every program's share included: the only importer of `pynvml`."""

from __future__ import annotations

import importlib.metadata
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from splittune.errors import NvmlUnavailableError

# From this version on the distribution `pynvml` holds no module `pynvml` any more, it asks for nvidia-ml-py instead.
_FIRST_HARMLESS_PYNVML = 12


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

        Not NVML's own 'used', which holds the driver's reserve in one version of the call and not in the other.
        """
        return self.total_bytes - self.free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlProcess:
    """A program that holds memory on a GPU."""

    pid: int
    """As the driver counts processes: inside a container it may name nobody."""
    used_bytes: int | None
    """None where the driver does not tell, as in containers and under Windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlDevice:
    """One GPU as the driver sees it, whatever this process may use of it."""

    name: str
    uuid: str
    """``"GPU-..."``: the same on every start, and what `Device.uuid` holds."""
    pci_bus_id: str
    memory: NvmlMemory | None
    """None where the driver keeps no figures of its own, as on GPUs that share the host's memory."""
    processes: tuple[NvmlProcess, ...] | None
    """None where the driver does not tell."""


class Nvml:
    """A connection to NVML. It opens with the first question and closes with `close`, a `with` block, or the program.

    GPUs are found by UUID, then by PCI bus id, never by a count: torch numbers its devices by speed or by
    CUDA_VISIBLE_DEVICES, NVML by bus, and NVML's order may change from one start to the next.

    Every question raises `NvmlUnavailableError` where NVML cannot be loaded or does not answer.
    """

    def __init__(self) -> None:
        self._pynvml: Any = None
        self._handles: dict[tuple[str | None, str | None], Any] = {}
        self._shutdown: weakref.finalize[..., Nvml] | None = None

    def device_memory(self, *, uuid: str | None, pci_bus_id: str | None = None) -> NvmlMemory:
        """The memory of one GPU now.

        Args:
            uuid: ``"GPU-" + str(torch.cuda.get_device_properties(i).uuid)``. torch leaves the same digits for a MIG
                instance, which NVML spells ``"MIG-..."``; both are tried.
            pci_bus_id: ``"00000000:3B:00.0"``, asked where the UUID is not known.
        """
        pynvml = self._connected()
        key = (uuid, pci_bus_id)
        with _answers(pynvml, f"the memory of {uuid or pci_bus_id}"):
            if key not in self._handles:
                self._handles[key] = _find_handle(pynvml, uuid, pci_bus_id)
            return _read_memory(pynvml, self._handles[key])

    def list_devices(self) -> tuple[NvmlDevice, ...]:
        """Every GPU the driver lets this user see, in NVML's order, which no index should rely on."""
        pynvml = self._connected()
        with _answers(pynvml, "a list of its devices"):
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            return tuple(_describe(pynvml, handle) for handle in handles)

    def driver_version(self) -> str:
        """The driver's version, ``"580.95.05"`` say."""
        pynvml = self._connected()
        with _answers(pynvml, "the driver's version"):
            return str(pynvml.nvmlSystemGetDriverVersion())

    def close(self) -> None:
        """Close the connection; without one, do nothing. Another question opens a new one."""
        if self._shutdown is not None:
            self._shutdown()
        self._pynvml = None
        self._shutdown = None
        self._handles.clear()

    def __enter__(self) -> Nvml:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> Any:
        if self._pynvml is None:
            pynvml = _import_pynvml()
            with _answers(pynvml, "a connection"):
                pynvml.nvmlInit()
            self._pynvml = pynvml
            # runs once: in `close`, when this object goes, or when the interpreter ends
            self._shutdown = weakref.finalize(self, _shut_down, pynvml)
        return self._pynvml


def _import_pynvml() -> Any:
    _refuse_old_distribution()
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnavailableError(
            f"the module pynvml cannot be imported ({error}): expected it from the distribution nvidia-ml-py. "
            "Run `pip install nvidia-ml-py`."
        ) from error
    return pynvml


def _refuse_old_distribution() -> None:
    """An old `pynvml` brings a package that hides the module of nvidia-ml-py, whichever was installed last."""
    try:
        version = str(importlib.metadata.version("pynvml"))
    except importlib.metadata.PackageNotFoundError:
        return
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) >= _FIRST_HARMLESS_PYNVML:
        return
    raise NvmlUnavailableError(
        f"the distribution pynvml {version} is installed: it is deprecated, and its module hides the one of "
        "nvidia-ml-py, which splittune expects. "
        "Run `pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py`."
    )


@contextmanager
def _answers(pynvml: Any, question: str) -> Iterator[None]:
    """Turns NVML's errors inside the block into ours."""
    try:
        yield
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(
            f"NVML was asked for {question} and answered: {error}. Expected an NVIDIA driver in working order: "
            "check that `nvidia-smi` runs here, inside a container too."
        ) from error


def _find_handle(pynvml: Any, uuid: str | None, pci_bus_id: str | None) -> Any:
    unknown = suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument)
    for spelling in _spellings(uuid):
        with unknown:
            return pynvml.nvmlDeviceGetHandleByUUID(spelling)
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


def _refuse_divided(pynvml: Any, handle: Any, pci_bus_id: str) -> None:
    """A bus id names the whole card. Of one divided by MIG this process sees a part, and the whole would mislead."""
    try:
        mode, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # a card that cannot be divided, or a driver older than MIG
        return
    if mode == pynvml.NVML_DEVICE_MIG_ENABLE:
        raise NvmlUnavailableError(
            f"the GPU at {pci_bus_id} is divided by MIG and NVML does not find this process's part of it by UUID; "
            "expected an instance whose UUID `nvidia-smi -L` lists. Name it in CUDA_VISIBLE_DEVICES as MIG-<uuid>."
        )


def _read_memory(pynvml: Any, handle: Any) -> NvmlMemory:
    # Version 1 of the call, which every driver has: total and free are the same in both.
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return NvmlMemory(total_bytes=int(memory.total), free_bytes=int(memory.free))


def _describe(pynvml: Any, handle: Any) -> NvmlDevice:
    try:
        memory = _read_memory(pynvml, handle)
    except pynvml.NVMLError:  # one card without figures must not hide the others
        memory = None
    return NvmlDevice(
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        pci_bus_id=_text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        memory=memory,
        processes=_read_processes(pynvml, handle),
    )


def _read_processes(pynvml: Any, handle: Any) -> tuple[NvmlProcess, ...] | None:
    try:
        running = list(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except pynvml.NVMLError:
        return None
    with suppress(pynvml.NVMLError):  # not every card draws
        running += pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
    # a program that computes and draws stands in both lists, with the same figure
    used = {int(process.pid): process.usedGpuMemory for process in running}
    return tuple(
        NvmlProcess(pid=pid, used_bytes=None if used_bytes is None else int(used_bytes))
        for pid, used_bytes in sorted(used.items())
    )


def _text(value: str | bytes) -> str:
    """Older releases of nvidia-ml-py return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _shut_down(pynvml: Any) -> None:
    with suppress(pynvml.NVMLError):  # the driver went first: there is nothing left to hand back
        pynvml.nvmlShutdown()
