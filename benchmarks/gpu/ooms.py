"""Part 4 of `benchmarks.gpu`: out of memory in each phase of a step, and everything as before afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from benchmarks.gpu.stage import Findings, Measured, Stage, held_bytes, mib
from benchmarks.jobs.gpu_models import NUM_CLASSES
from splittune.cards import module_of
from splittune.hardware import Hardware
from splittune.profiling.measurement import Outcome
from splittune.training import TrainingTask
from splittune.units import MIB, format_bytes

PHASES = ("forward", "loss", "backward", "state", "update")
NUM_BLOCKS = 64
# Torch keeps a little for itself, a generator's state say, in a segment of 2 MiB.
ALLOCATED_WITHIN_BYTES, RESERVED_WITHIN_BYTES = 1 * MIB, 2 * MIB
PEAK_WITHIN = 0.01


class Greed:
    """Takes blocks of memory in one phase until there are none left.

    The state of the optimizer is not helped along: there the limit is placed so that it alone does not fit.
    """

    def __init__(self) -> None:
        self.phase: str | None = None
        self.block_bytes = 0
        self.failed_in: str | None = None
        """The phase in which an allocation was refused."""

    def take(self, phase: str, like: Tensor) -> None:
        if self.phase != phase:
            return
        blocks = []
        try:
            for _ in range(NUM_BLOCKS):
                blocks.append(like.detach().new_zeros((self.block_bytes,), dtype=torch.uint8))  # noqa: PERF401  all at once would be one refusal
        except torch.OutOfMemoryError:
            self.failed_in = phase
            raise


class _TakeInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, greed: Greed) -> Tensor:
        ctx.greed = greed
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.greed.take("backward", grad)
        return grad, None


class GreedyModel(nn.Module):
    """Three wide layers; greedy in the middle of its forward or backward."""

    def __init__(self, width: int, greed: Greed) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width // 4, width), nn.Linear(width, width)
        self.third, self.last = nn.Linear(width, width), nn.Linear(width, NUM_CLASSES)
        self.greed = greed

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.second(functional.relu(self.first(x))))
        self.greed.take("forward", hidden)
        hidden = _TakeInBackward.apply(hidden, self.greed)
        logits: Tensor = self.last(functional.relu(self.third(hidden)))
        return logits


class GreedyAdamW(torch.optim.AdamW):
    """Notes whether it ran out of memory over its first state; greedy in its second update, when there is one."""

    def __init__(self, parameters: Iterable[Tensor], greed: Greed) -> None:
        super().__init__(parameters, lr=1e-4)
        self.greed = greed
        self.num_updates = 0

    def step(self, closure: Any = None) -> Any:
        try:
            result = super().step(closure)
        except torch.OutOfMemoryError:
            self.greed.failed_in = "state" if self.num_updates == 0 else "update"
            raise
        self.num_updates += 1
        if self.num_updates == 2:
            self.greed.take("update", self.param_groups[0]["params"][0])
        return result


def run(stage: Stage, findings: Findings) -> None:
    """A row for each phase."""
    greed = Greed()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stage.seed)
        model = GreedyModel(stage.sizes.greedy_width, greed)
    task = _task(stage, model, greed)
    rooms = _rooms(stage, task, greed)
    for phase in PHASES:
        with stage.limited_to(rooms[phase]) as hardware:
            findings.rows.append(_run_out_in(stage, phase, task, hardware, greed, rooms[phase]))
        _judge(findings, findings.rows[-1])
    stage.table(
        findings.rows,
        [
            "phase",
            "failed_in",
            "outcome",
            "room_mib",
            "allocated_left_bytes",
            "reserved_left_bytes",
            "is_model_unchanged",
            "peak_allocated_change",
        ],
    )


def _task(stage: Stage, model: GreedyModel, greed: Greed) -> TrainingTask:
    generator = torch.Generator().manual_seed(stage.seed)
    inputs = torch.randn(stage.sizes.greedy_batch, stage.sizes.greedy_width // 4, generator=generator)
    targets = torch.randint(NUM_CLASSES, (len(inputs),), generator=generator)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        greed.take("loss", output)
        return functional.cross_entropy(output, target)

    return TrainingTask(
        model, [(inputs, targets)], loss_fn=loss_fn, optimizer=lambda parameters: GreedyAdamW(parameters, greed)
    )


def _rooms(stage: Stage, task: TrainingTask, greed: Greed) -> dict[str, int]:
    """Room for one and a half times a step; for the first state half of what it needs beyond the gradients."""
    with Measured(task, stage.hardware) as job:
        measurement = job.measure(1)
    if measurement.outcome is not Outcome.OK:
        raise RuntimeError(f"the job did not run without a limit: {measurement.message}")
    memory = measurement.memory[0]
    ample = int(1.5 * memory.peak_reserved_bytes)
    greed.block_bytes = ample // 8
    state_bytes = 2 * sum(parameter.nbytes for parameter in task.model.parameters())
    # at rest parameters and state are held, so that without state a micro-step takes that much less
    assert memory.micro_step_peak_bytes is not None
    without_state = memory.micro_step_peak_bytes - state_bytes
    excess = memory.peak_reserved_bytes - memory.peak_allocated_bytes
    return dict.fromkeys(PHASES, ample) | {"state": without_state + excess + state_bytes // 2}


def _run_out_in(
    stage: Stage, phase: str, task: TrainingTask, hardware: Hardware, greed: Greed, room_bytes: int
) -> dict[str, Any]:
    """One trial that runs out of memory in `phase`, and what is left of it; where there is room, one that does not."""
    task.model.to(stage.torch_device)  # found on the card, it must be put back there
    with Measured(task, hardware) as job:
        greed.phase = greed.failed_in = None
        before = None if phase == "state" else job.measure(1)
        weights = [tensor.clone().cpu() for tensor in task.model.state_dict().values()]
        random = (
            module_of(stage.torch_device).get_rng_state(stage.torch_device)
            if not stage.is_rehearsal
            else torch.get_rng_state()
        )
        allocated, reserved = held_bytes(hardware)
        greed.phase = phase
        measurement = job.measure(1)
        greed.phase = None
        allocated_after, reserved_after = held_bytes(hardware)
        random_after = (
            module_of(stage.torch_device).get_rng_state(stage.torch_device)
            if not stage.is_rehearsal
            else torch.get_rng_state()
        )
        found = zip(weights, task.model.state_dict().values(), strict=True)
        row: dict[str, Any] = {
            "phase": phase,
            "failed_in": greed.failed_in,
            "outcome": measurement.outcome.value,
            "room_mib": mib(room_bytes),
            "allocated_before_bytes": allocated,
            "allocated_left_bytes": allocated_after - allocated,
            "reserved_before_bytes": reserved,
            "reserved_left_bytes": reserved_after - reserved,
            "is_model_unchanged": all(torch.equal(was, now.cpu()) for was, now in found)
            and all(parameter.grad is None for parameter in task.model.parameters())
            and all(parameter.device == stage.torch_device for parameter in task.model.parameters()),
            "is_random_unchanged": torch.equal(random, random_after),
            "message": measurement.message,
            "notes": " ".join(measurement.notes),
        }
        if before is not None:
            after = job.measure(1)
            peaks = [m.memory[0].peak_allocated_bytes for m in (before, after) if m.outcome is Outcome.OK]
            row["peak_allocated_change"] = peaks[1] / peaks[0] - 1 if len(peaks) == 2 else None
    task.model.to("cpu")
    return row


def _judge(findings: Findings, row: dict[str, Any]) -> None:
    phase = row["phase"]
    findings.check(
        f"{phase}: the trial ran out of memory in that phase",
        (row["outcome"], row["failed_in"]) == (Outcome.OUT_OF_MEMORY.value, phase),
        f"{row['outcome']} in {row['failed_in']}: {row['message'][:90]}",
    )
    left = row["allocated_left_bytes"], row["reserved_left_bytes"]
    findings.check(
        f"{phase}: memory is back at its baseline",
        left[0] <= ALLOCATED_WITHIN_BYTES and left[1] <= RESERVED_WITHIN_BYTES,
        f"{format_bytes(left[0])} more allocated, {format_bytes(left[1])} more reserved",
    )
    findings.check(
        f"{phase}: weights, gradients, devices and random numbers are as they were",
        row["is_model_unchanged"] and row["is_random_unchanged"],
        f"model {row['is_model_unchanged']}, random numbers {row['is_random_unchanged']}",
    )
    if "peak_allocated_change" in row:
        change = row["peak_allocated_change"]
        findings.check(
            f"{phase}: the next trial runs as the one before",
            change is not None and abs(change) <= PEAK_WITHIN,
            "it did not run" if change is None else f"its peak changed by {change:+.2%}",
        )
