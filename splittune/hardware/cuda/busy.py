"""How long each card's replica runs, by events on its own device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splittune.cards import module_of
from splittune.parallel.nesting import tensors_of


class BusyGauge:
    """Adds up, device by device, the seconds that its replica's forwards and backwards take.

    An event is recorded where a replica's forward begins and ends, where the first gradient reaches
    its output, and where the last one leaves it at a parameter; each on its device's stream, so
    that waiting for other devices, the copies between them and the loss of gathered outputs are
    left out. Events are recorded inside `counting` alone.

    What lies between two events counts in full: also gaps between kernels, in which the device
    waits for the host to launch the next. Worked: 100 kernels of 10 us that the host launches 15 us
    apart are 1.5 ms, not 1 ms. Of a model whose launches take longer than its kernels this is the
    host's time, much the same for any shard. Where replicas' threads hold one another up in the
    interpreter, it grows with their number.

    Which parameter is the last is learned from the first backward since `forget`: from then on a
    backward costs one hook instead of one for each parameter, which would slow a model of many
    small ones down. That hook, one at each output, and four events a replica are what a timed
    micro-step has and training has not.

    Args:
        devices: of the replicas, by position.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self._busy_s = [0.0] * len(self._devices)
        self._last_parameters: dict[int, str] = {}
        self._is_on = False
        self._drop()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside; may be nested."""
        before, self._is_on = self._is_on, True
        try:
            yield
        finally:
            self._is_on = before
            if not before:
                self._drop()

    def forget(self) -> None:
        """Another model comes: which of its parameters is the last is not known."""
        self._last_parameters.clear()
        self._drop()

    def begin(self, position: int, module: nn.Module) -> None:
        """A replica's forward begins, in a thread of its own."""
        if not self._is_on:
            return
        self._unhook(position)
        run = _Run(position, self._devices[position])
        if torch.is_grad_enabled():
            self._hooks[position] = [
                parameter.register_hook(partial(run.leave_backward, name))
                for name, parameter in self._watched(position, module)
            ]
        self._begun[position] = run
        run.forward_begins.record(run.stream)

    def _watched(self, position: int, module: nn.Module) -> list[tuple[str, Tensor]]:
        """The last parameter, by its name, where it is known: walking the module would be part of what is timed."""
        last = self._last_parameters.get(position)
        if last is not None:
            path, _, name = last.rpartition(".")
            with suppress(AttributeError, KeyError):
                parameter = module.get_submodule(path)._parameters[name]  # no nn.Parameter: a replica's is a copy
                if parameter is not None and parameter.requires_grad:
                    return [(last, parameter)]
        return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]

    def end(self, position: int, output: Any) -> None:
        """A replica's forward has ended, and given `output`."""
        run = self._begun.pop(position, None)
        if run is None:
            return
        run.forward_ends.record(run.stream)
        for _, tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(run.enter_backward)
        self._runs.append(run)

    def busy_s(self) -> tuple[float, ...] | None:
        """Seconds so far, once every device has finished.

        None where a run since the last call could not be followed: the model was called twice
        before it went backward, or a gradient took another way.
        """
        if not self._is_on:
            return None
        runs, is_known = self._runs, True
        self._drop()
        for run in runs:
            seconds = run.busy_s()
            if seconds is None:
                is_known = False
                self._last_parameters.pop(run.position, None)
                continue
            self._busy_s[run.position] += seconds
            if run.last_parameter is not None:
                self._last_parameters[run.position] = run.last_parameter
        return tuple(self._busy_s) if is_known else None

    def _drop(self) -> None:
        for position in list(getattr(self, "_hooks", ())):
            self._unhook(position)
        self._runs: list[_Run] = []
        self._begun: dict[int, _Run] = {}
        self._hooks: dict[int, list[Any]] = {}

    def _unhook(self, position: int) -> None:
        for hook in self._hooks.pop(position, ()):
            hook.remove()


class _Run:
    """One forward of one replica, and its backward."""

    def __init__(self, position: int, device: torch.device) -> None:
        self.position, self._device = position, device
        self._module = module_of(device)
        self.forward_begins, self.forward_ends = self._timing_event(), self._timing_event()
        self._backward_begins, self._backward_ends = self._timing_event(), self._timing_event()
        self._has_entered = False
        self.last_parameter: str | None = None

    @property
    def stream(self) -> Any:
        """Of the thread that asks: the replica's own, or autograd's for its device."""
        return self._module.current_stream(self._device)

    def enter_backward(self, _grad: Tensor) -> None:
        if not self._has_entered:  # of several outputs the first counts
            self._has_entered = True
            self._backward_begins.record(self.stream)

    def leave_backward(self, parameter: str, _grad: Tensor) -> None:
        self.last_parameter = parameter
        self._backward_ends.record(self.stream)  # anew for each parameter: the last one stands

    def busy_s(self) -> float | None:
        if self._has_entered != (self.last_parameter is not None):
            return None
        forward_ms = float(self.forward_begins.elapsed_time(self.forward_ends))
        if not self._has_entered:
            return forward_ms / 1e3
        return (forward_ms + float(self._backward_begins.elapsed_time(self._backward_ends))) / 1e3

    def _timing_event(self) -> Any:
        return self._module.Event(enable_timing=True)
