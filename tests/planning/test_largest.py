"""The largest micro-batch that fits: exact where peaks are straight lines, bracketed where they are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune import BatchSplit, Measurement, Outcome
from splittune.hardware import DeviceMemory
from splittune.planning.largest import MAX_MICRO_BATCH, MAX_RUNS, PRECISION, largest_micro_batch
from splittune.search import Trial
from splittune.units import MIB

Measure = Callable[[BatchSplit], Measurement]


def machine(
    *, totals: Sequence[int], fixed: Sequence[int], share: float, whole: float = 0.0, bend: float = 0.0
) -> Measure:
    """Cards of these sizes in MiB, on which a sample of a share and of the micro-batch costs so many."""

    def measure(split: BatchSplit) -> Measurement:
        memory = []
        for device, (total, held) in enumerate(zip(totals, fixed, strict=True)):
            samples = split.shard_sizes[device]
            peak = held + share * samples + bend * samples**2
            peak += whole * split.micro_batch_size if device == 0 else 0
            peak_bytes = int(peak * MIB)
            memory.append(
                DeviceMemory(
                    device=device,
                    total_bytes=total * MIB,
                    outside_bytes=0,
                    peak_allocated_bytes=peak_bytes,
                    peak_reserved_bytes=peak_bytes,
                    micro_step_peak_bytes=peak_bytes,
                )
            )
        if min(each.headroom_bytes for each in memory) < 0:
            return Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY, message="device 0: out of memory")
        return Measurement(
            split=split, outcome=Outcome.OK, micro_step_times_s=(1.0,), update_times_s=(1.0,), memory=tuple(memory)
        )

    return measure


def searched(measure: Measure, num_devices: int, sizes: Sequence[int]) -> list[Trial]:
    splits = [
        BatchSplit.even(global_batch_size=size * num_devices, accumulation_steps=1, num_devices=num_devices)
        for size in sizes
    ]
    return [
        Trial(number=number, kind="search", measurement=measure(split), reason="")
        for number, split in enumerate(splits)
    ]


@given(
    totals=st.lists(st.integers(200, 2000), min_size=1, max_size=4),
    share=st.floats(0.5, 8),
    whole=st.floats(0, 4),
)
def test_it_is_within_1_percent_of_the_truth(totals: list[int], share: float, whole: float) -> None:
    """On any cards with straight lines it is the best balance's size to 1 % or a sample, and is bracketed."""
    fixed = [20] * len(totals)
    whole = whole if len(totals) > 1 else 0.0
    measure, runs = machine(totals=totals, fixed=fixed, share=share, whole=whole), []

    def counted(split: BatchSplit) -> Measurement:
        runs.append(split)
        return measure(split)

    found = largest_micro_batch(searched(measure, len(totals), (1, 4)), counted, min_headroom_bytes=(0,) * len(totals))
    assert found is not None
    assert measure(found.split).outcome is Outcome.OK
    room = [total - held for total, held in zip(totals, fixed, strict=True)]

    def fits(size: int) -> bool:
        first = (room[0] - whole * size) / share
        return first >= 0 and int(first) + sum(int(each / share) for each in room[1:]) >= size

    truth = max(size for size in range(1, 20000) if fits(size))
    assert truth * (1 - 1 / PRECISION) - len(totals) - 1 <= found.num_samples <= truth
    assert len(runs) <= MAX_RUNS


def test_the_headroom_demanded_is_kept() -> None:
    """100 MiB less 20 that are fixed and 20 demanded leave 60 MiB for samples of 2 MiB: 30, on each of two cards."""
    measure = machine(totals=(100, 100), fixed=(20, 20), share=2)

    def judged(split: BatchSplit) -> Measurement:
        return measure(split).judged((20 * MIB, 20 * MIB))

    found = largest_micro_batch(searched(judged, 2, (2, 4)), judged, min_headroom_bytes=(20 * MIB, 20 * MIB))
    assert found is not None
    assert found.split.shard_sizes == (30, 30)
    assert found.is_measured


def test_memory_that_bends_is_bracketed() -> None:
    """Where a line foretells too much, the gap is halved until one fits and one 1 % larger does not."""
    measure = machine(totals=(1000,), fixed=(10,), share=1, bend=0.002)
    found = largest_micro_batch(searched(measure, 1, (1, 8)), measure, min_headroom_bytes=(0,))
    assert found is not None
    truth = max(size for size in range(1000) if 10 + size + 0.002 * size**2 <= 1000)
    assert 0.99 * truth - 1 <= found.num_samples <= truth
    assert found.is_measured


def test_without_growth_a_larger_size_is_tried_first() -> None:
    """Trials of one size tell no growth: a far larger one is tried, and then it is known."""
    measure = machine(totals=(1000, 1000), fixed=(10, 10), share=1)
    found = largest_micro_batch(searched(measure, 2, (8,)), measure, min_headroom_bytes=(0, 0))
    assert found is not None
    assert found.num_samples == 1980
    assert found.is_measured


def test_every_card_keeps_the_least_share() -> None:
    """With BatchNorm no card is left with fewer samples than it needs, GPU 0 neither."""
    measure = machine(totals=(100, 1000), fixed=(10, 10), share=1, whole=0.5)
    found = largest_micro_batch(searched(measure, 2, (4, 8)), measure, min_headroom_bytes=(0, 0), min_shard_size=4)
    assert found is not None
    assert found.split.gpu0_bsz >= 4
    assert found.num_samples == pytest.approx((90 - 4) / 0.5, abs=2)


def test_far_beyond_what_people_use_it_is_a_lower_bound() -> None:
    """Samples that cost next to nothing are tried at the last size once, and no further."""
    measure = machine(totals=(1000,), fixed=(10,), share=2**-10)
    found = largest_micro_batch(searched(measure, 1, (1, 100)), measure, min_headroom_bytes=(0,))
    assert found is not None
    assert (found.num_samples, found.is_measured) == (MAX_MICRO_BATCH, False)


def test_the_trials_alone_give_a_lower_bound() -> None:
    """Where nothing may be measured it is the largest trial that fitted, and does not count as measured."""
    measure = machine(totals=(100,), fixed=(20,), share=2)
    found = largest_micro_batch(searched(measure, 1, (2, 30, 50)), None, min_headroom_bytes=(0,))
    assert found is not None
    assert (found.num_samples, found.is_measured) == (30, False)


def test_a_job_may_refuse_a_size_nobody_asked_for() -> None:
    """What it raises then ends the look for more: the largest that ran is a lower bound."""
    measure = machine(totals=(1000,), fixed=(10,), share=1)

    def refusing(split: BatchSplit) -> Measurement:
        assert split.micro_batch_size <= 512, "at most 512 samples"
        return measure(split)

    found = largest_micro_batch(searched(measure, 1, (2, 30)), refusing, min_headroom_bytes=(0,))
    assert found is not None
    assert (found.num_samples, found.is_measured) == (30, False)


def test_nothing_that_fits_has_no_largest() -> None:
    """Without a trial that fitted there is none."""
    measure = machine(totals=(10,), fixed=(20,), share=2)
    assert largest_micro_batch(searched(measure, 1, (2,)), measure, min_headroom_bytes=(0,)) is None
