"""What `autotune` returns: the winner, what it is compared with, every trial, and the config to train with."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from splittune.config.files import write_atomically
from splittune.config.split_config import SplitConfig
from splittune.hardware.base import Device
from splittune.profiling.measurement import Measurement
from splittune.report.explain import explain
from splittune.report.tables import devices_table, save_csv, trials_table
from splittune.search import Trial

CONFIG_FILE, TRIALS_FILE, DEVICES_FILE = "split.json", "trials.csv", "devices.csv"
EXPLANATION_FILE = "explanation.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """A finished search. `best` and `baseline` were measured alike, in whole optimizer steps, in the same run."""

    best: Measurement
    baseline: Measurement | None
    """The even split at the fewest accumulation steps that fit; None where no even split does."""
    trials: tuple[Trial, ...]
    config: SplitConfig
    stopped: str = ""
    """Why the search ended: ``"converged"``, ``"max_trials"``, ``"timeout"`` or ``"space exhausted"``."""
    warnings: tuple[str, ...] = ()
    """What people should know before they rely on it, in sentences: models that did not fit, a loader that is too slow."""

    @property
    def speedup(self) -> float | None:
        """Best over baseline in samples/s, at least 1: 300 over 240 is 1.25. None without a baseline."""
        if self.baseline is None or self.baseline.throughput is None or self.best.throughput is None:
            return None
        return self.best.throughput / self.baseline.throughput

    @property
    def explanation(self) -> str:
        """One paragraph: how far apart the cards are at the best split, what fills the fullest, what would help.

        The warnings follow.
        """
        text = explain(self.trials, self.best, self.baseline, self.config.devices, is_modelled=self.config.is_modelled)
        return " ".join((text, *self.warnings))

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``split.json``, ``trials.csv``, ``devices.csv`` and ``explanation.txt`` into `folder`, made if missing.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        self.config.save(Path(folder) / CONFIG_FILE)
        write_atomically(Path(folder) / EXPLANATION_FILE, textwrap.fill(self.explanation, 100) + "\n")
        return save_tables(folder, self.trials, self.config.devices, is_modelled=self.config.is_modelled)


def save_tables(
    folder: str | os.PathLike[str], trials: Iterable[Trial], devices: Sequence[Device], *, is_modelled: bool
) -> Path:
    """Write ``trials.csv`` and ``devices.csv``: those of a search that was interrupted, too."""
    trials = list(trials)
    save_csv(trials_table(trials, is_modelled=is_modelled), Path(folder) / TRIALS_FILE)
    save_csv(devices_table(trials, devices=devices), Path(folder) / DEVICES_FILE)
    return Path(folder)
