"""The user's job as it was found: kept in host memory, put back bit by bit."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim


class Snapshot:
    """Model, optimizer, random number generators and the loader's generators at one moment.

    Kept: every parameter and buffer (which object, its values, its device), gradients, requires_grad, train or eval mode
    of each submodule, the optimizer's state and groups, the generators of torch on the CPU and each CUDA device, of
    Python and of NumPy where it is loaded, and those the loader was given. `restore` puts all of it back into the same
    objects and may be called any number of times. Gradients are taken off the parameters, so that they hold no device
    memory meanwhile. Python attributes that a forward pass assigns are not tensors, and are not kept.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer | None = None, loader: Iterable[Any] = ()) -> None:
        self._modules = [_SavedModule(module) for module in model.modules()]
        unique = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._tensors = [_SavedTensor(tensor) for tensor in unique.values()]
        self._optimizer = None if optimizer is None else _SavedOptimizer(optimizer)
        self._random = _SavedRandom(loader)
        for tensor in unique.values():
            tensor.grad = None

    def restore(self) -> None:
        """Put everything back. Call it once what the trial left on the devices has been freed."""
        for module in self._modules:
            module.restore()
        for tensor in self._tensors:
            tensor.restore(with_grad=False)
        if self._optimizer is not None:
            self._optimizer.restore()
        self._random.restore()

    def restore_gradients(self) -> None:
        """Put the gradients back as well: last of all, since they take device memory."""
        for tensor in self._tensors:
            tensor.restore(with_grad=True)


class _SavedModule:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.training = module.training
        self.parameters = dict(module._parameters)
        self.buffers = dict(module._buffers)

    def restore(self) -> None:
        self.module.training = self.training
        # Moving a module replaces its buffers by new tensors, and a forward pass may assign new ones
        for current, saved in ((self.module._parameters, self.parameters), (self.module._buffers, self.buffers)):
            if list(current) != list(saved) or any(current[name] is not saved[name] for name in saved):
                current.clear()
                current.update(saved)  # type: ignore[arg-type]


class _SavedTensor:
    """A parameter or buffer with its gradient. Values are cloned to the host, whatever the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.device = tensor.device
        self.requires_grad = tensor.requires_grad
        self.values = _host_copy(tensor)
        # Keeping the host's own storage costs nothing and keeps views of it valid; a device's would hold its memory.
        self.storage = tensor.data if tensor.device.type == "cpu" else None
        grad = tensor.grad
        self.grad_on_host = grad if grad is None or grad.device.type == "cpu" else None
        self.grad_values = None if grad is None else _host_copy(grad)

    def restore(self, *, with_grad: bool) -> None:
        with torch.no_grad():
            if with_grad:
                self.tensor.grad = self._grad()
                return
            if self.storage is not None:
                if self.tensor.data_ptr() != self.storage.data_ptr():
                    self.tensor.data = self.storage
            elif self.tensor.device != self.device:
                self.tensor.data = torch.empty_like(self.values, device=self.device)
            self.tensor.data.copy_(self.values)
        self.tensor.grad = None
        self.tensor.requires_grad_(self.requires_grad) if self.tensor.is_leaf else None

    def _grad(self) -> Tensor | None:
        if self.grad_values is None:
            return None
        if self.grad_on_host is not None:
            return self.grad_on_host.copy_(self.grad_values)
        return self.grad_values.to(self.device)


class _SavedOptimizer:
    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.groups = [(group, {**group, "params": list(group["params"])}) for group in optimizer.param_groups]
        self.tensor_options = [
            {key: value.clone() for key, value in group.items() if isinstance(value, Tensor)}
            for group in optimizer.param_groups
        ]
        self.state = {
            parameter: (state, {key: _SavedValue(value) for key, value in state.items()})
            for parameter, state in optimizer.state.items()
        }
        self.counters = {k: v for k, v in vars(optimizer).items() if isinstance(v, bool | int | float | None)}

    def restore(self) -> None:
        optimizer = self.optimizer
        for (group, saved), tensors in zip(self.groups, self.tensor_options, strict=True):
            for key, values in tensors.items():
                saved[key].copy_(values)
            group.clear()
            group.update({**saved, "params": list(saved["params"])})
        optimizer.param_groups[:] = [group for group, _ in self.groups]
        optimizer.state.clear()
        for parameter, (state, saved) in self.state.items():
            state.clear()
            state.update({key: value.restored() for key, value in saved.items()})
            optimizer.state[parameter] = state
        for key in [k for k, v in vars(optimizer).items() if isinstance(v, bool | int | float | None)]:
            if key not in self.counters:
                delattr(optimizer, key)
        vars(optimizer).update(self.counters)


class _SavedValue:
    """One entry of an optimizer's state: a tensor, or anything that can be copied."""

    def __init__(self, value: Any) -> None:
        self.original = value
        self.values = _host_copy(value) if isinstance(value, Tensor) else copy.deepcopy(value)

    def restored(self) -> Any:
        if not isinstance(self.original, Tensor):
            return copy.deepcopy(self.values)
        with torch.no_grad():
            return self.original.copy_(self.values)


class _SavedRandom:
    def __init__(self, loader: Iterable[Any]) -> None:
        self.python = random.getstate()
        self.numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self.generators = [(generator, generator.get_state()) for generator in _generators_of(loader)]

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        for generator, state in self.generators:
            generator.set_state(state)


def _generators_of(loader: Iterable[Any]) -> list[torch.Generator]:
    """The generators a DataLoader or its samplers were given: iterating advances them."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(g): g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    return list(found.values())


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
