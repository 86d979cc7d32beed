"""Which virtual device owns which tensor: births, deaths, capacity and modelled time, operation by operation."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Underscored by name, documented and in wide use; tests/hardware/test_ledger.py fails loudly should it change.
from torch.utils._python_dispatch import TorchDispatchMode

from splittune.hardware.virtual.allocator import Block, CachingAllocator
from splittune.hardware.virtual.catalog import GpuModel
from splittune.hardware.virtual.roofline import kernel_time_s
from splittune.hardware.virtual.timeline import Timeline
from splittune.units import format_bytes

_COPIES = {"aten::copy_", "aten::_copy_from"}
_WAITS = {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::nonzero", "aten::masked_select"}


class _Owned:
    """A storage on a device. The storage is held weakly; its block is freed when it dies."""

    __slots__ = ("block", "device", "key", "storage")

    def __init__(self, storage: Any, device: int, block: Block | None, died: deque[_Owned]) -> None:
        self.key = id(storage)
        self.device = device
        self.block = block
        # Only noted here and freed at the next operation: this may run in the middle of an allocation.
        self.storage = weakref.ref(storage, lambda _: died.append(self))


class Ledger(TorchDispatchMode):
    """Follows every storage of the code run inside it, on real tensors in host memory.

    An operation belongs to the device its inputs live on; one without tensor inputs to the device its code runs on
    (`on`), and to the host outside any. What an operation creates is allocated on its device, and where the capacity
    does not allow it `torch.OutOfMemoryError` is raised at that operation. Inputs from the host are taken along: 0-dim
    ones stay there, as CUDA allows, others move to the device. Inputs on two devices raise, as CUDA does, save for
    copies, which are transfers over the link.
    """

    def __init__(self, gpus: Sequence[GpuModel], capacities_bytes: Sequence[int]) -> None:
        super().__init__()
        self.gpus = tuple(gpus)
        self.allocators = [CachingAllocator(capacity) for capacity in capacities_bytes]
        self.timeline = Timeline(gpus)
        self._owned: dict[int, _Owned] = {}
        self._died: deque[_Owned] = deque()
        self._current: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.free_dead()
        inputs = _tensors_in(args, kwargs)
        name = func._schema.name
        if name in _COPIES:
            out = func(*args, **kwargs)
            self._transfer(inputs[0], inputs[1])
            return out
        device = self._device_of(name, inputs)
        if device is None:
            return func(*args, **kwargs)
        for tensor in inputs:
            if tensor.dim() and self.owner_of(tensor) is None and _is_whole_storage(tensor):
                self.own(tensor, device)
        out = func(*args, **kwargs)
        outputs = _tensors_in((out,), {})
        created = False
        for tensor in outputs:
            if self._entry(tensor) is None and not _shares_storage(tensor, inputs):
                created = True
                self.own(tensor, device)
        if name in _WAITS:
            self.timeline.wait_for(device)
        elif created or func._schema.is_mutable:
            touched = {id(tensor): tensor for tensor in (*inputs, *outputs)}.values()
            seconds = kernel_time_s(func, args, kwargs, tuple(touched), out, self.gpus[device])
            self.timeline.launch(device, seconds)
        return out

    def owner_of(self, tensor: Tensor) -> int | None:
        """The device that owns the tensor's storage; None for the host."""
        entry = self._entry(tensor)
        return None if entry is None else entry.device

    def own(self, tensor: Tensor, device: int) -> None:
        """Allocate the tensor's storage on `device`; nothing happens if it is owned already.

        Raises:
            torch.OutOfMemoryError: the capacity does not allow it.
        """
        if tensor.layout != torch.strided:
            for part in _dense_parts(tensor):
                self.own(part, device)
            return
        if self._entry(tensor) is not None:
            return
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        block = None
        if num_bytes:
            block = self.allocators[device].allocate(num_bytes)
            if block is None:
                raise torch.OutOfMemoryError(self._describe_lack(device, num_bytes))
        entry = _Owned(storage, device, block, self._died)
        self._owned[entry.key] = entry

    def free_dead(self) -> None:
        """Free the blocks of the storages that have died since."""
        while self._died:
            entry = self._died.popleft()
            self._release(entry)

    @contextmanager
    def on(self, device: int | None) -> Iterator[None]:
        """What code inside creates out of nothing belongs to `device`; to the host for None."""
        before, self._current = self._current, device
        try:
            yield
        finally:
            self._current = before

    def _entry(self, tensor: Tensor) -> _Owned | None:
        if tensor.layout != torch.strided:
            tensor = _dense_parts(tensor)[0]
        storage = tensor.untyped_storage()
        entry = self._owned.get(id(storage))
        if entry is not None and entry.storage() is not storage:  # its address has been given to a new storage
            self._release(entry)
            return None
        return entry

    def _release(self, entry: _Owned) -> None:
        if self._owned.get(entry.key) is entry:
            del self._owned[entry.key]
        if entry.block is not None:
            self.allocators[entry.device].free(entry.block)
            entry.block = None

    def _device_of(self, name: str, inputs: Sequence[Tensor]) -> int | None:
        if not inputs:
            return self._current
        owners = {owner for tensor in inputs if (owner := self.owner_of(tensor)) is not None}
        if len(owners) > 1:
            # 0-dim tensors may be anywhere on the host, but not on another card
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got tensors on virtual GPUs "
                f"{' and '.join(map(str, sorted(owners)))}. Move them to one device first, as on real GPUs."
            )
        return next(iter(owners), None)

    def _transfer(self, target: Tensor, source: Tensor) -> None:
        target_device, source_device = self.owner_of(target), self.owner_of(source)
        if target_device == source_device:
            if target_device is not None:
                num_bytes = 2 * target.numel() * target.element_size()
                bandwidth = self.gpus[target_device].memory_bandwidth_bytes_per_s
                self.timeline.launch(target_device, num_bytes / bandwidth)
            return
        self.timeline.transfer(source_device, target_device, target.numel() * target.element_size())

    def _describe_lack(self, device: int, num_bytes: int) -> str:
        allocator = self.allocators[device]
        free = allocator.capacity_bytes - allocator.reserved_bytes
        return (
            f"CUDA out of memory. Tried to allocate {format_bytes(num_bytes)}. Virtual GPU {device} "
            f"({self.gpus[device].name}) allows this process {format_bytes(allocator.capacity_bytes)}, of which "
            f"{format_bytes(free)} is free; {format_bytes(allocator.allocated_bytes)} is allocated and "
            f"{format_bytes(allocator.reserved_bytes - allocator.allocated_bytes)} reserved but unallocated."
        )


def _tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among an operation's arguments or results: at the top or in one list, by the operator schema."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(_tensors_in(value, {}))
    return found


def _shares_storage(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    if tensor.layout != torch.strided:
        return False
    storage = tensor.untyped_storage()
    return any(other.layout == torch.strided and other.untyped_storage() is storage for other in others)


def _is_whole_storage(tensor: Tensor) -> bool:
    """False for a part of something larger, a batch cut from a data set say, which must not be charged whole."""
    if tensor.layout != torch.strided:
        return True
    return tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
