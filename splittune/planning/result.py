"""What `plan` returns: splits foretold, or the best of each machine and batch size; to be saved, drawn, trained."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splittune.config.data import Strategy
from splittune.errors import ConfigError
from splittune.hardware.base import Device
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report import TuneResult
from splittune.report.capacity.files import save_capacity
from splittune.report.capacity.picture import draw
from splittune.report.capacity.row import CapacityRow, LargestMicroBatch
from splittune.report.capacity.table import capacity_table
from splittune.report.files import CAPACITY_FILE
from splittune.report.page.notebook import plan_output
from splittune.report.page.planned import plan_row_of
from splittune.report.page.source import rows_of
from splittune.report.tables import csv_text
from splittune.report.words import count_of
from splittune.search import Trial

if TYPE_CHECKING:
    from splittune.report.capacity.picture import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSearch:
    """The best split of one batch size on one machine; all of it is modelled."""

    devices: str
    """The machine as it was named."""
    cards: tuple[Device, ...]
    global_batch_size: int
    strategy: Strategy = "dp"
    """One process for all cards, or with "ddp" a rank for each."""
    result: TuneResult | None
    """None where nothing fits. Its config trains on real cards: ``config.wrap(model, devices=["cuda:0", ...])``."""
    lacking: str = ""
    """What was lacking then, and where."""
    trials: tuple[Trial, ...] = ()
    """What was tried, also where nothing fits."""
    largest: LargestMicroBatch | None = None
    """The largest micro-batch that fits on the machine; None where no trial did."""
    needs_values: str | None = None
    """Why the step was run on real tensors; None where shapes did."""

    def as_row(self) -> CapacityRow:
        """What the table, the picture and the console show of it."""
        result = self.result
        return CapacityRow(
            devices=self.devices,
            cards=self.cards,
            global_batch_size=self.global_batch_size,
            strategy=self.strategy,
            best=None if result is None else result.best,
            baseline=None if result is None else result.baseline,
            trials=self.trials,
            largest=self.largest,
            config=None if result is None else result.config,
            message=self.lacking,
            model=None if result is None else result.model,
            modules=() if result is None else result.modules,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Virtual cards, and how they were asked for."""

    devices: str
    cards: tuple[Device, ...]
    strategy: Strategy = "dp"
    """How they are used: a machine that is planned both ways is there twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `plan` foretold; memory is accounted, time is modelled."""

    measurements: tuple[Measurement, ...] = ()
    """Of the splits that were given: machine by machine, of each strategy by strategy, in their order."""
    searches: tuple[PlannedSearch, ...] = ()
    """Where none were given: machine by machine, of each strategy by strategy, and in the order of the batch sizes."""
    needs_values: str | None = None
    """Why the step was run on real tensors; None where shapes did."""
    machines: tuple[Machine, ...] = ()
    """The machines of `measurements`, each with as many of them."""

    @classmethod
    def of(cls, searches: Sequence[PlannedSearch]) -> Plan:
        """The plan of these searches: of a sweep that was interrupted, the finished ones."""
        reasons = [search.needs_values for search in searches if search.needs_values is not None]
        return cls(searches=tuple(searches), needs_values=next(iter(reasons), None))

    @property
    def rows(self) -> tuple[CapacityRow, ...]:
        """What the table, the picture and the console show, a row for each machine and batch size or given split."""
        return (*(search.as_row() for search in self.searches), *self._given_rows())

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``capacity.csv``, ``report.html``, ``capacity.png``, and a ``split-MACHINE-BATCH.json`` for what fits.

        A search also leaves ``modules.csv``: what each module of the job holds.

        `folder` is made if missing. `capacity_table` documents the columns; `SplitConfig.load` reads the configs.
        Without matplotlib (``pip install "splittune[report]"``) the picture is left out, which is logged.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        save_capacity(self.rows, folder)
        return Path(folder)

    def plot(self) -> Figure:
        """Throughput and memory against the batch size, machine by machine, as matplotlib's figure.

        Raises:
            ConfigError: matplotlib is missing, with the command that installs it, or the plan is empty.
        """
        try:
            return draw(self.rows)
        except ModuleNotFoundError as error:
            raise ConfigError(str(error)) from error

    def _repr_html_(self) -> str:
        text = csv_text(capacity_table(self.rows))
        return plan_output(rows_of(text, CAPACITY_FILE, plan_row_of)) if self.rows else "An empty plan."

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"Plan: {count_of(len(self.rows), 'row')}")

    def _given_rows(self) -> tuple[CapacityRow, ...]:
        if not self.machines:
            return ()
        each = len(self.measurements) // len(self.machines)
        rows = []
        for place, machine in enumerate(self.machines):
            runs = self.measurements[place * each : (place + 1) * each]
            trials = tuple(
                Trial(number=number, kind="search", measurement=run, reason="given") for number, run in enumerate(runs)
            )
            rows += [
                CapacityRow(
                    devices=machine.devices,
                    cards=machine.cards,
                    global_batch_size=run.split.global_batch_size,
                    strategy=machine.strategy,
                    best=run,
                    trials=trials,
                    message=run.message if run.outcome is not Outcome.OK else "",
                    is_given=True,
                )
                for run in runs
            ]
        return tuple(rows)
