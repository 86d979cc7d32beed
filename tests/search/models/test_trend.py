from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from splittune.search.models.memory_readings import REPEATABILITY, Reading
from splittune.search.models.trend import Trend

MIB = 1024**2


def reading(share: float, micro_batch: float, peak_mib: float) -> Reading:
    return Reading((share, micro_batch), True, round(peak_mib * MIB), None, None)


def sizes(*rows: tuple[float, float]) -> np.ndarray:
    return np.array(rows, dtype=float)


def test_the_worked_example() -> None:
    """1,000 to 1,600 MiB with micro-batches of 1 to 4, and no share: seen from 2 to 4, and a doubling assumed."""
    trend = Trend.through([reading(0, m, 800 + 200 * m) for m in (1, 2, 3, 4)])
    assert trend is not None
    assert trend.chance(sizes((0, 5))) == pytest.approx([np.log(4) / (np.log(4) + np.log(5 / 4))])
    assert trend.chance(sizes((0, 5))) == pytest.approx([0.86], abs=0.005)
    assert np.ravel(trend.between(sizes((0, 5)))) / MIB == pytest.approx([1800, 1800], rel=REPEATABILITY)


def test_the_line_of_two_peaks_holds_at_twice_the_size_with_a_chance_of_a_half() -> None:
    """And that of more with a larger one. One peak draws no line, nor do two of which the larger size held less."""
    trend = Trend.through([reading(1, 0, 100), reading(4, 0, 130)])
    assert trend is not None
    assert trend.chance(sizes((8, 0))) == pytest.approx([0.5])
    assert np.ravel(trend.between(sizes((8, 0)))) / MIB == pytest.approx([170, 170], rel=2 * REPEATABILITY)
    confirmed = Trend.through([reading(1, 0, 100), reading(2, 0, 110), reading(4, 0, 130)])
    assert confirmed is not None
    assert confirmed.chance(sizes((8, 0))) == pytest.approx([2 / 3])
    assert Trend.through([]) is None
    assert Trend.through([reading(1, 0, 100)]) is None
    assert Trend.through([reading(1, 0, 130), reading(4, 0, 100)]) is None


def test_of_one_size_what_the_forward_left_goes_on() -> None:
    """Of 10 GiB with 2 samples 4 rest and 5 were left: 15 to 16 with 4, with a chance of three in four. GPU 0 may have
    held them for its share or for the micro-batch, so with twice as many of either it is 10 to 16."""
    replica = replace(reading(2, 0, 10 * 1024), resting_bytes=4 * 1024 * MIB, saved_bytes=5 * 1024 * MIB)
    trend = Trend.through([replica])
    assert trend is not None
    assert np.ravel(trend.between(sizes((4, 0)))) / MIB == pytest.approx([15 * 1024, 16 * 1024])
    # of no more samples it says nothing: what took as much then may take as much without any
    assert trend.chance(sizes((4, 0), (2, 0), (1, 0))) == pytest.approx([0.75, 0.0, 0.0])
    # in a single step the forward copies a replica's parameters, too
    assert Trend.through([replace(replica, accumulates=False)]) is None
    gpu0 = Trend.through([replace(replica, size=(2.0, 6.0))])
    assert gpu0 is not None
    least, most = gpu0.between(sizes((4, 12), (4, 6), (2, 12)))
    assert least / MIB == pytest.approx([15 * 1024, 10 * 1024, 10 * 1024])
    assert most / MIB == pytest.approx([16 * 1024] * 3)


@pytest.mark.parametrize(
    ("grown", "left", "kept", "with_two"),
    [
        (3000, 0, 0, 6000),  # more than gradients take, and an output was replaced: all of outputs
        (3000, 0, 1000, 7000),  # so were those kept before, ...
        (3000, 0, 9000, 7500),  # ... which are at most half of it
        (500, 400, 0, None),  # less than gradients take, but outputs were left: as `saved_bytes` says
        (500, 0, 0, 1000),
        (1050, 0, 9000, 1100),  # as much as gradients take, and twice as much: the excess alone grows
        (2100, 0, 0, 2200),
        (1000, 900, 0, 1800),  # the forward's end takes over
        (1500, 0, 0, None),  # one or the other
    ],
)
def test_without_a_share_gradients_and_outputs_are_told_apart(
    grown: int, left: int, kept: int, with_two: int | None
) -> None:
    """On GPU 0, which sums 1,000 MiB of gradients: at most so much above rest with 2 samples, after 1 took `grown`."""
    one = replace(reading(0, 1, 200 + kept + grown), resting_bytes=200 * MIB, saved_bytes=left * MIB)
    trend = Trend.through([one], [], 1000 * MIB, kept * MIB)
    assert trend is not None
    most = float(trend.between(sizes((0, 2)))[1][0]) / MIB - 200 - kept
    untold = Trend.through([one])
    assert untold is not None
    as_left = float(untold.between(sizes((0, 2)))[1][0]) / MIB - 200 - kept
    assert most == pytest.approx(as_left if with_two is None else with_two)
    # of shares it says nothing
    assert trend.chance(sizes((0, 2), (1, 2))).tolist() == [0.75, 0]


@pytest.mark.parametrize("kept", [0, 1, 9])
def test_with_a_share_a_replica_tells_what_is_of_outputs(kept: int) -> None:
    """The worked example: 10 GiB with 2 of 4 samples, 3 of them of outputs; and 2.5 more for each further sample, as on
    the replica, of whose 5 the forward left 4."""
    gib = 1024 * MIB
    gpu0 = replace(reading(2, 4, 10 * 1024), resting_bytes=(2 - min(kept, 2)) * gib, saved_bytes=4 * gib)
    replica = replace(reading(2, 0, 6 * 1024), resting_bytes=1 * gib, saved_bytes=4 * gib)
    trend = Trend.through([gpu0], [replica], gib, min(kept, 2) * gib)
    assert trend is not None
    grows = 3 + min(kept, 1.5)
    most = trend.between(sizes((2, 4), (2, 8), (4, 4)))[1] / gib
    assert most == pytest.approx([10, 10 + grows, 15])
    for other in ([], [replace(replica, size=(3.0, 0.0))], [replace(replica, saved_bytes=3 * gib)]):
        untold, as_left = Trend.through([gpu0], other, gib, 0.0), Trend.through([gpu0])
        assert untold is not None
        assert as_left is not None
        assert (untold.corners == as_left.corners).all()


@pytest.mark.parametrize("change", [{"size": (1.0, 1.0)}, {"accumulates": False}])
def test_where_no_replica_had_as_much_nothing_tells_them_apart(change: dict[str, object]) -> None:
    """Nor does a single step, which holds no gradients of earlier ones."""
    one = replace(reading(0, 1, 3200), resting_bytes=200 * MIB, saved_bytes=0, **change)  # type: ignore[arg-type]
    told, untold = Trend.through([one], [], 1000 * MIB, 1000 * MIB), Trend.through([one])
    assert told is not None
    assert untold is not None
    assert (told.corners == untold.corners).all()


def test_of_a_size_that_never_varied_it_says_nothing() -> None:
    """GPU 0 without a share shows what the micro-batch takes, not what a share would."""
    trend = Trend.through([reading(0, m, 800 + 200 * m) for m in (1, 2, 3, 4)])
    assert trend is not None
    assert trend.chance(sizes((1, 4), (0, 4), (0, 2))).tolist() == [0, 1, 1]


def test_smaller_peaks_that_lie_off_the_line_do_not_count() -> None:
    """Another phase held 1,000 MiB up to 4 samples; since then 60 a sample: of 8, 12 and 16 the last was foretold."""
    flat = [reading(share, 0, 1000) for share in (1, 2, 4)]
    rising = [reading(share, 0, 700 + 60 * share) for share in (8, 12, 16)]
    trend = Trend.through(flat + rising)
    assert trend is not None
    assert trend.chance(sizes((32, 0))) == pytest.approx([np.log(2 * 16 / 12) / (np.log(2 * 16 / 12) + np.log(2))])
    assert np.ravel(trend.between(sizes((32, 0)))) / MIB == pytest.approx([2620, 2620], rel=REPEATABILITY)
    drawn = Trend.through(flat + rising[:2])  # two peaks on the new line only draw it
    assert drawn is not None
    assert drawn.chance(sizes((24, 0))) == pytest.approx([0.5])


@given(
    line=st.tuples(*[st.integers(0, 1000)] * 3),
    seen=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 200)), min_size=4, max_size=12, unique=True),
    asked=st.tuples(st.integers(0, 400), st.integers(1, 2000)),
)
def test_what_lies_on_the_line_is_held_possible(
    line: tuple[int, int, int], seen: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    """Whatever line the peaks are on, and whichever sizes were measured; of sizes that were 0 it says nothing."""

    def peak(size: tuple[int, int]) -> float:
        return 100.0 + line[0] + line[1] * size[0] + line[2] * size[1]

    trend = Trend.through([reading(*size, peak(size)) for size in seen])
    assume(trend is not None)
    if any(share for share, _ in seen) or not asked[0]:
        least, most = trend.between(sizes(asked))
        assert least[0] * (1 - 1e-6) <= peak(asked) * MIB <= most[0] * (1 + 1e-6)
        assert 0 <= trend.chance(sizes(asked))[0] <= 1
    else:
        assert trend.chance(sizes(asked)) == [0]
