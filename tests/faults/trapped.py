"""A job with a trap in it, and what is left of job and devices once the trap has gone off."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from splittune.hardware import resolve_hardware
from splittune.hardware.virtual.hardware import VirtualHardware

DEVICES = "3xRTX3090"


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
