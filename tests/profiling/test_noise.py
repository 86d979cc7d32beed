"""How far the median of a few step times may be off."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.profiling.noise import relative_standard_error


def test_the_worked_example() -> None:
    """1.00, 1.01 and 1.02 s: 1.2533 x 0.01 / sqrt(3) / 1.01 = 0.72 %."""
    assert relative_standard_error((1.00, 1.01, 1.02)) == pytest.approx(0.0072, abs=5e-5)


def test_a_clock_that_repeats_and_too_few_times_have_none() -> None:
    """Equal times have no spread, and one time shows none."""
    assert relative_standard_error((1.0, 1.0, 1.0)) == 0
    assert relative_standard_error((1.0,)) == relative_standard_error(()) == 0


@given(scale=st.floats(1e-6, 1e6), times=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=20))
def test_it_has_no_unit(scale: float, times: list[float]) -> None:
    """Milliseconds and seconds give the same."""
    error = relative_standard_error(times)
    assert relative_standard_error([scale * time for time in times]) == pytest.approx(error, rel=1e-6, abs=1e-12)


def test_it_is_that_of_medians_of_normal_samples() -> None:
    """Medians of 40 times that scatter by 2 % scatter by what the times themselves say."""
    samples = 1 + 0.02 * np.random.default_rng(0).standard_normal((2000, 40))
    told = np.median([relative_standard_error(sample.tolist()) for sample in samples])
    assert told == pytest.approx(np.median(samples, axis=1).std(), rel=0.1)
