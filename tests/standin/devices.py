"""Devices that stand in for cards: built where there is a compiler, and registered with torch as its own are."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.torch_version import TorchVersion

from splittune.units import GIB, MIB

NAME = "standin"
MIN_TORCH = TorchVersion("2.13")  # with which they were written; whether an earlier one has all of it was not tried
NUM_DEVICES = 4
CYCLES_PER_S = 1e9
CAPACITY_BYTES = 16 * GIB
OUTSIDE_BYTES = 256 * MIB  # as much as a context of CUDA's takes
LONGEST_BUILD_S = 900.0
SOURCES = Path(__file__).parent / "csrc"

_extension: Any = None


def why_not() -> str | None:
    """Why they cannot be built here; None where they can."""
    if shutil.which("g++") is None and shutil.which("c++") is None:
        return "no C++ compiler is found: the devices that stand in for cards cannot be built"
    if TorchVersion(torch.__version__) < MIN_TORCH:
        return (
            f"torch {torch.__version__} is older than {MIN_TORCH}, whose interfaces for devices the stand-ins implement"
        )
    if shutil.which("ninja", path=_path()) is None:
        return "ninja is not found (pip install ninja): the devices that stand in for cards cannot be built"
    return None


def _path() -> str:
    """Where programs are looked for: first where this environment's own are, ninja among them."""
    return os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))


def is_registered() -> bool:
    """Whether this process has them."""
    return _extension is not None


def register(num_devices: int = NUM_DEVICES) -> None:
    """Build the devices, which is cached, and register ``standin:0``, ``standin:1``, ... in this process, for good."""
    global _extension  # noqa: PLW0603  registering is for good, and once
    if _extension is not None:
        return
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    os.environ["PATH"] = _path()  # torch looks for ninja there
    from torch.utils import cpp_extension  # late: it takes its time, and ordinary runs need none of it

    sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    # its name tells what it was built from: another checkout, or another torch, has a library of its own
    contents = "".join(path.read_text(encoding="utf-8") for path in sorted(SOURCES.iterdir()))
    digest = hashlib.sha256((torch.__version__ + torch.__file__ + contents).encode()).hexdigest()[:12]
    name = f"splittune_standin_{digest}"
    _remove_stale_lock(Path(cpp_extension._get_build_directory(name, verbose=False)) / "lock")
    extension: Any = cpp_extension.load(name=name, sources=sources, extra_cflags=["-O1", "-w"])
    torch.utils.rename_privateuse1_backend(NAME)
    extension.init(num_devices)
    _extension = extension
    torch._register_device_module(NAME, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    for device in range(num_devices):
        extension.set_capacity(device, CAPACITY_BYTES, OUTSIDE_BYTES)
    atexit.register(_let_autograd_finish)


def _remove_stale_lock(lock: Path) -> None:
    """What a build that was killed has left: torch would wait for it, without a word, for ever."""
    with suppress(FileNotFoundError):
        if time.time() - lock.stat().st_mtime > LONGEST_BUILD_S:
            lock.unlink()


def _let_autograd_finish() -> None:
    """Its threads may be freeing the last graph, for which they need a Python that is still there."""
    time.sleep(0.2)


class _DeviceGuard:
    """``with torch.standin.device(1):``"""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = _extension.current_device()
        if self._index >= 0:
            _extension.set_device(self._index)

    def __exit__(self, *_error: object) -> None:
        _extension.set_device(self._before)


class _Properties(SimpleNamespace):
    """What `get_device_properties` tells."""


def _index(device: Any = None) -> int:
    if device is None:
        return int(_extension.current_device())
    if isinstance(device, int):
        return device
    device = torch.device(device)
    return int(_extension.current_device()) if device.index is None else int(device.index)


@contextmanager
def _stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with _DeviceGuard(stream.device):
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def _device_module() -> ModuleType:
    """``torch.standin``, with the names of torch.cuda."""
    module: Any = ModuleType(f"torch.{NAME}")
    e = _extension

    def stats(device: Any = None) -> dict[str, int]:
        return dict(e.stats(_index(device)))

    def properties(device: Any = None) -> _Properties:
        index = _index(device)
        if not 0 <= index < e.device_count():
            raise AssertionError(f"Invalid device id {index}: there are {e.device_count()}")
        return _Properties(name="Stand-in", total_memory=e.memory(index)[0], uuid=f"standin-{index}", major=0, minor=0)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        total_bytes, free_bytes = e.memory(_index(device))
        return free_bytes, total_bytes

    generators = tuple(e.default_generator(index) for index in range(e.device_count()))

    def manual_seed(seed: int) -> None:
        generators[e.current_device()].manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def set_rng_state_all(states: list[torch.Tensor]) -> None:
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)

    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        device_count=e.device_count,
        current_device=e.current_device,
        set_device=lambda device: e.set_device(_index(device)),
        device=_DeviceGuard,
        synchronize=lambda device=None: e.synchronize(_index(device)),
        Stream=lambda device=None, priority=0: torch.Stream(torch.device(NAME, _index(device)), priority=priority),
        Event=lambda enable_timing=False: torch.Event(NAME, enable_timing=enable_timing),
        stream=_stream,
        current_stream=lambda device=None: torch.accelerator.current_stream(torch.device(NAME, _index(device))),
        set_stream=torch.accelerator.set_stream,
        get_device_properties=properties,
        get_device_name=lambda device=None: properties(device).name,
        mem_get_info=mem_get_info,
        memory_stats=stats,
        memory_allocated=lambda device=None: stats(device)["allocated_bytes.all.current"],
        max_memory_allocated=lambda device=None: stats(device)["allocated_bytes.all.peak"],
        memory_reserved=lambda device=None: stats(device)["reserved_bytes.all.current"],
        max_memory_reserved=lambda device=None: stats(device)["reserved_bytes.all.peak"],
        reset_peak_memory_stats=lambda device=None: e.reset_peaks(_index(device)),
        empty_cache=e.empty_cache,
        set_per_process_memory_fraction=lambda fraction, device=None: e.set_fraction(_index(device), fraction),
        get_per_process_memory_fraction=lambda device=None: e.fraction(_index(device)),
        _sleep=lambda cycles: e.sleep(e.current_device(), cycles / CYCLES_PER_S),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        default_generators=generators,
        manual_seed=manual_seed,
        manual_seed_all=manual_seed_all,
        get_rng_state=lambda device=None: generators[_index(device)].get_state(),
        set_rng_state=lambda state, device=None: generators[_index(device)].set_state(state),
        get_rng_state_all=lambda: [generator.get_state() for generator in generators],
        set_rng_state_all=set_rng_state_all,
        OutOfMemoryError=torch.OutOfMemoryError,
    )
    return module  # type: ignore[no-any-return]


def set_capacity(device: int, total_bytes: int, outside_bytes: int = 0) -> None:
    """How much memory the device has, and how much of it others hold."""
    _extension.set_capacity(device, total_bytes, outside_bytes)


def set_delay(device: int, seconds: float) -> None:
    """Every piece of work on the device takes so much longer; nobody waits for it who does not ask."""
    _extension.set_delay(device, seconds)


def sleep(device: int, seconds: float) -> None:
    """The device's current stream is busy for so long: torch.cuda._sleep, in seconds."""
    _extension.sleep(device, seconds)


def forget_delays() -> None:
    """Every stream is done with what it was asked for, without waiting."""
    _extension.forget_delays()


def reports_so_far() -> list[str]:
    """What the check of order has found since it was asked last."""
    return list(_extension.take_reports())


@contextmanager
def order_checked() -> Iterator[list[str]]:
    """Inside, every access to memory is checked; the list holds what was found, once it is left."""
    reports: list[str] = []
    _extension.take_reports()
    _extension.set_checking(True)
    try:
        yield reports
    finally:
        _extension.set_checking(False)
        reports += _extension.take_reports()
