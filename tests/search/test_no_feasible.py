from __future__ import annotations

import pytest

from splittune.errors import NoFeasibleSplitError
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search import find_best_split
from splittune.split import BatchSplit
from tests.search.problem import MIB, Job, linear_job


def failure_of(problem: Job, **options: object) -> str:
    with pytest.raises(NoFeasibleSplitError) as failed:
        find_best_split(problem.space(), problem.measure, **options)  # type: ignore[arg-type]
    return str(failed.value)


def test_the_smallest_split_tried_and_what_it_lacked_are_named() -> None:
    """When nothing fits, the error names the smallest split, the amount it lacked, and the device."""
    problem = linear_job(B=16, num_devices=2, fixed_mib=3072.0, total_mib=(2048, 100_000))
    message = failure_of(problem)
    assert message.startswith("no split fits: ")
    assert "The smallest tried, 16 = 16 x (0 + 1), lacked 1.00 GiB on device 0 (device 0: 2.00 GiB in all" in message
    assert BatchSplit(global_batch_size=16, accumulation_steps=16, shard_sizes=(0, 1)) in problem.measured


def test_the_message_of_an_out_of_memory_error_is_passed_on() -> None:
    """Without readings the error repeats what the failed trial said, abridged to its first and last line."""
    problem = linear_job(B=2, num_devices=2)

    def measure(split: BatchSplit) -> Measurement:
        message = "Caught OutOfMemoryError in replica 1 on device cuda:1\n  line 3\nCUDA out of memory.\n"
        return Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY, message=message)

    with pytest.raises(NoFeasibleSplitError, match=r"replica 1 on device cuda:1 \.\.\. CUDA out of memory\. "):
        find_best_split(problem.space(), measure)


@pytest.mark.parametrize("sampler", ["guided", "random"])
def test_a_budget_that_ended_too_early_is_told_apart(sampler: str) -> None:
    """When the trials ran out before anything fitted, the error says so and asks for more."""
    problem = linear_job(B=256, num_devices=2, total_mib=50)
    message = failure_of(problem, max_trials=1, sampler=sampler)
    assert "no split that fits was found before 1 trial (max_trials) ran out: 1 split measured" in message
    smallest = {"guided": "256 = 128 x (1 + 1), lacked 50.0 MiB", "random": "256 = 1 x (128 + 128), lacked 12.45 GiB"}
    assert f"The smallest tried, {smallest[sampler]} on device 0" in message
    assert message.endswith("Allow more trials to try smaller ones.")


def test_time_that_ended_too_early_is_told_apart() -> None:
    """When the time ran out before anything fitted, the error asks for more time."""
    problem = linear_job(B=256, num_devices=2, total_mib=100)
    ticks = iter(range(1000))
    message = failure_of(problem, timeout_s=5.0, clock=lambda: float(next(ticks)), sampler="random")
    assert "before the time (timeout_s) ran out" in message
    assert message.endswith("Allow more time to try smaller ones.")


def test_a_demand_for_headroom_that_cannot_be_met_is_shown() -> None:
    """Where only the demanded headroom is missing, the arithmetic of it stands in the error."""
    problem = linear_job(B=2, num_devices=1, total_mib=300)
    message = failure_of(problem, min_headroom_bytes=250 * MIB)
    assert "lacked 50.0 MiB on device 0 (device 0: 300.0 MiB in all - 0.0 MiB held outside - 100.0 MiB" in message


def test_crashes_are_not_called_lack_of_memory() -> None:
    """When every split crashed, the error says that and quotes one."""
    problem = linear_job(B=2, num_devices=1)

    def measure(split: BatchSplit) -> Measurement:
        return Measurement(split=split, outcome=Outcome.CRASHED, message="illegal memory access")

    with pytest.raises(NoFeasibleSplitError, match=r"every one crashed\. .* crashed: illegal memory access\."):
        find_best_split(problem.space(), measure)


def test_finalists_that_all_fail_again_are_reported() -> None:
    """When splits fitted in the search and none when confirmed, the error tells that story."""
    problem = linear_job(B=4, num_devices=2)

    def confirm(split: BatchSplit) -> Measurement:
        return Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY, message="device 0: another program grew")

    with pytest.raises(NoFeasibleSplitError, match="none fitted again when confirmed") as failed:
        find_best_split(problem.space(), problem.measure, max_trials=3, confirm=confirm)
    assert "device 0: another program grew" in str(failed.value)


def test_without_an_even_split_that_fits_there_is_no_baseline_but_a_best() -> None:
    """A device that can hold nothing rules out every even split; the others still train."""
    problem = linear_job(B=8, num_devices=2, total_mib=(100_000, 0))
    result = find_best_split(problem.space(), problem.measure, max_trials=24)
    assert result.baseline is None
    assert result.speedup is None
    assert result.best.split == BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(8, 0))
