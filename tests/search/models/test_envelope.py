from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.search.models.envelope import Envelope, Points, begins_above


def at(*rows: tuple[float, float, float]) -> Points:
    return Points.of(list(rows))


def sizes(*rows: tuple[float, float]) -> np.ndarray:
    return np.array(rows, dtype=float)


def test_the_worked_example() -> None:
    """2 at rest, 5 at a share of 1 and 8 at 10: at most 14 at 20, at least 11.3."""
    points = at((1, 0, 5), (10, 0, 8))
    envelope = Envelope.through(points, points, rest=2.0)
    assert envelope.most(sizes((20, 0)))[0] == pytest.approx(14)
    assert envelope.least(sizes((20, 0)))[0] == pytest.approx(8 + 10 / 3)
    assert envelope.slopes == pytest.approx((1 / 3, 0.6))


@given(data=st.data())
def test_the_highest_of_any_lines_lies_within_the_envelope(data: st.DataObject) -> None:
    """Whatever lines there are that begin no lower than what rests, and whatever sizes were seen."""
    rest = data.draw(st.integers(0, 50))
    number = st.integers(0, 100)
    lines = data.draw(st.lists(st.tuples(number, number, number), min_size=1, max_size=4))
    # outputs are alive together with the activations: the line that rises most in one size does in the other
    omega = max(line[2] for line in lines)
    beta = max(line[1] for line in lines)
    lines = [*lines, (0, beta, omega)]

    def peak(share: float, size: float) -> float:
        return max(rest + 1 + f + b * share + o * size for f, b, o in lines)

    share = st.integers(0, 20)
    pairs = [(s, s + more) for s, more in data.draw(st.lists(st.tuples(share, share), min_size=1, max_size=6))]
    asked = [(s, s + more) for s, more in data.draw(st.lists(st.tuples(share, share), min_size=1, max_size=6))]
    seen = at(*((s, m, peak(s, m)) for s, m in pairs))
    knows_rest = data.draw(st.booleans())
    envelope = Envelope.through(seen, seen, rest=float(rest), most=(float(beta), np.inf), knows_rest=knows_rest)
    truth = np.array([peak(*one) for one in asked])
    assert (envelope.least(sizes(*asked)) <= truth * (1 + 1e-6) + 1e-6).all()
    if any(m for _, m in pairs) or not omega:
        assert (envelope.most(sizes(*asked)) >= truth * (1 - 1e-6) - 1e-6).all()


def test_a_failure_bounds_from_below_what_comes_close_to_it() -> None:
    """8 samples needed more than 40 bytes, and a sample takes at most 5: 7 need more than 35."""
    envelope = Envelope.through(at((2, 0, 10)), at((2, 0, 10), (8, 0, 40)), rest=0.0)
    assert envelope.slopes[1] == pytest.approx(5)
    assert envelope.least(sizes((7, 0)))[0] == pytest.approx(35)


def test_a_jump_that_nothing_contradicts_yet_makes_nothing_sure_beyond_the_most() -> None:
    """From 6 with 1 sample to 20 with 3 a sample took 7, and the first no more than 6."""
    points = at((1, 0, 6), (3, 0, 20))
    envelope = Envelope.through(points, points, rest=2.0)
    assert envelope.slopes[0] == pytest.approx(7)
    assert envelope.sure(sizes((1, 0))) == envelope.most(sizes((1, 0))) == pytest.approx(6)


def test_what_was_held_is_the_least_that_more_samples_may_take() -> None:
    """6 with 1 sample are 24 with 4 at most, in proportion; but 3 needed 30, whether that was measured or ran out."""
    ran, jumped = at((1, 0, 6)), at((1, 0, 6), (3, 0, 30))
    for at_most in (ran, jumped):
        envelope = Envelope.through(at_most, jumped, rest=2.0)
        assert envelope.most(sizes((2, 0), (3, 0), (4, 0))) == pytest.approx([12, 30, 30])


def test_no_slope_goes_on_from_a_rise_out_of_proportion_where_rest_is_known() -> None:
    """2 rest, and 5.7 with 4 samples: 6 take 7.55 at most, and took 8. The chord from 2 to 4 tells what a sample takes,
    0.9, and none to 6 does, by which 8 would take 10.3 at least."""
    points = at((2, 0, 3.9), (4, 0, 5.7), (6, 0, 8))
    known, unknown = (Envelope.through(points, points, 2.0, knows_rest=knows_rest) for knows_rest in (True, False))
    assert known.slopes[0] == pytest.approx(0.9)
    assert known.least(sizes((8, 0)))[0] < 10 < unknown.least(sizes((8, 0)))[0]


def test_what_ran_out_of_memory_is_no_jump() -> None:
    """Nothing was measured there: 6 samples that needed more than 8 may have needed it in proportion to more."""
    ran, failed = at((4, 0, 5.7)), at((4, 0, 5.7), (6, 0, 8))
    known, unknown = (Envelope.through(ran, failed, 2.0, knows_rest=knows_rest) for knows_rest in (True, False))
    assert known.least(sizes((8, 0))) == unknown.least(sizes((8, 0)))


def test_no_slope_goes_on_from_a_rise_that_was_flatter_further_on() -> None:
    """2 with 1 sample, 4 with 3 and 5 with 5: half of what came from 1 to 3 was a jump. By the chord over it a sample
    takes 1 and 11 take 12 at least, by that after it 0.5 and 8. From 1 to 5 is over the jump, too."""
    points = at((1, 0, 2), (3, 0, 4), (5, 0, 5))
    envelope = Envelope.through(points, points, rest=1.0)
    assert envelope.slopes[0] == pytest.approx(0.5)
    assert envelope.least(sizes((11, 0))) == pytest.approx(8)
    # a chord counts by the share alone, too, where the micro-batch was smaller: from 1 of 9 to 3 of 3
    points = at((1, 9, 2), (3, 3, 4), (5, 3, 5))
    assert Envelope.through(points, points, rest=1.0).slopes[0] == pytest.approx(0.5)
    not_seen = at((1, 0, 2), (3, 0, 4))
    assert Envelope.through(not_seen, not_seen, rest=1.0).least(sizes((11, 0))) == pytest.approx(12)


def test_beyond_a_jump_a_peak_may_grow_as_before() -> None:
    """2 rest, and 1 for each sample up to 4; then 5 take 10 for 7, so 9 take 14. By a line from 0, no steeper than 1.5,
    they would take 13.5 at most."""
    points = at((1, 0, 3), (4, 0, 6), (5, 0, 10))
    envelope = Envelope.through(points, points, 2.0, knows_rest=True)
    assert envelope.most(sizes((4, 0), (5, 0), (9, 0))) == pytest.approx([6, 10, 14])
    assert envelope.sure(sizes((9, 0))) == pytest.approx(14)


@given(
    rest=st.floats(1, 50),
    sample=st.floats(0.1, 9),
    jump=st.floats(0.1, 99),
    shares=st.lists(st.integers(1, 40), min_size=3, max_size=6, unique=True),
    further=st.integers(0, 40),
)
def test_what_a_line_with_a_jump_takes_is_held_possible(
    rest: float, sample: float, jump: float, shares: list[int], further: int
) -> None:
    """For any line that was seen at two shares before it jumps, at any share beyond those measured."""
    shares = sorted(shares)
    first = shares[2 + further % (len(shares) - 2)]

    def peak(share: int) -> float:
        return rest + sample * share + jump * (share >= first)

    points = at(*((share, 0, peak(share)) for share in shares))
    envelope = Envelope.through(points, points, rest, knows_rest=True)
    beyond = shares[-1] + further
    assert envelope.most(sizes((beyond, 0)))[0] >= peak(beyond) * (1 - 1e-6)


@given(st.data())
def test_no_jump_is_seen_where_there_is_none(data: st.DataObject) -> None:
    """Of the highest of any lines every chord counts."""
    lines = data.draw(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=4))
    grid = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=8, unique=True)
    peaks = [(s, m, 1 + max(f + beta * s + omega * m for f, beta, omega in lines)) for s, m in data.draw(grid)]
    points = at(*peaks)
    assert not Envelope.through(points, points, rest=0.0).jumped.num_bytes.size


def test_a_convex_peak_began_no_lower_than_its_line() -> None:
    """1,020 with 4 samples and 1,040 with 8 were no less than 1,000 without; points off the ray tell nothing."""
    points = at((4, 0, 1020), (8, 0, 1040))
    assert begins_above(999.0, points, points)
    assert not begins_above(1001.0, points, points)
    off = at((4, 8, 1020), (8, 9, 1040))
    assert not begins_above(0.0, off, off)
