from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.memory_readings import REPEATABILITY, MemoryReadings, size_of
from splittune.split import BatchSplit
from tests.search.models.readings import memory, ran
from tests.search.problem import MIB, even, split

B = 32


def peaks(*runs: Measurement, failures: Sequence[JudgedTrial] = ()) -> MemoryReadings:
    return MemoryReadings(runs[0].split.num_devices, list(runs), list(failures))


def test_a_reading_is_the_peak_of_forward_and_backward_where_that_is_known() -> None:
    """The update's peak is no reading of the micro-step; what is held at rest comes along, None
    where unknown.
    """
    told = memory(0, 90, micro_step_peak_bytes=70, update_peak_bytes=90, resting_bytes=30)
    (first,) = peaks(ran(even(B, 1, 2), told, 50)).readings(0)
    assert (first.peak_bytes, first.resting_bytes) == (70 * MIB, 30 * MIB)
    (other,) = peaks(ran(even(B, 1, 2), told, 50)).readings(1)
    assert (other.peak_bytes, other.resting_bytes) == (50 * MIB, None)


def test_a_replica_without_a_share_is_not_read() -> None:
    """A card that did nothing tells nothing; GPU 0 without a share still holds the job."""
    run = ran(split(B, 4, 8, 0), 100, 0), ran(split(B, 4, 0, 8), 60, 100)
    assert [len(peaks(*run).readings(device)) for device in (0, 1)] == [2, 1]


def test_a_step_of_one_micro_batch_seen_beside_is_a_reading_of_its_own() -> None:
    """`single_step_peak_bytes` is a second reading, without accumulation, of a trial that
    accumulates.
    """
    told = memory(0, 100, single_step_peak_bytes=80)
    assert [(r.accumulates, r.peak_bytes / MIB) for r in peaks(ran(even(B, 4, 1), told)).readings(0)] == [
        (True, 100),
        (False, 80),
    ]
    assert len(peaks(ran(even(B, 1, 1), told)).readings(0)) == 1


def test_room_is_the_least_that_others_left() -> None:
    """Other programs come and go: the most that they held counts."""
    seen = peaks(
        ran(even(B, 4, 2), memory(0, 1, outside_bytes=200), memory(1, 1)),
        ran(even(B, 2, 2), memory(0, 1, outside_bytes=50), memory(1, 1, outside_bytes=10)),
    )
    assert (seen.budget_bytes() / MIB).tolist() == [800, 990]
    assert MemoryReadings(2).budget_bytes().tolist() == [np.inf, np.inf]


def test_replicas_whose_peaks_agree_are_of_a_kind() -> None:
    """Kinds are told by peaks at equal shares, to 1 %; the replica with the largest share comes
    first; GPU 0 is none.
    """
    seen = peaks(ran(even(B, 4, 4), 90, 50, 50.2, 60), ran(split(B, 2, 4, 3, 6, 3), 90, 60, 90, 70))
    assert seen.same_memory_groups() == [(2, 1), (3,)]


def test_replicas_never_seen_alike_stay_apart() -> None:
    """Without a trial in which two replicas had the same share, nobody knows that they are alike."""
    assert peaks(ran(split(B, 4, 2, 2, 4), 90, 50, 50)).same_memory_groups() == [(2,), (1,)]


def test_what_was_seen_is_the_most_of_trials_that_demanded_no_more() -> None:
    """Of a replica by its share, on GPU 0 by share and micro-batch; nothing where all demanded more."""
    seen = peaks(ran(even(B, 4, 2), 100, 80), ran(even(B, 2, 2), 150, 130))
    sizes = np.array([[3.0, 8.0], [4.0, 8.0], [8.0, 12.0], [40.0, 64.0]])
    assert (seen.seen(0, sizes) / MIB).tolist() == [0, 100, 100, 150]
    assert (seen.seen(1, sizes * [1, 0]) / MIB).tolist() == [0, 80, 130, 130]


def test_a_failure_tells_of_the_devices_that_lacked_memory() -> None:
    """Where a device ran out, it is known to need what fills it, in steps that accumulate no less than those that
    failed; those that did not run out held no more than they were seen to.
    """
    measurement = Measurement(split=split(B, 2, 4, 12), outcome=Outcome.OUT_OF_MEMORY)
    failed = JudgedTrial(measurement=measurement, oom_devices=frozenset({1}))
    seen = peaks(ran(even(B, 4, 2), 90, 90), failures=[failed, replace(failed, oom_devices=frozenset())])
    assert seen.oom_sizes(1, True) == [size_of(1, measurement.split)] == [(12, 0)]
    assert seen.oom_sizes(1, False) == []
    assert seen.oom_sizes(0, True) == []


def test_what_another_held_before_a_failure_bounds_it_from_below() -> None:
    """GPU 0 held 95 MiB with 4 of 16 samples when GPU 1 ran out: it needs no less."""
    memory_then = (memory(0, 95), memory(1, 99))
    measurement = Measurement(split=split(B, 2, 4, 12), outcome=Outcome.OUT_OF_MEMORY, memory=memory_then)
    failed = JudgedTrial(measurement=measurement, oom_devices=frozenset({1}))
    _, at_least, _ = peaks(ran(even(B, 4, 2), 90, 90), failures=[failed]).points((0,), True)
    assert (4.0, 16.0, 95.0 * MIB) in at_least


def test_a_step_that_accumulates_needs_no_less_and_at_most_twice_as_much() -> None:
    """Of single steps alone: gradients that are held are as large as parameters, which every peak holds. GPU 0, which
    held more, needs more."""
    at_most, at_least, rest = peaks(ran(even(B, 1, 2), 100, 80)).points((1,), True)
    assert at_most == [(16.0, 0.0, pytest.approx(2 * held * MIB * (1 + REPEATABILITY))) for held in (80, 100)]
    assert at_least == [(16.0, 0.0, pytest.approx(80 * MIB * (1 - REPEATABILITY)))]
    assert rest is None


@pytest.mark.parametrize(("steps", "rest", "gradients"), [(4, 30, 15), (1, 30, 30), (1, 90, 90), (4, None, np.inf)])
def test_gradients_that_stay_are_no_larger_than_what_rests(steps: int, rest: float | None, gradients: float) -> None:
    """Beside them parameters rest, as large; before a single step parameters alone do. So a step that accumulates takes
    no more than a single one and so much, which is less than twice as much."""
    told = {} if rest is None else {"resting_bytes": rest}
    seen = peaks(ran(even(B, steps, 2), memory(0, 100, **told), 80), ran(split(B, 1, 20, 12), 200, 60))
    assert seen.most_gradient_bytes() == gradients * MIB
    at_most, *_ = seen.points((0,), True)
    assert (20.0, 32.0, pytest.approx((200 + min(gradients, 200)) * MIB * (1 + REPEATABILITY))) in at_most


def test_updates_hold_what_a_loop_keeps_of_outputs() -> None:
    """50 MiB after micro-batches of 2 and 60 after 16 are between these after 4; nothing is known of the replica's."""
    seen = peaks(
        *[ran(even(B, steps, 2), memory(0, 90, update_peak_bytes=held), 90) for steps, held in ((16, 50), (2, 60))]
    )
    sizes = np.array([[1.0, 1.0], [1.0, 2.0], [2.0, 4.0], [8.0, 16.0], [16.0, 32.0]])
    least, most = seen.update_bytes(0, sizes) / MIB
    assert least.tolist() == [0, 50, 50, 60, 60]
    assert most.tolist() == [50, 50, 60, 60, 60]
    assert not seen.update_bytes(1, sizes).any()


def test_gpu0_bounds_a_replica_that_held_no_more_with_as_many_samples() -> None:
    """With 4 samples each GPU 0 held 90 MiB and the replica 80. Then GPU 0 held 190 with 12: so does a replica at most,
    and of that nothing is unseen."""
    seen = peaks(ran(even(B, 4, 2), 90, 80), ran(split(B, 2, 12, 4), 190, 82))
    assert (12.0, 0.0, pytest.approx(190 * MIB * (1 + REPEATABILITY))) in seen.points((1,), True)[0]
    assert seen.held_more(1, np.array([[12.0, 0.0], [13.0, 0.0]]), accumulates=True).tolist() == [True, False]


@pytest.mark.parametrize(
    ("first", "replica"),
    [
        (even(B, 4, 2), memory(1, 95)),
        (even(B, 4, 2), memory(1, 80, total_bytes=2000)),
        (split(B, 4, 5, 3), memory(1, 80)),
    ],
    ids=["it held more", "another card", "never as many samples"],
)
def test_gpu0_bounds_no_other_replica(first: BatchSplit, replica: DeviceMemory) -> None:
    """What it held beyond GPU 0 it may hold with more samples, too."""
    seen = peaks(ran(first, 90, replica), ran(split(B, 2, 12, 4), 190, replica))
    assert max(share for share, *_ in seen.points((1,), True)[0]) <= 4
    assert not seen.held_more(1, np.array([[12.0, 0.0]]), accumulates=True).any()


def test_what_rests_is_less_without_earlier_gradients() -> None:
    """GPU 0 rests with 60 MiB of which 20 are gradients: 40 rest in a single step. A replica is not there before it."""
    told = [memory(i, 100, resting_bytes=60, single_step_peak_bytes=80) for i in (0, 1)]
    seen = peaks(ran(even(B, 4, 2), *told))
    assert [seen.points((i,), True)[2] for i in (0, 1)] == [60 * MIB, 60 * MIB]
    assert [seen.points((i,), False)[2] for i in (0, 1)] == [40 * MIB, 0]


def test_what_rests_of_a_batch_that_was_is_none_of_the_job() -> None:
    """The loop keeps an output of 1 MiB a sample while the next forward runs: beside it 60 MiB rest, and 40 of these in
    a single step, whose 32 samples left 72. Trials of one size do not tell that, so all beside 20 of parameters and 20
    of gradients may be outputs: with as many samples or more it rests all the same.
    """
    few, more = (
        ran(even(B, steps, 2), memory(0, 200, resting_bytes=60 + num_kept, single_step_peak_bytes=180), 100)
        for steps, num_kept in ((16, 2), (4, 8))
    )
    whole = ran(even(B, 1, 2), memory(0, 300, resting_bytes=72), 100)
    for alike in (peaks(few), peaks(few, few)):
        assert [alike.points((0,), kind)[2] for kind in (True, False)] == [40 * MIB, 20 * MIB]
        assert [alike.untold_bytes([device]) for device in (0, 1)] == [22 * MIB, 0]
        assert (alike.untold_at(0, np.array([[0.0, 1.0], [0.0, 2.0], [1.0, 3.0]])) == [0, 22 * MIB, 22 * MIB]).all()
    assert peaks(few, more).untold_bytes([0]) == 0
    # both outputs were there until one was gone: no more than the 15 that were when backward began
    begun = replace(few.memory[0], before_backward_bytes=185 * MIB)
    assert peaks(replace(few, memory=(begun, few.memory[1]))).untold_bytes([0]) == 15 * MIB
    for runs in ((few, more, whole), (few, whole)):
        told = [peaks(*runs).points((0,), kind)[2] for kind in (True, False)]
        assert told == pytest.approx([60 * MIB, 40 * MIB], rel=4 * REPEATABILITY)


def test_the_largest_held_is_the_allocators() -> None:
    """The largest peak of one device is that of what was held, not of what was live."""
    assert peaks(ran(even(B, 4, 2), memory(0, 90, peak_reserved_bytes=100), 40)).largest_held(0) == 100 * MIB


def test_what_one_of_a_kind_held_was_seen_of_the_others() -> None:
    """Two replicas that held as much with 4 samples: the 90 MiB of one with 8 are no news of the other."""
    seen = peaks(ran(even(B, 2, 4), 100, 50, 50, 60), ran(split(B, 2, 0, 8, 4, 4), 80, 90, 50, 60))
    size = np.array([[9.0, 0.0]])
    assert [float(seen.seen(device, size)[0]) / MIB for device in (1, 2, 3)] == [90, 90, 60]
    assert seen.alike(2) == (1, 2)
    assert seen.alike(0) == (0,)


def test_cards_that_never_had_the_same_share_are_not_of_one_kind() -> None:
    """GPU 1 and GPU 3 both agreed with GPU 2, which is one with the card of the larger share: nothing says that they
    hold as much.
    """
    together = ran(split(B, 4, 0, 4, 4, 0), 80, 200, 200, 0), ran(split(B, 2, 0, 0, 8, 8), 80, 0, 400, 400)
    seen = peaks(*together, ran(split(B, 2, 4, 0, 0, 12), 80, 0, 0, 600), ran(split(B, 2, 0, 0, 16, 0), 80, 0, 800, 0))
    assert [set(seen.alike(device)) for device in (1, 2, 3)] == [{1}, {2, 3}, {2, 3}]


def test_nothing_is_alike_before_anything_ran() -> None:
    """Without a run whose memory was read no card stands for another."""
    assert MemoryReadings(3).alike(1) == (1,)


def test_a_larger_size_was_held_only_in_as_much_of_a_step() -> None:
    """Four samples of eight were held while gradients stay: so are fewer, of fewer, and such as come and go; a
    single step tells of no others."""
    stay = peaks(ran(split(B, 4, 4, 4), 500, 400))
    sizes = np.array([[4.0, 8.0], [0.0, 6.0], [5.0, 8.0], [4.0, 9.0]])
    for accumulates in (True, False):
        assert stay.held_more(0, sizes, accumulates=accumulates).tolist() == [True, True, False, False]
    single = peaks(ran(split(B, 1, 16, 16), 500, 400))
    assert not single.held_more(0, sizes, accumulates=True).any()
    assert single.held_more(0, sizes, accumulates=False).all()
