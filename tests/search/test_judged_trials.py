from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.judged_trials import JudgedTrial, oom_devices_of
from splittune.split import BatchSplit, SplitSpace
from tests.search.problem import linear_job, rows
from tests.search.spaces import failures, spaces


def split_of(steps: int, *shards: int) -> BatchSplit:
    return BatchSplit(global_batch_size=32, accumulation_steps=steps, shard_sizes=shards)


def out_of_memory(split: BatchSplit, *oom_devices: int, message: str = "") -> JudgedTrial:
    measurement = Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY, message=message)
    return JudgedTrial(measurement=measurement, oom_devices=frozenset(oom_devices))


def test_a_known_device_rules_out_larger_shards_on_it() -> None:
    """A device that lacked memory lacks it with any shard at least as large, whatever the others get."""
    failed = out_of_memory(split_of(2, 8, 8), 0)
    assert failed.rules_out(split_of(2, 8, 8))
    assert failed.rules_out(split_of(2, 9, 7))
    assert not failed.rules_out(split_of(2, 7, 9))


def test_an_unknown_device_rules_out_only_what_is_larger_everywhere() -> None:
    """Where nobody knows which device lacked memory, one smaller shard leaves hope."""
    failed = out_of_memory(split_of(4, 4, 4))
    assert failed.rules_out(split_of(2, 8, 8))
    assert not failed.rules_out(split_of(2, 3, 13))
    assert not failed.rules_out(split_of(4, 5, 3))


def test_a_smaller_micro_batch_is_not_ruled_out_where_gpu0_failed() -> None:
    """GPU 0 gathers the whole micro-batch's outputs, so the same shard may fit in a smaller one; no other does."""
    assert not out_of_memory(split_of(2, 8, 8), 0).rules_out(split_of(4, 8, 0))
    assert out_of_memory(split_of(2, 8, 8), 1).rules_out(split_of(4, 0, 8))


def test_a_failure_with_accumulation_says_nothing_about_a_single_step() -> None:
    """Accumulation costs GPU 0 a copy of the gradients that a single step does not need."""
    assert not out_of_memory(split_of(2, 8, 8), 0).rules_out(split_of(1, 16, 16))


def test_only_lack_of_memory_rules_out() -> None:
    """A crash says nothing about other splits."""
    crashed = JudgedTrial(measurement=Measurement(split=split_of(2, 8, 8), outcome=Outcome.CRASHED))
    assert not crashed.rules_out(split_of(2, 8, 8))


@given(data=st.data(), space=spaces())
def test_what_is_ruled_out_is_no_easier_on_a_device_that_failed(data: st.DataObject, space: SplitSpace) -> None:
    """For any failure and split of a space, the rule in words: as large a shard, on GPU 0 as large a micro-batch."""
    failure = data.draw(failures(space))
    failed, splits = failure.split, list(space)

    def must_fail(split: BatchSplit) -> bool:
        if not failure.lacks_memory or (split.accumulation_steps == 1 and failed.accumulation_steps > 1):
            return False
        as_large = split.micro_batch_size >= failed.micro_batch_size
        larger = [own >= other for own, other in zip(split.shard_sizes, failed.shard_sizes, strict=True)]
        if not failure.oom_devices:
            return as_large and all(larger)
        return any(larger[device] and (as_large or device > 0) for device in failure.oom_devices)

    assert failure.rules_out_each(*rows(splits)).tolist() == [must_fail(split) for split in splits]
    assert failure.rules_out(splits[-1]) == must_fail(splits[-1])


def test_the_largest_shards_left_open() -> None:
    """GPU 0 lacked memory with 8 of 16 samples in 2 steps: 7 are left open there, as many as there are elsewhere."""
    failed = out_of_memory(split_of(2, 8, 8), 0)
    steps, micro_batches = np.array([2.0, 2.0, 1.0, 4.0]), np.array([16.0, 20.0, 32.0, 8.0])
    open_shards = failed.largest_open_shards(steps, micro_batches)
    assert open_shards[:, 0].tolist() == [7, 7, np.inf, np.inf]
    assert np.isinf(open_shards[:, 1]).all()
    assert out_of_memory(split_of(4, 0, 8), 0).largest_open_shards(steps[:1], micro_batches[:1])[0, 0] == -1


@given(data=st.data())
def test_nothing_that_fits_is_ever_ruled_out(data: st.DataObject) -> None:
    """In any job whose memory grows with shards, micro-batch and accumulation, no failure rules out what fits."""
    num_devices = data.draw(st.integers(1, 4))
    problem = linear_job(
        B=data.draw(st.integers(1, 16)),
        num_devices=num_devices,
        total_mib=tuple(data.draw(st.lists(st.integers(0, 1600), min_size=num_devices, max_size=num_devices))),
        output_mib=data.draw(st.sampled_from([0.0, 30.0])),
        gradients_mib=data.draw(st.sampled_from([0.0, 250.0])),
        oom=data.draw(st.sampled_from(["readings", "named", "silent"])),
    )
    trials = [JudgedTrial.of(problem.measure(split), (0,) * num_devices) for split in problem.space()]
    fitting = [split for split in problem.space() if problem.fits(split)]
    if fitting:
        assert not any(trial.rules_out_each(*rows(fitting)).any() for trial in trials)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("device 1: 1.00 GiB in all", {1}),
        ("Caught OutOfMemoryError in replica 1 on device cuda:3, a shard of 8 samples.\nTraceback", {1}),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 16.00 GiB", set()),
        ("device 7: not one of these two", set()),
        ("", set()),
    ],
)
def test_the_oom_device_is_read_where_the_message_counts_the_jobs_devices(message: str, expected: set[int]) -> None:
    """A message names the device by its place in the job; torch's own numbers count something else and are not read."""
    measurement = Measurement(split=split_of(2, 8, 8), outcome=Outcome.OUT_OF_MEMORY, message=message)
    assert oom_devices_of(measurement, (0, 0)) == expected


def test_oom_devices_are_read_from_each_devices_own_demand() -> None:
    """A device lacks memory when its headroom is below what is demanded of it, not of another."""
    problem = linear_job(B=32, num_devices=2, total_mib=1000)
    measurement = problem.measure(split_of(2, 8, 8)).judged((0, 300 * 1024**2))
    assert measurement.outcome is Outcome.NO_HEADROOM
    assert oom_devices_of(measurement, (0, 300 * 1024**2)) == {1}


@pytest.mark.parametrize(
    ("allocated", "runs", "expected"), [(600, True, True), (950, True, False), (600, False, False)]
)
def test_headroom_that_the_allocator_holds_is_lacking_for_now(allocated: int, runs: bool, expected: bool) -> None:
    """Of 1,000 bytes it reserved all and 100 are demanded: 600 were alive, so 400 were free; of 950 that left, 50."""
    reading = DeviceMemory(
        device=0, total_bytes=1000, outside_bytes=0, peak_allocated_bytes=allocated, peak_reserved_bytes=1000
    )
    split = split_of(4, 8)
    measurement = Measurement(
        split=split,
        outcome=Outcome.OK if runs else Outcome.OUT_OF_MEMORY,
        memory=(reading,),
        micro_step_times_s=(0.1,) if runs else (),
        update_times_s=(0.1,) if runs else (),
    )
    judged = JudgedTrial.of(measurement, [100])
    assert judged.ran == runs
    assert judged.oom_devices == {0}
    assert judged.lacks_cached == expected
    assert judged.rules_out(split)
