"""What `autotune` returns: the winner, what it is compared with, every trial, and the config."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splittune.config.files import write_atomically
from splittune.config.split_config import SplitConfig
from splittune.exports import Export, TriedSplit
from splittune.hardware.base import Device
from splittune.profiling.foretold import Foretold
from splittune.profiling.measurement import Measurement
from splittune.report.advice import AdviceRow, advice_table
from splittune.report.diagnosis import Diagnosis, diagnose
from splittune.report.explain import facts_of, paragraph_of, remedy_of, risks_of
from splittune.report.files import (
    ADVICE_FILE,
    CONFIG_FILE,
    DEVICES_FILE,
    EXPLANATION_FILE,
    RESULT_FILE,
    TRIALS_FILE,
)
from splittune.report.foretold import describe_foretold
from splittune.report.memory_parts import MemoryParts
from splittune.report.page import save_search_report
from splittune.report.page.notebook import Drawing, search_drawing, search_output
from splittune.report.page.source import SearchFiles, busy_of, rows_of, trial_of
from splittune.report.ranks import parts_of_ranks, why_ranks
from splittune.report.result_file import Found
from splittune.report.state_parts import ModelBytes, PartsOfTrials
from splittune.report.tables import csv_text, devices_table, save_csv, trials_table
from splittune.report.words import describe_model_error
from splittune.search import Trial
from splittune.search.result import speedup_over
from splittune.training.module_memory import ModuleMemory

# Columns of the explanation's file, as any terminal shows them. A choice.
EXPLANATION_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """A finished search.

    `best` and `baseline` were measured alike, in whole optimizer steps, in the same run.
    """

    best: Measurement
    baseline: Measurement | None
    """The even split at the fewest accumulation steps that fit; None where no even split does.

    Fewer may fit, too, where they were foretold to be slower: nobody would choose them.
    """
    trials: tuple[Trial, ...]
    config: SplitConfig
    stopped: str = ""
    """Why it ended: ``"converged"``, ``"models disagree"``, ``"max_trials"``, ``"timeout"``, ``"space exhausted"``."""
    warnings: tuple[str, ...] = ()
    """What the search's models could not explain, in sentences. The emitted split was measured all
    the same, twice, and kept its headroom: they are for whoever looks into the search."""
    notes: tuple[str, ...] = ()
    """What to see to before training, in sentences: a loss that is a sum, a loader that is too slow."""
    foretold: Foretold | None = None
    """What a plan for these cards said of `best` and `baseline`: modelled, beside what was measured. None where the
    cards are virtual."""
    nodes: tuple[str, ...] = ()
    """The machine of each rank, where trials ran in ranks on real cards; else empty."""
    job: str = ""
    """What was trained, ``"ByteGPT of 812800 parameters"``; empty where nobody said."""
    model: ModelBytes | None = None
    """What the model takes once; None where nobody said."""
    modules: tuple[ModuleMemory, ...] = ()
    """What its modules hold, most first; activations where the step was run on shapes."""
    advice: tuple[AdviceRow, ...] = ()
    """What was tried beside the split, best first; empty where nobody asked."""

    @property
    def speedup(self) -> float | None:
        """Best over baseline in samples/s, at least 1; None without a baseline.

        Worked: 300 over 240 is 1.25.
        """
        return speedup_over(self.baseline, self.best)

    @property
    def diagnosis(self) -> Diagnosis:
        """What fills the devices at the best split, what that bought, and what would help."""
        return diagnose(self.trials, self.best, self.baseline, self.config.devices, is_modelled=self.config.is_modelled)

    @property
    def facts(self) -> tuple[str, ...]:
        """The facts that matter most, a sentence or two each: what fills the fullest card, what was bought."""
        if self.config.strategy == "ddp":
            fullest = min(self.best.memory, key=lambda memory: memory.headroom_bytes).device
            return (why_ranks(self.best, parts_of_ranks(self.trials, self.best), fullest, self.config.devices),)
        return facts_of(self.diagnosis)

    @property
    def remedy(self) -> str:
        """The remedy that fits best, as a clause in the imperative; empty where none is known."""
        return "" if self.config.strategy == "ddp" else remedy_of(self.diagnosis)

    @property
    def explanation(self) -> str:
        """The diagnosis in one paragraph; risks, notes and warnings follow."""
        if self.config.strategy == "ddp":
            error = (describe_model_error(),) if self.config.is_modelled else ()
            return " ".join((*self.facts, *error, *self.notes, *self.warnings))
        diagnosis = self.diagnosis
        risks = [risk[0].upper() + risk[1:] for risk in risks_of(diagnosis)]
        beside = () if self.foretold is None else (describe_foretold(self.foretold, self.best),)
        return " ".join((paragraph_of(diagnosis), *beside, *risks, *self.notes, *self.warnings))

    def export(self, to: str, *, config_path: str = "split.json") -> Export:
        """What the tool `to` reads of the winner, or of the fastest even split tried; see `SplitConfig.export`.

        Raises:
            ConfigError: an unknown tool, or one that cannot express the config: no even split was measured.
        """
        tried = [
            TriedSplit(
                split=trial.measurement.split,
                kind=trial.kind,
                outcome=trial.measurement.outcome.value,
                throughput=trial.measurement.throughput,
            )
            for trial in self.trials
        ]
        return self.config.export(to, trials=tried, config_path=config_path)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``split.json``, ``trials.csv``, ``devices.csv``, ``explanation.txt``, ``result.json``, ``report.html``.

        `folder` is made if missing. The last is for people, and is made from the others: any browser shows it. Where
        advice was asked for, also ``advice.csv``; one that an earlier search left there goes.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        self.config.save(Path(folder) / CONFIG_FILE)
        write_atomically(Path(folder) / EXPLANATION_FILE, textwrap.fill(self.explanation, EXPLANATION_WIDTH) + "\n")
        write_atomically(Path(folder) / RESULT_FILE, self._found().to_text())
        save_tables(
            folder,
            self.trials,
            self.config.devices,
            is_modelled=self.config.is_modelled,
            foretold=self.foretold,
            nodes=self.nodes,
            parts=self._parts.of,
        )
        if self.advice:
            save_csv(advice_table(self.advice), Path(folder) / ADVICE_FILE)
        else:
            (Path(folder) / ADVICE_FILE).unlink(missing_ok=True)
        save_search_report(folder)
        return Path(folder)

    def plot(self) -> Drawing:
        """Where memory goes, one step, what was tried, how the search went; a notebook shows it, `save` writes SVG."""
        return search_drawing(self._files())

    def _repr_html_(self) -> str:
        return search_output(self._files())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """One line where a notebook shows text: the trials would fill pages."""
        printer.text(f"TuneResult: {self.config.summary()}, {len(self.trials)} trials")

    def _files(self) -> SearchFiles:
        """What a report reads of this result, were it saved."""
        trials = trials_table(self.trials, is_modelled=self.config.is_modelled)
        devices = devices_table(self.trials, devices=self.config.devices)
        return SearchFiles(
            config=self.config,
            found=self._found(),
            trials=rows_of(csv_text(trials), TRIALS_FILE, trial_of),
            cards=rows_of(csv_text(devices), DEVICES_FILE, busy_of),
            advice=self.advice,
        )

    @property
    def _parts(self) -> PartsOfTrials:
        return PartsOfTrials(self.trials, self.config.strategy, self.model)

    def _found(self) -> Found:
        parts = self._parts
        return Found(
            best=self.best,
            baseline=self.baseline,
            best_parts=parts.of(self.best),
            baseline_parts=() if self.baseline is None else parts.of(self.baseline),
            job=self.job,
            stopped=self.stopped,
            facts=self.facts,
            notes=self.notes,
            remedy=self.remedy,
            explanation=self.explanation,
            modules=self.modules,
            foretold="" if self.foretold is None else describe_foretold(self.foretold, self.best),
        )


def save_tables(
    folder: str | os.PathLike[str],
    trials: Iterable[Trial],
    devices: Sequence[Device],
    *,
    is_modelled: bool,
    foretold: Foretold | None = None,
    nodes: Sequence[str] = (),
    parts: Callable[[Measurement], Sequence[MemoryParts]] | None = None,
) -> Path:
    """Write ``trials.csv`` and ``devices.csv``: those of a search that was interrupted, too."""
    trials = list(trials)
    save_csv(trials_table(trials, is_modelled=is_modelled, foretold=foretold), Path(folder) / TRIALS_FILE)
    table = devices_table(trials, devices=devices, foretold=foretold, nodes=nodes, parts=parts)
    save_csv(table, Path(folder) / DEVICES_FILE)
    return Path(folder)
