from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.memory_readings import QUANTUM_BYTES, MemoryReadings, row_of, rows_of
from splittune.split import BatchSplit
from tests.search.problem import MIB, even, split

B = 32


def memory(device: int, peak: float, **known: float) -> DeviceMemory:
    """Readings in MiB; the allocator holds what is live, and the device has 1000, unless told
    otherwise.
    """
    known = {"total_bytes": 1000, "outside_bytes": 0, "peak_reserved_bytes": peak, **known}
    return DeviceMemory(
        device=device, peak_allocated_bytes=int(peak * MIB), **{name: int(mib * MIB) for name, mib in known.items()}
    )


def ran(tried: BatchSplit, *readings: DeviceMemory | float) -> Measurement:
    told = tuple(memory(i, one) if isinstance(one, int | float) else one for i, one in enumerate(readings))
    return Measurement(split=tried, outcome=Outcome.OK, whole_step_times_s=(1.0,), memory=told)


def peaks(*runs: Measurement, failures: Sequence[JudgedTrial] = ()) -> MemoryReadings:
    return MemoryReadings(runs[0].split.num_devices, list(runs), list(failures))


def test_rows_hold_what_the_coefficients_are_multiplied_by() -> None:
    """A constant, the share and whether steps accumulate; on GPU 0 the whole micro-batch, too."""
    assert row_of(1, 4, 16, 1.0).tolist() == [1, 4, 1]
    assert row_of(0, 4, 16, 0.0).tolist() == [1, 4, 0, 16]
    assert rows_of(0, np.array([4.0, 5.0]), np.array([16.0, 17.0]), np.zeros(2)).shape == (2, 4)


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
        (1.0, 100),
        (0.0, 80),
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


def test_the_update_is_a_floor_and_the_smallest_peak_bounds_the_reduce() -> None:
    """No split needs less than the update, nor is the reduce above the smallest peak seen of its
    kind of step.
    """
    told = [memory(0, peak, micro_step_peak_bytes=peak, update_peak_bytes=40) for peak in (70, 90, 30)]
    tried = [even(B, 8, 1), even(B, 4, 1), even(B, 1, 1)]
    seen = peaks(*(ran(one, reading) for one, reading in zip(tried, told, strict=True)))
    least, most = seen.floors(0, np.array([1.0, 0.0]))
    assert (least / MIB).tolist() == [40, 40]
    assert (most / MIB).tolist() == [70, 40]


def test_what_accumulating_needs_is_in_doubt_until_seen() -> None:
    """Half of what a replica holds at rest may come or go with accumulation, until both kinds of
    step were read.
    """
    seen = peaks(ran(even(B, 4, 2), 90, memory(1, 90, resting_bytes=60)))
    less, more = seen.doubt_about_accumulating(1, np.array([1.0, 0.0]))
    assert (less / MIB).tolist() == [0, 30]
    assert (more / MIB).tolist() == [0, 0]
    seen.runs.append(ran(even(B, 1, 2), 120, 120))
    assert not any(doubt.any() for doubt in seen.doubt_about_accumulating(1, np.array([1.0, 0.0])))


def test_a_device_that_never_worked_is_in_doubt_as_gpu0_is() -> None:
    """A replica without a reading takes the doubt of GPU 0's kinds of step."""
    seen = peaks(ran(split(B, 4, 8, 0), memory(0, 90, resting_bytes=60), 0))
    assert seen.doubt_about_accumulating(1, np.array([0.0]))[0][0] == 0
    assert not seen.doubt_about_accumulating(1, np.array([1.0]))[1].any()


def test_blocks_of_the_allocator_are_a_constant_and_the_rest_a_proportion() -> None:
    """Up to a block beyond what is live says nothing of larger sizes, and is handed back when
    short; more grows with them.
    """
    held = [memory(0, 500, peak_reserved_bytes=572), memory(1, 50, peak_reserved_bytes=54)]
    overhead = peaks(ran(even(B, 4, 2), *held)).allocator_overhead(range(2))
    live = np.array([1000.0 * MIB])
    assert overhead.least(live)[0] == pytest.approx(0)
    assert overhead.mean(live)[0] == pytest.approx((QUANTUM_BYTES + 4 * MIB) / 2 + 0.05 * live[0])
    assert overhead.most(live)[0] == pytest.approx(QUANTUM_BYTES + 0.1 * live[0])
    assert overhead.after_flush(live)[0] == pytest.approx(4 * MIB + 0.1 * live[0])


def test_each_device_has_gaps_of_its_own_allocator() -> None:
    """A small share of one leaves gaps of a half, a large one of another of a tenth; who held nothing takes both."""
    seen = peaks(
        ran(split(B, 4, 4, 4, 0), memory(0, 1000, peak_reserved_bytes=1122), memory(1, 100, peak_reserved_bytes=172), 0)
    )
    live = np.array([2000.0 * MIB])
    assert seen.allocator_overhead([0]).most(live)[0] == pytest.approx(QUANTUM_BYTES + 0.1 * live[0])
    assert seen.allocator_overhead([1]).most(live)[0] == pytest.approx(QUANTUM_BYTES + 0.5 * live[0])
    assert seen.allocator_overhead([2]).most(live)[0] == pytest.approx(QUANTUM_BYTES + 0.5 * live[0])
    assert seen.allocator_overhead([2]).mean(live)[0] == pytest.approx(QUANTUM_BYTES + 0.3 * live[0])


def test_what_was_seen_is_the_most_of_trials_that_demanded_no_more() -> None:
    """Of a replica by its share, on GPU 0 by share and micro-batch; nothing where all demanded more."""
    seen = peaks(ran(even(B, 4, 2), 100, 80), ran(even(B, 2, 2), 150, 130))
    shares, sizes = np.array([3.0, 4.0, 8.0, 40.0]), np.array([8.0, 8.0, 12.0, 64.0])
    assert (seen.seen(0, shares, sizes) / MIB).tolist() == [0, 100, 100, 150]
    assert (seen.seen(1, shares, sizes) / MIB).tolist() == [0, 80, 130, 130]


def test_a_trial_that_demanded_no_less_proves_what_is_needed() -> None:
    """What a trial held is enough for no larger share; on GPU 0 for no larger micro-batch, and
    never for another kind of step.
    """
    seen = peaks(ran(even(B, 2, 2), 100, 80), ran(even(B, 1, 2), 150, 130))
    shares, sizes = np.array([8.0, 8.0, 9.0]), np.array([16.0, 32.0, 32.0])
    held = seen.proven(0, shares, sizes, np.array([1.0, 0.0, 1.0])) / MIB
    assert held.tolist() == [100, 150, np.inf]
    assert (seen.proven(1, shares, sizes, np.array([1.0, 1.0, 0.0])) / MIB).tolist() == [80, 80, 130]


def test_a_failure_is_a_row_of_the_devices_that_lacked_memory() -> None:
    """Where a device ran out, its row is known to need what fills it; those that did not tell
    nothing.
    """
    failed = JudgedTrial(
        measurement=Measurement(split=split(B, 2, 4, 12), outcome=Outcome.OUT_OF_MEMORY), oom_devices=frozenset({1})
    )
    seen = peaks(ran(even(B, 4, 2), 90, 90), failures=[failed, replace(failed, oom_devices=frozenset())])
    (row,) = seen.oom_rows(1)
    assert row.tolist() == [1, 12, 1]
    assert seen.oom_rows(0) == []


def test_the_largest_held_is_the_allocators() -> None:
    """The largest peak of one device is that of what was held, not of what was live."""
    assert peaks(ran(even(B, 4, 2), memory(0, 90, peak_reserved_bytes=100), 40)).largest_held(0) == 100 * MIB


def test_what_one_of_a_kind_held_proves_it_for_the_others() -> None:
    """Two replicas that held as much with 4 samples: the 90 MiB of one with 8 are the most the
    other holds with 6.
    """
    seen = peaks(ran(even(B, 2, 4), 100, 50, 50, 60), ran(split(B, 2, 0, 8, 4, 4), 80, 90, 50, 60))
    shares, sizes, accumulates = np.array([6.0]), np.array([16.0]), np.array([1.0])
    assert [float(seen.proven(device, shares, sizes, accumulates)[0]) / MIB for device in (1, 2)] == [90, 90]
    assert np.isinf(seen.proven(3, shares, sizes, accumulates)[0])
    assert seen.alike(2) == (1, 2)
    assert seen.alike(0) == (0,)


def test_one_that_held_a_little_more_is_proven_a_little_more() -> None:
    """With 4 samples GPU 2 held 0.5 % more than GPU 1, so it is taken to with 8."""
    seen = peaks(ran(even(B, 2, 4), 100, 200, 201, 60), ran(split(B, 2, 0, 8, 4, 4), 80, 400, 201, 60))
    shares, sizes, accumulates = np.array([8.0]), np.array([16.0]), np.array([1.0])
    assert seen.proven(2, shares, sizes, accumulates)[0] / MIB == pytest.approx(400 * 1.005)
    assert seen.proven(1, shares, sizes, accumulates)[0] / MIB == pytest.approx(400)


def test_cards_of_a_kind_by_a_third_differ_by_what_a_kind_may() -> None:
    """GPU 1 and GPU 3 never had the same share, both agreed with GPU 2: what one held is the
    other's to 1 %.
    """
    together = ran(split(B, 4, 0, 4, 4, 0), 80, 200, 200, 0), ran(split(B, 2, 0, 0, 8, 8), 80, 0, 400, 400)
    seen = peaks(*together, ran(split(B, 2, 4, 0, 0, 12), 80, 0, 0, 600), ran(split(B, 2, 0, 0, 16, 0), 80, 0, 800, 0))
    assert set(seen.alike(1)) == {1, 2, 3}
    shares, sizes, accumulates = np.array([12.0]), np.array([16.0]), np.array([1.0])
    proven = [seen.proven(device, shares, sizes, accumulates)[0] / MIB for device in (1, 2, 3)]
    assert proven == pytest.approx([606, 600, 600])


def test_nothing_is_alike_before_anything_ran() -> None:
    """Without a run whose memory was read no card stands for another."""
    assert MemoryReadings(3).alike(1) == (1,)
