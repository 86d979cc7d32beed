"""One trial: what is run and timed, how it may end, and that the job is as it was afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain, cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from splittune.profiling.measurement import Outcome
from splittune.profiling.profiler import MAX_ROUNDS, MIN_ROUNDS, NUM_WARM_UPS, NUM_WHOLE_STEPS, Profiler
from splittune.split import BatchSplit
from splittune.training import TrainingTask, read_batches
from tests.profiling.fake_hardware import FakeHardware
from tests.training.state import state_of

B = 64


class Model(nn.Module):
    """Counts its samples in a buffer; `on_forward` may fail."""

    def __init__(self, on_forward: Callable[[Tensor], None] = lambda x: None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.backbone = nn.BatchNorm1d(2)
        self.on_forward = on_forward

    def forward(self, x: Tensor) -> Tensor:
        self.on_forward(x)
        return self.linear(self.backbone(x) if len(x) > 1 else x)


class Job:
    """A task that writes down the size of every micro-step, and 'update' for every update."""

    def __init__(self, hardware: FakeHardware, **options: Any) -> None:
        self.hardware = hardware
        self.steps: list[int | str] = []
        self.model = options.pop("model", None) or Model()
        self.on_update: Callable[[], None] = options.pop("on_update", lambda: None)
        demands = options.pop("min_headroom_bytes", 0)
        job = self

        class Sgd(optim.SGD):
            def step(self, closure: Any = None) -> None:
                job.steps.append("update")
                job.on_update()
                super().step()

        self.optimizer = Sgd(self.model.parameters(), lr=0.1, momentum=0.9)
        loader = [(torch.randn(B, 2), torch.randn(B, 1))]
        self.task = TrainingTask(self.model, loader, loss_fn=self._loss, optimizer=self.optimizer, **options)
        self.state = state_of(self.model, self.optimizer)
        self.profiler = Profiler(
            self.task, hardware, read_batches(loader), self.task.snapshot(), min_headroom_bytes=demands
        )

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        self.steps.append(len(output))
        return nn.functional.mse_loss(output, targets)


def split(accumulation_steps: int) -> BatchSplit:
    return BatchSplit.even(global_batch_size=B, accumulation_steps=accumulation_steps, num_devices=2)


# what is run


@pytest.mark.parametrize(("accumulation_steps", "num_micro_steps"), [(1, 1), (2, 2), (3, 3), (4, 3), (32, 3), (64, 3)])
def test_a_trial_costs_no_more_with_many_accumulation_steps(accumulation_steps: int, num_micro_steps: int) -> None:
    """Warm-ups, then rounds of one to three micro-steps of the largest size and an update, however large k is."""
    job = Job(FakeHardware())
    measured = job.profiler.measure(split(accumulation_steps))
    size = -(-B // accumulation_steps)
    one_round = [*[size] * num_micro_steps, "update"]
    assert job.steps == [size, "update"] * NUM_WARM_UPS + one_round * MIN_ROUNDS
    assert len(measured.micro_step_times_s) == (1 if num_micro_steps == 3 else num_micro_steps) * MIN_ROUNDS
    assert len(measured.update_times_s) == MIN_ROUNDS


def test_a_modelled_clock_is_asked_once() -> None:
    """A clock that repeats itself exactly needs one warm-up and one round, and one whole step."""
    job = Job(FakeHardware(is_modelled=True))
    job.profiler.measure(split(4))
    assert job.steps == [16, "update", 16, 16, 16, "update"]
    job.steps.clear()
    job.profiler.measure_whole_steps(split(3))
    assert job.steps == [22, "update", 22, 21, 21, "update"]


def test_whole_steps_run_every_micro_batch() -> None:
    """Whole steps run k micro-batches of the sizes that training will have, then the update, each timed as one."""
    job = Job(FakeHardware(durations_s=[9.0, *range(1, NUM_WHOLE_STEPS + 1)]))
    measured = job.profiler.measure_whole_steps(split(5))
    assert split(5).micro_batch_sizes == (13, 13, 13, 13, 12)
    assert job.steps == [13, "update"] + [13, 13, 13, 13, 12, "update"] * NUM_WHOLE_STEPS
    assert measured.whole_step_times_s == tuple(range(1, NUM_WHOLE_STEPS + 1))
    assert measured.step_time_s == 3.0


# times


def test_the_median_counts() -> None:
    """One slow micro-step changes nothing; the step's time is k medians and the median update."""
    one_round = [2.0, 2.0, 2.0, 0.5]
    hardware = FakeHardware(durations_s=[9.0] * NUM_WARM_UPS + [2.0, 40.0, 2.0, 0.5] + one_round * (MAX_ROUNDS - 1))
    measured = Job(hardware).profiler.measure(split(8))
    assert measured.step_time_s == 8 * 2.0 + 0.5
    assert measured.is_noisy  # one in four


def test_rounds_go_on_until_they_settle() -> None:
    """Rounds are run until the last three agree within 2 %: here the first two were still slow."""
    rounds = [5.0, 1.0, 3.0, 1.0, 2.0, 1.0, 2.015625, 1.0, 2.03125, 1.0]
    hardware = FakeHardware(durations_s=chain([9.0] * NUM_WARM_UPS, rounds))
    measured = Job(hardware).profiler.measure(split(1))
    assert measured.micro_step_times_s == (5.0, 3.0, 2.0, 2.015625, 2.03125)


def test_rounds_end_on_a_clock_that_never_settles() -> None:
    """After ten rounds it ends, and the measurement says that it is noisy."""
    hardware = FakeHardware(durations_s=cycle([1.0, 1.0, 3.0, 1.0, 9.0, 1.0]))
    measured = Job(hardware).profiler.measure(split(1))
    assert len(measured.micro_step_times_s) == MAX_ROUNDS
    assert measured.is_noisy


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
        "metered", "wrap", "prepare Sgd", "unmetered", "recover",
    ]  # fmt: skip


def test_the_job_is_put_back_even_if_the_devices_do_not_recover() -> None:
    """An error of the devices' own recovery leaves, and the job is as it was all the same."""

    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    job = Job(FakeHardware(on_recover=fail))
    with pytest.raises(RuntimeError, match="device-side assert"):
        job.profiler.measure(split(2))
    assert state_of(job.model, job.optimizer) == job.state


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
