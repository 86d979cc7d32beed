"""What the recorder says of a trial's phases: their times, their peaks, and how busy the devices were."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from splittune.profiling.measurement import Outcome
from splittune.profiling.recorder import Phase, Recorder
from splittune.split import BatchSplit
from tests.profiling.fake_hardware import FakeHardware

SPLIT = BatchSplit(global_batch_size=8, accumulation_steps=2, shard_sizes=(1, 3))


def record(hardware: FakeHardware, *phases: str) -> Recorder:
    recorder = Recorder(hardware)
    for name in phases:
        with recorder.phase(name):  # type: ignore[arg-type]
            hardware.log.append(name)
    return recorder


def test_times_are_kept_by_phase() -> None:
    """Every phase's time is what the clock says of it; the warm-up's is no sample."""
    hardware = FakeHardware(durations_s=[9.0, 2.0, 3.0, 0.5])
    measured = record(hardware, "warm_up", "micro_step", "micro_step", "update").measurement(SPLIT)
    assert measured.outcome is Outcome.OK
    assert measured.micro_step_times_s == (2.0, 3.0)
    assert measured.update_times_s == (0.5,)
    assert measured.whole_step_times_s == ()


def test_whole_steps_are_kept_apart() -> None:
    """Whole steps are their own samples."""
    measured = record(FakeHardware(durations_s=[9.0, 4.0, 5.0]), "warm_up", *["whole_step"] * 2).measurement(SPLIT)
    assert measured.whole_step_times_s == (4.0, 5.0)
    assert measured.micro_step_times_s == measured.update_times_s == ()


def test_an_unbroken_round_is_a_sample_of_its_own() -> None:
    """It stands beside the parts, its peak and its retries count in the trial's, and no phase's own peak is its."""
    hardware = FakeHardware(
        durations_s=[2.0, 3.0, 0.5, 5.0], peaks=[(10, 10), (170, 70), (10, 10), (160, 80), (150, 60), (300, 90)]
    )
    recorder = record(hardware, "micro_step", "micro_step", "update")
    with recorder.phase("unbroken_round"):
        hardware.alloc_retries[1] += 2
    measured = recorder.measurement(SPLIT)
    assert measured.micro_step_times_s == (2.0, 3.0)
    assert measured.unbroken_round_times_s == (5.0,)
    assert measured.num_alloc_retries == 2
    assert [device.peak_allocated_bytes for device in measured.memory] == [300, 90]
    assert [device.micro_step_peak_bytes for device in measured.memory] == [170, 80]
    assert [device.update_peak_bytes for device in measured.memory] == [150, 60]


def test_peaks_start_anew_with_each_phase() -> None:
    """Before a phase the peaks are reset, after it they are read; before a micro-step also, at rest."""
    hardware = FakeHardware()
    record(hardware, "micro_step", "update")
    assert hardware.log == ["reset_peaks", "memory", "micro_step", "memory", "reset_peaks", "update", "memory"]


def test_the_trials_peak_is_the_largest_of_all_phases() -> None:
    """A device's peak is its largest in any phase, warm-up included, and so is what others held."""
    hardware = FakeHardware(peaks=[(300, 50), (10, 10), (100, 80), (150, 60)], outside=[100, 100, 120, 110])
    first, second = record(hardware, "warm_up", "micro_step", "update").measurement(SPLIT).memory
    assert (first.device, first.peak_allocated_bytes, first.peak_reserved_bytes) == (0, 300, 310)
    assert (second.device, second.peak_allocated_bytes, second.peak_reserved_bytes) == (1, 80, 90)
    assert first.outside_bytes == second.outside_bytes == 120


def test_the_phases_own_peaks_are_told() -> None:
    """The peaks of micro-steps, updates, a single step, and at rest are given besides, each over
    its own phases only."""
    peaks = [(300, 50), (90, 40), (20, 10), (100, 80), (30, 10), (170, 70), (150, 60)]
    phases = ["warm_up", "single_step", "micro_step", "micro_step", "update"]
    memory = record(FakeHardware(peaks=peaks), *phases).measurement(SPLIT).memory
    assert [device.micro_step_peak_bytes for device in memory] == [170, 80]
    assert [device.update_peak_bytes for device in memory] == [150, 60]
    assert [device.single_step_peak_bytes for device in memory] == [90, 40]
    assert [device.resting_bytes for device in memory] == [30, 10]


@pytest.mark.parametrize(("is_modelled", "told"), [(False, [50, 20]), (True, [70, 30])])
def test_what_a_forward_left_is_read_before_the_backward(is_modelled: bool, told: list[int]) -> None:
    """The most of all micro-steps; on a real clock not while it runs, for asking takes a while."""
    hardware = FakeHardware()
    hardware.is_modelled = is_modelled
    recorder = Recorder(hardware)
    phases: dict[Phase, list[int]] = {
        "warm_up": [50, 10],
        "single_step": [40, 20],
        "micro_step": [70, 30],
        "update": [60, 0],
    }
    for phase, allocated in phases.items():
        hardware.allocated = allocated
        with recorder.phase(phase):
            if phase != "update":
                recorder.before_backward()
        hardware.allocated = [900, 900]
    assert [device.before_backward_bytes for device in recorder.measurement(SPLIT).memory] == told


def test_whole_steps_tell_no_phases_peaks() -> None:
    """In whole steps the phases were not seen apart: their own peaks are not known."""
    memory = record(FakeHardware(), "warm_up", "whole_step").measurement(SPLIT).memory
    assert all(device.micro_step_peak_bytes is None and device.update_peak_bytes is None for device in memory)
    assert all(device.single_step_peak_bytes is None and device.resting_bytes is None for device in memory)


def test_busy_time_is_the_median_micro_steps() -> None:
    """How long each device worked is the median over micro-steps, other phases left out."""
    busy = [(50.0, 50.0), (1.0, 4.0), (2.0, 5.0), (30.0, 6.0), (70.0, 70.0)]
    hardware = FakeHardware(busy=busy)
    measured = record(hardware, "warm_up", *["micro_step"] * 3, "update").measurement(SPLIT)
    assert measured.device_busy_s == (2.0, 5.0)


def test_busy_time_is_that_of_unbroken_rounds_where_they_ran() -> None:
    """Each one's seconds over its micro-steps: without stops, as in training, fewer gaps are among them."""
    rounds = ["micro_step", "micro_step", "update", "unbroken_round"]
    busy = [(2.0, 5.0), (2.0, 5.0), (0.0, 0.0), (3.0, 9.0)]
    longer = [(2.0, 5.0), (2.0, 5.0), (0.0, 0.0), (9.0, 8.0)]
    hardware = FakeHardware(busy=[*busy, *busy, *longer])
    assert record(hardware, *rounds * 3).measurement(SPLIT).device_busy_s == (1.5, 4.5)
    unseen = [*busy[:3], (0.0, 0.0)]
    assert record(FakeHardware(busy=unseen), *rounds).measurement(SPLIT).device_busy_s == (2.0, 5.0)


def test_busy_time_may_be_unknown() -> None:
    """Hardware that cannot tell leaves it None."""
    assert record(FakeHardware(), "micro_step", "update").measurement(SPLIT).device_busy_s is None


def test_busy_time_that_no_replica_spent_is_unknown() -> None:
    """Where in a micro-step no device worked, the job went past what counts: such micro-steps tell nothing."""
    hardware = FakeHardware(busy=[(0.0, 0.0), (0.0, 0.0), (2.0, 0.0), (0.0, 0.0)])
    assert record(hardware, *["micro_step"] * 2, "update").measurement(SPLIT).device_busy_s is None
    hardware = FakeHardware(busy=[(0.0, 0.0), (2.0, 0.0), (1.0, 1.0)])
    assert record(hardware, *["micro_step"] * 2, "update").measurement(SPLIT).device_busy_s == (2.0, 0.0)


def test_retries_of_the_timed_phases_are_counted() -> None:
    """An allocator's retries count, over all cards, where they cost measured time; the warm-up's do not."""
    hardware = FakeHardware(alloc_retries=[7, 0])
    recorder = Recorder(hardware)
    for name, retries in (("warm_up", 5), ("single_step", 3), ("micro_step", 1), ("micro_step", 0), ("update", 2)):
        with recorder.phase(name):  # type: ignore[arg-type]
            hardware.alloc_retries[retries % 2] += retries
    assert recorder.measurement(SPLIT).num_alloc_retries == 3
    assert recorder.measurement(SPLIT).is_on_the_edge


def test_notes_go_with_the_measurement() -> None:
    """What was noted during a trial is kept, in order."""
    recorder = record(FakeHardware(), "micro_step", "update")
    recorder.notes += ["First.", "Second."]
    assert recorder.measurement(SPLIT).notes == ("First.", "Second.")


def test_a_phase_that_fails_is_no_sample() -> None:
    """What did not run through is not recorded, and alone it is no measurement."""
    hardware = FakeHardware(durations_s=count(1.0))
    recorder = Recorder(hardware)
    with pytest.raises(KeyError), recorder.phase("micro_step"):
        raise KeyError
    assert recorder.times_s["micro_step"] == []
    with pytest.raises(ValueError, match="without a measured step"):
        recorder.measurement(SPLIT)


class Copying(FakeHardware):
    """Of every phase its devices stand still for one entry of `copies`."""

    def __init__(self, copies: list[tuple[float, float]], **options: Any) -> None:
        super().__init__(**options)
        self._copies, self._reads = copies, 0

    def copied_s(self) -> tuple[float, ...]:
        """The second of two readings comes one phase later."""
        done = self._copies[: (self._reads + 1) // 2]
        self._reads += 1
        return tuple(sum(each[device] for each in done) for device in range(2))


def test_copies_are_those_of_a_typical_micro_step() -> None:
    """Not of the first and the last of a round, which copy parameters and gradients; dropped ones do not count."""
    once = [(5.0, 4.0), (1.0, 0.5), (3.0, 2.0), (0.0, 0.0)]
    round_of = ("micro_step", "micro_step", "micro_step", "update")
    recorder = record(Copying(2 * once, durations_s=[1.0] * 8), *round_of, *round_of)
    assert recorder.measurement(SPLIT).device_copied_s == (1.0, 0.5)
    recorder.drop_latest(micro_step=3, update=1)
    assert recorder.measurement(SPLIT).device_copied_s == (1.0, 0.5)
    alone = record(Copying(once, durations_s=[1.0] * 4), "micro_step", "update").measurement(SPLIT)
    assert alone.device_copied_s == (5.0, 4.0)
    assert (
        record(FakeHardware(durations_s=[1.0, 1.0]), "micro_step", "update").measurement(SPLIT).device_copied_s is None
    )
