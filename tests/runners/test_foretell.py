"""Splits of a job at hand are foretold as a plan has them; what goes wrong is said, and nothing of the job changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splittune import plan
from splittune.fakes import FakeTensor
from splittune.hardware import resolve_hardware
from splittune.hardware.base import Device, DeviceMemory
from splittune.hardware.virtual import VirtualHardware
from splittune.profiling.foretold import Foretold
from splittune.runners.foretell import Asked, foretell
from splittune.runners.in_process import InProcessRunner
from splittune.runners.worker.runner import WorkerRunner
from splittune.split import BatchSplit
from splittune.training import TrainingTask, read_batches
from splittune.units import GIB

CARDS = "2xT400-4GB"
ASKED: list[Asked] = [
    (BatchSplit(global_batch_size=16, accumulation_steps=k, shard_sizes=shards), "output")
    for k, shards in ((1, (6, 10)), (2, (4, 4)))
]
DEVICES = [Device(index=i, name="NVIDIA T400 4GB", torch_device=f"cuda:{i}", total_bytes=4 * GIB) for i in range(2)]
MEMORY = [
    DeviceMemory(device=i, total_bytes=4 * GIB, outside_bytes=GIB, peak_allocated_bytes=0, peak_reserved_bytes=0)
    for i in range(2)
]
JOB = """
import os, time, torch
from torch import nn
from splittune import TrainingTask

class Model(nn.Linear):
    def forward(self, x):
        if os.environ.get("DIES_ON_SHAPES") and type(x).__name__ == "FakeTensor":
            os.abort()
        return super().forward(x)

def make_task():
    torch.manual_seed(0)
    return TrainingTask(Model(6, 3), [(torch.ones(16, 6), torch.ones(16, 3))])
"""


def virtual() -> VirtualHardware:
    hardware = resolve_hardware(CARDS)
    assert isinstance(hardware, VirtualHardware)
    return hardware


def job(**parts: Any) -> TrainingTask:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return TrainingTask(model, [(torch.randn(16, 6), torch.randint(3, (16,)))], **parts)


def told(task: TrainingTask, budget_s: float = 60.0) -> Foretold:
    return foretell(task, read_batches(task.loader), virtual(), ASKED, budget_s=budget_s)


def test_it_is_what_a_plan_says() -> None:
    """Of the same splits on the same cards, in their order."""
    task = job()
    splits = [split for split, _ in ASKED]
    assert told(task).planned == plan(task, CARDS, splits=splits, progress=False).measurements
    assert told(task).why == ""


def test_the_loss_is_computed_where_it_was() -> None:
    """In the replicas, GPU 0 holds the outputs of its own share alone."""
    split = BatchSplit(global_batch_size=4096, accumulation_steps=1, shard_sizes=(512, 3584))
    wide = TrainingTask(nn.Linear(4, 512), [(torch.zeros(16, 4), torch.zeros(16, dtype=torch.long))])
    samples = read_batches(wide.loader)
    gathered, placed = foretell(
        wide, samples, virtual(), [(split, "output"), (split, "replica")], budget_s=60.0
    ).planned
    assert (gathered.loss_placement, placed.loss_placement) == ("output", "replica")
    assert placed.memory[0].peak_allocated_bytes < gathered.memory[0].peak_allocated_bytes / 2


def test_a_job_that_reads_values_is_not_foretold() -> None:
    """It says which line, and no step is run with real tensors instead."""
    seen: list[type] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        seen.append(type(batch[0]))
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        return loss if loss.item() < 100 else loss * 0

    foretold = told(job(step_fn=step))
    assert foretold.planned == ()
    assert "needs values: test_foretell.py" in foretold.why
    assert set(seen) == {FakeTensor}


def test_what_the_job_raises_is_the_reason() -> None:
    """A step that minds shapes without values loses nothing."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        raise LookupError("no such batch")

    assert told(job(step_fn=step)) == Foretold(why="LookupError: no such batch")


def test_the_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was foretold until then is there; a step is ended in the middle."""
    now_s = [0.0]
    monkeypatch.setattr("splittune.runners.foretell.time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def step(model: nn.Module, batch: Any) -> Tensor:
        now_s[0] += 100.0 if len(batch[0]) < 16 else 0.0  # the second split's micro-batches
        return functional.cross_entropy(model(batch[0]), batch[1])

    foretold = told(job(step_fn=step), budget_s=60.0)
    assert [each.split for each in foretold.planned] == [ASKED[0][0]]
    assert foretold.why == "that took longer than 60 s"


def test_lists_of_the_job_hold_no_shapes_afterwards() -> None:
    """Losses that a step collects are the real ones alone."""
    losses = [torch.ones(())]
    best = {"loss": torch.ones(())}

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        losses.append(loss.detach())
        best["loss"] = loss.detach()
        return loss

    assert len(told(job(step_fn=step)).planned) == 2
    assert [type(each) for each in (*losses, *best.values())] == [Tensor, Tensor]


def test_a_job_in_this_process_is_foretold_beside_its_trials() -> None:
    """With the cards' room: 3 GiB of each."""
    runner = InProcessRunner(job(), virtual())
    try:
        runner.open(["output"])
        foretold = runner.foretell(DEVICES, MEMORY, ASKED, budget_s=60.0)
    finally:
        runner.close()
    assert [each.split for each in foretold.planned] == [split for split, _ in ASKED]
    assert {memory.outside_bytes for each in foretold.planned for memory in each.memory} == {GIB}


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], WorkerRunner]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    return lambda: WorkerRunner("job.py:make_task", CARDS)


def test_a_worker_foretells_its_own_job(worker: Callable[[], WorkerRunner]) -> None:
    """As this process would."""
    runner = worker()
    try:
        runner.open(["output"])
        foretold = runner.foretell(DEVICES, MEMORY, ASKED, budget_s=60.0)
        late = runner.foretell(DEVICES, MEMORY, ASKED, budget_s=0.0)
    finally:
        runner.close()
    assert foretold.why == ""
    assert [each.split for each in foretold.planned] == [split for split, _ in ASKED]
    assert late.why == "that took longer than 0 s"


def test_a_worker_that_dies_of_it_is_a_reason(
    worker: Callable[[], WorkerRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none is started for it again."""
    monkeypatch.setenv("DIES_ON_SHAPES", "1")
    runner = worker()
    try:
        runner.open(["output"])
        foretold = runner.foretell(DEVICES, MEMORY, ASKED, budget_s=60.0)
        again = runner.foretell(DEVICES, MEMORY, ASKED, budget_s=60.0)
    finally:
        runner.close()
    assert foretold.planned == ()
    assert "SIGABRT" in foretold.why
    assert again == Foretold(why="the worker process had ended with a trial")
