"""Trials on shapes give what trials on real tensors give, touch nothing of the job, and say when values are needed."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import VirtualHardware
from splittune.profiling.measurement import Measurement, Outcome
from splittune.runners.in_process import InProcessRunner
from splittune.runners.shapes import ShapeRunner
from splittune.split import BatchSplit
from splittune.training import TrainingTask, saved
from tests.runners.jobs import JOBS, mlp, vectors

SPLITS = [
    BatchSplit(global_batch_size=16, accumulation_steps=k, shard_sizes=shards)
    for k, shards in ((1, (4, 6, 6)), (2, (0, 4, 4)), (2, (4, 2, 2)))
]


# the fields that hold times, with what leaves them out of a comparison
TIMELESS: dict[str, Any] = {
    "micro_step_times_s": (1.0,),
    "update_times_s": (1.0,),
    "device_busy_s": None,
    "device_copied_s": None,
}


def cards(spec: str = "3xT400-4GB") -> VirtualHardware:
    hardware = resolve_hardware(spec)
    assert isinstance(hardware, VirtualHardware)
    return hardware


def measured(runner: Any) -> list[Measurement]:
    try:
        runner.open(["output"])
        profiler = runner.profiler(min_headroom_bytes=(0, 0, 0), loss_placement="output")
        return [profiler.measure(split) for split in SPLITS]
    finally:
        runner.close()


@pytest.mark.parametrize("name", JOBS)
def test_shapes_give_what_real_tensors_give(name: str) -> None:
    """Outcomes and peaks to the byte, times to nine digits: only the first step asks whether the loss is finite."""
    torch.manual_seed(0)
    task = JOBS[name]()
    runner = ShapeRunner(task, cards())
    on_shapes = measured(runner)
    assert runner.needs_values is None
    for mine, real in zip(on_shapes, measured(InProcessRunner(task, cards())), strict=True):
        assert replace(mine, **TIMELESS) == replace(real, **TIMELESS)
        # the statistics of a normalisation in bfloat16: by torch's rule for shapes in that, by its kernel in float32
        digits = 2e-2 if name == "bfloat16" else 1e-9
        for times in TIMELESS:
            assert getattr(mine, times) == pytest.approx(getattr(real, times), rel=digits)
    assert {each.outcome for each in on_shapes} == {Outcome.OK}


@pytest.mark.parametrize("name", JOBS)
def test_the_job_is_only_read(name: str) -> None:
    """Weights, gradients, statistics, the optimizer's state and every generator are as they were."""
    torch.manual_seed(0)
    task = JOBS[name]()
    before = {key: value.clone() for key, value in task.model.state_dict().items()}
    adams = copy.deepcopy(task.optimizer.state_dict()) if isinstance(task.optimizer, torch.optim.Optimizer) else None
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    measured(ShapeRunner(task, cards()))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    for key, value in task.model.state_dict().items():
        assert torch.equal(value, before[key])
    assert all(type(parameter) is nn.Parameter and parameter.grad is None for parameter in task.model.parameters())
    if isinstance(task.optimizer, torch.optim.Optimizer):
        assert str(task.optimizer.state_dict()) == str(adams)
    assert task.model.training


def test_what_the_jobs_functions_change_is_put_back() -> None:
    """Random generators that the loader and the step draw from, and a list of losses that the step keeps."""
    losses = [torch.ones(())]

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = functional.cross_entropy(model(batch[0]), batch[1]) * (1 + random.random() * torch.rand(()).item() * 0)
        losses.append(loss.detach())
        return loss

    def easy_step(model: nn.Module, batch: Any) -> Tensor:
        random.random()
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        losses.append(loss.detach())
        return loss

    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
    for function, needs_values in ((easy_step, False), (step, True)):
        loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
        task = TrainingTask(mlp(), loader, step_fn=function)
        torch_state, python_state = torch.get_rng_state(), random.getstate()
        runner = ShapeRunner(task, cards())
        measured(runner)
        assert (runner.needs_values is not None) == needs_values
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert random.getstate() == python_state
        assert [type(each) for each in losses] == [Tensor]


def test_what_the_jobs_functions_write_to_past_the_copy_is_put_back() -> None:
    """The loader counts in a buffer of the model, and the step changes a parameter of the model that it closes over."""
    model = mlp()
    model.register_buffer("num_read", torch.zeros(1))
    bias = model[0].bias
    before = {key: value.clone() for key, value in model.state_dict().items()}
    versions = []

    class Counting(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            model.num_read.add_(1)
            return torch.ones(6), index % 3

    def step(given: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            bias.add_(1)
        versions.append(bias._version)
        return functional.cross_entropy(given(batch[0]), batch[1])

    loader = torch.utils.data.DataLoader(Counting(), batch_size=16)
    runner = ShapeRunner(TrainingTask(model, loader, step_fn=step), cards())
    measured(runner)
    assert runner.needs_values is None
    assert model.num_read._version > 0
    assert versions == list(range(versions[0], versions[0] + len(versions)))  # written to each time
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_a_model_that_is_only_read_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes no memory for the values of its job."""
    copied = []
    monkeypatch.setattr(saved, "_host_copy", copied.append)
    assert {each.outcome for each in measured(ShapeRunner(TrainingTask(mlp(), vectors()), cards()))} == {Outcome.OK}
    assert not copied


def test_a_step_that_reads_a_value_goes_on_with_real_tensors(caplog: pytest.LogCaptureFixture) -> None:
    """Which line of whose code that is is said once, and the figures are those of real tensors."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        if len(batch[0]) < 16 and loss.item() > 100:
            raise AssertionError("diverged")
        return loss

    task = TrainingTask(mlp(), vectors(), step_fn=step)
    runner = ShapeRunner(task, cards())
    found = measured(runner)
    assert runner.needs_values is not None
    assert "test_shapes.py:" in runner.needs_values
    assert runner.needs_values.endswith("in step: if len(batch[0]) < 16 and loss.item() > 100:")
    assert caplog.text.count("Trials run on real tensors") == 1
    assert found[1:] == measured(InProcessRunner(task, cards()))[1:]  # the first did without values


def test_a_teacher_beside_the_model_is_not_copied() -> None:
    """Its weights would be inside the step: such a job runs on real tensors from the start."""
    teacher = nn.Linear(6, 3)

    def step(model: nn.Module, batch: Any) -> Tensor:
        return functional.mse_loss(model(batch[0]), teacher(batch[0]).detach())

    runner = ShapeRunner(TrainingTask(mlp(), vectors(), step_fn=step), cards())
    assert runner.needs_values == "the step uses Linear beside the model, which are not copied"
    assert {each.outcome for each in measured(runner)} == {Outcome.OK}


def test_a_gradient_scaler_needs_values() -> None:
    """It looks whether gradients are finite."""
    scaler = torch.amp.GradScaler("cpu")
    runner = ShapeRunner(TrainingTask(mlp(), vectors(), grad_scaler=scaler), cards())
    assert runner.needs_values is not None
    assert "finite" in runner.needs_values


def test_cards_larger_than_this_machine_are_filled() -> None:
    """A step that would take 100 GiB of this machine's memory runs out of it on the card that it does not fit."""
    task = TrainingTask(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))), [(torch.ones(4, 1024),) * 2])
    split = BatchSplit(global_batch_size=2**21, accumulation_steps=1, shard_sizes=(2**20, 2**19, 2**19))
    runner = ShapeRunner(task, cards("3xA100-80GB"))
    try:
        runner.open(["output"])
        measurement = runner.profiler(min_headroom_bytes=(0, 0, 0), loss_placement="output").measure(split)
    finally:
        runner.close()
    assert runner.needs_values is None
    assert measurement.outcome is Outcome.OK
    assert 30 * 2**30 < measurement.memory[0].peak_reserved_bytes < 80 * 2**30
