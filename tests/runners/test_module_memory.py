"""The activations of each module, accounted on shapes."""

from __future__ import annotations

import torch
from torch import nn

from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import VirtualHardware
from splittune.runners.shapes import ShapeRunner
from splittune.training import TrainingTask

WIDTH = 64


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).relu())


def job(model: nn.Module) -> TrainingTask:
    inputs = torch.zeros(8, WIDTH)
    return TrainingTask(model, [(inputs, torch.zeros(8, WIDTH))], loss_fn=nn.functional.mse_loss)


def cards() -> VirtualHardware:
    hardware = resolve_hardware("2xT4")
    assert isinstance(hardware, VirtualHardware)
    return hardware


def test_each_module_has_what_its_forward_keeps() -> None:
    """`first` keeps its inputs, the model its ReLU's result, which `second` keeps too; the loss outputs and targets."""
    model = Layers()
    runner = ShapeRunner(job(model), cards())
    try:
        facts = runner.open(["output"])
    finally:
        runner.close()
    kept = {module.name: module.activation_bytes for module in facts.modules}
    assert kept == {"first": 4 * WIDTH, "(itself)": 4 * 2 * WIDTH, "second": 0, "(outside)": 4 * 2 * WIDTH}
    sizes = {module.name: module.parameter_bytes for module in facts.modules}
    assert sum(sizes.values()) == sum(parameter.nbytes for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert type(facts).from_dict(facts.to_dict()) == facts


def test_they_are_not_looked_at_where_nobody_asks() -> None:
    """The parameters are told, and no forward is run."""
    runner = ShapeRunner(job(Layers()), cards(), looks_at_modules=False)
    try:
        facts = runner.open(["output"])
    finally:
        runner.close()
    assert {module.name: module.activation_bytes for module in facts.modules} == {"first": None, "second": None}


def test_a_step_that_refuses_two_samples_loses_its_activations_alone() -> None:
    """The parameters are told all the same, and the search goes on."""

    class Picky(Layers):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if len(inputs) < 4:
                raise ValueError("at least 4 samples")
            return super().forward(inputs)

    runner = ShapeRunner(job(Picky()), cards())
    try:
        facts = runner.open(["output"])
    finally:
        runner.close()
    assert {module.name for module in facts.modules} == {"first", "second"}
    assert {module.activation_bytes for module in facts.modules} == {None}
