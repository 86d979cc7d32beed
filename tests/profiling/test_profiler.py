"""One trial: what is run and timed, how it may end, and that the job is as it was afterwards."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from splittune.profiling.measurement import Outcome
from splittune.units import MIB
from tests.profiling.fake_hardware import FakeHardware
from tests.profiling.job import Job, Model, split
from tests.training.state import state_of

# how a trial ends


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB\nmore"), RuntimeError("CUDA error: out of memory")],
)
@pytest.mark.parametrize("place", ["forward", "update"])
def test_running_out_of_memory_is_an_outcome(place: str, error: Exception) -> None:
    """An out-of-memory error anywhere in a trial is its outcome: no times, the readings, and the error's first line."""

    def fail(*_: Any) -> None:
        raise error

    hooks: dict[str, Any] = {"model": Model(fail)} if place == "forward" else {"on_update": fail}
    job = Job(FakeHardware(), **hooks)
    for measure in (job.profiler.measure, job.profiler.measure_whole_steps):
        measured = measure(split(2))
        assert measured.outcome is Outcome.OUT_OF_MEMORY
        assert measured.throughput is None
        assert [device.peak_allocated_bytes for device in measured.memory] == [200, 100]
        assert "out of memory" in measured.message
        assert "\n" not in measured.message


@pytest.mark.parametrize("free", [(50 * MIB, 1024 * MIB), (1024 * MIB, 1024 * MIB), None])
def test_a_handle_that_cannot_be_created_is_an_outcome_on_a_full_card(free: tuple[int, ...] | None) -> None:
    """cuBLAS says the same for want of memory and after a bug: the cards, as full as they were then, decide."""

    def fail() -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")

    hardware = FakeHardware(free=free)
    hardware.on_recover = lambda: setattr(hardware, "free", (1024 * MIB, 1024 * MIB))
    job = Job(hardware, on_update=fail)
    if free is not None and min(free) == 50 * MIB:
        measured = job.profiler.measure(split(2))
        assert measured.outcome is Outcome.OUT_OF_MEMORY
        assert measured.message.startswith("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED")
    else:
        with pytest.raises(RuntimeError, match="NOT_INITIALIZED"):
            job.profiler.measure(split(2))
    assert state_of(job.model, job.optimizer) == job.state


@pytest.mark.parametrize(("located", "expected"), [(None, "CUDA out of memory"), (1, "device 1: CUDA out of memory")])
def test_the_device_that_ran_out_leads_the_message(located: int | None, expected: str) -> None:
    """Where the hardware can tell which device an error is about, the message begins with it: the search reads it."""

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    job = Job(FakeHardware(located=located), on_update=fail)
    assert job.profiler.measure(split(2)).message == expected


def test_an_error_without_words_is_named_by_its_type() -> None:
    """A MemoryError says nothing: its type does."""

    def fail() -> None:
        raise MemoryError

    assert Job(FakeHardware(), on_update=fail).profiler.measure(split(2)).message == "MemoryError"


@pytest.mark.parametrize("demands", [700, (691, 0), (0, 791)])
def test_too_little_headroom_is_an_outcome(demands: Any) -> None:
    """1,000 in all - 100 outside - 210 and 110 reserved leave 690 and 790: a device below its demand is the outcome."""
    measured = Job(FakeHardware(), min_headroom_bytes=demands).profiler.measure(split(2))
    assert measured.outcome is Outcome.NO_HEADROOM
    assert measured.step_time_s is not None
    assert "demanded" in measured.message


@pytest.mark.parametrize("demands", [690, (690, 790)])
def test_headroom_that_is_just_kept_is_enough(demands: Any) -> None:
    """A device that keeps exactly what is demanded has kept it."""
    assert Job(FakeHardware(), min_headroom_bytes=demands).profiler.measure(split(2)).outcome is Outcome.OK


@pytest.mark.parametrize("error", [ValueError("mine"), RuntimeError("shapes"), KeyboardInterrupt(), SystemExit(3)])
def test_every_other_exception_passes_through(error: BaseException) -> None:
    """The user's own exception leaves as it is, the very object, and the job is as it was."""

    def fail() -> None:
        raise error

    job = Job(FakeHardware(), on_update=fail)
    with pytest.raises(type(error)) as caught:
        job.profiler.measure(split(2))
    assert caught.value is error
    assert "recover, an exception in flight" in job.hardware.log
    job.profiler._snapshot.restore_gradients()
    assert state_of(job.model, job.optimizer) == job.state


# as found


@pytest.mark.parametrize("outcome", ["ok", "oom"])
def test_the_job_is_as_it_was_after_each_trial(outcome: str) -> None:
    """After any trial model and optimizer are as they were, so the next one starts from the same place."""
    seen: list[Tensor] = []

    def remember() -> None:
        if outcome == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = Model(lambda x: seen.append(model.linear.weight.detach().clone()))
    job = Job(FakeHardware(is_modelled=True), model=model, on_update=remember)
    for measure in (job.profiler.measure, job.profiler.measure_whole_steps, job.profiler.measure):
        seen.clear()
        measure(split(1))
        assert state_of(model, job.optimizer) == job.state
        assert torch.equal(seen[0], model.linear.weight)


def test_a_failed_step_holds_nothing_when_memory_is_recovered() -> None:
    """Tensors of the step that ran out of memory are gone before the devices are asked to recover."""
    held: list[weakref.ref[Tensor]] = []

    def fail(x: Tensor) -> None:
        activation = x * 2
        held.append(weakref.ref(activation))
        raise torch.OutOfMemoryError("CUDA out of memory")

    hardware = FakeHardware()
    alive: list[bool] = []
    hardware.on_recover = lambda: alive.extend(ref() is not None for ref in held)
    Job(hardware, model=Model(fail)).profiler.measure(split(2))
    assert alive
    assert not any(alive)
    assert hardware.told("metered", "wrap", "prepare Sgd", "unmetered", "recover") == [
        "metered",
        "wrap",
        "prepare Sgd",
        "unmetered",
        "recover",
    ]


def test_the_job_is_put_back_even_if_the_devices_do_not_recover() -> None:
    """An error of the devices' own recovery leaves, and the job is as it was all the same."""

    def fail() -> None:
        raise RuntimeError("CUDA error: unknown error")

    job = Job(FakeHardware(on_recover=fail))
    with pytest.raises(RuntimeError, match="unknown error"):
        job.profiler.measure(split(2))
    assert state_of(job.model, job.optimizer) == job.state


# what is left behind


def test_memory_that_stays_is_recovered_once_more() -> None:
    """What the first recovery leaves is recovered thoroughly; if that frees it, nothing is said."""
    hardware = FakeHardware()

    def hold() -> None:
        hardware.allocated[1] = 20 * MIB

    def free() -> None:
        if hardware.log[-1] == "recover thoroughly":
            hardware.allocated[1] = 0

    hardware.on_recover = free
    measured = Job(hardware, on_update=hold).profiler.measure(split(2))
    assert hardware.told("recover", "recover thoroughly") == ["recover", "recover thoroughly"]
    assert measured.notes == ()


def test_memory_that_stays_for_good_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """What not even that frees is named with device, bytes and holder, once; what is added later is told again."""
    hardware = FakeHardware()
    model = Model()
    job = Job(hardware, model=model)
    kept: list[Tensor] = []

    def hold() -> None:
        if not kept:
            kept.append(torch.zeros(5 * MIB))
        hardware.allocated[1] = kept[0].nbytes

    job.on_update = hold
    first, second = (job.profiler.measure(split(2)).notes for _ in range(2))
    assert first == ("20.0 MiB more than before the first trial stay allocated on device 1.",)
    assert second == ()
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith(first[0])
    assert "(5242880,) of torch.float32, 20.0 MiB, held by a list in " in warning
    hardware.allocated[0] = 17 * MIB
    assert job.profiler.measure(split(2)).notes == (
        "17.0 MiB more than before the first trial stay allocated on device 0.",
    )


def test_a_little_that_stays_is_not_told() -> None:
    """Up to 16 MiB, or 1 % of what was held before, is torch's own: no second recovery, no note."""
    hardware = FakeHardware(allocated=[10_000 * MIB, 0])

    def hold() -> None:
        hardware.allocated[:] = [10_100 * MIB, 16 * MIB]

    assert Job(hardware, on_update=hold).profiler.measure(split(2)).notes == ()
    assert hardware.told("recover thoroughly") == []


# other programs, heat


def disturbed(hardware: FakeHardware, amounts: list[int], *, settle: bool = True) -> tuple[Job, list[int]]:
    """A job with a trial behind it, in each of whose trials from then on others take the next of
    `amounts` on device 1."""
    job = Job(hardware)
    if settle:
        job.profiler.measure(split(2))
    left = iter(amounts)
    num_trials = [0]
    wrap = hardware.wrap

    def wrap_and_take(*args: Any, **options: Any) -> Any:
        num_trials[0] += 1
        hardware.others_hold[1] += next(left, 0)
        return wrap(*args, **options)

    hardware.wrap = wrap_and_take  # type: ignore[method-assign]
    return job, num_trials


@pytest.mark.parametrize(
    ("amount", "change"),
    [(2048 * MIB, "other programs took 2.00 GiB"), (-2048 * MIB, "other programs gave back 2.00 GiB")],
)
def test_a_trial_that_another_program_disturbs_is_measured_again(
    amount: int, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that others take or give back during a trial: it is run once more, that one counts, and both are told."""
    hardware = FakeHardware(others_hold=[0, 4096 * MIB])
    job, num_trials = disturbed(hardware, [amount])
    measured = job.profiler.measure(split(2))
    assert num_trials == [2]
    assert measured.notes == (f"Measured again: {change} on device 1 during the trial.",)
    assert measured.memory[1].outside_bytes == 100 + 4096 * MIB + amount
    assert change[1:] in caplog.text
    caplog.clear()
    assert job.profiler.measure(split(2)).notes == ()


def test_a_trial_is_measured_again_once_only() -> None:
    """Where the second run is disturbed as well it counts all the same, and its notes say both."""
    job, num_trials = disturbed(FakeHardware(), [1024 * MIB, 2048 * MIB])
    measured = job.profiler.measure(split(2))
    assert num_trials == [2]
    assert measured.notes == (
        "Measured again: other programs took 1.00 GiB on device 1 during the trial.",
        "Other programs took 2.00 GiB on device 1 during the trial.",
    )


def test_running_out_of_memory_beside_another_program_is_tried_again() -> None:
    """A trial that failed while others took memory may fit once they are done: it is run once more."""
    hardware = FakeHardware()
    job, num_trials = disturbed(hardware, [1024 * MIB])

    def fail_at_first() -> None:
        if num_trials == [1]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    job.on_update = fail_at_first
    measured = job.profiler.measure(split(2))
    assert measured.outcome is not Outcome.OUT_OF_MEMORY
    assert measured.update_times_s
    assert num_trials == [2]


def test_our_own_context_is_not_another_program() -> None:
    """Until a trial has run through, what grows outside our allocator is the CUDA context: nothing is repeated."""
    job, num_trials = disturbed(FakeHardware(), [500 * MIB, 300 * MIB], settle=False)
    assert job.profiler.measure(split(2)).notes == ()
    assert num_trials == [1]
    assert job.profiler.measure(split(2)).notes != ()


def test_small_changes_outside_are_nobodys_business() -> None:
    """Up to 128 MiB more or less is not told."""
    job, num_trials = disturbed(FakeHardware(others_hold=[0, 300 * MIB]), [128 * MIB, -128 * MIB])
    assert job.profiler.measure(split(2)).notes == job.profiler.measure(split(2)).notes == ()
    assert num_trials == [2]


def test_changes_between_trials_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """What others took since the trial before is noted and logged; this trial is sound and is not repeated."""
    hardware = FakeHardware()
    job, num_trials = disturbed(hardware, [])
    hardware.others_hold[0] = 1024 * MIB
    measured = job.profiler.measure(split(2))
    assert measured.notes == ("Other programs took 1.00 GiB on device 0 since the trial before.",)
    assert num_trials == [1]
    assert "Trials measured earlier had other memory to work with." in caplog.text


def test_what_was_told_before_a_trial_stays_with_its_repeat() -> None:
    """A change since the trial before and one during this trial are both in the notes of the second run."""
    hardware = FakeHardware()
    job, _ = disturbed(hardware, [1024 * MIB])
    hardware.others_hold[0] = 2048 * MIB
    assert job.profiler.measure(split(2)).notes == (
        "Other programs took 2.00 GiB on device 0 since the trial before.",
        "Measured again: other programs took 1.00 GiB on device 1 during the trial.",
    )


def test_a_split_on_the_edge_is_told() -> None:
    """An allocator that tries again during the timed steps is counted and noted, and the trial stands."""
    hardware = FakeHardware()

    def try_again() -> None:
        hardware.alloc_retries[1] += 1

    measured = Job(hardware, on_update=try_again).profiler.measure(split(2))
    assert measured.outcome is Outcome.OK
    assert measured.num_alloc_retries == len(measured.update_times_s + measured.unbroken_round_times_s) == 6
    assert measured.is_on_the_edge
    assert measured.notes == (
        "Allocators handed their cache back 6 times in the timed steps: this split only just fits.",
    )


def test_a_throttled_trial_is_marked_and_measured_again() -> None:
    """A device that was slowed down at the end of the timed steps: the trial is run once more, and says so."""
    hardware = FakeHardware(throttled=[(), ("hardware thermal slowdown",)])
    job, num_trials = disturbed(hardware, [])
    note = "Device 1 was throttled: hardware thermal slowdown."
    measured = job.profiler.measure(split(2))
    assert num_trials == [2]
    assert measured.notes == (f"Measured again: {note[0].lower()}{note[1:]}", note)


def test_a_power_cap_is_marked_only() -> None:
    """A card at its power cap will be there in training too: it is noted, and measuring again would not help."""
    hardware = FakeHardware(throttled=[("power cap",), ()])
    job, num_trials = disturbed(hardware, [], settle=False)
    assert job.profiler.measure(split(2)).notes == ("Device 0 was throttled: power cap.",)
    assert num_trials == [1]


def test_modelled_devices_are_not_watched() -> None:
    """On virtual devices a trial is run once, recovered once, and asks for nothing more."""
    hardware = FakeHardware(is_modelled=True, throttled=[("hardware slowdown",), ()])
    job, num_trials = disturbed(hardware, [1024 * MIB], settle=False)

    def hold() -> None:
        hardware.allocated[:] = [1024 * MIB, 0]

    job.on_update = hold
    assert job.profiler.measure(split(2)).notes == ()
    assert num_trials == [1]
    assert hardware.told("recover", "recover thoroughly") == ["recover"]


# devices that cannot be used any more


def unusable() -> RuntimeError:
    return RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize("place", ["update", "recovery"])
def test_after_a_sticky_error_the_devices_are_left_alone(place: str) -> None:
    """It leaves as the object that was raised, with a note; the job is put back, and no recovery follows it."""
    error = unusable()

    def fail() -> None:
        raise error

    hardware = FakeHardware(**({"on_recover": fail} if place == "recovery" else {}))
    job = Job(hardware, **({"on_update": fail} if place == "update" else {}))
    with pytest.raises(RuntimeError) as caught:
        job.profiler.measure(split(2))
    assert caught.value is error
    assert hardware.told("recover", "recover thoroughly") == (["recover"] if place == "recovery" else [])
    assert state_of(job.model, job.optimizer) == job.state
    assert str(error) == "CUDA error: device-side assert triggered"
    if hasattr(error, "__notes__"):  # from Python 3.11 on
        (note,) = error.__notes__
        assert "Start a new process; trials that were finished are in the storage" in note


def test_a_sticky_error_is_not_hidden_by_what_it_makes_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Putting the job back fails on such devices: the first error is what leaves."""
    error = unusable()

    def fail() -> None:
        raise error

    job = Job(FakeHardware(), on_update=fail)

    def fail_again() -> None:
        raise unusable()

    monkeypatch.setattr(job.profiler._snapshot, "restore", fail_again)
    with pytest.raises(RuntimeError) as caught:
        job.profiler.measure(split(2))
    assert caught.value is error


def test_out_of_memory_on_the_way_to_a_sticky_error_is_no_outcome() -> None:
    """An error that is both, a kernel's failure while memory ran out, ends the search: the process
    has lost its devices."""

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory") from unusable()

    with pytest.raises(torch.OutOfMemoryError):
        Job(FakeHardware(), on_update=fail).profiler.measure(split(2))


@pytest.mark.parametrize(("model_trains", "backbone_trains"), [(True, True), (True, False), (False, True)])
def test_trials_train_and_keep_what_the_user_froze(model_trains: bool, backbone_trains: bool) -> None:
    """A model found in eval mode is trained on; one in train mode keeps a part that the user put in eval mode."""
    modes = []
    model = Model(lambda x: modes.append((model.training, model.backbone.training)))
    model.train(model_trains)
    model.backbone.train(backbone_trains)
    job = Job(FakeHardware(is_modelled=True), model=model)
    job.profiler.measure(split(1))
    assert modes[0] == (True, backbone_trains)
    assert (model.training, model.backbone.training) == (model_trains, backbone_trains)


def test_further_models_are_adopted_and_their_optimizers_prepared() -> None:
    """What a step uses beside the model is made known to the devices before the trial, each module by itself."""
    critic = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    optimizer = torch.optim.Adam(critic.parameters())
    hardware = FakeHardware()
    job = Job(hardware, other_state=(critic, optimizer))
    job.profiler.measure(split(1))
    assert hardware.told("prepare Sgd", "adopt Linear", "adopt Model", "adopt ReLU", "prepare Adam") == [
        "prepare Sgd",
        "adopt Linear",
        "prepare Adam",
    ]
