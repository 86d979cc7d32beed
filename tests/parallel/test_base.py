"""SplitModule: whoever implements it is trained like any other wrapper."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import splittune
from splittune.config import SplitConfig
from splittune.hardware.base import Device
from splittune.parallel import BalancedDataParallel, SplitModule
from splittune.split import BatchSplit
from splittune.training import TrainingStep, TrainingTask, read_batches
from tests.parallel.models import CPU, assert_same, gradients, mlp, vectors

SPLIT = BatchSplit(global_batch_size=5, accumulation_steps=3, shard_sizes=(2,))


class Alone(SplitModule):
    """The module by itself, as another kind of wrapper might run it; it counts what is asked of it."""

    computes_loss = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.devices, self.output_device = module, (CPU,), CPU
        self.num_held_back = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.num_held_back += 1
        yield

    def to_output(self, tree: Any) -> Any:
        return tree

    def weight_of(self, batch: Any, num_samples: int) -> float:
        return float(num_samples)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return vectors(5), torch.randn(5, 3)


def expected_of(module: nn.Module) -> dict[str, Tensor | None]:
    inputs, targets = batch()
    twin = copy.deepcopy(module)
    nn.functional.mse_loss(twin(inputs), targets).backward()
    return gradients(twin)


def test_the_wrapper_is_one() -> None:
    """And so is everything that must be there to be one."""
    module = mlp()
    wrapped = BalancedDataParallel(module=module, shard_sizes=(2,), device_ids=["cpu"])
    assert isinstance(wrapped, SplitModule)
    assert (wrapped.unwrap(), wrapped.devices, wrapped.output_device) == (module, (CPU,), CPU)


def test_one_that_lacks_something_cannot_be_made() -> None:
    """What a wrapper must say for itself is said by Python when it is made."""

    class Silent(SplitModule):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Silent()


def test_another_kind_is_trained_by_the_tuner() -> None:
    """A trial's step needs no more of it: micro-batches whose gradients are held back but for the last one's."""
    module = mlp()
    model, loader = Alone(module), [batch()]
    job = TrainingTask(module, loader, optimizer=lambda parameters: optim.SGD(parameters, lr=0.0))
    step = TrainingStep(job, model, job.make_optimizer(), SPLIT, read_batches(loader))
    for number, size in enumerate(SPLIT.micro_batch_sizes, start=1):
        step.micro_step(size, last=number == SPLIT.accumulation_steps)
    assert model.num_held_back == 2
    assert all(gradient is not None and gradient.any() for gradient in gradients(module).values())


def test_another_kind_is_trained_under_a_config() -> None:
    """micro_batches() holds the gradients back and weighs by what the wrapper says."""
    module = mlp()
    expected, model = expected_of(module), Alone(module)
    device = Device(index=0, name="any", torch_device="cpu", total_bytes=1)
    config = SplitConfig(split=SPLIT, devices=(device,), min_headroom_bytes=(0,), is_modelled=False)
    for micro in config.micro_batches(batch(), model):
        inputs, targets = micro.batch
        loss = nn.functional.mse_loss(model(inputs), model.to_output(targets))
        (loss * micro.weight).backward()
    assert model.num_held_back == 2
    assert_same(gradients(module), expected)


def test_only_hardware_names_the_wrapper_itself() -> None:
    """Above it everybody names the seam, so that a second wrapper needs no change there."""
    house = Path(splittune.__file__).parent
    naming = [
        str(path.relative_to(house))
        for path in house.rglob("*.py")
        if any(
            isinstance(node, ast.Name) and node.id == "BalancedDataParallel"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    ]
    assert sorted(naming) == [
        "hardware/cuda/hardware.py",
        "hardware/virtual/hardware.py",
        "parallel/functional.py",
    ]
