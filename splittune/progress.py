"""Shows a search and its result to people: a live bar in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from splittune.profiling.measurement import Measurement, Outcome
from splittune.units import format_bytes, format_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splittune.hardware import DeviceMemory
    from splittune.results import SplitConfig, TuneResult
    from splittune.results.verification import Verification
    from splittune.runner import Cards
    from splittune.search import Trial
    from splittune.split import BatchSplit, SplitSpace

_WORDS = {
    Outcome.OK: "ok",
    Outcome.OUT_OF_MEMORY: "out of memory",
    Outcome.NO_HEADROOM: "too little headroom",
    Outcome.CRASHED: "crashed",
}


def reporter_for(progress: bool, console: Console | None = None) -> ConsoleReporter | SilentReporter:
    """A reporter on standard error, so that standard output stays the caller's; a silent one for False.

    Notebooks get plain lines on standard output: they show the other one as if something were wrong.
    """
    if not progress:
        return SilentReporter()
    if console is None and Console().is_jupyter:
        console = Console(force_jupyter=False, force_terminal=False, width=160)
    return ConsoleReporter(console or Console(stderr=True))


def describe_trial(trial: Trial) -> str:
    """One line on a finished trial: what was measured, how it went, and why this split was tried."""
    measurement = trial.measurement
    return f"{_shape_of(measurement.split):<22} {_result_of(measurement):<44} {trial.reason}"


WHY_STOPPED = {
    "converged": "The search ended because no other split is expected to be faster.",
    "max_trials": "The search ended at its limit of trials; more may find a faster split.",
    "timeout": "The search ended at its limit of time; more may find a faster split.",
    "space exhausted": "The search ended because every other split is measured or known not to fit.",
}


def show_result(result: TuneResult, console: Console) -> None:
    """The baseline beside the best, where every device's memory went under each, and why."""
    modelled = ", modelled" if result.config.is_modelled else ""
    rows = [("even split", result.baseline), ("tuned split", result.best)]
    table = Table("", "steps x shards", f"samples/s{modelled}", "time of a step", title="Baseline and best")
    for name, measurement in rows:
        if measurement is None:
            table.add_row(name, "fits at no number of steps", "", "")
        else:
            speed = _speed_of(measurement).removesuffix(" samples/s")
            table.add_row(name, _shape_of(measurement.split), speed, format_time(measurement.step_time_s or 0.0))
    console.print(table)
    if result.speedup is not None:
        console.print(f"{result.speedup:.2f} times the even split's throughput{modelled}.", highlight=False)
    if result.stopped in WHY_STOPPED:
        console.print(WHY_STOPPED[result.stopped], highlight=False)
    console.print("\nMemory at the peak   # held by others   = this job   . free", highlight=False, markup=False)
    for index, device in enumerate(result.config.devices):
        title = f"GPU {index}  {device.name}"
        for name, measurement in rows:
            if measurement is not None and measurement.memory:
                bar = _memory_bar(measurement.memory[index])
                console.print(f"{title:<18} {name:<12} {bar}", highlight=False, markup=False)
                title = ""  # once a card
    console.print(f"\n{result.explanation}", highlight=False, markup=False)


def show_memory_plan(config: SplitConfig, peaks: Sequence[DeviceMemory], console: Console) -> None:
    """What training really took on every device, beside what the config planned."""
    table = Table("device", "planned peak", "peak in training", "", title="Memory reserved")
    for device, planned, peak in zip(config.devices, config.planned_peak_reserved_bytes, peaks, strict=True):
        within = peak.peak_reserved_bytes <= planned
        table.add_row(
            f"GPU {device.index}  {device.name}",
            format_bytes(planned),
            format_bytes(peak.peak_reserved_bytes),
            "as planned" if within else "MORE THAN PLANNED",
        )
    console.print(table)


def show_verification(result: Verification, console: Console) -> None:
    """Every device's peaks in training and evaluation beside the plan, the loss, and what else is to be known."""
    planned = result.config.planned_peak_reserved_bytes or (None,) * len(result.devices)
    table = Table(
        Column("device", no_wrap=True), "planned peak", "in training", "in evaluation", "", title="Memory reserved"
    )
    for index, device in enumerate(result.devices):
        plan, evaluation = planned[index], result.evaluation_peak_reserved_bytes[index]
        unevaluated = "no more" if result.num_evaluations else "not run"
        table.add_row(
            f"GPU {index}  {device.name}",
            "not measured" if plan is None else format_bytes(plan),
            format_bytes(result.training_peak_reserved_bytes[index]),
            unevaluated if evaluation is None else format_bytes(evaluation),
            result.verdicts[index],
        )
    console.print(table)
    if result.losses:
        loss = (
            f"The loss was {result.losses[0]:.3f} at step 1 and {result.losses[-1]:.3f} at step {len(result.losses)}."
        )
        console.print(loss, highlight=False)
    for note in (*result.notes, *([] if result.lack is None else [result.lack.message])):
        console.print(note, highlight=False, markup=False)
    if result.config.eval_batch_size is not None:
        console.print(
            f"Evaluation batches of {result.config.eval_batch_size} samples keep the headroom: under torch.no_grad() the "
            "wrapped model takes them at once.",
            highlight=False,
        )


def _memory_bar(memory: DeviceMemory, width: int = 16) -> str:
    """``####====......`` for what others hold, what this job took, and what was left."""
    outside = round(width * memory.outside_bytes / memory.total_bytes)
    taken = min(round(width * memory.peak_reserved_bytes / memory.total_bytes), width - outside)
    bar = "#" * outside + "=" * taken + "." * (width - outside - taken)
    return f"{bar}  {format_bytes(memory.peak_reserved_bytes)}, {format_bytes(memory.headroom_bytes)} left"


class SilentReporter:
    """Shows nothing."""

    def on_start(self, cards: Cards, space: SplitSpace, max_trials: int) -> None: ...

    def on_measure(self, split: BatchSplit, *, in_whole_steps: bool) -> None: ...

    def on_trial(self, trial: Trial) -> None: ...

    def on_end(self) -> None: ...

    def on_activity(self, what: str) -> None: ...

    def on_step(self, step: int, num_steps: int, loss: float) -> None: ...


class ConsoleReporter:
    """A line for every finished trial; in a terminal also a bar with what is being measured and the best so far."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._best: Measurement | None = None
        self._modelled = ""
        self._progress = _bar_of("trial", console)
        self._bar = self._progress.add_task("", total=None)

    def on_start(self, cards: Cards, space: SplitSpace, max_trials: int) -> None:
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
        best = "" if self._best is None else f"; best {_shape_of(self._best.split)}, {_speed_of(self._best)}"
        self._progress.update(self._bar, description=f"{what} {_shape_of(split)}{best}{self._modelled}")

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


class StepReporter:
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


def _shape_of(split: BatchSplit) -> str:
    return f"{split.accumulation_steps} x ({'+'.join(map(str, split.shard_sizes))})"


def _speed_of(measurement: Measurement) -> str:
    return "not timed" if measurement.throughput is None else f"{measurement.throughput:,.1f} samples/s"


def _result_of(measurement: Measurement) -> str:
    if measurement.outcome is not Outcome.OK:
        return _WORDS[measurement.outcome]
    least = min(measurement.memory, key=lambda memory: memory.headroom_bytes, default=None)
    if least is None:
        return _speed_of(measurement)
    return f"{_speed_of(measurement)}, {format_bytes(least.headroom_bytes)} left on GPU {least.device}"
