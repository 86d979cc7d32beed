"""A training step as it was measured, traced on shapes: every operation, every allocation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.truth.models import build
from splittune.fakes import ShapeMode
from splittune.hardware.virtual import VirtualHardware, find_gpu
from splittune.hardware.virtual.allocator import CachingAllocator
from splittune.hardware.virtual.hardware import VirtualLink
from splittune.units import GIB

# No trial runs out of memory while it is traced: what a card would say is found by replay.
_ROOMY = replace(find_gpu("RTX3090"), total_bytes=100_000 * GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One training step at one batch size."""

    calls: tuple[str, ...]
    """Each different call once, as JSON: operator, arguments, result; see `_describe`."""
    order: NDArray[np.int32]
    """Which call each operation is, in the order in which they are launched."""
    events: NDArray[np.int64]
    """Above 0: bytes requested; otherwise minus the number of the request (from 0) that is freed."""
    places: NDArray[np.int32]
    """For each event, how many operations had been launched."""
    num_before: int
    """Events before the step: parameters, gradients, momentum and batch."""

    def save(self, path: Path) -> None:
        """Written whole or not at all, so that a broken run goes on where it was."""
        partial = path.with_suffix(".partial.npz")
        np.savez_compressed(
            partial,
            calls=np.frombuffer(json.dumps(self.calls).encode(), dtype=np.uint8),
            order=self.order,
            events=self.events,
            places=self.places,
            num_before=self.num_before,
        )
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Trace:
        with np.load(path) as file:
            return cls(
                calls=tuple(json.loads(file["calls"].tobytes())),
                order=file["order"],
                events=file["events"],
                places=file["places"],
                num_before=int(file["num_before"]),
            )


def trace_step(architecture: str, batch_size: int, image_size: int) -> Trace:
    """One step of the model in its steady state, on one virtual card, without values.

    As the timm project measured it: autocast to float16, cross-entropy, then SGD with Nesterov's momentum, parameter by
    parameter; gradients are zeroed rather than dropped, as was torch's default then, and are there from the start, with
    the momentum.
    """
    with torch.device("meta"):
        model = build(architecture, image_size)
    mode = ShapeMode(allow_non_fake_inputs=True)  # some keep a table or a number of their own beside the buffers
    with mode:
        _leave_meta(model)
    hardware = VirtualHardware([_ROOMY])
    with mode, _noted_allocations() as log, hardware.metered():
        optimizer = _place(model, hardware)
        with VirtualLink(hardware).on(0):
            images = torch.empty(batch_size, 3, image_size, image_size)
            labels = torch.empty(batch_size, dtype=torch.long)
        num_before = len(log.events)
        with _Recorder(hardware, log) as recorder, VirtualLink(hardware).on(0):
            _step(model, optimizer, images, labels)
        hardware.allocated_bytes()  # frees what has died
        events, places = np.array(log.events, dtype=np.int64), np.array(log.places, dtype=np.int32)
    return Trace(
        calls=tuple(recorder.numbers),
        order=np.array(recorder.order, dtype=np.int32),
        events=events,
        places=places,
        num_before=num_before,
    )


def _leave_meta(model: nn.Module) -> None:
    """Parameters and buffers of the same sizes on the CPU; what is shared stays shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    moved = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
                    made[id(tensor)] = (
                        nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
                    )
                own[name] = made[id(tensor)]  # type: ignore[assignment]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    with torch.autocast("cpu", torch.float16):
        output = model(images)
        if isinstance(output, tuple | list):  # a second head, for distillation
            output = output[0]
        loss = nn.functional.cross_entropy(output, labels).mean()
    loss.backward()
    optimizer.step()


def _place(model: nn.Module, hardware: VirtualHardware) -> torch.optim.Optimizer:
    """Parameters, gradients and momentum on the card."""
    with VirtualLink(hardware).on(0):
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
    for module in model.modules():
        hardware.adopt(module)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        foreach=False,
    )
    with VirtualLink(hardware).on(0):
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter)
    return optimizer


class _Log:
    """The requests and returns of one allocator."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.places: list[int] = []
        self.num_operations = 0
        self._numbers: dict[int, int] = {}
        self._num_requests = 0

    def request(self, block: object, num_bytes: int) -> None:
        self._numbers[id(block)] = self._num_requests
        self._num_requests += 1
        self._note(num_bytes)

    def free(self, block: object) -> None:
        self._note(-self._numbers.pop(id(block)))

    def _note(self, event: int) -> None:
        self.events.append(event)
        self.places.append(self.num_operations)


@contextmanager
def _noted_allocations() -> Iterator[_Log]:
    log = _Log()
    allocate, free = CachingAllocator.allocate, CachingAllocator.free

    def noted_allocate(self: CachingAllocator, num_bytes: int) -> Any:
        block = allocate(self, num_bytes)
        log.request(block, num_bytes)
        return block

    def noted_free(self: CachingAllocator, block: Any) -> None:
        log.free(block)
        free(self, block)

    CachingAllocator.allocate = noted_allocate  # type: ignore[method-assign]
    CachingAllocator.free = noted_free  # type: ignore[method-assign]
    try:
        yield log
    finally:
        CachingAllocator.allocate = allocate  # type: ignore[method-assign]
        CachingAllocator.free = free  # type: ignore[method-assign]


class _Recorder(TorchDispatchMode):
    """Describes every call for which the ledger launches a kernel."""

    def __init__(self, hardware: VirtualHardware, log: _Log) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hardware, self._log = hardware, log
        self.numbers: dict[str, int] = {}
        self.order: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        before = self._hardware.busy_s()
        out = func(*args, **(kwargs or {}))
        if self._hardware.busy_s() != before:
            call = json.dumps([func.name(), _describe(args), _describe(kwargs or {}), _describe(out)])
            self.order.append(self.numbers.setdefault(call, len(self.numbers)))
            self._log.num_operations += 1
        return out


def _describe(value: Any) -> Any:
    """A value as JSON holds it: a tensor is its dtype, sizes and strides."""
    if isinstance(value, Tensor):
        return {"t": str(value.dtype).removeprefix("torch."), "n": list(value.shape), "s": list(value.stride())}
    if isinstance(value, list | tuple):
        return [_describe(each) for each in value]
    if isinstance(value, dict):
        return {"k": {key: _describe(each) for key, each in value.items()}}
    if isinstance(value, bool | int | float | str | None):
        return value
    return {"o": str(value)}
