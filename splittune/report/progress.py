"""Shows a search and its result to people: a live bar in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.words import shape_of, speed_of
from splittune.units import format_bytes

if TYPE_CHECKING:
    from splittune.runners.base import DeviceView
    from splittune.search import Trial
    from splittune.split import BatchSplit, SplitSpace

_WORDS = {
    Outcome.OK: "ok",
    Outcome.OUT_OF_MEMORY: "out of memory",
    Outcome.NO_HEADROOM: "too little headroom",
    Outcome.CRASHED: "crashed",
}


def callback_for(progress: bool, console: Console | None = None) -> ConsoleCallback | SilentCallback:
    """A callback on standard error, so that standard output stays the caller's; a silent one for False.

    Notebooks get plain lines on standard output: they show the other one as if something were wrong.
    """
    if not progress:
        return SilentCallback()
    if console is None and Console().is_jupyter:
        console = Console(force_jupyter=False, force_terminal=False, width=160)
    return ConsoleCallback(console or Console(stderr=True))


def describe_trial(trial: Trial) -> str:
    """One line on a finished trial: what was measured, how it went, and why this split was tried."""
    measurement = trial.measurement
    return f"{shape_of(measurement.split):<22} {_result_of(measurement):<44} {trial.reason}"


class SilentCallback:
    """Shows nothing."""

    def on_start(self, cards: DeviceView, space: SplitSpace, max_trials: int) -> None: ...

    def on_measure(self, split: BatchSplit, *, in_whole_steps: bool) -> None: ...

    def on_trial(self, trial: Trial) -> None: ...

    def on_end(self) -> None: ...

    def on_activity(self, what: str) -> None: ...

    def on_step(self, step: int, num_steps: int, loss: float) -> None: ...


class ConsoleCallback:
    """A line for every finished trial; in a terminal also a bar with what is being measured and the best so far."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._best: Measurement | None = None
        self._modelled = ""
        self._progress = _bar_of("trial", console)
        self._bar = self._progress.add_task("", total=None)

    def on_start(self, cards: DeviceView, space: SplitSpace, max_trials: int) -> None:
        self._modelled = " (modelled)" if cards.is_modelled else ""
        with cards.metered():
            for device, memory in zip(cards.devices, cards.memory(), strict=True):
                self._print(
                    f"GPU {device.index}  {device.name}: {format_bytes(memory.total_bytes)}, "
                    f"{format_bytes(memory.outside_bytes)} of it held outside this job"
                )
        self._print(
            f"{space.global_batch_size} samples a step over {space.num_devices} devices: {space.num_splits:,} legal splits, "
            f"at most {max_trials} trials"
        )
        self._progress.update(self._bar, total=max_trials)
        self._progress.start()

    def on_measure(self, split: BatchSplit, *, in_whole_steps: bool) -> None:
        what = "in whole steps" if in_whole_steps else "measuring"
        best = "" if self._best is None else f"; best {shape_of(self._best.split)}, {speed_of(self._best)}"
        self._progress.update(self._bar, description=f"{what} {shape_of(split)}{best}{self._modelled}")

    def on_trial(self, trial: Trial) -> None:
        measurement = trial.measurement
        fits = measurement.outcome is Outcome.OK and measurement.throughput is not None
        if fits and (self._best is None or (measurement.throughput or 0) > (self._best.throughput or 0)):
            self._best = measurement
        if trial.kind == "search":
            self._progress.advance(self._bar)
        label = f"trial {trial.number:>2}" if trial.kind == "search" else "confirm "
        self._print(f"{label}  {describe_trial(trial)}")

    def on_end(self) -> None:
        self._progress.stop()

    def _print(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)


class StepCallback:
    """A line for the first and every tenth part of the steps; in a terminal also a bar with what is going on."""

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


def _result_of(measurement: Measurement) -> str:
    if measurement.outcome is not Outcome.OK:
        return _WORDS[measurement.outcome]
    least = min(measurement.memory, key=lambda memory: memory.headroom_bytes, default=None)
    if least is None:
        return speed_of(measurement)
    return f"{speed_of(measurement)}, {format_bytes(least.headroom_bytes)} left on GPU {least.device}"
