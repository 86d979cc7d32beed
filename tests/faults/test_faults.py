"""Whatever goes wrong in a trial, and wherever: the job is as it was found, and the devices are empty."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from splittune.hardware import resolve_hardware
from splittune.hardware.virtual.allocator import CachingAllocator
from splittune.hardware.virtual.hardware import VirtualHardware
from splittune.profiling.measurement import Outcome
from splittune.profiling.profiler import Profiler
from splittune.split import BatchSplit
from splittune.training import Snapshot, TrainingTask, read_batches
from splittune.tuner import autotune
from tests.faults.trapped import DEVICES, FAULTS, Job, Row, Trap, try_fault

SPLIT = BatchSplit(global_batch_size=14, accumulation_steps=2, shard_sizes=(2, 2, 3))
MAX_SAMPLED = 60
SMALL_DEVICES = "2xRTX3090"
SMALL_SPLIT = BatchSplit(global_batch_size=14, accumulation_steps=2, shard_sizes=(4, 3))
SPOKEN = {"KeyboardInterrupt": "Ctrl-C", "OutOfMemoryError": "out of memory", "MineError": "an exception of the user's"}


def expected_words(fault: str) -> str:
    return "OUT_OF_MEMORY" if fault == "OutOfMemoryError" else "the very exception"


class SmallModel(nn.Sequential):
    """Two layers: so few allocations that each can fail in turn."""

    def __init__(self, trap: Trap) -> None:
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.trap = trap


def profile_small(job: Job, hardware: VirtualHardware) -> str:
    return profile(job, hardware, SMALL_SPLIT)


def profile(job: Job, hardware: VirtualHardware, split: BatchSplit = SPLIT) -> str:
    """One trial, as the tuner runs it; how it ended."""
    snapshot = Snapshot(job.model, job.optimizer, job.loader)
    try:
        task = TrainingTask(job.model, job.loader, loss_fn=job.loss_fn, optimizer=job.optimizer)
        profiler = Profiler(task, hardware, read_batches(job.loader), snapshot)
        return profiler.measure(split).outcome.value
    finally:
        snapshot.restore()
        snapshot.restore_gradients()


def tune(job: Job, hardware: VirtualHardware) -> str:
    """The whole search."""
    autotune(job.model, job.loader, loss_fn=job.loss_fn, optimizer=job.optimizer, devices=hardware.spec, progress=False)
    return "tuned"


CHECKED = "state bit-identical, no tensor left, devices empty"


def assert_all_passed(rows: list[Row]) -> None:
    table = "\n".join(str(row) for row in rows if not row.has_passed)
    assert all(row.has_passed for row in rows), f"{len(rows)} faults were tried; these did not pass:\n{table}"


def test_a_trial_without_a_fault_leaves_the_job_as_it_was(owned):
    """The yardstick: nothing raised, nothing changed, nothing left."""
    assert_all_passed([try_fault(Trap(), "none", "ok", owned, profile)])


def count_allocations(monkeypatch, fails_at: int | None = None) -> list[int]:
    """From now on allocations are counted, and the one of this number fails."""
    allocate, count = CachingAllocator.allocate, [0]

    def allocate_or_fail(self: CachingAllocator, num_bytes: int) -> Any:
        count[0] += 1
        return None if count[0] - 1 == fails_at else allocate(self, num_bytes)

    monkeypatch.setattr(CachingAllocator, "allocate", allocate_or_fail)
    return count


def test_running_out_of_memory_at_any_allocation_is_an_outcome(owned, tried):
    """Wherever in a trial memory runs out, in replicas, loss, backward or update, it is reported
    and nothing is lost."""
    with pytest.MonkeyPatch.context() as patch:
        count = count_allocations(patch)
        assert profile(Job(Trap()), resolve_hardware(DEVICES)) == Outcome.OK.value
    num_allocations = count[0]
    assert num_allocations > 300
    sampled = sorted({round(i * (num_allocations - 1) / (MAX_SAMPLED - 1)) for i in range(MAX_SAMPLED)})
    rows = []
    for index in sampled:
        with pytest.MonkeyPatch.context() as patch:
            count = count_allocations(patch, fails_at=index)
            row = try_fault(Trap(), f"allocation {index}", Outcome.OUT_OF_MEMORY.value, owned, profile)
        assert count[0] > index
        rows.append(row._replace(place="allocator"))
    assert_all_passed(rows)
    tried("out of memory", f"in a trial, at {MAX_SAMPLED} allocations spread over it", "OUT_OF_MEMORY", CHECKED)


def test_running_out_of_memory_at_every_allocation_of_a_small_job_is_an_outcome(owned, tried):
    """Two layers, AdamW, two micro-batches, two cards: each allocation of a trial fails in turn, none left out."""
    with pytest.MonkeyPatch.context() as patch:
        count = count_allocations(patch)
        assert profile_small(Job(Trap(), SmallModel), resolve_hardware(SMALL_DEVICES)) == Outcome.OK.value
    num_allocations, rows = count[0], []
    assert num_allocations > 100
    for index in range(num_allocations):
        with pytest.MonkeyPatch.context() as patch:
            count = count_allocations(patch, fails_at=index)
            row = try_fault(
                Trap(),
                f"allocation {index}",
                Outcome.OUT_OF_MEMORY.value,
                owned,
                profile_small,
                make_model=SmallModel,
                devices=SMALL_DEVICES,
            )
        assert count[0] > index
        rows.append(row._replace(place="allocator"))
    assert_all_passed(rows)
    tried("out of memory", "in a trial of a small job, at every allocation", "OUT_OF_MEMORY", CHECKED)


@pytest.mark.parametrize("place", ["forward", "loss_fn", "backward", "optimizer"])
@pytest.mark.parametrize("visit", [1, 2])
def test_an_exception_of_the_users_own_passes_through(owned, tried, place, visit):
    """It arrives as the object that was raised, Ctrl-C too; only running out of memory is an outcome."""
    rows = []
    for fault, make in FAULTS.items():
        expected = Outcome.OUT_OF_MEMORY.value if fault == "OutOfMemoryError" else fault
        rows.append(try_fault(Trap(place, visit, make), fault, expected, owned, profile))
        tried(SPOKEN.get(fault, fault), f"in a trial, {place}, visit {visit}", expected_words(fault), CHECKED)
    assert_all_passed(rows)


@pytest.mark.parametrize(
    ("place", "visit"), [("loader", 1), ("loader", 2), ("forward", 7), ("backward", 7), ("optimizer", 3)]
)
def test_a_search_that_fails_leaves_the_job_as_it_was_found(owned, tried, place, visit):
    """Through `autotune` too: a loader that raises, a fault in some later trial, Ctrl-C in the middle."""
    names = ("MineError", "KeyboardInterrupt")
    assert_all_passed([try_fault(Trap(place, visit, FAULTS[name]), name, name, owned, tune) for name in names])
    for name in names:
        tried(SPOKEN[name], f"in a search, {place}, visit {visit}", expected_words(name), CHECKED)
