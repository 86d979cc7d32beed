"""What a snapshot keeps of one thing, a module, a tensor or an optimizer say, and how that is put back."""

from __future__ import annotations

import copy
from collections import deque
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn, optim

from splittune.parallel.replicas import hook_tables_of

# Numbers are compared by their bits, for NaN is not equal to itself; byte by byte that takes four times as long.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class SavedAttributes:
    """Which objects an object's attributes are."""

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.attributes = dict(getattr(owner, "__dict__", {}))

    def restore(self) -> None:
        current = getattr(self.owner, "__dict__", {})
        current.update(self.attributes)
        for name in current.keys() - self.attributes.keys():
            del current[name]


class SavedContainer:
    """What a dict, a list or a deque holds: which objects, in which order."""

    def __init__(self, container: dict[Any, Any] | list[Any] | deque[Any]) -> None:
        self.container = container
        self.entries = _entries_of(container)

    def restore(self) -> None:
        container, current = self.container, _entries_of(self.container)
        if len(current) == len(self.entries) and all(map(is_, current, self.entries)):
            return
        container.clear()
        if isinstance(container, dict):
            container.update(zip(self.entries[0::2], self.entries[1::2], strict=True))
        else:
            container.extend(self.entries)


def _entries_of(container: dict[Any, Any] | list[Any] | deque[Any]) -> list[Any]:
    """In order; of a dict each key and then its value."""
    return [part for item in container.items() for part in item] if isinstance(container, dict) else list(container)


class SavedModule:
    """The attributes of a module, train or eval mode among them, its tensors and modules by name; its hooks."""

    def __init__(self, module: nn.Module) -> None:
        # A first forward may complete the config, as transformers' classifiers do with the kind of
        # labels. Other objects that a module holds are its user's, and keep what happened to them.
        config = vars(module).get("config")
        self.attributes = [SavedAttributes(owner) for owner in (module, config) if not isinstance(owner, type)]
        named: tuple[Any, ...] = (
            *(module._parameters, module._buffers, module._modules),
            *hook_tables_of(module).values(),
        )
        self.named = [(current, dict(current)) for current in named]

    def restore(self) -> None:
        for owner in self.attributes:
            owner.restore()
        # Moving a module replaces its buffers by new tensors, and a forward pass may assign new ones or install hooks
        for current, saved in self.named:
            if list(current) != list(saved) or any(current[name] is not saved[name] for name in saved):
                current.clear()
                current.update(saved)


class SavedTensor:
    """A parameter or buffer with its gradient. Values are cloned to the host, whatever the device.

    With `at_once` False they are not until `keep_values`, which has to come before anything may write to them.
    """

    def __init__(self, tensor: Tensor, *, at_once: bool = True) -> None:
        self.tensor = tensor
        self.device = tensor.device
        self.requires_grad = tensor.requires_grad
        self.is_leaf = tensor.is_leaf
        self.values: Tensor | None = None
        # Keeping the host's own storage costs nothing and keeps views of it valid; a device's would hold its memory.
        self.memory: Tensor | None = tensor.data
        if at_once or not is_told_by_storage(tensor):
            self.keep_values()
        grad = tensor.grad if tensor.is_leaf else None
        self.grad_on_host = grad if grad is None or grad.device.type == "cpu" else None
        self.grad_values = None if grad is None else _host_copy(grad)

    def keep_values(self) -> None:
        """Clone the values, where they are not yet."""
        if self.values is None:
            assert self.memory is not None, "it goes once there are values"
            self.values = _host_copy(self.memory)
            self.memory = self.memory if self.device.type == "cpu" else None

    def take_gradient(self) -> None:
        if self.is_leaf:
            self.tensor.grad = None

    def restore(self, *, on_host_only: bool) -> None:
        if self.memory is not None or not on_host_only:
            self._restore_values()
        if self.is_leaf:
            if not self.tensor.is_leaf:  # it was updated in place with something that has a gradient
                self.tensor.detach_()
            self.tensor.grad = None
            self.tensor.requires_grad_(self.requires_grad)

    def _restore_values(self) -> None:
        values = self.values
        with torch.no_grad():
            if self.memory is not None:
                if not _is_same_memory(self.tensor, self.memory):
                    self.tensor.data = self.memory
                if values is None or _has_same_bits(self.tensor.data, values):
                    return  # what was not written to may be read-only, a file mapped into memory say
            assert values is not None, "there are, or there is its memory"
            if self.memory is None and not self._is_like(values):
                self.tensor.data = torch.empty_like(values, device=self.device)
            _copy_into(self.tensor.data, values)

    def _is_like(self, values: Tensor) -> bool:
        tensor = self.tensor
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


class SavedOptimizer:
    """An optimizer: its attributes, its groups with their options by value, and the state of each parameter."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        # Among the attributes are the dict of states and the list of groups: loading a state replaces both
        self.attributes = SavedAttributes(optimizer)
        self.state: Any = optimizer.state
        self.state_of = {parameter: SavedValue(state) for parameter, state in optimizer.state.items()}
        self.param_groups = optimizer.param_groups
        self.groups = [SavedGroup(group) for group in optimizer.param_groups]

    def restore(self, *, on_host_only: bool) -> None:
        self.attributes.restore()
        self.state.clear()
        self.state.update({parameter: state.restored(on_host_only) for parameter, state in self.state_of.items()})
        self.param_groups[:] = [group.restored(on_host_only) for group in self.groups]


class SavedObject:
    """A scheduler, a scaler or another object with a state: its attributes, those that are data by value."""

    def __init__(self, owner: object) -> None:
        self.attributes = SavedAttributes(owner)
        self.values = {
            name: SavedValue(value, copies_objects=False) for name, value in self.attributes.attributes.items()
        }

    def restore(self, *, on_host_only: bool) -> None:
        self.attributes.restore()
        for value in self.values.values():
            value.restored(on_host_only)


class SavedGroup:
    """A group of an optimizer: its options by value, its parameters by identity."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group, self.params, self.saved_params = group, group["params"], list(group["params"])
        self.options = {name: None if name == "params" else SavedValue(value) for name, value in group.items()}

    def restored(self, on_host_only: bool) -> dict[str, Any]:
        self.params[:] = self.saved_params
        options = {
            name: option.restored(on_host_only) if option else self.params for name, option in self.options.items()
        }
        self.group.clear()
        self.group.update(options)
        return self.group


class SavedValue:
    """A tensor, a container or anything else that can be copied; tensors, dicts and lists stay the same objects.

    With `copies_objects` False everything but those is kept as it is: what else a scheduler holds, its optimizer say.
    """

    def __init__(self, value: Any, *, copies_objects: bool = True) -> None:
        self.original, self.copies_objects = value, copies_objects
        self.values: Any
        if isinstance(value, Tensor):
            self.values = _host_copy(value)
        elif isinstance(value, dict):
            self.values = {key: SavedValue(entry, copies_objects=copies_objects) for key, entry in value.items()}
        elif isinstance(value, list | tuple | deque):
            self.values = [SavedValue(entry, copies_objects=copies_objects) for entry in value]
        else:
            self.values = copy.deepcopy(value) if copies_objects else value

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
        elif isinstance(original, list | tuple | deque):
            entries_in_order = [entry.restored(on_host_only) for entry in self.values]
            if isinstance(original, list):
                original[:] = entries_in_order
            elif isinstance(original, deque):
                original.clear()
                original.extend(entries_in_order)
        else:
            return copy.deepcopy(self.values) if self.copies_objects else self.values
        return original


def is_told_by_storage(tensor: Tensor) -> bool:
    """Whether what writes to it can be told by the storage: not for a sparse one, or one of a class of its own."""
    return tensor.layout == torch.strided and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    if tensor.device != other.device or tensor.dtype != other.dtype:
        return False
    if tensor.layout != torch.strided or other.layout != torch.strided:
        return False
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) == (other.data_ptr(), other.shape, other.stride())


def _has_same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors on the host surely hold the same; False where that cannot be told without a copy."""
    if tensor.layout != torch.strided or not (tensor.is_contiguous() and other.is_contiguous()) or not tensor.numel():
        return False
    bits = _BITS.get(tensor.element_size(), torch.uint8)
    return torch.equal(tensor.reshape(-1).view(bits), other.reshape(-1).view(bits))


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
