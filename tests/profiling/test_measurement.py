"""`Measurement`: raw samples kept, statistics derived, what did not run is refused, absent is None."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from statistics import mean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.split import BatchSplit
from splittune.units import GIB

SPLIT = BatchSplit(global_batch_size=64, accumulation_steps=4, shard_sizes=(4, 12))
FAILED = [Outcome.OUT_OF_MEMORY, Outcome.CRASHED]
RAN = [Outcome.OK, Outcome.NO_HEADROOM]

times = st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=1, max_size=9).map(tuple)


def memory(device: int = 0, *, headroom_gib: float = 3, **phases: int) -> DeviceMemory:
    """A 24 GiB device with 1 GiB held outside that keeps `headroom_gib`."""
    reserved = int((23 - headroom_gib) * GIB)
    return DeviceMemory(
        device=device,
        total_bytes=24 * GIB,
        outside_bytes=GIB,
        peak_allocated_bytes=reserved - GIB // 2,
        peak_reserved_bytes=reserved,
        **phases,
    )


def measurement(**fields: Any) -> Measurement:
    """A trial that ran, with `fields` changed."""
    ran: dict[str, Any] = {
        "split": SPLIT,
        "outcome": Outcome.OK,
        "micro_step_times_s": (0.10, 0.09, 0.11),
        "update_times_s": (0.02, 0.03, 0.01),
    }
    return Measurement(**(ran | fields))


def failed(outcome: Outcome, **fields: Any) -> Measurement:
    """A trial that did not run through."""
    return Measurement(split=SPLIT, outcome=outcome, message="device 1: out of memory", **fields)


# Statistics


def test_worked_example() -> None:
    """The docstring's numbers: 4 x 0.10 s + 0.02 s = 0.42 s, and 64 samples at 152.4 samples/s."""
    measured = measurement()
    assert measured.micro_step_time_s == 0.10
    assert measured.update_time_s == 0.02
    assert measured.step_time_s == pytest.approx(0.42)
    assert measured.throughput == pytest.approx(152.38, abs=0.01)


@given(micro_steps=times, updates=times)
def test_step_time_is_k_micro_steps_and_an_update(micro_steps: tuple[float, ...], updates: tuple[float, ...]) -> None:
    """k x median micro-step + median update, for any samples; the throughput is the global batch over it."""
    measured = measurement(micro_step_times_s=micro_steps, update_times_s=updates)
    assert measured.step_time_s == pytest.approx(4 * median(micro_steps) + median(updates))
    assert measured.throughput == pytest.approx(64 / (4 * median(micro_steps) + median(updates)))


@given(micro_steps=times, updates=times, whole_steps=times)
def test_whole_steps_count_before_their_parts(
    micro_steps: tuple[float, ...], updates: tuple[float, ...], whole_steps: tuple[float, ...]
) -> None:
    """Where complete optimizer steps were run, their median is the step time."""
    measured = measurement(micro_step_times_s=micro_steps, update_times_s=updates, whole_step_times_s=whole_steps)
    assert measured.step_time_s == median(whole_steps)


def test_whole_steps_alone_are_enough() -> None:
    """A finalist may be measured in whole steps only; its parts are then unknown, not zero."""
    measured = measurement(micro_step_times_s=(), update_times_s=(), whole_step_times_s=(0.5,))
    assert (measured.micro_step_time_s, measured.update_time_s) == (None, None)
    assert (measured.step_time_s, measured.throughput) == (0.5, 128.0)


def test_an_outlier_does_not_move_the_statistics() -> None:
    """They are medians: one slow sample of three changes nothing."""
    assert measurement(micro_step_times_s=(0.10, 0.10, 9.0)).step_time_s == pytest.approx(0.42)


def unbroken(*rounds_s: float, accumulation_steps: int = 8, **fields: Any) -> Measurement:
    """The docstring's trial: micro-steps of 12 ms, an update of 4 ms, and rounds of both that took so many ms."""
    split = BatchSplit.even(global_batch_size=64, accumulation_steps=accumulation_steps, num_devices=2)
    times: dict[str, Any] = {
        "micro_step_times_s": (0.012,) * len(rounds_s),
        "update_times_s": (0.004,) * len(rounds_s),
        "unbroken_round_times_s": tuple(each / 1e3 for each in rounds_s),
    }
    return measurement(**{**times, "split": split, **fields})


def test_a_step_takes_what_it_takes_unbroken() -> None:
    """The docstring's numbers: 40 ms in parts and 34 ms unbroken are 10 ms a micro-step, so 84 ms at 8 steps."""
    measured = unbroken(34, 34, 34)
    assert measured.micro_step_time_s == pytest.approx(0.010)
    assert measured.update_time_s == 0.004
    assert measured.step_time_s == pytest.approx(0.084)
    assert measured.throughput == pytest.approx(64 / 0.084)


@pytest.mark.parametrize(("accumulation_steps", "round_ms"), [(1, 14), (2, 25), (3, 34)])
def test_a_step_as_long_as_a_round_takes_what_the_median_round_takes(accumulation_steps: int, round_ms: float) -> None:
    """Up to 3 accumulation steps nothing is extrapolated: the step is the round."""
    measured = unbroken(round_ms - 1, round_ms, 30 * round_ms, accumulation_steps=accumulation_steps)
    assert measured.step_time_s == pytest.approx(round_ms / 1e3)


def test_a_round_that_is_slower_unbroken_counts_as_it_is() -> None:
    """Noise goes both ways: 43 ms beside 40 ms add 1 ms to each micro-step, as 37 ms take it off."""
    assert unbroken(43).micro_step_time_s == pytest.approx(0.013)
    assert unbroken(37).micro_step_time_s == pytest.approx(0.011)


def test_rounds_without_stops_add_no_bias() -> None:
    """Where stops cost nothing, 2,000 trials of 3 rounds with 2 % of noise give the true step time on average."""
    draw = random.Random(0)

    def noisy(time_s: float) -> float:
        return time_s * draw.gauss(1.0, 0.02)

    for accumulation_steps, true_s in ((1, 0.016), (3, 0.040), (32, 0.388)):
        steps = []
        for _ in range(2000):
            fields = {
                "micro_step_times_s": tuple(noisy(0.012) for _ in range(3)),
                "update_times_s": tuple(noisy(0.004) for _ in range(3)),
            }
            rounds_ms = [noisy(12.0 * min(accumulation_steps, 3) + 4.0) for _ in range(3)]
            step_s = unbroken(*rounds_ms, accumulation_steps=accumulation_steps, **fields).step_time_s
            assert step_s is not None
            steps.append(step_s)
        assert mean(steps) == pytest.approx(true_s, rel=0.002)


def test_a_micro_step_takes_a_third_of_its_time_alone_at_least() -> None:
    """Whatever noise or an update that was slow once may say: no time is ever 0 or negative."""
    for round_ms in (0.001, 4.0, 15.9):
        assert unbroken(round_ms).micro_step_time_s == pytest.approx(0.004)
        assert unbroken(round_ms).step_time_s == pytest.approx(0.036)
    assert unbroken(19.0).micro_step_time_s == pytest.approx(0.005)


def test_the_error_and_the_noise_are_those_of_steps_made_of_unbroken_rounds() -> None:
    """Rounds of 34, 35 and 36 ms are steps of 84, 86.7 and 89.3 ms at 8 micro-steps; micro-steps' spread is not."""
    steps = tuple(8 * (each - 4) / 3 / 1e3 + 0.004 for each in (34, 35, 36))
    measured = unbroken(34, 35, 36)
    assert measured.main_times_s == pytest.approx(steps)
    assert measured.relative_error == pytest.approx(measurement(whole_step_times_s=steps).relative_error)
    assert not unbroken(34, 34, 34, micro_step_times_s=(0.010, 0.012, 0.014)).is_noisy
    assert unbroken(30, 34, 38).is_noisy
    whole = unbroken(30, 34, 38, whole_step_times_s=(0.1, 0.1, 0.1))
    assert (whole.main_times_s, whole.step_time_s, whole.is_noisy) == ((0.1, 0.1, 0.1), 0.1, False)


@pytest.mark.parametrize("outcome", FAILED)
def test_a_failed_trial_has_no_statistics(outcome: Outcome) -> None:
    """None, never 0, -1 or inf: a failed trial cannot be averaged or compared by mistake."""
    measured = failed(outcome)
    assert measured.micro_step_time_s is None
    assert measured.update_time_s is None
    assert measured.step_time_s is None
    assert measured.throughput is None
    assert not measured.is_noisy


# Refusals


@pytest.mark.parametrize("outcome", RAN)
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"micro_step_times_s": (), "update_times_s": ()}, id="no times"),
        pytest.param({"micro_step_times_s": ()}, id="updates only"),
        pytest.param({"update_times_s": ()}, id="micro-steps only"),
    ],
)
def test_a_trial_that_did_not_run_is_not_ok(outcome: Outcome, fields: dict[str, Any]) -> None:
    """An OK without a measured step, or with half of one, cannot be built."""
    with pytest.raises(ValueError, match=f"outcome {outcome.value} without a measured step: a trial counts only if it"):
        measurement(outcome=outcome, **fields)


@pytest.mark.parametrize("outcome", FAILED)
@pytest.mark.parametrize(
    "field", ["micro_step_times_s", "update_times_s", "unbroken_round_times_s", "whole_step_times_s"]
)
def test_a_failed_trial_with_times_is_refused(outcome: Outcome, field: str) -> None:
    """Steps that were timed before the failure say nothing about a split that fails."""
    with pytest.raises(ValueError, match=rf"outcome {outcome.value} with times \(0\.1,\): a failed trial has none"):
        failed(outcome, **{field: (0.1,)})


@pytest.mark.parametrize("time", [0.0, -1.0, math.nan])
@pytest.mark.parametrize(
    "field", ["micro_step_times_s", "update_times_s", "unbroken_round_times_s", "whole_step_times_s"]
)
def test_a_time_that_is_not_above_zero_is_refused(field: str, time: float) -> None:
    """A step that took no time did not run."""
    with pytest.raises(
        ValueError, match=r"a measured time is not above 0 and finite: .* What did not run is not measured"
    ):
        measurement(**{field: (0.1, time)})


def test_memory_of_other_devices_than_the_splits_is_refused() -> None:
    """One reading for each device, or none at all."""
    with pytest.raises(ValueError, match="1 memory readings for a split over 2 devices"):
        measurement(memory=(memory(0),))


def test_rounds_go_with_updates() -> None:
    """An unbroken round for each update, or none at all."""
    with pytest.raises(ValueError, match="2 unbroken rounds beside 3 updates: one for each"):
        unbroken(34, 34, 34, unbroken_round_times_s=(0.034, 0.034))


# Noise


@pytest.mark.parametrize(
    ("samples", "noisy"),
    [
        pytest.param((1.0, 1.0, 1.0), False, id="steady"),
        pytest.param((0.976, 1.0, 1.024), False, id="quartiles 2.4 % apart"),
        pytest.param((0.94, 1.0, 1.06), True, id="quartiles 6 % apart"),
        pytest.param((1.0,) * 9 + (5.0,), False, id="one outlier"),
        pytest.param((1.0, 5.0), False, id="too few to tell"),
        pytest.param((1.0,), False, id="one"),
    ],
)
def test_noise_is_an_interquartile_range_above_five_percent(samples: tuple[float, ...], noisy: bool) -> None:
    """The measurement says itself when it cannot be trusted."""
    assert measurement(micro_step_times_s=samples).is_noisy is noisy


@given(
    samples=st.lists(st.floats(min_value=0.5, max_value=2), min_size=3, max_size=9), scale=st.sampled_from([2, 1024])
)
def test_noise_is_relative(samples: list[float], scale: int) -> None:
    """A slower machine with the same spread is as noisy (powers of two scale floats exactly)."""
    scaled = tuple(scale * sample for sample in samples)
    assert measurement(micro_step_times_s=scaled).is_noisy == measurement(micro_step_times_s=tuple(samples)).is_noisy


def test_noise_is_that_of_the_whole_steps_where_they_were_run() -> None:
    """The times that count are the times that are judged."""
    steady, shaky = (1.0, 1.0, 1.0), (1.0, 2.0, 3.0)
    assert not measurement(micro_step_times_s=shaky, whole_step_times_s=steady).is_noisy
    assert measurement(micro_step_times_s=steady, whole_step_times_s=shaky).is_noisy


def test_the_relative_error_is_the_medians_confidence() -> None:
    """The docstring's numbers: 1.00, 1.01 and 1.02 s are known to 3.1 %."""
    assert measurement(whole_step_times_s=(1.0, 1.01, 1.02)).relative_error == pytest.approx(0.0308, abs=1e-4)
    assert measurement(whole_step_times_s=(1.0, 1.0, 1.0)).relative_error == 0


@given(seed=st.integers(0, 2**32), count=st.integers(3, 20))
def test_the_relative_error_is_a_95_percent_confidence(seed: int, count: int) -> None:
    """Of 400 series of normal steps of 1 s the true median lies within it in at least 91 %, however few the steps."""
    draw = random.Random(seed)
    hits = 0
    for _ in range(400):
        steps = tuple(draw.gauss(1.0, 0.02) for _ in range(count))
        error = measurement(whole_step_times_s=steps).relative_error
        assert error is not None
        hits += abs(median(steps) - 1.0) <= error * median(steps)
    assert hits >= 0.91 * 400


@pytest.mark.parametrize("each", [1, 2])
def test_the_relative_error_is_that_of_steps(each: int) -> None:
    """Micro-steps of two kinds, first and last, are no noise: rounds are compared, k micro-steps and an update each."""
    micro_steps = (0.3, 0.1, 0.3, 0.1, 0.3, 0.1)[:: 3 - each]
    assert measurement(micro_step_times_s=micro_steps, update_times_s=(0.02,) * 3).relative_error == pytest.approx(0)
    noisy = measurement(micro_step_times_s=(0.1,) * 3 * each, update_times_s=(0.02, 0.03, 0.01))
    assert noisy.relative_error == pytest.approx(4.303 * 1.2533 * 0.01 / 3**0.5 / 0.42)


def test_the_relative_error_of_few_samples_is_unknown() -> None:
    """Two samples tell nothing of their spread, and a failed trial has none."""
    assert measurement(micro_step_times_s=(0.1, 0.2), update_times_s=(0.01, 0.02)).relative_error is None
    assert failed(Outcome.CRASHED).relative_error is None


def test_without_rounds_the_micro_steps_stand_for_the_step() -> None:
    """Where micro-steps are no multiple of updates, theirs is the error."""
    measured = measurement(micro_step_times_s=(1.0, 1.01, 1.02), update_times_s=(0.01, 0.02))
    assert measured.relative_error == pytest.approx(0.0308, abs=1e-4)


def test_a_split_whose_allocator_had_to_try_again_is_on_the_edge() -> None:
    """One retry is enough; a negative number is refused."""
    assert not measurement().is_on_the_edge
    assert measurement(num_alloc_retries=1).is_on_the_edge
    with pytest.raises(ValueError, match="num_alloc_retries is -1: expected at least 0"):
        measurement(num_alloc_retries=-1)


# Headroom


def test_a_device_below_its_headroom_is_judged_no_headroom() -> None:
    """The trial ran, and keeps its times; its outcome and message say which device kept too little."""
    measured = measurement(memory=(memory(0, headroom_gib=0.5), memory(1)))
    judged = measured.judged(GIB)
    assert judged.outcome is Outcome.NO_HEADROOM
    assert judged.message == (
        "device 0: 24.00 GiB in all - 1.00 GiB held outside - 22.50 GiB at the peak = 512.0 MiB left, 1.00 GiB demanded"
    )
    assert judged == dataclasses.replace(measured, outcome=Outcome.NO_HEADROOM, message=judged.message)


def test_a_device_at_exactly_its_headroom_is_ok() -> None:
    """The demand is a minimum; a trial that keeps it is returned unchanged."""
    measured = measurement(memory=(memory(0, headroom_gib=1), memory(1)))
    assert measured.judged(GIB) is measured
    assert measured.judged(GIB + 1).outcome is Outcome.NO_HEADROOM


def test_each_device_may_have_a_demand_of_its_own() -> None:
    """One number for all, or one per device; the device named is the one furthest below its own demand."""
    measured = measurement(memory=(memory(0, headroom_gib=1), memory(1, headroom_gib=2)))
    assert measured.lacks_headroom((GIB, 2 * GIB)) is None
    assert measured.lacks_headroom((2 * GIB, 4 * GIB)) == (measured.memory[1], 4 * GIB)
    assert measured.lacks_headroom(3 * GIB) == (measured.memory[0], 3 * GIB)


def test_a_demand_too_many_or_too_few_is_refused() -> None:
    """Demands are never matched to devices by guessing."""
    measured = measurement(memory=(memory(0), memory(1)))
    with pytest.raises(ValueError, match="3 headroom demands for 2 devices: give one for each"):
        measured.judged((GIB, GIB, GIB))


@pytest.mark.parametrize("outcome", FAILED)
def test_a_failed_trial_is_not_judged_again(outcome: Outcome) -> None:
    """It stays what it was, also when memory was read and lacks headroom."""
    measured = failed(outcome, memory=(memory(0, headroom_gib=-1), memory(1)))
    assert measured.judged(GIB) is measured


def test_without_memory_readings_nothing_is_judged() -> None:
    """Hardware that reads no memory, a fake in a test say, leaves the outcome alone."""
    measured = measurement()
    assert measured.lacks_headroom(GIB) is None
    assert measured.judged(GIB) is measured


def test_headroom_is_what_neither_this_process_nor_others_hold() -> None:
    """Total - outside - peak reserved; what the caching allocator holds counts, not only live tensors."""
    reading = memory(headroom_gib=3)
    assert reading.headroom_bytes == 3 * GIB
    assert reading.headroom_bytes < reading.total_bytes - reading.outside_bytes - reading.peak_allocated_bytes


@pytest.mark.parametrize(
    "field", ["device", "total_bytes", "outside_bytes", "peak_allocated_bytes", "peak_reserved_bytes"]
)
def test_negative_memory_is_refused(field: str) -> None:
    """Only the headroom, which is derived, may be negative."""
    with pytest.raises(ValueError, match=rf"DeviceMemory\.{field} is -1: expected at least 0"):
        dataclasses.replace(memory(), **{field: -1})


# JSON


@pytest.mark.parametrize(
    "measured",
    [
        pytest.param(measurement(), id="ok"),
        pytest.param(
            measurement(
                whole_step_times_s=(0.41, 0.43),
                memory=(memory(0, micro_step_peak_bytes=5 * GIB, update_peak_bytes=4 * GIB), memory(1)),
                device_busy_s=(0.05, 0.08),
                num_alloc_retries=2,
                notes=("Measured again: it was hot.", "Still hot."),
            ),
            id="everything",
        ),
        pytest.param(unbroken(34, 35.5), id="unbroken rounds"),
        pytest.param(measurement(memory=(memory(0, headroom_gib=0.5), memory(1))).judged(GIB), id="no headroom"),
        pytest.param(failed(Outcome.OUT_OF_MEMORY), id="out of memory"),
        pytest.param(failed(Outcome.CRASHED), id="crashed"),
    ],
)
def test_json_gives_back_an_equal_measurement(measured: Measurement) -> None:
    """Through JSON text and back everything is equal: floats exact, tuples tuples, None None."""
    text = json.dumps(measured.to_dict(), allow_nan=False)
    assert Measurement.from_dict(json.loads(text)) == measured


@given(micro_steps=times, updates=times)
def test_json_keeps_every_sample_exactly(micro_steps: tuple[float, ...], updates: tuple[float, ...]) -> None:
    """Raw samples survive bit for bit."""
    measured = measurement(micro_step_times_s=micro_steps, update_times_s=updates)
    assert Measurement.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured


def test_json_of_an_earlier_version_is_read() -> None:
    """What was written before retries, notes and unbroken rounds were kept has none of them."""
    data = measurement().to_dict()
    del data["num_alloc_retries"], data["notes"], data["unbroken_round_times_s"]
    assert Measurement.from_dict(data) == measurement()


def test_outcomes_are_spelled_in_json_as_documented() -> None:
    """Files written by one version are read by the next: these words are a format."""
    assert [outcome.value for outcome in Outcome] == ["ok", "out_of_memory", "no_headroom", "crashed"]
    assert failed(Outcome.OUT_OF_MEMORY).to_dict()["outcome"] == "out_of_memory"


def test_json_that_does_not_add_up_is_refused() -> None:
    """A file edited by hand passes the same checks as a trial."""
    data = measurement().to_dict()
    with pytest.raises(ValueError, match="'fine' is not a valid Outcome"):
        Measurement.from_dict(data | {"outcome": "fine"})
    with pytest.raises(ValueError, match="a failed trial has none"):
        Measurement.from_dict(data | {"outcome": "crashed"})
