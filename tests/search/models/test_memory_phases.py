from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.search.models.memory_phases import Phases, are_of_share, fit_phases
from splittune.search.models.memory_readings import REPEATABILITY, Reading, row_of

FREE = (0.0, np.inf)


def reading(share: int, peak: float, *, size: int | None = None, resting: int = 0, accumulates: float = 1.0) -> Reading:
    """Of GPU 0 where the micro-batch `size` is told, else of a replica."""
    device, size = (1, 2 * share) if size is None else (0, size)
    return Reading(row_of(device, share, size, accumulates), round(peak), resting)


def fitted(*readings: Reading, slope_range: tuple[float, float] = FREE, failed: tuple = ()) -> Phases:
    return fit_phases(readings, failed, slope_range=slope_range, largest_budget_bytes=1e6)


def rows(*readings: Reading) -> np.ndarray:
    return np.array([one.row for one in readings])


def test_one_line_that_agrees_is_all_there_is() -> None:
    """1,000 bytes and 100 for each sample; the flat below is no phase that a size changes."""
    told = fitted(*(reading(share, max(1200, 1000 + 100 * share)) for share in (1, 4, 8)))
    assert len(told.polytopes) == 1
    assert told.misfit == 0


def test_gradients_and_activations_are_two_lines_of_a_replica() -> None:
    """The worked example: 300 and 10 a sample, then 155 and 40 a sample. More samples need 40 each."""
    peaks = {2: 320, 4: 340, 8: 475, 10: 555}
    told = fitted(*(reading(share, peak, resting=150) for share, peak in peaks.items()))
    assert len(told.polytopes) == 2
    assert told.misfit == pytest.approx(0, abs=1e-3)
    ask = rows(*(reading(share, 0) for share in (3, 20)))
    assert told.likely(ask) == pytest.approx([330, 955], rel=0.03)
    assert told.lowest(ask)[1] <= 955 <= told.highest(ask)[1]


def test_what_gpu0_gathers_may_peak_without_its_share() -> None:
    """The peak of 3,760 bytes and 3 for each gathered sample says nothing of its own: 550 for each of those are seen
    once they hold more."""

    def peak(share: int, size: int) -> float:
        return max(3760 + 3 * size, 2000 + 550 * share + 4 * size)

    tried = [(1, 2), (0, 39), (5, 11), (16, 39), (19, 39)]
    readings = [reading(share, peak(share, size), size=size, resting=1990) for share, size in tried]
    told = fitted(*readings, slope_range=(540, 560))
    assert are_of_share(readings).tolist() == [False, False, True, True, True]
    assert told.misfit == pytest.approx(0, abs=1e-3)
    others = [(12, 30), (0, 20), (22, 54)]
    ask = rows(*(reading(share, 0, size=size) for share, size in others))
    assert told.likely(ask) == pytest.approx([peak(*one) for one in others], rel=0.02)


def test_gpu0_may_peak_where_its_share_grows_less_than_a_replicas() -> None:
    """78 bytes for each of its samples, where replicas need 144: it peaks in another phase than they do."""
    tried = [(1, 4), (3, 4), (3, 13), (2, 11), (8, 8)]
    readings = [reading(share, 1500 + 78 * share + 375 * size, size=size, resting=1400) for share, size in tried]
    told = fitted(*readings, slope_range=(130, 159))
    assert told.misfit <= 1
    ask = rows(reading(6, 0, size=18))
    assert told.likely(ask) == pytest.approx([1500 + 78 * 6 + 375 * 18], rel=0.02)


def test_a_failure_may_have_been_in_either_phase() -> None:
    """A micro-batch of 60 filled 8,000 bytes without a share of GPU 0: that was the phase of what it gathers."""

    def peak(share: int, size: int) -> float:
        return max(2000 + 100 * size, 3000 + 400 * share + 10 * size)

    tried = [(1, 4), (4, 8), (0, 40), (8, 40), (2, 40)]
    readings = [reading(share, peak(share, size), size=size, resting=1900) for share, size in tried]
    told = fitted(*readings, slope_range=(390, 410), failed=((row_of(0, 0, 60, 1.0), 7990.0),))
    assert told.misfit <= 1
    assert told.likely(rows(reading(0, 0, size=50))) == pytest.approx([7000], rel=0.03)


@given(
    constant=st.integers(500, 2000),
    slope=st.integers(1, 300),
    per_gathered=st.integers(0, 100),
    flat=st.integers(0, 4000),
    tilt=st.integers(0, 40),
    tried=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), min_size=2, max_size=8),
)
def test_no_phase_exceeds_a_peak_and_those_of_the_share_are_reached(
    constant: int, slope: int, per_gathered: int, flat: int, tilt: int, tried: list[tuple[int, int]]
) -> None:
    """For any two phases of GPU 0 and any splits, wherever the phases agree with the readings."""

    def peak(share: int, size: int) -> float:
        return max(flat + tilt * size, constant + slope * share + per_gathered * size)

    readings = [reading(own, peak(own, own + rest), size=own + rest, resting=constant) for own, rest in tried]
    told = fitted(*readings, slope_range=(slope * 0.98, slope * 1.02))
    if told.misfit <= 1:
        peaks, ask, of_share = np.array([one.peak_bytes for one in readings]), rows(*readings), are_of_share(readings)
        assert (told.lowest(ask) <= peaks * (1 + 3 * REPEATABILITY) + 2).all()
        assert (told.highest(ask) >= peaks * (1 - 3 * REPEATABILITY) - 2)[of_share].all()
