"""A search or a run as it goes: a live bar in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from splittune.profiling.measurement import LossPlacement, Measurement, Outcome
from splittune.report.like_devices import like_devices
from splittune.report.words import count_of, gpus, rate_of, shape_of
from splittune.split.batch_split import MAX_LISTED
from splittune.units import format_bytes

if TYPE_CHECKING:
    from splittune.runners.base import DeviceView
    from splittune.search import Trial
    from splittune.split import BatchSplit, SplitSpace

_FAILURES = {
    Outcome.OUT_OF_MEMORY: "out of memory",
    Outcome.NO_HEADROOM: "too little left",
    Outcome.CRASHED: "crashed",
}
_SHAPES = "accumulation steps x samples per GPU"
HEADER = f"trial  {_SHAPES}  samples/s  least memory left"


def callback_for(progress: bool) -> ConsoleCallback | SilentCallback:
    """A callback on standard error, so that standard output stays the caller's; silent for False."""
    return ConsoleCallback(callers_console()) if progress else SilentCallback()


def lines_for(progress: bool) -> Callable[[str], None]:
    """Prints lines where `callback_for` shows a search, in a terminal as elsewhere; nothing for False."""
    if not progress:
        return lambda _: None
    console = callers_console()
    return lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)


def callers_console() -> Console:
    """Standard error; in a notebook plain lines on standard output, for it shows the other one as an error."""
    if Console().is_jupyter:
        return Console(force_jupyter=False, force_terminal=False, width=160)
    return Console(stderr=True)


def describe_trial(trial: Trial) -> str:
    """One line under `HEADER`: the split, its speed, and what it left free or how it failed."""
    measurement = trial.measurement
    rate = rate_of(measurement) if measurement.outcome is Outcome.OK else "-"
    return f"{trial.number:>5}  {shape_of(measurement.split):<{len(_SHAPES)}}  {rate:>9}  {_left_by(measurement)}"


class SilentCallback:
    """Shows nothing."""

    def on_start(self, cards: DeviceView, space: SplitSpace, max_trials: int) -> None: ...

    def on_measure(self, split: BatchSplit, *, in_whole_steps: bool) -> None: ...

    def on_trial(self, trial: Trial) -> None: ...

    def on_end(self) -> None: ...

    def on_activity(self, what: str) -> None: ...

    def on_step(self, step: int, num_steps: int, loss: float) -> None: ...


class ConsoleCallback:
    """A line for each searched trial, and one for all that were measured again.

    In a terminal also a bar with what is being measured and the best so far. If `verbose`, the
    reason of every trial, and a line for each that was measured again.
    """

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._is_verbose = verbose
        self._has_header = False
        self._searched: dict[tuple[BatchSplit, LossPlacement], float] = {}
        self._again: dict[tuple[BatchSplit, LossPlacement], float] = {}
        self._best: Measurement | None = None
        self._modelled = ""
        self._progress = _bar_of("trial", console)
        self._bar = self._progress.add_task("", total=None)

    def on_start(self, cards: DeviceView, space: SplitSpace, max_trials: int) -> None:
        self._modelled = " (modelled)" if cards.is_modelled else ""
        with cards.metered():
            memory = [replace(each, peak_allocated_bytes=0, peak_reserved_bytes=0) for each in cards.memory()]
        for group in like_devices(cards.devices, memory):
            free = min(memory[index].headroom_bytes for index in group)
            device = cards.devices[group[0]]
            self._print(
                f"{gpus(group):<7}  {device.name}, {format_bytes(free)} of {format_bytes(device.total_bytes)} free"
            )
        modelled = " (memory accounted, time modelled)" if cards.is_modelled else ""
        # to count the splits of hundreds of cards takes longer than to search them
        of_all = f"of {count_of(space.num_splits, 'split')}" if space.num_devices <= MAX_LISTED else "splits"
        size = count_of(space.global_batch_size, "sample")
        self._print(f"{size} a step: at most {max_trials} {of_all} are tried{modelled}")
        self._progress.update(self._bar, total=max_trials)
        self._progress.start()

    def on_measure(self, split: BatchSplit, *, in_whole_steps: bool) -> None:
        what = "in whole steps" if in_whole_steps else "measuring"
        best = self._best
        so_far = "" if best is None else f"; best {shape_of(best.split)}, {rate_of(best)} samples/s"
        self._progress.update(self._bar, description=f"{what} {shape_of(split)}{so_far}{self._modelled}")

    def on_trial(self, trial: Trial) -> None:
        measurement = trial.measurement
        key, rate = (measurement.split, measurement.loss_placement), measurement.throughput
        fits = measurement.outcome is Outcome.OK and rate is not None
        if fits and (self._best is None or (rate or 0) > (self._best.throughput or 0)):
            self._best = measurement
        if trial.kind == "search":
            self._progress.advance(self._bar)
            self._searched[key] = rate or 0.0
        elif fits:
            self._again[key] = rate or 0.0
        if trial.kind == "search" or self._is_verbose or not fits:
            # Not at the start: what is logged before the first trial stands above it.
            if not self._has_header:
                self._print(HEADER)
            self._has_header = True
            again = "" if trial.kind == "search" else " (again)"
            self._print(f"{describe_trial(trial)}{again}{f'  {trial.reason}' if self._is_verbose else ''}")

    def on_activity(self, what: str) -> None:
        self._progress.update(self._bar, description=what)
        if not self._progress.console.is_terminal:
            self._print(what)

    def on_end(self) -> None:
        self._progress.stop()
        off = [abs(rate / self._searched[key] - 1) for key, rate in self._again.items() if self._searched.get(key)]
        if off:
            splits = f"{len(off)} splits agree" if len(off) > 1 else "1 split agrees"
            self._print(f"measured again in whole steps: {splits} to {100 * max(off):.1f} %")

    def _print(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)


class StepCallback:
    """A line for the first and every tenth part of the steps; in a terminal also a bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = _bar_of("step", console)
        self._bar = self._progress.add_task("", total=None)

    def on_activity(self, what: str) -> None:
        self._progress.start()
        self._progress.update(self._bar, description=what)
        if not self._console.is_terminal:
            self._console.print(what, highlight=False)

    def on_step(self, step: int, num_steps: int, loss: float) -> None:
        self._progress.update(self._bar, completed=step, total=num_steps, description=f"loss {loss:.3f}")
        if step in (1, num_steps) or step % max(1, num_steps // 10) == 0:
            self._console.print(f"step {step:>{len(str(num_steps))}}  loss {loss:.3f}", highlight=False)

    def on_end(self) -> None:
        self._progress.stop()


def _bar_of(what: str, console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn(what),
        MofNCompleteColumn(),
        BarColumn(bar_width=10),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def _left_by(measurement: Measurement) -> str:
    """``"8.2 MiB on GPU 0"``, what went wrong, if anything, and where the loss was computed."""
    least = min(measurement.memory, key=lambda memory: memory.headroom_bytes, default=None)
    parts = [] if least is None else [f"{format_bytes(least.headroom_bytes)} on GPU {least.device}"]
    failure = _FAILURES.get(measurement.outcome)
    if measurement.outcome in (Outcome.OUT_OF_MEMORY, Outcome.CRASHED):
        parts = []
    if failure is not None:
        parts.append(failure)
    if measurement.loss_placement == "replica":
        parts.append("loss in the replicas")
    return ", ".join(parts)
