"""Which virtual device owns which tensor: births, deaths, capacity, modelled time."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Underscored by name, documented and in wide use; tests/hardware/virtual/test_ledger.py fails
# loudly should it change.
from torch.utils._python_dispatch import TorchDispatchMode

from splittune.fakes import FakeTensor
from splittune.hardware.virtual.allocator import Block, CachingAllocator
from splittune.hardware.virtual.catalog import GpuModel
from splittune.hardware.virtual.roofline import Work, copy_work, kernel_time_s, work_of
from splittune.hardware.virtual.timeline import Timeline
from splittune.units import format_bytes

_STRIDED = torch.strided
_MEMORY_ONLY = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_permuted",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_MASKS = (torch.bool, torch.uint8)
# torch's own marks for results, or sizes of results, that the host must read before it can go on
_READ_BY_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_NO_DISPATCH = Tensor.__torch_dispatch__
_DEVICE_OF = torch.ops.prim.device.default
_HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key


class _Owned(weakref.ref[Any]):
    """A storage that is accounted for, held weakly, and its blocks."""

    __slots__ = ("birth", "blocks", "home", "is_guest", "key", "num_bytes")

    key: int
    birth: int
    """How many were accounted for before it."""
    home: int | None
    """The device it lives on; None for the host."""
    is_guest: bool
    num_bytes: int
    blocks: dict[int, Block | None]
    """For each device that it is charged to; None where it is empty."""


_BIRTH = attrgetter("birth")


class _Operation(NamedTuple):
    """What torch says of an operator, whatever it is called with."""

    name: str
    is_copy: bool
    is_composite: bool
    is_view: bool
    """Of its first argument, the only tensor that it takes."""
    is_empty: bool
    """It allocates and computes nothing."""
    writes: bool
    """It changes the values of one of its arguments."""
    waits: bool
    """The host reads what it computes, or how many of them there are."""


class Ledger(TorchDispatchMode):
    """Follows every storage of the code run inside it, on real tensors in host memory.

    An operation belongs to the device its inputs live on; one without tensor inputs to the device
    its code runs on (`on`), and to the host outside any. What an operation creates is allocated on
    its device, and where the capacity does not allow it `torch.OutOfMemoryError` is raised at that
    operation. Inputs on two devices raise, as CUDA does, save for copies, which are transfers over
    the link.

    Guests may be used on any device and are charged to each that uses them, since on real cards
    code would make them on each: whole tensors from the host (``mask.to(x.device)`` does nothing
    here), and, in a replica's forward, what is made out of nothing, a table of positions say that
    the model keeps for its next call. 0-dim tensors from the host stay there, as CUDA allows, and
    so do parts of something larger: a batch cut from a data set is not the data set.
    """

    def __init__(self, gpus: Sequence[GpuModel], capacities_bytes: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpus = tuple(gpus)
        self.allocators = [CachingAllocator(capacity) for capacity in capacities_bytes]
        self.timeline = Timeline(gpus)
        self._owned: dict[int, _Owned] = {}
        self._died: deque[_Owned] = deque()
        self._num_born = 0
        self._current: int | None = None
        self._makes_guests = False
        self._is_unseen = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: no compiled code comes here (`as_written`), and torch's guard against it costs each call 10 us."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and type(args[0]) is FakeTensor:  # asked twice an operation: first of all
            return args[0].fake_device
        if types and any(kind is not FakeTensor and kind.__torch_dispatch__ is not _NO_DISPATCH for kind in types):
            return NotImplemented  # torch asks the subclass next; what that does to the tensors it wraps is seen here
        if self._is_unseen:
            return func(*args, **(kwargs or {}))
        return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One operation, accounted for."""
        operation = _operation(func)
        if operation.is_composite:  # seen only where autograd is off altogether, in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        self.free_dead()
        if operation.is_copy:
            out = func(*args, **kwargs)
            self._transfer(args[0], args[1])
            return out
        if operation.is_view and args[0].layout is _STRIDED:
            entry = self._entry(args[0].untyped_storage())
            if entry is not None and not entry.is_guest:  # nothing is made, and nothing runs
                return func(*args, **kwargs)
        inputs = _tensors_in((*args, *kwargs.values()))
        storages = [tensor.untyped_storage() for tensor in inputs]  # kept: `set_` may free one, and its id
        entries = [self._entry(storage) for storage in storages]
        device, as_guest = self._device_of(operation.name, inputs, entries)
        if device is None:
            return func(*args, **kwargs)
        for tensor, entry in zip(inputs, entries, strict=True):
            if entry is None or (entry.is_guest and device not in entry.blocks):
                self._take_along(tensor, entry, device)
        out = func(*args, **kwargs)
        outputs = _tensors_in((out,))
        created = False
        known = {id(storage) for storage in storages}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if self._entry(storage) is None and id(storage) not in known:
                created = True
                self._add(tensor, device, home=device, is_guest=as_guest)
        if operation.writes or (created and not operation.is_empty):
            self.launch(device, work_of(func, args, kwargs, out, inputs, outputs))
        # an index reads its own size only where it selects by a mask
        if operation.waits and (operation.name != "aten::index" or any(t.dtype in _MASKS for t in inputs[1:])):
            self.timeline.wait_for(device)
        return out

    def owner_of(self, tensor: Tensor) -> int | None:
        """The device on which the tensor lives; None for the host."""
        for part in _dense_parts(tensor):
            entry = self._entry(part.untyped_storage())
            return None if entry is None else entry.home
        return None

    def own(self, tensor: Tensor, device: int) -> None:
        """Allocate the tensor's storage on `device`, unless it lives on one already.

        Raises:
            torch.OutOfMemoryError: the capacity does not allow it.
        """
        for part in _dense_parts(tensor):
            storage = part.untyped_storage()
            entry = self._entry(storage)
            if entry is None:
                self._add(part, device, home=device, is_guest=False)
            elif entry.home is None:
                self._charge(entry, device)
                entry.home, entry.is_guest = device, False

    def allocate(self, device: int, num_bytes: int) -> Block | None:
        """A block of `device`; None where it is empty.

        Raises:
            torch.OutOfMemoryError: the capacity does not allow it.
        """
        if not num_bytes:
            return None
        self.free_dead()
        block = self.allocators[device].allocate(num_bytes)
        if block is None:
            raise torch.OutOfMemoryError(self._describe_lack(device, num_bytes))
        return block

    def free(self, device: int, block: Block) -> None:
        """Give the block back to its device."""
        self.allocators[device].free(block)

    def launch(self, device: int, work: Work) -> None:
        """Run one operation on `device`."""
        self.timeline.launch(device, kernel_time_s(work, self.gpus[device]))

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What runs inside is not looked at: whoever runs it tells the timeline. It creates nothing."""
        self._is_unseen = True
        try:
            yield
        finally:
            self._is_unseen = False

    def free_dead(self) -> None:
        """Free the blocks of the storages that have died since, oldest first: torch lets go of them in any order."""
        while self._died:
            died = [self._died.popleft() for _ in range(len(self._died))]
            for entry in sorted(died, key=_BIRTH) if len(died) > 1 else died:
                self._release(entry)

    @contextmanager
    def on(self, device: int | None, *, makes_guests: bool = False) -> Iterator[None]:
        """What code inside creates out of nothing belongs to `device`, None for the host.

        If so wished as a guest.
        """
        before = self._current, self._makes_guests
        self._current, self._makes_guests = device, makes_guests
        try:
            yield
        finally:
            self._current, self._makes_guests = before

    def _entry(self, storage: Any) -> _Owned | None:
        entry = self._owned.get(id(storage))
        if entry is None:
            return None
        num_bytes = storage.nbytes()
        if entry() is not storage:  # a new one has its address, by chance: the dead go in their own order
            self.free_dead()
            self._release(entry)
            return None
        if entry.num_bytes != num_bytes:
            self._follow_size(entry, num_bytes)
        return entry

    def _device_of(
        self, name: str, inputs: Sequence[Tensor], entries: Sequence[_Owned | None]
    ) -> tuple[int | None, bool]:
        """Where the operation runs, None for the host, and whether it creates guests there."""
        device: int | None = None
        guest: _Owned | None = None
        for entry in entries:
            if entry is None:
                continue
            if entry.is_guest:
                guest = guest or entry
            elif device is None:
                device = entry.home
            elif device != entry.home:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {name} got tensors on virtual GPUs "
                    f"{device} and {entry.home}. Move them to one device first, as on real GPUs; "
                    "what a model keeps from one call to the next belongs in register_buffer."
                )
        if device is not None:
            return device, False
        if guest is not None:
            return next(iter(guest.blocks)) if self._current is None else self._current, True
        return (None if inputs else self._current), self._makes_guests

    def _take_along(self, tensor: Tensor, entry: _Owned | None, device: int) -> None:
        """Charge a guest to a device that uses it; what stays on the host is left alone."""
        if tensor.dim() == 0:
            return
        if entry is not None:
            self._charge(entry, device)
            return
        storage = tensor.untyped_storage()
        # looked up again, for another input may have brought it just now
        if storage.nbytes() <= tensor.nbytes and self._entry(storage) is None:
            self._add(tensor, device, home=None, is_guest=True)

    def _add(self, tensor: Tensor, device: int, *, home: int | None, is_guest: bool) -> None:
        # The meta device has no memory, and real cards account for theirs. The tensor is asked: the storage of a fake
        # one is on the meta device.
        if tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        # Its death is only noted, for the next operation: it may come in the middle of an
        # allocation.
        entry = _Owned(storage, self._died.append)
        entry.key, entry.num_bytes = id(storage), storage.nbytes()
        entry.home, entry.is_guest = home, is_guest
        entry.birth, self._num_born = self._num_born, self._num_born + 1
        entry.blocks = {}
        self._charge(entry, device)
        self._owned[entry.key] = entry

    def _charge(self, entry: _Owned, device: int) -> None:
        if device not in entry.blocks:
            entry.blocks[device] = self.allocate(device, entry.num_bytes)

    def _follow_size(self, entry: _Owned, num_bytes: int) -> None:
        """A storage was resized: as on CUDA the new block is there before the old one goes."""
        for device, block in entry.blocks.items():
            entry.blocks[device] = self.allocate(device, num_bytes)
            if block is not None:
                self.free(device, block)
        entry.num_bytes = num_bytes

    def _release(self, entry: _Owned) -> None:
        if self._owned.get(entry.key) is entry:
            del self._owned[entry.key]
        for device, block in entry.blocks.items():
            if block is not None:
                self.free(device, block)
        entry.blocks = {}

    def _transfer(self, target: Tensor, source: Tensor) -> None:
        target_device, source_device = self.owner_of(target), self.owner_of(source)
        num_bytes = sum(part.nbytes for part in _dense_parts(target))
        if target_device != source_device:
            self.timeline.transfer(source_device, target_device, num_bytes)
        elif target_device is not None:
            self.launch(target_device, copy_work(_dense_parts(target), _dense_parts(source)))

    def _describe_lack(self, device: int, num_bytes: int) -> str:
        allocator = self.allocators[device]
        free = allocator.capacity_bytes - allocator.reserved_bytes
        return (
            f"CUDA out of memory. Tried to allocate {format_bytes(num_bytes)}. Virtual GPU {device} "
            f"({self.gpus[device].name}) allows this process {format_bytes(allocator.capacity_bytes)}, of which "
            f"{format_bytes(free)} is free; {format_bytes(allocator.allocated_bytes)} is allocated and "
            f"{format_bytes(allocator.reserved_bytes - allocator.allocated_bytes)} reserved but unallocated."
        )


@functools.cache
def _operation(func: Any) -> _Operation:
    schema = func._schema
    return _Operation(
        name=schema.name,
        is_copy=schema.name == "aten::copy_",
        is_composite=_HAS_KERNEL(func.name(), "CompositeImplicitAutograd"),
        is_view=func.is_view and _takes_one_tensor(schema),
        is_empty=schema.name in _MEMORY_ONLY,
        writes=schema.is_mutable and torch.Tag.inplace_view not in func.tags,
        waits=not _READ_BY_HOST.isdisjoint(func.tags),
    )


def _takes_one_tensor(schema: Any) -> bool:
    """Whether that is its first argument."""
    first, *others = [str(argument.type) for argument in schema.arguments]
    return first == "Tensor" and not any("Tensor" in other for other in others)


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The dense tensors among an operation's arguments or results.

    By operator schema they stand at the top or in one list.
    """
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is _STRIDED:
                found.append(value)
            else:
                found += _dense_parts(value)
        elif isinstance(value, list | tuple):
            found += _tensors_in(value)
    return found


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's bytes.

    That is itself, a sparse one's indices and values, or a subclass's inner tensors.

    None for a layout that shows no storage, oneDNN's own.
    """
    if hasattr(tensor, "__tensor_flatten__"):  # torch's protocol for subclasses that wrap other tensors
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _dense_parts(getattr(tensor, name))]
    if tensor.layout is _STRIDED:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
