from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.search.models.interval import Interval

GIB = float(1024**3)


def peaks(
    sure: float,
    least: float,
    foretold: float,
    most: float,
    *,
    overhead: float = 0,
    steady: float = 1,
    on_trend: float = 0,
    goes_on: float = 0,
    jump: float = 0,
) -> Interval:
    """Of one split on one device, in GiB; a fifth of all peaks is a surprise, and what is unknown spans 32 times."""
    sizes = {"sure": sure, "least": least, "foretold": foretold, "most": most, "most_after_cache_flush": most}
    sizes |= {"trend_least": on_trend - 0.5, "trend_most": on_trend + 0.5, "jump": jump, "overhead": overhead}
    bounds = {name: np.array([[size * GIB]]) for name, size in sizes.items()}
    ratios = {"surprise": 0.2, "least_part": 1 / 32, "goes_on": goes_on, "steady": steady}
    return Interval(**bounds, **{name: np.array([[ratio]]) for name, ratio in ratios.items()})


def smooth(chance: float) -> float:
    return 3 * chance**2 - 2 * chance**3


@pytest.mark.parametrize(
    ("limit", "chance"),
    [
        (3.9, 0),
        (2 + 8, 0.8 * (1 - 2 / 5)),  # a quarter of what is not known
        (2 + 16, 0.8 * (1 - 1 / 5)),
        (2 + 32, 0.8),
        (2 + 32 + 4, 0.8 + 0.2 / 2),
        (42, 1),
        (np.inf, 1),
    ],
)
def test_what_is_not_known_is_even_in_its_logarithm(limit: float, chance: float) -> None:
    """2 GiB are sure and up to 32 are not: each halving takes a fifth of the chance; a surprise goes beyond, evenly."""
    assert peaks(2, 4, 34, 42).chance_below(np.array([limit * GIB])) == pytest.approx([smooth(chance)])


@pytest.mark.parametrize(("steady", "chance"), [(1, 0), (0.5, 0.3), (0, 0.6)])
def test_an_overhead_that_is_not_steady_adds_little_more_often(steady: float, chance: float) -> None:
    """8 GiB are alive and up to 8 come on top: within 10 GiB if no more than 0.25 does, so parts up to 0.63 of one."""
    told = peaks(8, 8, 16, 17, overhead=8, steady=steady).chance_below(np.array([10 * GIB]))
    assert told == pytest.approx([smooth(0.8 * chance)])


@given(
    alive=st.floats(0, 20),
    overhead=st.floats(0, 20),
    steady=st.floats(0, 1),
    limit=st.floats(0, 60),
    more=st.floats(0, 9),
)
def test_chances_rise_with_the_limit_and_fall_with_steadiness(
    alive: float, overhead: float, steady: float, limit: float, more: float
) -> None:
    """Whatever the allocator adds: between 0 and 1, no less within more, and most where it need not add it all."""
    foretold = 2 + alive + overhead
    told = [peaks(2, 2, foretold, foretold + 1, overhead=overhead, steady=part) for part in (steady, 0, 1)]
    chances = [one.chance_below(np.array([limit * GIB]))[0] for one in told]
    assert 0 <= chances[2] <= chances[0] + 1e-9
    assert chances[0] <= chances[1] + 1e-9 <= 1 + 2e-9
    assert chances[0] <= told[0].chance_below(np.array([(limit + more) * GIB]))[0] + 1e-9


def test_what_is_known_exactly_stays_below_or_does_not() -> None:
    """An interval of one point has no chance between 0 and 1."""
    exact = peaks(8, 8, 8, 8)
    assert exact.chance_below(np.array([8 * GIB])) == [1]
    assert exact.chance_below(np.array([7.99 * GIB])) == [0]


@pytest.mark.parametrize(("on_trend", "kept"), [(9, 1), (9.75, 0.75), (11, 0)])
def test_a_trend_that_likely_goes_on_decides_so_often(on_trend: float, kept: float) -> None:
    """Within 10 GiB by what bounds tell with 0.47; three times in four by where the trend leads, give or take 0.5."""
    chance = peaks(2, 4, 34, 42, on_trend=on_trend, goes_on=0.75).chance_below(np.array([10 * GIB]))
    assert chance == pytest.approx([0.75 * kept + 0.25 * smooth(0.8 * (1 - 2 / 5))])


@pytest.mark.parametrize(("limit", "has_chance"), [(10.1, True), (9.9, False)])
def test_a_trend_leads_nowhere_below_the_least(limit: float, has_chance: bool) -> None:
    """10 GiB at least, and a line that would be at 5: within 9.9 it cannot stay, though it likely goes on."""
    chance = peaks(2, 10, 34, 42, on_trend=5, goes_on=0.75).chance_below(np.array([limit * GIB]))
    assert (chance > 0.7) == [has_chance]
    assert (chance > 0) == [has_chance]


@pytest.mark.parametrize(("left", "chance"), [(4, 0.9375), (2, 0.75), (1, 0), (0.5, 0)])
def test_a_jump_takes_twice_as_much_with_a_chance_of_a_quarter(left: float, chance: float) -> None:
    """8 GiB surely, and a jump of 1 GiB at least: what is left beside them has to hold all of it."""
    told = peaks(8, 8, 8, 8, jump=1).chance_below(np.array([(8 + left) * GIB]))
    assert told == pytest.approx([chance])


def test_the_device_with_the_least_chance_decides() -> None:
    """All devices must stay below their limits."""
    one, other = peaks(2, 4, 34, 42), peaks(1, 1, 2, 3)
    both = Interval(**{name: np.hstack([getattr(one, name), getattr(other, name)]) for name in Interval.__slots__})
    assert both.chance_below(np.array([18, 3]) * GIB) == one.chance_below(np.array([18 * GIB]))
    assert both.chance_below(np.array([18, 0.5]) * GIB) == [0]
