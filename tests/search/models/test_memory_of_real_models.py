"""The memory model beside recorded steps of real models: what it takes for sure is never more than what they held."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.search import recorded
from splittune.profiling.measurement import Measurement
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.memory import MemoryModel

# The model promises its bounds up to what readings differ by, and the allocator's last segments.
TOLERANCE = 0.02
# As many recordings as seeds: each comes upon the next one.
SEEDS = range(len(recorded.names()))


def that_run(problem: recorded.RecordedProblem) -> list[Measurement]:
    """Every split that ran, smallest micro-batch first."""
    told = [problem.measure(split) for split in problem.space() if problem.runs(split)]
    return sorted(told, key=lambda run: (run.split.micro_batch_size, run.split.accumulation_steps))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_trials", [1, 2, 3])
def test_what_surely_grows_is_never_more_than_what_was_held(seed: int, num_trials: int) -> None:
    """After the first even splits that run, of every other split."""
    problem = recorded.draw(seed)
    evens = [split for split in reversed(list(problem.space().even_splits())) if problem.runs(split)][:num_trials]
    model = MemoryModel(
        [JudgedTrial.of(problem.measure(split), problem.min_headroom_bytes) for split in evens],
        problem.space().num_devices,
    )
    runs = that_run(problem)[::5]
    steps = np.array([float(run.split.accumulation_steps) for run in runs])
    told = model.needed(steps, np.array([run.split.shard_sizes for run in runs], dtype=float))
    held = np.array([[card.peak_reserved_bytes for card in run.memory] for run in runs], dtype=float)
    assert (told.sure <= held * (1 + TOLERANCE)).all()
