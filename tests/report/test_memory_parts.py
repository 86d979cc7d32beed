"""The parts of a peak: recovered from the trials, adding up, and None where the trials do not tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.memory_parts import MemoryParts, memory_parts
from splittune.split import BatchSplit
from splittune.units import MIB
from tests.report.job import BATCH, LEVEL, Job, trials_of


def sums_up(parts: MemoryParts) -> bool:
    assert parts.per_share_bytes is not None
    assert parts.whole_batch_bytes is not None
    assert parts.fixed_bytes is not None
    assert min(parts.per_share_bytes, parts.whole_batch_bytes, parts.fixed_bytes) >= 0
    return parts.per_share_bytes + parts.whole_batch_bytes + parts.fixed_bytes == parts.peak_bytes


def in_mib(parts: MemoryParts) -> list[float | None]:
    three = (parts.per_share_bytes, parts.whole_batch_bytes, parts.fixed_bytes)
    return [None if part is None else part / MIB for part in three]


def test_the_worked_number_of_the_docstring() -> None:
    """Peaks of 18, 22 and 40 MiB on GPU 0: of the last, 6 are its share, 24 the whole micro-batch, 10 neither."""
    job = Job()
    runs = [job.run(2, 2, 4), job.run(4, 2, 2), job.run(3, 22, 23)]
    assert [run.memory[0].peak_allocated_bytes / MIB for run in runs] == [18, 22, 40]
    parts = memory_parts(trials_of(*runs), runs[-1])
    assert in_mib(parts[0]) == [6, 24, 10]
    assert in_mib(parts[2]) == [46, 0, 7]


@given(
    share=st.floats(0, 100),
    whole=st.floats(0, 100),
    fixed0=st.floats(0, 10_000),
    fixed=st.floats(0, 10_000),
    is_split=st.booleans(),
)
def test_known_slopes_are_recovered(share: float, whole: float, fixed0: float, fixed: float, is_split: bool) -> None:
    """Whatever the lines behind the trials, the parts are what they say to a few hundred bytes, and add up."""
    job = Job(share=share, whole=whole, fixed0=fixed0, fixed=fixed)
    best = job.run(4, 22, 22, is_split=is_split)
    for parts in memory_parts(job.trials(is_split), best):
        expected = (share * best.split.shard_sizes[parts.device], 0 if parts.device else whole * 48)
        assert parts.per_share_bytes == pytest.approx(expected[0] * MIB, abs=500)
        assert parts.whole_batch_bytes == pytest.approx(expected[1] * MIB, abs=500)
        assert sums_up(parts)


@given(peaks=st.lists(st.tuples(*[st.integers(0, 10**12)] * 3), min_size=3, max_size=3))
def test_parts_add_up_whatever_was_measured(peaks: list[tuple[int, int, int]]) -> None:
    """Peaks on no line at all still give parts of at least 0 that sum to the peak."""
    runs = [
        Measurement(
            split=BatchSplit(global_batch_size=BATCH, accumulation_steps=BATCH // sum(shards), shard_sizes=shards),
            outcome=Outcome.OK,
            whole_step_times_s=(1.0,),
            memory=tuple(
                DeviceMemory(
                    device=i, total_bytes=10**12, outside_bytes=0, peak_allocated_bytes=peak, peak_reserved_bytes=peak
                )
                for i, peak in enumerate(row)
            ),
        )
        for shards, row in zip([(2, 3, 3), (4, 2, 2), (4, 22, 22)], peaks, strict=True)
    ]
    assert all(sums_up(parts) for parts in memory_parts(trials_of(*runs), runs[-1]))


def test_the_update_does_not_bend_the_lines() -> None:
    """Where the update peaks higher in the small trials, forward and backward alone are what is fitted."""
    job = Job(update=25)
    best = job.run(4, 22, 22)
    parts = memory_parts([*job.trials(), *trials_of(job.run(4, 2, 2, is_split=False))], best)[0]
    assert (parts.per_share_bytes, parts.whole_batch_bytes, parts.update_peak_bytes) == (8 * MIB, 24 * MIB, None)


def test_failed_trials_do_not_count() -> None:
    """A trial that ran out of memory stopped before its peak; one that lacked headroom reached it."""
    job = Job()
    failed = Job(share=0).run(8, 20, 20, outcome=Outcome.OUT_OF_MEMORY)
    lacking = [job.run(2, 3, 3, outcome=Outcome.NO_HEADROOM), job.run(4, 2, 2, outcome=Outcome.NO_HEADROOM)]
    parts = memory_parts(trials_of(failed, *lacking), job.run(4, 22, 22))[0]
    assert (parts.per_share_bytes, parts.whole_batch_bytes) == (8 * MIB, 24 * MIB)


def test_what_the_trials_do_not_tell_is_none() -> None:
    """One size of share leaves all unknown; one size of micro-batch leaves GPU 0's other parts unknown."""
    job = Job()
    best = job.run(4, 2, 2)
    assert in_mib(memory_parts([], best)[0]) == [None, None, None]
    first, second, _ = memory_parts(trials_of(job.run(2, 3, 3)), best)
    assert in_mib(first) == [8, None, None]
    assert in_mib(second) == [4, 0, 7]


def test_a_single_device_has_one_part_for_the_batch() -> None:
    """Alone, GPU 0's share is the micro-batch, and one slope holds both."""
    job = Job(totals=(200,), outside=(0,))
    runs = [job.run(8), job.run(24)]
    (parts,) = memory_parts(trials_of(*runs), runs[1])
    assert in_mib(parts) == [60, 0, 10]


def test_a_loss_in_the_replicas_is_fitted_alone() -> None:
    """Trials with the loss elsewhere lie on other lines."""
    gathered, own = Job(totals=LEVEL, whole=1.5, share=0.5), Job(totals=LEVEL, whole=1, share=1)
    runs = [replace(trial.measurement, loss_placement="replica") for trial in own.trials()]
    parts = memory_parts([*gathered.trials(), *trials_of(*runs)], runs[-1])[0]
    assert in_mib(parts) == [4, 48, 10]


def test_without_a_reading_there_are_no_parts() -> None:
    """Memory that was not recorded has none."""
    split = BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(4, 4))
    best = Measurement(split=split, outcome=Outcome.OK, whole_step_times_s=(1.0,))
    assert memory_parts([], best) == ()
