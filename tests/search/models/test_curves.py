from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from splittune.search.models.curves import MOST_EXTRA, PLAIN, Curve, Work, fit_curve

Floats = NDArray[np.float64]

NOISE = 0.001


def fitted(shares: list[float], times_s: list[float], noise: float = NOISE) -> Curve:
    return fit_curve(shares, times_s, noise)


def at(curve: Curve, *shares: float) -> list[float]:
    return curve(np.array(shares, dtype=float)).tolist()


def test_the_worked_example() -> None:
    """2 ms of floor, 1 ms a sample and a knee of 4 make 6 ms up to 4 samples and 10 ms for 8; no
    share takes no time.
    """
    curve = Curve(0.002, 0.001, 4.0, np.array([1.0]), np.zeros(1))
    assert at(curve, 0, 1, 4, 8) == pytest.approx([0, 0.006, 0.006, 0.010])


@given(
    floor_s=st.floats(0, 1),
    slope_s=st.floats(1e-4, 1),
    shares=st.lists(st.integers(1, 500), min_size=2, max_size=6, unique=True),
)
def test_lines_are_recovered_exactly(floor_s: float, slope_s: float, shares: list[int]) -> None:
    """Two shares or more on any line give that line, far beyond them too."""
    curve = fitted([float(s) for s in shares], [floor_s + slope_s * s for s in shares])
    assert at(curve, 2000) == pytest.approx([floor_s + slope_s * 2000], rel=1e-4)
    assert curve.knee == 0


def test_a_knee_is_found_where_a_straight_line_does_not_do() -> None:
    """Shares below 16 that all take as long as 16 show a knee there, and larger ones are on the
    line behind it.
    """
    shares = [1.0, 2.0, 8.0, 16.0, 64.0, 128.0]
    curve = fitted(shares, [0.004 + 0.001 * max(share, 16) for share in shares])
    assert curve.knee == pytest.approx(16, rel=0.5)
    assert at(curve, 4, 256) == pytest.approx([0.020, 0.260], rel=0.02)


@given(
    floor_s=st.floats(0, 1),
    slope_s=st.floats(0.01, 1),
    knee=st.floats(5, 60),
    noise=st.sampled_from([0.0, NOISE]),
)
def test_a_knee_is_found_exactly(floor_s: float, slope_s: float, knee: float, noise: float) -> None:
    """Wherever it lies between two shares: it is where the flat of the smaller ones meets the line
    of the larger.
    """
    shares = [1.0, 4.0, 64.0, 96.0, 128.0]
    curve = fitted(shares, [floor_s + slope_s * max(share, knee) for share in shares], noise)
    if floor_s + slope_s * 128 > 1.2 * (floor_s + slope_s * knee):
        wanted = [20.0, 32.0, 50.0, 256.0]
        truth = [floor_s + slope_s * max(share, knee) for share in wanted]
        assert at(curve, *wanted) == pytest.approx(truth, rel=0.005)


def test_of_a_single_share_most_is_taken_for_floor() -> None:
    """One share alone cannot tell a floor from a slope: it is met exactly, and others are in much
    doubt.
    """
    curve = fitted([4.0, 4.0], [0.010, 0.010])
    assert at(curve, 4, 8) == pytest.approx([0.010, 0.014])
    (doubt,) = curve.doubt(np.array([8.0]))
    assert doubt > 0.2


def test_deviations_are_followed_where_they_were_measured() -> None:
    """A tile that makes 33 to 64 samples slow is met at the shares that were measured, and in
    between by their neighbours.
    """
    shares = [8.0, 16.0, 32.0, 48.0, 64.0]
    times = [0.008, 0.016, 0.032, 0.064, 0.064]
    curve = fitted(shares, times)
    assert at(curve, *shares) == pytest.approx(times, rel=0.01)
    assert 0.032 < at(curve, 40)[0] < 0.064


def test_noise_is_not_followed() -> None:
    """What scatters as much as clocks do stays off the curve: it goes through the middle."""
    shares = [4.0, 8.0, 16.0, 32.0, 64.0]
    scatter = [1.02, 0.98, 1.02, 0.98, 1.02]
    times = [(0.005 + 0.001 * share) * off for share, off in zip(shares, scatter, strict=True)]
    quiet, loud = fitted(shares, times, noise=0.0001), fitted(shares, times, noise=0.1)
    assert at(quiet, *shares) == pytest.approx(times, rel=0.002)
    assert np.abs(loud.deviations).max() < 0.1 * np.abs(quiet.deviations).max()
    assert loud.knee == 0


def test_several_times_of_one_share_count_as_one() -> None:
    """Two times of the same share are averaged, in logarithms."""
    curve = fitted([1.0, 1.0, 2.0, 2.0], [0.010, 0.0225, 0.020, 0.045])
    assert at(curve, 1, 2) == pytest.approx([0.015, 0.030])


def test_of_one_share_doubt_grows_with_the_distance_of_two_there_is_none() -> None:
    """No doubt at the measured share, more the further away; a second share tells floor from slope."""
    one, two = fitted([8.0], [0.016]), fitted([8.0, 32.0], [0.016, 0.064])
    at_it, near, far = one.doubt(np.array([8.0, 16.0, 512.0]))
    assert at_it == pytest.approx(0)
    assert 0 < near < far
    assert two.doubt(np.array([1.0, 16.0, 512.0])) == pytest.approx([0, 0, 0])


def test_of_two_shares_nothing_tells_a_line_from_one_with_a_knee() -> None:
    """6 ms for 1 sample and 8 for 13 are a line, on which 7 take 7 ms, or 6 up to a knee at 9.75: half of that is in
    doubt. Nothing is at and beyond the two, nor where a third share lies between them."""
    two, three = fitted([1.0, 13.0], [0.006, 0.008]), fitted([1.0, 7.0, 13.0], [0.006, 0.007, 0.008])
    assert at(two, 7) == pytest.approx([0.007])
    wanted = np.array([1.0, 7.0, 9.75, 13.0, 99.0])
    assert two.doubt(wanted) == pytest.approx([0, np.log(7 / 6) / 2, np.log(7.458333 / 6) / 2, 0, 0], abs=1e-6)
    assert three.doubt(wanted) == pytest.approx(np.zeros(5), abs=1e-9)


def test_a_jump_may_be_anywhere_between_two_shares() -> None:
    """From 7 to 63 samples the deviation falls by 0.08: half way it is 0.04 more or less, at a fifth of the way
    ``0.08 x sqrt(0.2 x 0.8)``, and at and beyond what was measured there is no doubt."""
    works = np.array([7.0, 63.0, 255.0])
    curve = Curve(0.0, 0.001, 0.0, works, np.array([0.08, 0.0, 0.0]))
    wanted = np.array([1.0, 7.0, 8 * 8**0.2 - 1, 8 * 8**0.5 - 1, 63.0, 100.0, 999.0])
    assert curve.doubt(wanted) == pytest.approx([0, 0, 0.032, 0.04, 0, 0, 0])
    assert curve.deviation(wanted[3:4]) == pytest.approx([0.04])


def test_a_ratio_stands_for_a_card_of_another_speed() -> None:
    """A card with a ratio of 2 takes for 4 samples what the curve says of 8."""
    curve = fitted([4.0, 8.0], [0.004, 0.008])
    slow = Curve(curve.floor_s, curve.slope_s, curve.knee, curve.works, curve.deviations, ratio=2.0)
    assert at(slow, 0, 4) == pytest.approx([0, at(curve, 8)[0]])
    assert slow.doubt(np.array([4.0]))[0] == pytest.approx(0)


@pytest.mark.parametrize("size", [4, 8, 32])
def test_tiles_are_learned_from_a_few_shares(size: int) -> None:
    """Where part of a tile is paid like a whole one, shares never measured are foretold on both
    sides of its edges.
    """

    def truth(shares: Floats) -> Floats:
        return 0.002 + 0.0005 * shares + 0.001 * size * np.ceil(shares / size)

    shares = np.array([1.0, size, size + 1.0, 2.5 * size, 4.0 * size])
    work = Work.in_tiles(size, shares, truth(shares))
    assert work.tiled == pytest.approx(2 / 3, rel=0.01)
    curve = replace(fit_curve(work.of(shares), truth(shares), NOISE), work=work)
    wanted = np.array([2.0 * size, 2 * size + 1, 3 * size, 3 * size + 1, 7 * size])
    assert curve(wanted) == pytest.approx(truth(wanted), rel=0.01)


def test_of_times_on_a_line_no_part_is_in_tiles() -> None:
    """Nor does a single share, or tiles of 1, tell any."""
    shares = np.array([1.0, 3.0, 8.0, 11.0])
    assert Work.in_tiles(8, shares, 0.010 + 0.002 * shares).tiled == pytest.approx(0)
    assert Work.in_tiles(8, np.array([3.0, 3.0]), np.array([0.01, 0.01])).tiled == 0
    assert Work.in_tiles(1, shares, 0.010 + 0.002 * shares).tiled == 0


def test_times_that_differ_within_a_tile_speak_against_it() -> None:
    """Each of four shares up to 32 takes as long as it likes: tiles of 32 explain nothing, so all deviations stay."""
    shares, times_s = np.array([1.0, 11.0, 16.0, 32.0]), np.array([0.0105, 0.0108, 0.0067, 0.0078])
    work = Work.in_tiles(32, shares, times_s)
    assert np.abs(fit_curve(work.of(shares), times_s, NOISE).deviations).max() > 0.2


@pytest.mark.parametrize("fades", [2.0, 8.0, 32.0])
def test_what_the_first_samples_are_more_is_learned_from_a_few_shares(fades: float) -> None:
    """Where each further sample takes a little less, shares far beyond those measured are foretold."""

    def truth(shares: Floats) -> Floats:
        return 0.002 + 0.001 * shares + 0.0015 * shares * fades / (shares + fades)

    shares = np.array([1.0, 2.0, 3.0, 5.0, 8.0])
    work = Work.fading(fades, shares, truth(shares))
    assert work.extra == pytest.approx(1.5, rel=0.01)
    curve = replace(fit_curve(work.of(shares), truth(shares), NOISE), work=work)
    wanted = np.array([4.0, 16.0, 40.0])
    assert curve(wanted) == pytest.approx(truth(wanted), rel=0.01)


def test_of_times_on_a_line_the_first_samples_are_no_more() -> None:
    """Two shares do not tell; and however little later ones take, the first are no more than `MOST_EXTRA` more."""
    shares = np.array([1.0, 3.0, 8.0, 11.0])
    assert Work.fading(4.0, shares, 0.010 + 0.002 * shares).extra == pytest.approx(0, abs=1e-6)
    assert Work.fading(4.0, np.array([1.0, 3.0, 3.0]), np.array([0.01, 0.02, 0.02])) == PLAIN
    assert Work.fading(4.0, shares, np.sqrt(np.log1p(shares))).extra == MOST_EXTRA


def test_the_worked_examples_of_first_samples_that_are_more() -> None:
    """Up to twice as much work, half of it gone with 4 samples."""
    assert Work(extra=1.0, fades=4.0).of(np.array([0.0, 4.0, 12.0])).tolist() == [0.0, 6.0, 15.0]


def test_the_worked_examples_of_tiles() -> None:
    """Half in tiles of 8, 9 samples are as much work as 12.5; a device rounds its own share up, before its ratio."""
    assert Work(8, 0.5).of(np.array([9.0])).tolist() == [12.5]
    curve = Curve(0.002, 0.001, 4.0, np.array([1.0]), np.zeros(1), ratio=2.0, work=Work(4, 1.0))
    assert at(curve, 0, 1, 4, 5) == pytest.approx([0, 0.010, 0.010, 0.018])


def test_three_shares_on_a_line_with_a_knee_do_not_tell_that_there_is_one() -> None:
    """1 and 2 samples take as long, and 6 twice that: a knee, or tiles of 2 or 4. A fourth on that line tells."""
    shares, times_s = np.array([1.0, 2.0, 6.0, 8.0]), np.array([0.01, 0.01, 0.02, 0.025])
    three, four = fit_curve(shares[:3], times_s[:3], NOISE), fit_curve(shares, times_s, NOISE)
    assert three.knee > 0
    assert three.deviations == pytest.approx([0, 0, 0], abs=1e-6)
    assert not three.has_form(NOISE)
    assert four.knee > 0
    assert four.has_form(NOISE)


def test_a_curve_has_its_form_when_all_shares_lie_on_it() -> None:
    """A share that is off is to be explained."""
    line = {share: 0.01 + 0.002 * share for share in (1.0, 3.0, 8.0, 11.0)}
    assert fitted(list(line), list(line.values())).has_form(NOISE)
    assert not fitted(list(line), [*list(line.values())[:3], 0.036]).has_form(NOISE)
