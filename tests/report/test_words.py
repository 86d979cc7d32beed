"""Splits, speeds and devices are spelled alike everywhere."""

from __future__ import annotations

import pytest

from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.words import count_of, gpus, rate_of, shape_of, shares_of
from splittune.split import BatchSplit

SPLIT = BatchSplit(global_batch_size=64, accumulation_steps=2, shard_sizes=(5, 9, 9, 9))


def test_a_split_is_its_steps_and_shares() -> None:
    """Accumulation steps x the samples of each device."""
    assert (shape_of(SPLIT), shares_of(SPLIT)) == ("2 x (5+9+9+9)", "5+9+9+9")


@pytest.mark.parametrize(
    ("step_time_s", "rate"),
    [(0.01, "6,400"), (0.5, "128"), (0.65, "98.5"), (60, "1.07"), (6400, "0.0100")],
)
def test_a_rate_has_three_digits_at_least(step_time_s: float, rate: str) -> None:
    """Slow jobs have decimals, fast ones none."""
    measurement = Measurement(split=SPLIT, outcome=Outcome.OK, whole_step_times_s=(step_time_s,))
    assert rate_of(measurement) == rate


def test_what_was_not_timed_has_no_rate() -> None:
    """A failed trial is not called slow."""
    assert rate_of(Measurement(split=SPLIT, outcome=Outcome.OUT_OF_MEMORY)) == "not timed"


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([0], "GPU 0"),
        ([1, 2, 3], "GPU 1-3"),
        ([0, 2, 3], "GPU 0, 2-3"),
        ([0, 2, 4], "GPU 0, 2, 4"),
        ([0, 1], "GPU 0-1"),
    ],
)
def test_neighbours_are_a_range(indices: list[int], words: str) -> None:
    """Devices in a row are named by the first and the last."""
    assert gpus(indices) == words


def test_one_is_singular() -> None:
    """1 sample, 0 and 2 samples."""
    assert [count_of(number, "sample") for number in (0, 1, 2)] == ["0 samples", "1 sample", "2 samples"]
