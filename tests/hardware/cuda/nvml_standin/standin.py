"""Builds the stand-in for libnvidia-ml.so.1, writes what its cards are, and reads which calls were made."""

from __future__ import annotations

import functools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"

NOT_SUPPORTED, NO_PERMISSION, NO_WORDS, GPU_IS_LOST, UNKNOWN = 3, 4, 28, 15, 999


@dataclass(frozen=True, kw_only=True)
class Process:
    pid: int
    used: int | None = None
    """None: the driver does not tell."""
    drawing: bool = False


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A MIG instance. `reserved` bytes are the driver's own, neither free nor, in this version of the call, 'used'."""

    uuid: str
    total: int
    free: int
    name: str = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    reserved: int = 0
    processes: tuple[Process, ...] = ()
    silent: tuple[str, ...] = ()
    """Lists that the driver does not give: "computing", "drawing"."""

    def lines(self) -> list[str]:
        kind, more = self._kind()
        used = self.total - self.free - self.reserved
        return [
            f"{kind} uuid={self.uuid} total={self.total} free={self.free} used={used} reserved={self.reserved}{more}",
            f"name {self.name}",
            *(
                f"process pid={process.pid} drawing={int(process.drawing)}"
                + ("" if process.used is None else f" used={process.used}")
                for process in self.processes
            ),
            *(f"silent drawing={int(name == 'drawing')}" for name in self.silent),
        ]

    def _kind(self) -> tuple[str, str]:
        return "instance", ""


@dataclass(frozen=True, kw_only=True)
class Card(Instance):
    bus: str
    name: str = "NVIDIA GeForce RTX 3090"
    mig: int | None = None
    """None: a card that MIG does not know; 1: divided into `instances`."""
    instances: tuple[Instance, ...] = ()
    clock: int | None = None
    temperature: int | None = None
    reasons: int | None = None

    def lines(self) -> list[str]:
        return [*super().lines(), *(line for instance in self.instances for line in instance.lines())]

    def _kind(self) -> tuple[str, str]:
        told = {name: getattr(self, name) for name in ("bus", "mig", "clock", "temperature", "reasons")}
        return "card", "".join(f" {name}={value}" for name, value in told.items() if value is not None)


class Standin:
    """A copy of the library in a folder of its own: its cards, its troubles and its calls are one test's."""

    def __init__(self, library: Path, folder: Path) -> None:
        folder.mkdir()
        self.path = folder / LIBRARY
        shutil.copy(library, self.path)

    def write(self, *cards: Card, trouble: tuple[str, ...] = ()) -> None:
        """The cards in NVML's order, from the next call on; `trouble` as in ``"hang nvmlShutdown"``."""
        lines = ["driver 580.95.05", *trouble, *(line for card in cards for line in card.lines())]
        new = self.path.with_name("new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self.path.with_name("state"))  # at once: a call may be reading

    def calls(self) -> list[str]:
        """The names of the calls made so far."""
        calls = self.path.with_name("calls")
        return calls.read_text().split() if calls.exists() else []


@functools.cache
def build(folder: Path, *flags: str) -> Path:
    """The library, compiled once for each set of flags; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the stand-in for the NVIDIA driver's library is C, and there is no C compiler here (cc, gcc)")
    library = folder / f"{LIBRARY}{''.join(flags)}"
    subprocess.run(
        [compiler, *flags, "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"],
        check=True,
        capture_output=True,
        text=True,
    )
    return library
