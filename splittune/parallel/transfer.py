"""Differentiable transfers: send, broadcast, gather. Backward, gradients are copied or added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from splittune.parallel.link import Link, buckets_of, flatten, unflatten


def send(tensor: Tensor, link: Link, place: Any) -> Tensor:
    """`tensor` at `place`: itself if it lives there, else a copy whose gradient is copied back."""
    if link.place_of(tensor) == place:
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        sent: Tensor = apply(_Send, link, place, tensor)
        return sent
    with torch.no_grad():
        return link.copy(tensor, place)


def gather(chunks: Sequence[Tensor], link: Link, place: Any, dim: int) -> Tensor:
    """The chunks joined along `dim` at `place`, each written straight into the result."""
    if len(chunks) == 1:
        return send(chunks[0], link, place)
    joined: Tensor = apply(_Gather, link, place, dim, *chunks)
    return joined


def broadcast(tensors: Sequence[Tensor], link: Link, positions: Sequence[int]) -> list[list[Tensor]]:
    """Copies of all `tensors` on the devices at `positions`.

    ``result[i][j]`` is tensor j on device ``positions[i]``. All gradients pass through one autograd
    node. It runs once every replica's gradients are there, and adds them up where the tensors live.
    A tensor that no replica used gets no gradient at all, as on one device.
    """
    if not tensors:
        return [[] for _ in positions]
    copies: tuple[Tensor, ...] = apply(_Broadcast, link, tuple(positions), *tensors)
    return [list(copies[start : start + len(tensors)]) for start in range(0, len(copies), len(tensors))]


def copy_to_each(tensors: Sequence[Tensor], link: Link, positions: Sequence[int]) -> list[list[Tensor]]:
    """Like `broadcast`, but nothing is recorded: for buffers. Travels in coalesced buckets."""
    copies: list[list[Any]] = [[None] * len(tensors) for _ in positions]
    with torch.no_grad():
        for bucket in buckets_of(tensors):
            members = [tensors[index] for index in bucket]
            with link.on(link.place_of(members[0])):
                flat = flatten(members)
            for device_copies, position in zip(copies, positions, strict=True):
                for index, part in zip(bucket, unflatten(link.copy(flat, link.place(position)), members), strict=True):
                    device_copies[index] = part
    return copies


def apply(function: Any, *args: Any) -> Any:
    """``function.apply(*args)``, which torch declares in some versions only, and for one tensor."""
    return function.apply(*args)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Link, place: Any, tensor: Tensor) -> Tensor:
        ctx.link, ctx.source = link, link.place_of(tensor)
        return link.copy(tensor, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, apply(_Send, ctx.link, ctx.source, grads[0])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Link, place: Any, dim: int, *chunks: Tensor) -> Tensor:
        ctx.link, ctx.dim = link, dim
        ctx.sources = [link.place_of(chunk) for chunk in chunks]
        ctx.sizes = [chunk.size(dim) for chunk in chunks]
        shape = list(chunks[0].shape)
        shape[dim] = sum(ctx.sizes)
        # stored as torch.cat would: in the chunks' order of dimensions, if that is one
        joined = link.empty(shape, next((chunk for chunk in chunks if chunk.is_contiguous()), chunks[0]), place)
        for part, chunk in zip(joined.split(ctx.sizes, dim), chunks, strict=True):
            part.copy_(chunk, non_blocking=not joined.is_cpu)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        parts = grads[0].split(ctx.sizes, ctx.dim)
        wanted = ctx.needs_input_grad[3:]
        sent = [
            send(part, ctx.link, source) if want else None
            for source, part, want in zip(ctx.sources, parts, wanted, strict=True)
        ]
        return None, None, None, *sent


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Link, positions: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.link, ctx.positions = link, positions
        ctx.sources = [link.place_of(tensor) for tensor in tensors]
        ctx.set_materialize_grads(False)
        copies = [copy for on_device in copy_to_each(tensors, link, positions) for copy in on_device]
        ctx.mark_non_differentiable(
            *(copy for index, copy in enumerate(copies) if not tensors[index % len(tensors)].requires_grad)
        )
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        count = len(ctx.sources)
        per_device = [grads[start : start + count] for start in range(0, len(grads), count)]
        if torch.is_grad_enabled():  # create_graph=True: the sum must be differentiable itself
            return None, None, *_add_up_differentiably(per_device, ctx.link, ctx.sources)
        return None, None, *_add_up(per_device, ctx.link, ctx.positions, ctx.sources)


def _add_up(
    per_device: Sequence[Sequence[Tensor | None]], link: Link, positions: Sequence[int], sources: Sequence[Any]
) -> list[Tensor | None]:
    """The sum over devices of each tensor's gradients, where it lives, in coalesced buckets.

    The devices' own gradients stay alive meanwhile: autograd holds what it has handed to a node
    until that returns.
    """
    totals = Sums(len(sources))
    for position, grads in zip(positions, per_device, strict=True):
        add_to_home(position, list(grads), link, sources[0], totals, range(len(sources)))
    return totals.values


class Sums:
    """Tensors that are added up, one sum for each place of a list; in place where the sum is ours.

    What autograd hands over may be handed to others too, as the gradient of ``a + b`` is both of
    ``a`` and of ``b``: nothing is added to it. Example: of ``add([0], [x])``, ``add([0], [y])`` and
    ``add([0], [z])`` the second makes a new tensor, and the third is in place.
    """

    def __init__(self, count: int) -> None:
        self.values: list[Tensor | None] = [None] * count
        self._are_ours = [False] * count

    def put(self, index: int, tensor: Tensor) -> None:
        """Begin this sum with a tensor that is ours."""
        self.values[index], self._are_ours[index] = tensor, True

    def drop(self, index: int) -> None:
        """Begin this sum anew."""
        self.values[index], self._are_ours[index] = None, False

    def own(self, index: int) -> Tensor | None:
        """This sum, as a tensor that nobody else has."""
        value = self.values[index]
        if value is not None and not self._are_ours[index]:
            self.put(index, value := value.clone())
        return value

    def add_ours(self, index: int, tensor: Tensor) -> None:
        """Add one tensor that is ours."""
        value = self.values[index]
        if value is not None and self._are_ours[index] and value.layout == torch.strided:
            value.add_(tensor)
        else:
            self.add([index], [tensor], are_ours=True)

    def add_sums(self, indices: Sequence[int], others: Sums) -> None:
        """Add each of the other sums to the sum at its index; they are taken out, so that none is held twice."""
        for place, index in enumerate(indices):
            value, others.values[place] = others.values[place], None
            self.add([index], [value], are_ours=others._are_ours[place])

    def add(self, indices: Iterable[int], tensors: Iterable[Tensor | None], *, are_ours: bool = False) -> None:
        """Add each tensor, None for nothing, to the sum at its index."""
        ours: list[tuple[Tensor, Tensor]] = []
        others: list[tuple[int, Tensor, Tensor]] = []
        for index, tensor in zip(indices, tensors, strict=True):
            value = self.values[index]
            if tensor is None:
                continue
            if value is None:
                self.values[index] = tensor.detach() if tensor.requires_grad else tensor
                self._are_ours[index] = are_ours
            elif value.layout != torch.strided:  # of an embedding, say: what is dense as well must stand on the left
                self.put(index, tensor.detach() + value)
            elif tensor.layout != torch.strided:
                self.put(index, value.add_(tensor) if self._are_ours[index] else value + tensor)
            elif self._are_ours[index]:
                ours.append((value, tensor))
            else:
                others.append((index, value, tensor))
        if ours:
            torch._foreach_add_(*map(list, zip(*ours, strict=True)))
        if others:
            places, values, added = map(list, zip(*others, strict=True))
            for index, total in zip(places, torch._foreach_add(values, added), strict=True):
                self.put(index, total)


def add_to_home(
    position: int, grads: list[Tensor | None], link: Link, home: Any, totals: Sums, indices: Sequence[int]
) -> None:
    """Add a device's gradients to the totals at `home` with these indices, in coalesced buckets.

    Whoever gives the list away gives the memory too: each bucket's gradients are freed on their
    device once they have been sent.
    """
    present = [index for index, grad in enumerate(grads) if grad is not None]
    for bucket in buckets_of([grad for grad in grads if grad is not None]):
        places = [present[member] for member in bucket]
        members = [grad for place in places if (grad := grads[place]) is not None]
        for place in places:
            grads[place] = None
        # Autograd's thread of another device has its streams, and of this one the default alone.
        with link.on(home):
            with link.on(link.place(position)):
                arrived = unflatten(link.copy(flatten(members, 1), home), members, 1)
            totals.add([indices[place] for place in places], arrived, are_ours=True)


def plus(total: Tensor | None, grad: Tensor) -> Tensor:
    """Their sum, in place where `total`, which is ours, allows it."""
    if total is None:
        return grad
    if total.layout != torch.strided:
        return grad + total
    return total.add_(grad)


def _add_up_differentiably(
    per_device: Sequence[Sequence[Tensor | None]], link: Link, sources: Sequence[Any]
) -> list[Tensor | None]:
    totals: list[Tensor | None] = []
    for source, *grads in zip(sources, *per_device, strict=True):
        sent = [apply(_Send, link, source, grad) for grad in grads if grad is not None]
        totals.append(sum(sent[1:], sent[0]) if sent else None)
    return totals
