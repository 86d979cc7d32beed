"""Whatever goes wrong in a trial, and wherever: the job is as it was found, and the devices are empty."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import ledger as ledger_module
from splittune.hardware.virtual.allocator import CachingAllocator
from splittune.hardware.virtual.hardware import VirtualHardware
from splittune.profiling.measurement import Outcome
from splittune.profiling.profiler import Profiler
from splittune.split import BatchSplit
from splittune.training import Snapshot, TrainingTask, read_batches
from splittune.tuner import autotune

DEVICES = "3xRTX3090"
SPLIT = BatchSplit(global_batch_size=14, accumulation_steps=2, shard_sizes=(2, 2, 3))
MAX_SAMPLED = 60
SMALL_DEVICES = "2xRTX3090"
SMALL_SPLIT = BatchSplit(global_batch_size=14, accumulation_steps=2, shard_sizes=(4, 3))


class MineError(Exception):
    """With arguments that cannot be rebuilt from a message, as a user's exception may have."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(code, detail)


FAULTS: dict[str, Callable[[], BaseException]] = {
    "MineError": lambda: MineError(7, detail="mine"),
    "RuntimeError": lambda: RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"),
    "KeyError": lambda: KeyError("labels"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
}


SPOKEN = {"KeyboardInterrupt": "Ctrl-C", "OutOfMemoryError": "out of memory", "MineError": "an exception of the user's"}


def expected_words(fault: str) -> str:
    return "OUT_OF_MEMORY" if fault == "OutOfMemoryError" else "the very exception"


class Trap:
    """Raises at one visit of one place in the job; every place asks it each time it is passed."""

    def __init__(self, place: str = "", visit: int = 1, make: Callable[[], BaseException] = RuntimeError) -> None:
        self.place, self.visits_left, self.make = place, visit, make
        self.raised: BaseException | None = None

    def pass_by(self, place: str) -> None:
        if place != self.place or self.raised is not None:
            return
        self.visits_left -= 1
        if self.visits_left == 0:
            self.raised = self.make()
            raise self.raised


class RaisesInBackward(torch.autograd.Function):
    """The identity, which passes the trap on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.trap.pass_by("backward")
        return grads[0], None


class Model(nn.Module):
    """BatchNorm and dropout, one frozen layer, one in eval mode; forward draws from every generator."""

    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self.trap = trap
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.frozen, self.last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3)
        self.evaluated = nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)) * (random.random() + np.random.rand())  # noqa: NPY002  # the global one
        self.trap.pass_by("forward")
        hidden = RaisesInBackward.apply(self.evaluated(self.frozen(hidden.relu())), self.trap)
        return self.last(torch.nn.functional.dropout(hidden, 0.1, self.training))


class SmallModel(nn.Sequential):
    """Two layers: so few allocations that each can fail in turn."""

    def __init__(self, trap: Trap) -> None:
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.trap = trap


class TrappedAdamW(torch.optim.AdamW):
    def __init__(self, parameters: Any, trap: Trap) -> None:
        self.trap = trap
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        super().step(closure)  # weights and state have changed when it raises
        self.trap.pass_by("optimizer")


class Loader:
    """Batches of 14, the second of which may not come."""

    def __init__(self, trap: Trap) -> None:
        self.trap = trap
        self.batches = [(torch.randn(14, 6), torch.randint(0, 3, (14,))) for _ in range(2)]

    def __iter__(self):
        for batch in self.batches:
            self.trap.pass_by("loader")
            torch.rand(1)  # a data set that augments
            yield batch


class Job:
    """A job that has trained for two steps and has gradients, with one trap in it."""

    def __init__(self, trap: Trap, make_model: Callable[[Trap], Any] = Model) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3)
        self.trap, self.model, self.loader = Trap(), make_model(Trap()), Loader(Trap())
        self.optimizer = TrappedAdamW(self.model.parameters(), self.trap)
        for step in range(3):
            self.loss_fn(self.model(self.loader.batches[0][0]), self.loader.batches[0][1]).backward()
            if step < 2:
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.trap = self.model.trap = self.loader.trap = self.optimizer.trap = trap

    def loss_fn(self, output: Tensor, targets: Tensor) -> Tensor:
        self.trap.pass_by("loss_fn")
        return torch.nn.functional.cross_entropy(output, targets)

    def tensors(self) -> list[Tensor]:
        """What may be alive after a trial."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        batches = [tensor for batch in self.loader.batches for tensor in batch]
        return [*self.model.parameters(), *self.model.buffers(), *states, *grads, *batches]

    def fingerprint(self) -> dict[str, Any]:
        """Everything that must be bit-identical afterwards."""
        tensors = {**self.model.state_dict(keep_vars=True)}
        groups = [
            {k: [id(p) for p in v] if k == "params" else v for k, v in group.items()}
            for group in self.optimizer.param_groups
        ]
        return {
            "weights": {name: (id(t), t.detach().numpy().tobytes(), str(t.device)) for name, t in tensors.items()},
            "gradients": {name: None if t.grad is None else t.grad.numpy().tobytes() for name, t in tensors.items()},
            "requires_grad": {name: t.requires_grad for name, t in tensors.items()},
            "modes": {name: module.training for name, module in self.model.named_modules()},
            "optimizer state": [
                (id(p), {key: value.numpy().tobytes() for key, value in state.items()})
                for p, state in self.optimizer.state.items()
            ],
            "param_groups": groups,
            "grad mode": torch.is_grad_enabled(),
            "generators": (torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())),  # noqa: NPY002
        }


class Row(NamedTuple):
    """One fault that was tried."""

    place: str
    fault: str
    came_out: str
    expected: str
    not_as_found: list[str]
    num_left_alive: int
    bytes_left: tuple[int, ...]

    @property
    def has_passed(self) -> bool:
        return self.came_out == self.expected and not (self.not_as_found or self.num_left_alive or any(self.bytes_left))


@pytest.fixture
def owned(monkeypatch):
    """Weak references to every storage that any ledger accounted for."""
    refs: list[weakref.ref] = []
    add = ledger_module.Ledger._add

    def add_and_note(self, storage, *args, **kwargs):
        refs.append(weakref.ref(storage))
        add(self, storage, *args, **kwargs)

    monkeypatch.setattr(ledger_module.Ledger, "_add", add_and_note)
    return refs


def try_fault(
    trap: Trap,
    fault: str,
    expected: str,
    owned: list[weakref.ref],
    run: Callable[..., str],
    *,
    make_model: Callable[[Trap], Any] = Model,
    devices: str = DEVICES,
) -> Row:
    """Build the job, let it fail once, and look at what is left."""
    owned.clear()
    job, hardware = Job(trap, make_model), resolve_hardware(devices)
    assert isinstance(hardware, VirtualHardware)
    found = job.fingerprint()
    try:
        came_out = run(job, hardware)
    except BaseException as error:  # noqa: BLE001  # KeyboardInterrupt is one of the faults
        came_out = type(error).__name__ if error is trap.raised else f"another {type(error).__name__}: {error}"
    trap.raised = None  # it holds the frames of the failed step, as any exception does
    left = job.fingerprint()
    kept = {id(tensor.untyped_storage()) for tensor in job.tensors()}
    alive = [ref() for ref in owned if ref() is not None and id(ref()) not in kept]
    with hardware.metered():
        bytes_left = hardware.allocated_bytes()
    return Row(
        place=trap.place,
        fault=fault,
        came_out=came_out,
        expected=expected,
        not_as_found=[what for what in found if left[what] != found[what]],
        num_left_alive=len(alive),
        bytes_left=bytes_left,
    )


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
    """Wherever in a trial memory runs out, in replicas, loss, backward or update, it is reported and nothing is lost."""
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
