"""What `autotune` returns: the winner, what it is compared with, every trial, and the config."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from splittune.config.files import write_atomically
from splittune.config.split_config import SplitConfig
from splittune.hardware.base import Device
from splittune.profiling.foretold import Foretold
from splittune.profiling.measurement import Measurement
from splittune.report.diagnosis import Diagnosis, diagnose
from splittune.report.explain import facts_of, paragraph_of, remedy_of, risks_of
from splittune.report.foretold import describe_foretold
from splittune.report.ranks import parts_of_ranks, why_ranks
from splittune.report.tables import devices_table, save_csv, trials_table
from splittune.report.words import describe_model_error
from splittune.search import Trial
from splittune.search.result import speedup_over

CONFIG_FILE = "split.json"
TRIALS_FILE = "trials.csv"
DEVICES_FILE = "devices.csv"
EXPLANATION_FILE = "explanation.txt"
# Columns of the explanation's file, as any terminal shows them. A choice.
EXPLANATION_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """A finished search.

    `best` and `baseline` were measured alike, in whole optimizer steps, in the same run.
    """

    best: Measurement
    baseline: Measurement | None
    """The even split at the fewest accumulation steps that fit; None where no even split does."""
    trials: tuple[Trial, ...]
    config: SplitConfig
    stopped: str = ""
    """Why it ended: ``"converged"``, ``"max_trials"``, ``"timeout"`` or ``"space exhausted"``."""
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

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``split.json``, ``trials.csv``, ``devices.csv`` and ``explanation.txt``.

        `folder` is made if missing.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        self.config.save(Path(folder) / CONFIG_FILE)
        write_atomically(Path(folder) / EXPLANATION_FILE, textwrap.fill(self.explanation, EXPLANATION_WIDTH) + "\n")
        return save_tables(
            folder,
            self.trials,
            self.config.devices,
            is_modelled=self.config.is_modelled,
            foretold=self.foretold,
            nodes=self.nodes,
        )


def save_tables(
    folder: str | os.PathLike[str],
    trials: Iterable[Trial],
    devices: Sequence[Device],
    *,
    is_modelled: bool,
    foretold: Foretold | None = None,
    nodes: Sequence[str] = (),
) -> Path:
    """Write ``trials.csv`` and ``devices.csv``: those of a search that was interrupted, too."""
    trials = list(trials)
    save_csv(trials_table(trials, is_modelled=is_modelled, foretold=foretold), Path(folder) / TRIALS_FILE)
    save_csv(devices_table(trials, devices=devices, foretold=foretold, nodes=nodes), Path(folder) / DEVICES_FILE)
    return Path(folder)
