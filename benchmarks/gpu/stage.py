"""What the parts of `benchmarks.gpu` share: the card or its rehearsal, its limit, the time, what was found."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.jobs.gpu_models import CARD, REHEARSAL, Sizes
from splittune.cards import module_of
from splittune.config.data import current_versions
from splittune.errors import NvmlUnavailableError
from splittune.hardware import CudaHardware, Hardware, resolve_hardware
from splittune.hardware.cuda.nvml import Nvml
from splittune.hardware.virtual import VirtualHardware
from splittune.options import HEADROOM_FRACTION, SearchOptions
from splittune.profiling.measurement import Measurement
from splittune.profiling.profiler import Profiler
from splittune.runners.in_process import InProcessRunner
from splittune.search.result import Trial
from splittune.split import BatchSplit, SplitSpace
from splittune.training import TrainingTask, read_batches
from splittune.tuner import tune
from splittune.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that should hold, and whether it did; None where it could not be told, and `detail` says why."""

    part: str
    claim: str
    passed: bool | None
    detail: str

    def __str__(self) -> str:
        word = {True: "passed", False: "FAILED", None: "not told"}[self.passed]
        return f"{word:<8}  {self.part}: {self.claim}: {self.detail}"


@dataclass(slots=True, kw_only=True)
class Findings:
    """What one part found so far: it is filled as the part goes, so that an error leaves what came before."""

    part: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    cut_short: str = ""
    """What was left out for want of time, in words; empty where nothing was."""

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]

    def check(self, claim: str, passed: bool | None, detail: str) -> None:
        known = None if passed is None else bool(passed)  # numpy's False is not False
        self.checks.append(Check(part=self.part, claim=claim, passed=known, detail=detail))


class Stage:
    """The hardware that the parts run on: one CUDA card, or a virtual GPU to rehearse on.

    Args:
        devices: as `resolve_hardware` takes them: one device.
        seed: of weights, data and limits.
        quiet: nothing is printed.
        sizes: of the jobs; None for those of a card, or of a rehearsal.
    """

    def __init__(
        self, devices: str = "cuda:0", *, seed: int = 0, quiet: bool = False, sizes: Sizes | None = None
    ) -> None:
        self.devices, self.seed, self._quiet = devices, seed, quiet
        self.hardware: Hardware = resolve_hardware(devices)
        if len(self.hardware.devices) != 1:
            raise ValueError(f"{devices!r} has {len(self.hardware.devices)} devices: expected one, such as 'cuda:0'.")
        self.is_rehearsal = self.hardware.is_modelled
        self.sizes: Sizes = sizes or (REHEARSAL if self.is_rehearsal else CARD)
        self.ends_at_s = float("inf")
        """When the part that runs should end, by the monotonic clock."""
        self.is_spoilt = False
        """A CUDA error has come after which this process can use the card no more."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.hardware.devices[0].torch_device)

    def say(self, text: str) -> None:
        """Print; what comes from virtual hardware is called modelled, line by line."""
        if not self._quiet:
            prefix = "[modelled] " if self.is_rehearsal else ""
            print("\n".join(prefix + line for line in text.splitlines()), flush=True)

    def table(self, rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> None:
        """Print rows as a table."""
        if rows:
            frame = pd.DataFrame(list(rows))
            shown = frame if columns is None else frame[[name for name in columns if name in frame.columns]]
            self.say(shown.to_string(index=False, float_format=lambda number: f"{number:.4g}", na_rep="-"))

    def has_time(self, needed_s: float = 0.0) -> bool:
        """Whether so much of the part's time is left."""
        return time.monotonic() + needed_s < self.ends_at_s

    @contextmanager
    def limited_to(self, room_bytes: int | None) -> Iterator[Hardware]:
        """The hardware with no more than so much for this process's allocator; None leaves it as it is.

        torch keeps such a cap for the process, so it is lifted again, whatever happens inside.
        """
        if room_bytes is None:
            yield self.hardware
        elif isinstance(self.hardware, VirtualHardware):
            gpu, outside_bytes = self.hardware.gpus[0], self.hardware.outside_bytes[0]
            occupied = max(0, gpu.total_bytes - outside_bytes - room_bytes)
            yield VirtualHardware([gpu], occupied_bytes=[occupied])
        else:
            device = self.hardware.devices[0]
            self.hardware.recover(thoroughly=True)
            fraction = min(1.0, room_bytes / device.total_bytes)
            module = module_of(self.torch_device)
            module.set_per_process_memory_fraction(fraction, self.torch_device)
            try:
                yield self.hardware
            finally:
                module.set_per_process_memory_fraction(1.0, self.torch_device)
                self.hardware.recover(thoroughly=True)

    def can_tell_limits(self) -> bool:
        """Whether the hardware knows of a limit: not every torch tells the cap that it was given."""
        return self.is_rehearsal or hasattr(module_of(self.torch_device), "get_per_process_memory_fraction")

    def num_ooms(self) -> int | None:
        """How many allocations torch's allocator has refused so far, by its own count; None on virtual hardware."""
        if self.is_rehearsal:
            return None
        return int(module_of(self.torch_device).memory_stats(self.torch_device).get("num_ooms", 0))

    def used_bytes(self) -> int:
        """The whole card's memory in use, every program's, by the runtime; on virtual hardware what is outside."""
        if isinstance(self.hardware, CudaHardware):
            free_bytes, total_bytes = module_of(self.torch_device).mem_get_info(self.torch_device)
            return total_bytes - free_bytes
        with self.hardware.metered():
            return self.hardware.memory()[0].outside_bytes

    def columns(self) -> dict[str, Any]:
        """What the figures were measured on."""
        return {
            "card": self.hardware.devices[0].name,
            "driver": _driver(),
            "cuda": str(torch.version.cuda),
            **_versions(),
            "seed": self.seed,
            "is_modelled": self.is_rehearsal,
        }


class Measured:
    """A job ready to be measured on some hardware; the model is as it was found once the block is left."""

    def __init__(self, task: TrainingTask, hardware: Hardware, *, min_headroom_bytes: int = 0) -> None:
        self.task, self.hardware = task, hardware
        self._snapshot = task.snapshot()
        self.samples = read_batches(task.loader)
        self.profiler = Profiler(task, hardware, self.samples, self._snapshot, min_headroom_bytes=min_headroom_bytes)

    @property
    def global_batch_size(self) -> int:
        return self.samples.loader_batch_size

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *_: object) -> None:
        self.hardware.recover()
        self._snapshot.restore()
        self._snapshot.restore_gradients()

    def measure(self, accumulation_steps: int) -> Measurement:
        return self.profiler.measure(self.split(accumulation_steps))

    def split(self, accumulation_steps: int) -> BatchSplit:
        return split_of(self.global_batch_size, accumulation_steps)


def split_of(global_batch_size: int, accumulation_steps: int) -> BatchSplit:
    """The split of one card at so many steps."""
    return BatchSplit.even(global_batch_size=global_batch_size, accumulation_steps=accumulation_steps, num_devices=1)


def useful_splits(global_batch_size: int) -> list[BatchSplit]:
    """Every micro-batch size of one card at its fewest steps, largest first; the other splits have a step more each."""
    by_size = {}
    for split in SplitSpace(global_batch_size=global_batch_size, num_devices=1):
        by_size.setdefault(split.micro_batch_size, split)
    return list(by_size.values())


class QuietCallback:
    """Watches a search without a word; parts look through its eyes."""

    def on_start(self, cards: Any, space: SplitSpace, max_trials: int) -> None:
        """Nothing to see."""

    def on_measure(self, split: BatchSplit, *, in_whole_steps: bool) -> None:
        """Nothing to see."""

    def on_trial(self, trial: Any) -> None:
        """Nothing to see."""

    def on_activity(self, what: str) -> None:
        """Nothing to see."""

    def on_end(self) -> None:
        """Nothing to see."""


def tuned(task: TrainingTask, hardware: Hardware, *, callback: QuietCallback | None = None, **options: Any) -> Any:
    """`autotune` on hardware at hand."""
    return tune(InProcessRunner(task, hardware), SearchOptions(**options), callback or QuietCallback())


def room_of(hardware: Hardware) -> int:
    """Bytes of the first device that are left for this process."""
    with hardware.metered():
        memory = hardware.memory()[0]
    return memory.total_bytes - memory.outside_bytes


def held_bytes(hardware: Hardware) -> tuple[int, int]:
    """What our tensors and the allocator hold on the first device, once everything that can be is given back."""
    with hardware.metered():
        hardware.recover(thoroughly=True)
        return hardware.allocated_bytes()[0], hardware.memory()[0].peak_reserved_bytes  # peaks have just begun anew


def demand_of(hardware: Hardware) -> int:
    """The headroom that `autotune` demands by itself."""
    return int(HEADROOM_FRACTION * room_of(hardware))


def in_brief(trials: Sequence[Trial]) -> str:
    """The trials of a search on one card, each with its kind, steps x size, outcome and reserved peak in MiB.

    Such as ``search 4x16 ok 2518; confirm 4x16 no_headroom 2630``.
    """
    return "; ".join(
        f"{trial.kind} {trial.measurement.split.accumulation_steps}x{trial.measurement.split.micro_batch_size} "
        f"{trial.measurement.outcome.value}"
        + "".join(f" {m.peak_reserved_bytes / MIB:.0f}" for m in trial.measurement.memory)
        for trial in trials
    )


def mib(num_bytes: float | None) -> float | None:
    """For tables."""
    return None if num_bytes is None else num_bytes / 2**20


def relative(value: float | None, truth: float | None) -> float | None:
    """By which part `value` is above `truth`; None where one of them is unknown."""
    return None if value is None or truth is None or not truth else value / truth - 1


def percent(number: float | None) -> str:
    """For people."""
    return "unknown" if number is None else f"{number:+.2%}"


def _driver() -> str:
    try:
        with Nvml() as nvml:
            return nvml.driver_version()
    except NvmlUnavailableError:
        return "unknown"


def _versions() -> dict[str, str]:
    versions = current_versions()
    project = Path(__file__).parents[2] / "pyproject.toml"
    if versions["splittune"] == "not installed" and project.is_file():  # run from the source tree alone
        named = re.search(r'^version = "([^"]+)"', project.read_text(encoding="utf-8"), re.MULTILINE)
        versions["splittune"] = f"{named[1]} (source tree)" if named else "not installed"
    return versions
