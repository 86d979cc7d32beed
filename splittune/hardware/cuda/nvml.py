"""NVML, the driver's own view of every GPU, all programs included. `pynvml`'s only importer."""

from __future__ import annotations

import importlib.metadata
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from splittune.errors import NvmlUnavailableError
from splittune.hardware.base import DeviceConditions
from splittune.hardware.cuda.nvml_calls import (
    NvmlDevice,
    NvmlMemory,
    NvmlProcess,
    describe,
    find_handle,
    read_conditions,
    read_memory,
    read_processes,
)
from splittune.hardware.cuda.patience import OutOfPatienceError, PatientThread

_Answer = TypeVar("_Answer")

# Long enough for a driver that has to wake several GPUs first, where no persistence daemon keeps
# them awake.
TIME_LIMIT_S = 10.0

# From this version on the distribution `pynvml` holds no module `pynvml` any more, it asks for
# nvidia-ml-py instead.
_FIRST_HARMLESS_PYNVML = 12

_EXPECTED = "Expected an NVIDIA driver in working order: check that `nvidia-smi` runs here, inside a container too."


class Nvml:
    """A connection to NVML.

    It opens with the first question and closes with `close`, a `with` block, or the program.

    GPUs are found by UUID, then by PCI bus id, never by a count: torch numbers its devices by speed
    or by CUDA_VISIBLE_DEVICES, NVML by bus, and NVML's order may change from one start to the next.
    `uuid` is ``"GPU-" + str(torch.cuda.get_device_properties(i).uuid)``; torch leaves the same
    digits for a MIG instance, which NVML spells ``"MIG-..."``, and both are tried. `pci_bus_id`,
    ``"00000000:3B:00.0"``, is asked for where the UUID is not known.

    Every question raises `NvmlUnavailableError` where NVML cannot be loaded or does not answer. A
    driver that hangs is left behind after the time limit and not asked again by this object; it
    holds up neither the caller nor the exit.

    Args:
        time_limit_s: how long an answer may take.
    """

    def __init__(self, *, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._thread = PatientThread(time_limit_s)
        self._pynvml: Any = None
        self._handles: dict[tuple[str | None, str | None], Any] = {}
        self._shutdown: weakref.finalize[..., Nvml] | None = None

    def device_memory(self, *, uuid: str | None, pci_bus_id: str | None = None) -> NvmlMemory:
        """The memory of one GPU or MIG instance now."""
        return self._ask_device("the memory", read_memory, uuid, pci_bus_id)

    def conditions(self, *, uuid: str | None, pci_bus_id: str | None = None) -> DeviceConditions:
        """How fast and how hot one GPU runs now, and what slows it down.

        A MIG instance has the figures of its card.
        """
        return self._ask_device("the conditions", read_conditions, uuid, pci_bus_id)

    def processes(self, *, uuid: str | None, pci_bus_id: str | None = None) -> tuple[NvmlProcess, ...] | None:
        """The programs on one GPU or MIG instance, by pid; None where the driver does not tell."""
        return self._ask_device("the processes", read_processes, uuid, pci_bus_id)

    def list_devices(self) -> tuple[NvmlDevice, ...]:
        """Every GPU this user may see, in NVML's order, which no index should rely on."""

        def listed(pynvml: Any) -> tuple[NvmlDevice, ...]:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            return tuple(describe(pynvml, handle) for handle in handles)

        return self._ask("a list of its devices", listed)

    def driver_version(self) -> str:
        """The driver's version, ``"580.95.05"`` say."""
        return self._ask("the driver's version", lambda pynvml: str(pynvml.nvmlSystemGetDriverVersion()))

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

    def _ask_device(
        self, figures: str, read: Callable[[Any, Any], _Answer], uuid: str | None, pci_bus_id: str | None
    ) -> _Answer:
        handles, key = self._handles, (uuid, pci_bus_id)

        def answer(pynvml: Any) -> _Answer:
            if key not in handles:
                handles[key] = find_handle(pynvml, uuid, pci_bus_id)
            return read(pynvml, handles[key])

        return self._ask(f"{figures} of {uuid or pci_bus_id}", answer)

    def _ask(self, question: str, answer: Callable[[Any], _Answer]) -> _Answer:
        if self._pynvml is None:
            self._connect()
        pynvml = self._pynvml
        return self._within_limit(pynvml, question, lambda: answer(pynvml))

    def _connect(self) -> None:
        pynvml = _import_pynvml()
        self._within_limit(pynvml, "a connection", pynvml.nvmlInit)
        self._pynvml = pynvml
        # runs once: in `close`, when this object goes, or when the interpreter ends
        self._shutdown = weakref.finalize(self, _shut_down, pynvml, self._thread)

    def _within_limit(self, pynvml: Any, question: str, call: Callable[[], _Answer]) -> _Answer:
        """The answer of a call, and NVML's errors turned into ours."""
        hung_before = self._thread.has_given_up
        try:
            return self._thread.call(call)
        except pynvml.NVMLError as error:
            raise NvmlUnavailableError(f"NVML was asked for {question} and answered: {error}. {_EXPECTED}") from error
        except OutOfPatienceError:
            limit = f"{self._thread.time_limit_s:g} s"
            raise NvmlUnavailableError(
                f"NVML is not asked for {question}: it did not answer an earlier question within {limit}. {_EXPECTED}"
                if hung_before
                else f"NVML was asked for {question} and did not answer within {limit}; it is not asked again. "
                f"{_EXPECTED}"
            ) from None


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
    """Refuse an old `pynvml`: its package hides the module of nvidia-ml-py.

    That is so whichever was installed last.
    """
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


def _shut_down(pynvml: Any, thread: PatientThread) -> None:
    # A driver that went first has nothing to take back, and one that hangs could not. Nor has a
    # forked child a connection of its own to close.
    if thread.is_running:
        with suppress(pynvml.NVMLError, OutOfPatienceError):
            thread.call(pynvml.nvmlShutdown)
        thread.stop()
