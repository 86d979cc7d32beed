"""The largest size that fits: found to within 5 %, in few runs, and without running what cannot fit."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from splittune.split.largest import MAX_RUNS, PRECISION, find_largest


class Card:
    """Holds `base` bytes and `slope` more for every sample; keeps its headroom up to `budget`, and has `capacity`."""

    def __init__(self, *, base: int, slope: int, budget: int, capacity: int) -> None:
        self.base, self.slope, self.budget, self.capacity = base, slope, budget, capacity
        self.sizes: list[int] = []
        self.num_out_of_memory = 0

    def measure(self, size: int) -> tuple[bool, tuple[int, ...]]:
        self.sizes.append(size)
        taken = self.base + self.slope * size
        if taken > self.capacity:
            self.num_out_of_memory += 1
            return False, ()
        return taken <= self.budget, (taken,)

    def find(self, start: int, limit: int) -> int:
        return find_largest(self.measure, start=start, limit=limit, capacities=[self.capacity])


@given(
    base=st.integers(0, 1000),
    slope=st.integers(1, 50),
    room=st.integers(0, 20_000),
    headroom=st.integers(0, 500),
    start=st.integers(1, 64),
)
@example(base=0, slope=1, room=100, headroom=0, start=16)
def test_it_ends_within_a_20th_of_what_fits(base: int, slope: int, room: int, headroom: int, start: int) -> None:
    """What is found keeps the headroom, a 20th more does not, and memory runs out where two sizes did not tell only."""
    card = Card(base=base, slope=slope, budget=base + room, capacity=base + room + headroom)
    limit = 64 * start
    found = card.find(start, limit)
    truth = min(limit, room // slope)
    assert found <= truth
    assert truth - found <= max(1, found // PRECISION)
    assert len(card.sizes) <= MAX_RUNS
    if start * 2 <= truth:  # then two sizes ran, and the line through them tells
        assert card.num_out_of_memory == 0


def test_the_worked_example() -> None:
    """From 16, where a sample takes 1 of 100: 128 cannot fit and is not run."""
    card = Card(base=0, slope=1, budget=100, capacity=100)
    assert card.find(16, 1024) == 100
    assert card.sizes == [16, 32, 64, 96, 100]


def test_it_stops_at_the_limit() -> None:
    """Sizes beyond the limit are not run; the limit itself is."""
    card = Card(base=0, slope=1, budget=10_000, capacity=10_000)
    assert card.find(3, 100) == 100
    assert max(card.sizes) == 100


def test_nothing_fits() -> None:
    """Where not even one sample keeps the headroom it says 0."""
    assert Card(base=10, slope=1, budget=10, capacity=12).find(8, 100) == 0
