"""How tensors travel between devices, and where code runs: the seam that virtual GPUs replace."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from splittune.cards import is_card, module_of
from splittune.fakes import FakeTensor
from splittune.parallel.nccl import Nccl, TorchNccl, is_nccl_usable

# torch's own bucket for DataParallel's broadcast: large enough to amortise a launch, small enough
# to stay transient.
BUCKET_BYTES = 10 * 1024**2
# What kernels look for at most: vectorised ones for 16 bytes, matrix products and convolutions for up
# to 256. Of a tensor elsewhere they take a slower variant.
ALIGNMENT_BYTES = 256


class Link(Protocol):
    """Moves tensors between places: the wrapper's devices, by position, and the host.

    A place is opaque to callers: `place` and `place_of` give one, the other methods take it.
    Nothing here records gradients; `splittune.parallel.transfer` makes differentiable operations of
    it.
    """

    threaded: bool
    """True where every replica should have a thread of its own, so that launches on several
    devices overlap."""

    def adopt(self, wrapper: nn.Module) -> None:
        """`wrapper`, new or a copy, runs over this link now; its tensors live at place 0."""
        ...

    def place(self, position: int) -> Any:
        """The place of the device at `position`."""
        ...

    def place_of(self, tensor: Tensor) -> Any:
        """Where `tensor` lives."""
        ...

    def copy(self, tensor: Tensor, place: Any) -> Tensor:
        """A copy of `tensor` at `place`, strides and all; a new one even if it is there already."""
        ...

    def empty(self, shape: Sequence[int], like: Tensor, place: Any) -> Tensor:
        """An uninitialised tensor at `place`, of the dtype of `like`, its dimensions stored in that order."""
        ...

    def hop(self, source: Tensor, start: Any, target: Tensor, end: Any) -> Any:
        """Copy the flat `source` at `start` into `target` at `end`, another place, beside what both work on.

        It begins once both have done what they were given so far. Neither place waits for its end: `wait` with the mark
        that is returned does, at the end before `target` is read, at the start before `source` is written or freed.
        Between a card and the host it is over when this returns.
        """
        ...

    def wait(self, place: Any, mark: Any) -> None:
        """What is given to `place` from now on begins after the hop of this mark."""
        ...

    def nccl(self, places: Sequence[Any]) -> Nccl | None:
        """NCCL over these places, the first of which is the root; None where it cannot be had.

        Asked for the first time for these places it is tried out, which may take seconds, warn, or raise a DeviceError
        (`splittune.parallel.nccl`). What it holds on the cards stays for good.
        """
        ...

    def is_in_order_with(self, other: Link) -> bool:
        """Whether work over either link is queued where the other's is, so that the later follows the earlier."""
        ...

    def on(self, place: Any) -> AbstractContextManager[Any]:
        """Code inside runs at `place`."""
        ...

    def replica(self, position: int, num_replicas: int) -> AbstractContextManager[Any]:
        """Code inside is one replica's forward pass; `num_replicas` run at the same time."""
        ...


class TorchLink:
    """Torch devices as they are; any mix of cards and the CPU, repeated ones included.

    Make it in the thread that calls the wrapper: it remembers that thread's current streams, for
    the replicas' threads.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.threaded = any(device.type != "cpu" for device in self.devices)
        self._streams = {
            device: module_of(device).current_stream(device) for device in set(self.devices) if is_card(device)
        }

    def adopt(self, wrapper: nn.Module) -> None:
        """Nothing to do: tensors know where they live."""

    def place(self, position: int) -> torch.device:
        return self.devices[position]

    def place_of(self, tensor: Tensor) -> torch.device:
        return tensor.device

    def copy(self, tensor: Tensor, place: Any) -> Tensor:
        if is_card(place) and not is_card(tensor.device) and _is_plain(tensor):
            return self._copy_ahead(tensor, place)
        # copy=True: replicas that share one device must not share one tensor. To the host it must
        # block: nothing there waits for a stream, so the copy could be read before it has arrived.
        return tensor.to(place, non_blocking=place.type != "cpu", copy=True)

    def _copy_ahead(self, tensor: Tensor, place: torch.device) -> Tensor:
        """From the host to a card, on a stream of its own: it is not queued behind what the card still has to do.

        From pinned memory the host goes on at once. From other memory it waits for the copy, and for nothing else.
        """
        module, side = module_of(place), _stream_for_inputs(place)
        with module.stream(side):
            copied = tensor.to(place, non_blocking=True, copy=True)
        current = self._stream(place)
        current.wait_stream(side)
        # its memory is the side stream's, which must not have it back before the card is done with it
        copied.record_stream(current)
        return copied

    def empty(self, shape: Sequence[int], like: Tensor, place: Any) -> Tensor:
        return torch.empty_strided(tuple(shape), strides_as(like, shape), dtype=like.dtype, device=place)

    def hop(self, source: Tensor, start: Any, target: Tensor, end: Any) -> Any:
        if not (is_card(start) and is_card(end)):
            with self.on(start), self.on(end):  # it blocks: the host waits for no stream
                target.copy_(source)
            return None
        outgoing, incoming = _outgoing(start), _incoming(end)
        outgoing.wait_stream(self._stream(start))
        incoming.wait_stream(self._stream(end))
        # torch copies on the current stream of the source's card, and has the current one of the other wait for it
        with module_of(end).stream(incoming), module_of(start).stream(outgoing):
            target.copy_(source, non_blocking=True)
        return outgoing.record_event()

    def wait(self, place: Any, mark: Any) -> None:
        if mark is not None:
            self._stream(place).wait_event(mark)

    def is_in_order_with(self, other: Link) -> bool:
        return isinstance(other, TorchLink) and self._streams == other._streams

    def nccl(self, places: Sequence[Any]) -> Nccl | None:
        return TorchNccl({place: self._stream(place) for place in places}) if is_nccl_usable(tuple(places)) else None

    def on(self, place: Any) -> AbstractContextManager[Any]:
        if not is_card(place):
            return nullcontext()
        module, stack = module_of(place), ExitStack()
        stack.enter_context(module.device(place))
        if place in self._streams:
            stack.enter_context(module.stream(self._streams[place]))
        return stack

    def replica(self, position: int, num_replicas: int) -> AbstractContextManager[Any]:
        place = self.devices[position]
        if place in self._streams:
            _make_context(place, self._streams[place])
        return self.on(place)

    def _stream(self, place: torch.device) -> Any:
        """The stream on which the caller's work on that card is queued."""
        return self._streams.get(place) or module_of(place).current_stream(place)


_OWN = threading.local()


def _make_context(place: torch.device, stream: Any) -> None:
    """Give the calling thread a context of that card, the first time.

    cuBLAS warns of a thread that has none, and in one whose first operation is a product torch has made none: any call
    of CUDA's runtime does. Once only, for a graph that is being captured allows no such call.
    """
    known = _OWN.__dict__.setdefault("places", set())
    if place not in known:
        stream.query()
        known.add(place)


@cache
def _stream_for_inputs(device: torch.device) -> Any:
    """One for good: the allocator keeps memory by stream, and another stream's could not serve the next input."""
    return module_of(device).Stream(device)


@cache
def _incoming(device: torch.device) -> Any:
    """The stream on which hops arrive at that card. It has no memory of its own."""
    return module_of(device).Stream(device)


@cache
def _outgoing(device: torch.device) -> Any:
    """The stream on which hops leave that card: its links carry both ways at once."""
    return module_of(device).Stream(device)


def strides_as(like: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of this shape, its dimensions stored in the order of those of `like`.

    Example: of channels-last images, ``(2, 3, 4, 4)``, those of ``(5, 3, 4, 4)`` are
    ``(48, 1, 12, 3)``. Where `like` has gaps or repeats, dimensions are stored as they are counted.
    """
    order = list(range(len(shape)))
    if _is_dense(like) and not like.is_contiguous():
        order.sort(key=lambda place: -like.stride()[place])
    strides, step = [0] * len(shape), 1
    for place in reversed(order):
        strides[place] = step
        step *= max(shape[place], 1)
    return tuple(strides)


def buckets_of(tensors: Sequence[Tensor], limit_bytes: int = BUCKET_BYTES) -> list[list[int]]:
    """Indices of `tensors` grouped so that each group can travel as one flat copy.

    Dense tensors of one dtype are joined up to `limit_bytes`, in whatever order of dimensions they
    are stored, channels last say; every other one travels alone. Example: three float32 tensors of
    6, 3 and 6 MiB with a limit of 10 MiB give ``[[0, 1], [2]]``.
    """
    groups: list[list[int]] = []
    open_groups: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        if not is_joinable(tensor) or tensor.nbytes >= limit_bytes:
            groups.append([index])
            continue
        group, size = open_groups.get(tensor.dtype, ([], 0))
        if not group or size + tensor.nbytes > limit_bytes:
            group, size = [], 0
            groups.append(group)
        group.append(index)
        open_groups[tensor.dtype] = (group, size + tensor.nbytes)
    return groups


_PLAIN_TYPES = (Tensor, torch.nn.Parameter, FakeTensor)


def is_joinable(tensor: Tensor) -> bool:
    """Whether `as_flat` gives all there is of it, and other memory of its dtype can take it."""
    return _is_plain(tensor) and _is_dense(tensor) and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def as_flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as they are stored, one after another: the same memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN_TYPES and tensor.layout == torch.strided and not tensor.is_nested


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one stretch of memory, each once."""
    if tensor.layout != torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def flatten(tensors: Sequence[Tensor], alignment_bytes: int = ALIGNMENT_BYTES) -> Tensor:
    """One flat tensor of all their elements, as they are stored; of a single tensor it is the very memory.

    Each begins at a multiple of `alignment_bytes`, as it would in memory of its own.
    """
    if len(tensors) == 1:
        return as_flat(tensors[0])
    paddings = _paddings(tensors, alignment_bytes)
    zeros = tensors[0].new_zeros(max(paddings)) if any(paddings) else None
    parts = []
    for tensor, padding in zip(tensors, paddings, strict=True):
        parts.append(as_flat(tensor))
        if zeros is not None and padding:
            parts.append(zeros[:padding])
    return torch.cat(parts)


def unflatten(flat: Tensor, like: Sequence[Tensor], alignment_bytes: int = ALIGNMENT_BYTES) -> list[Tensor]:
    """Undo `flatten`: tensors shaped and stored as `like`.

    They are views of `flat` that autograd takes for tensors of their own.
    """
    views, offset = [], 0
    for tensor, padding in zip(like, _paddings(like, alignment_bytes), strict=True):
        # .data: a view among a Function's several outputs may not be changed in place, and buffers
        # are changed in place
        views.append(flat.as_strided(tensor.shape, tensor.stride(), offset).data)
        offset += tensor.numel() + padding
    return views


def _paddings(tensors: Sequence[Tensor], alignment_bytes: int) -> list[int]:
    """Elements between each tensor and the next, for dtypes whose size divides the alignment."""
    return [-tensor.numel() % max(alignment_bytes // tensor.element_size(), 1) for tensor in tensors[:-1]] + [0]
