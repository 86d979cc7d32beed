"""A plan as it goes: which machine and batch size, of how many; a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from splittune.report.capacity.row import named_of
from splittune.report.progress import callers_console, describe_trial
from splittune.report.words import rate_of, shape_of

if TYPE_CHECKING:
    from splittune.report.capacity.row import CapacityRow
    from splittune.runners.base import DeviceView
    from splittune.search import Trial
    from splittune.split import BatchSplit, SplitSpace


class PlanCallback(Protocol):
    """Is told what a plan does, and what each of its searches does."""

    def on_row(self, devices: str, global_batch_size: int | None, number: int, num_rows: int) -> None:
        """A machine and batch size begin, the number-th from 1; None is the loader's own size."""
        ...

    def on_planned(self, row: CapacityRow) -> None:
        """They are done."""
        ...

    def on_split(self, devices: str, split: BatchSplit, number: int, num_splits: int) -> None:
        """A given split begins."""
        ...

    def on_finish(self) -> None:
        """The plan is done, or was ended."""
        ...

    def on_start(self, cards: DeviceView, space: SplitSpace, max_trials: int) -> None: ...

    def on_measure(self, split: BatchSplit, *, in_whole_steps: bool) -> None: ...

    def on_trial(self, trial: Trial) -> None: ...

    def on_end(self) -> None: ...


def plan_callback_for(progress: bool) -> PlanCallback:
    """A callback on standard error, so that standard output stays the caller's; silent for False."""
    return PlanProgress(callers_console()) if progress else SilentPlanCallback()


def describe_row(row: CapacityRow) -> str:
    """``"4xRTX3090, batch 512: 1,234 samples/s (modelled) as 2 x (40+72+72+72)"``, or that nothing fits."""
    name = f"{named_of(row)}, batch {row.global_batch_size}"
    if row.best is None or not row.fits:
        return f"{name}: no split fits (modelled)"
    return f"{name}: {rate_of(row.best)} samples/s (modelled) as {shape_of(row.best.split)}"


class SilentPlanCallback:
    """Shows nothing."""

    def on_row(self, devices: str, global_batch_size: int | None, number: int, num_rows: int) -> None: ...

    def on_planned(self, row: CapacityRow) -> None: ...

    def on_split(self, devices: str, split: BatchSplit, number: int, num_splits: int) -> None: ...

    def on_finish(self) -> None: ...

    def on_start(self, cards: DeviceView, space: SplitSpace, max_trials: int) -> None: ...

    def on_measure(self, split: BatchSplit, *, in_whole_steps: bool) -> None: ...

    def on_trial(self, trial: Trial) -> None: ...

    def on_end(self) -> None: ...


class PlanProgress(SilentPlanCallback):
    """A line for each machine and batch size that is done; in a terminal also a bar with what is being planned.

    If `verbose`, a line for each trial as well, with its reason.
    """

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._is_verbose = verbose
        self._of = self._now = ""
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("planning"),
            MofNCompleteColumn(),
            BarColumn(bar_width=10),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._bar = self._progress.add_task("", total=None)

    def on_row(self, devices: str, global_batch_size: int | None, number: int, num_rows: int) -> None:
        batch = "the loader's batch" if global_batch_size is None else f"batch {global_batch_size}"
        self._begin(f"{devices}, {batch}", number, num_rows)

    def on_planned(self, row: CapacityRow) -> None:
        self._print(f"{self._of} {describe_row(row)}")
        self._progress.advance(self._bar)

    def on_split(self, devices: str, split: BatchSplit, number: int, num_splits: int) -> None:
        self._begin(f"{devices}, {split}", number, num_splits)
        self._progress.update(self._bar, completed=number - 1)

    def on_measure(self, split: BatchSplit, *, in_whole_steps: bool) -> None:
        self._progress.update(self._bar, description=f"{self._now}: {shape_of(split)}")

    def on_trial(self, trial: Trial) -> None:
        if self._is_verbose:
            self._print(f"{describe_trial(trial)}  {trial.reason}")

    def on_finish(self) -> None:
        self._progress.stop()

    def _begin(self, what: str, number: int, total: int) -> None:
        self._of, self._now = f"{number} of {total}:", what
        self._progress.update(self._bar, total=total, description=what)
        self._progress.start()

    def _print(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)
