"""The user's job as it was found: kept in host memory, put back bit by bit."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from splittune.parallel.replicas import hook_tables_of


class Snapshot:
    """Model, optimizer, random number generators and the loader's generators at one moment.

    Kept: every parameter and buffer (which object, its values, its device), gradients, requires_grad, train or eval mode
    and hooks of each submodule, the optimizer's state, groups and parameters, the generators of torch on the CPU and each
    CUDA device, of Python and of NumPy where it is loaded, and those the loader was given. `restore` puts all of it back
    into the same objects and may be called any number of times. Gradients are taken off the parameters, so that they hold
    no device memory meanwhile. Other attributes of modules, optimizer and loader get back the object they held; what
    became of the inside of that object, a list that grew say, is not undone.

    Args:
        model: what is trained.
        optimizer: the one that trains it, where it exists already.
        loader: what gives the batches.
        others: further modules of the job, a loss with parameters of its own say.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer | None = None,
        loader: Iterable[Any] = (),
        *,
        others: Sequence[nn.Module] = (),
    ) -> None:
        modules = list(dict.fromkeys(module for root in (model, *others) for module in root.modules()))
        groups = [] if optimizer is None else optimizer.param_groups
        tensors = [tensor for root in (model, *others) for tensor in (*root.parameters(), *root.buffers())]
        tensors += [parameter for group in groups for parameter in group["params"]]
        self._modules = [_SavedModule(module) for module in modules]
        self._tensors = [_SavedTensor(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values()]
        self._optimizer = None if optimizer is None else _SavedOptimizer(optimizer)
        self._loader = [_SavedAttributes(owner) for owner in _parts_of(loader)]
        self._random = _SavedRandom(loader)
        for tensor in self._tensors:
            tensor.take_gradient()

    def restore(self, *, on_host_only: bool = False) -> None:
        """Put everything back. Call it once what the trial left on the devices has been freed.

        `on_host_only` is for devices that a CUDA error has made unusable: no value on them is touched.
        """
        for module in self._modules:
            module.restore()
        for tensor in self._tensors:
            tensor.restore(on_host_only=on_host_only)
        if self._optimizer is not None:
            self._optimizer.restore(on_host_only=on_host_only)
        for owner in self._loader:
            owner.restore()
        self._random.restore(on_host_only=on_host_only)

    def restore_gradients(self, *, on_host_only: bool = False) -> None:
        """Put the gradients back as well: last of all, since they take device memory."""
        for tensor in self._tensors:
            tensor.restore_gradient(on_host_only=on_host_only)


class _SavedAttributes:
    """Which objects an object's attributes are."""

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.attributes = dict(getattr(owner, "__dict__", {}))

    def restore(self) -> None:
        current = getattr(self.owner, "__dict__", {})
        current.update(self.attributes)
        for name in current.keys() - self.attributes.keys():
            del current[name]


class _SavedModule:
    """The attributes of a module, train or eval mode among them; its tensors and modules by name; its hooks."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes = _SavedAttributes(module)
        named: tuple[Any, ...] = (
            *(module._parameters, module._buffers, module._modules),
            *hook_tables_of(module).values(),
        )
        self.named = [(current, dict(current)) for current in named]

    def restore(self) -> None:
        self.attributes.restore()
        # Moving a module replaces its buffers by new tensors, and a forward pass may assign new ones or install hooks
        for current, saved in self.named:
            if list(current) != list(saved) or any(current[name] is not saved[name] for name in saved):
                current.clear()
                current.update(saved)


class _SavedTensor:
    """A parameter or buffer with its gradient. Values are cloned to the host, whatever the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.device = tensor.device
        self.requires_grad = tensor.requires_grad
        self.is_leaf = tensor.is_leaf
        self.values = _host_copy(tensor)
        # Keeping the host's own storage costs nothing and keeps views of it valid; a device's would hold its memory.
        self.on_host = tensor.data if tensor.device.type == "cpu" else None
        grad = tensor.grad if tensor.is_leaf else None
        self.grad_on_host = grad if grad is None or grad.device.type == "cpu" else None
        self.grad_values = None if grad is None else _host_copy(grad)

    def take_gradient(self) -> None:
        if self.is_leaf:
            self.tensor.grad = None

    def restore(self, *, on_host_only: bool) -> None:
        if self.on_host is not None or not on_host_only:
            self._restore_values()
        if self.is_leaf:
            if not self.tensor.is_leaf:  # it was updated in place with something that has a gradient
                self.tensor.detach_()
            self.tensor.grad = None
            self.tensor.requires_grad_(self.requires_grad)

    def _restore_values(self) -> None:
        with torch.no_grad():
            if self.on_host is not None:
                if not _is_same_memory(self.tensor, self.on_host):
                    self.tensor.data = self.on_host
            elif not self._is_as_found():
                self.tensor.data = torch.empty_like(self.values, device=self.device)
            _copy_into(self.tensor.data, self.values)

    def _is_as_found(self) -> bool:
        tensor, values = self.tensor, self.values
        return (tensor.device, tensor.dtype, tensor.shape) == (self.device, values.dtype, values.shape)

    def restore_gradient(self, *, on_host_only: bool) -> None:
        if not self.is_leaf or (on_host_only and self.grad_values is not None and self.grad_on_host is None):
            return
        if self.grad_values is None:
            self.tensor.grad = None
        elif self.grad_on_host is None:
            self.tensor.grad = self.grad_values.to(self.device)
        else:
            with torch.no_grad():
                _copy_into(self.grad_on_host, self.grad_values)
            self.tensor.grad = self.grad_on_host


class _SavedOptimizer:
    def __init__(self, optimizer: optim.Optimizer) -> None:
        # Among the attributes are the dict of states and the list of groups: loading a state replaces both
        self.attributes = _SavedAttributes(optimizer)
        self.state: Any = optimizer.state
        self.state_of = {parameter: _SavedValue(state) for parameter, state in optimizer.state.items()}
        self.param_groups = optimizer.param_groups
        self.groups = [_SavedGroup(group) for group in optimizer.param_groups]

    def restore(self, *, on_host_only: bool) -> None:
        self.attributes.restore()
        self.state.clear()
        self.state.update({parameter: state.restored(on_host_only) for parameter, state in self.state_of.items()})
        self.param_groups[:] = [group.restored(on_host_only) for group in self.groups]


class _SavedGroup:
    """A group of an optimizer: its options by value, its parameters by identity."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group, self.params, self.saved_params = group, group["params"], list(group["params"])
        self.options = {name: None if name == "params" else _SavedValue(value) for name, value in group.items()}

    def restored(self, on_host_only: bool) -> dict[str, Any]:
        self.params[:] = self.saved_params
        options = {
            name: option.restored(on_host_only) if option else self.params for name, option in self.options.items()
        }
        self.group.clear()
        self.group.update(options)
        return self.group


class _SavedValue:
    """A tensor, a container or anything else that can be copied; tensors, dicts and lists stay the same objects."""

    def __init__(self, value: Any) -> None:
        self.original = value
        self.values: Any
        if isinstance(value, Tensor):
            self.values = _host_copy(value)
        elif isinstance(value, dict):
            self.values = {key: _SavedValue(entry) for key, entry in value.items()}
        elif isinstance(value, list | tuple):
            self.values = [_SavedValue(entry) for entry in value]
        else:
            self.values = copy.deepcopy(value)

    def restored(self, on_host_only: bool) -> Any:
        original = self.original
        if isinstance(original, Tensor):
            if original.device.type == "cpu" or not on_host_only:
                with torch.no_grad():
                    _copy_into(original, self.values)
        elif isinstance(original, dict):
            entries = {key: entry.restored(on_host_only) for key, entry in self.values.items()}
            original.clear()
            original.update(entries)
        elif isinstance(original, list | tuple):
            entries_in_order = [entry.restored(on_host_only) for entry in self.values]
            if isinstance(original, list):
                original[:] = entries_in_order
        else:
            return copy.deepcopy(self.values)
        return original


class _SavedRandom:
    def __init__(self, loader: Iterable[Any]) -> None:
        self.python = random.getstate()
        self.numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        found = (getattr(owner, "generator", None) for owner in _parts_of(loader))
        generators = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
        self.generators = [(generator, generator.get_state()) for generator in generators.values()]

    def restore(self, *, on_host_only: bool) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda and not on_host_only:
            torch.cuda.set_rng_state_all(self.cuda)
        for generator, state in self.generators:
            if generator.device.type == "cpu" or not on_host_only:
                generator.set_state(state)


def _parts_of(loader: Iterable[Any]) -> list[object]:
    """A DataLoader and its samplers, whose generators, and whatever else they keep, iterating advances."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(part): part for part in parts if part is not None}.values())


def _is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    if tensor.device != other.device or tensor.dtype != other.dtype:
        return False
    if tensor.layout != torch.strided or other.layout != torch.strided:
        return False
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) == (other.data_ptr(), other.shape, other.stride())


def _copy_into(target: Tensor, values: Tensor) -> None:
    """Copy `values`, once where `target` repeats one place in memory, as an expanded tensor does."""
    if target.layout == torch.strided:
        for dim, stride in enumerate(target.stride()):
            if stride == 0:
                target, values = (
                    target.narrow(dim, 0, min(target.size(dim), 1)),
                    values.narrow(dim, 0, min(values.size(dim), 1)),
                )
    target.copy_(values)


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
