"""Recorded problems: real models on virtual cards, every split foretold once; a search on them costs nothing."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.search.noise import Noise, drawn_noise
from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.split import BatchSplit, SplitSpace

RECORDED = Path(__file__).parents[1] / "results" / "search_recorded.csv.gz"
COLUMNS = (
    *("job", "devices", "shares", "min_headroom_bytes", "global_batch_size", "accumulation_steps", "shard_sizes"),
    *("outcome", "message", "micro_step_s", "update_s", "device_busy_s", "total_bytes", "outside_bytes"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "micro_step_peak_bytes", "update_peak_bytes"),
    *("single_step_peak_bytes", "resting_bytes", "before_backward_bytes"),
)
MEMORY = COLUMNS[COLUMNS.index("total_bytes") :]


class RecordedProblem:
    """A `Problem` that reads every answer from what was foretold, and adds noise to its times.

    A split with more accumulation steps than its micro-batch needs has the micro-steps of the one
    with the fewest.
    """

    def __init__(self, *, seed: int, kind: str, rows: Sequence[dict[str, str]], noise: Noise) -> None:
        self.seed = seed
        self.kind = kind
        self.noise = noise
        self.measured: list[BatchSplit] = []
        self.num_oom = 0
        self._num_trials = 0
        self.min_headroom_bytes = tuple(_integers(rows[0]["min_headroom_bytes"]))
        self._trials = {trial.split.shard_sizes: trial for trial in map(measurement_of, rows)}
        self._space = SplitSpace(
            global_batch_size=int(rows[0]["global_batch_size"]),
            num_devices=len(self.min_headroom_bytes),
            shares="each" if rows[0]["shares"] == "each" else "gpu0",
        )

    def space(self) -> SplitSpace:
        """The legal splits."""
        return self._space

    def measure(self, split: BatchSplit) -> Measurement:
        """A short trial: 5 micro-steps and 3 updates, or what was foretold of one that does not run."""
        self.measured.append(split)
        measurement = self._trial(split, is_whole=False)
        self.num_oom += measurement.outcome is Outcome.OUT_OF_MEMORY
        return measurement

    def confirm(self, split: BatchSplit) -> Measurement:
        """A longer trial: 5 whole steps."""
        return self._trial(split, is_whole=True)

    def runs(self, split: BatchSplit) -> bool:
        """Whether no card runs out of memory."""
        return self._foretold(split).outcome is not Outcome.OUT_OF_MEMORY

    def fits(self, split: BatchSplit) -> bool:
        """Whether every card keeps its headroom."""
        return self._foretold(split).outcome is Outcome.OK

    def throughput(self, split: BatchSplit) -> float:
        """Samples per second without noise; 0 for a split that runs out of memory, of which no time is known."""
        return self._foretold(split).throughput or 0.0

    @property
    def best_throughput(self) -> float | None:
        """Of the fastest split that fits: all with the fewest steps of their size were foretold."""
        return max(
            (self.throughput(trial.split) for trial in self._trials.values() if self.fits(trial.split)), default=None
        )

    def _foretold(self, split: BatchSplit) -> Measurement:
        if split not in self._space:
            raise ValueError(f"{split} is not in the space of this problem, {self._space}.")
        return replace(self._trials[split.shard_sizes], split=split)

    def _trial(self, split: BatchSplit, *, is_whole: bool) -> Measurement:
        foretold = self._foretold(split)
        trial, self._num_trials = self._num_trials, self._num_trials + 1
        if foretold.step_time_s is None or foretold.update_time_s is None or foretold.micro_step_time_s is None:
            return foretold
        rng = np.random.default_rng([self.seed, trial, split.accumulation_steps, *split.shard_sizes])
        factors = self.noise.factors(8, trial, rng)
        if is_whole:
            whole = tuple(foretold.step_time_s * factor for factor in factors[:5])
            return replace(foretold, micro_step_times_s=(), update_times_s=(), whole_step_times_s=whole)
        micro = tuple(foretold.micro_step_time_s * factor for factor in factors[:5])
        update = tuple(foretold.update_time_s * factor for factor in factors[5:])
        busy = tuple(float(np.median(factors[:5])) * busy_s for busy_s in foretold.device_busy_s or ())
        return replace(foretold, micro_step_times_s=micro, update_times_s=update, device_busy_s=busy or None)


def names() -> list[str]:
    """What was recorded, ``"GPT on 4xT400-4GB with 24 samples"`` say."""
    return list(_recordings())


def draw(seed: int) -> RecordedProblem:
    """The recording that the seed comes upon, with noise of this seed."""
    recordings = _recordings()
    name = list(recordings)[seed % len(recordings)]
    noise, unusual = drawn_noise(np.random.default_rng([seed, 4]))
    return RecordedProblem(seed=seed, kind=", ".join([name, *unusual]), rows=recordings[name], noise=noise)


@cache
def _recordings() -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for row in read_rows(RECORDED):
        name = f"{row['job']} on {row['devices']} with {row['global_batch_size']} samples"
        found.setdefault(name.replace(",", " and "), []).append(row)
    return found


def read_rows(path: Path) -> list[dict[str, str]]:
    """What `write_rows` wrote."""
    return list(csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode())))


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[dict[str, str]]) -> None:
    """As a CSV, packed so that the same rows are the same bytes."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def row_of(job: str, devices: str, shares: str, headrooms: Sequence[int], measurement: Measurement) -> dict[str, str]:
    """One split as text; figures of several cards stand side by side, and what is not known is left out."""
    split = measurement.split
    seconds = (measurement.micro_step_time_s, measurement.update_time_s, *(measurement.device_busy_s or ()))
    micro_step_s, update_s, *busy_s = ["" if time_s is None else f"{time_s:.9g}" for time_s in seconds]
    memory = {
        name: " ".join(str(getattr(card, name)) for card in measurement.memory if getattr(card, name) is not None)
        for name in MEMORY
    }
    return memory | {
        "job": job,
        "devices": devices,
        "shares": shares,
        "min_headroom_bytes": " ".join(map(str, headrooms)),
        "global_batch_size": str(split.global_batch_size),
        "accumulation_steps": str(split.accumulation_steps),
        "shard_sizes": " ".join(map(str, split.shard_sizes)),
        "outcome": measurement.outcome.value,
        "message": measurement.message,
        "micro_step_s": micro_step_s,
        "update_s": update_s,
        "device_busy_s": " ".join(busy_s),
    }


def measurement_of(row: dict[str, str]) -> Measurement:
    """What `row_of` wrote."""
    figures = {name: _integers(row[name]) for name in MEMORY}
    num_cards = len(figures["total_bytes"])
    memory = tuple(
        DeviceMemory(device=card, **{name: known[card] for name, known in figures.items() if len(known) == num_cards})
        for card in range(num_cards)
    )
    return Measurement(
        split=BatchSplit(
            global_batch_size=int(row["global_batch_size"]),
            accumulation_steps=int(row["accumulation_steps"]),
            shard_sizes=tuple(_integers(row["shard_sizes"])),
        ),
        outcome=Outcome(row["outcome"]),
        micro_step_times_s=tuple(map(float, row["micro_step_s"].split())),
        update_times_s=tuple(map(float, row["update_s"].split())),
        memory=memory,
        device_busy_s=tuple(map(float, row["device_busy_s"].split())) or None,
        message=row["message"],
    )


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split()]
