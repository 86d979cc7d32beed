"""Differentiable transfers: send, broadcast, gather. Backward, gradients are copied or added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from splittune.parallel.collectives import Part, add_from_afar, copy_to_each
from splittune.parallel.link import Link
from splittune.parallel.sums import Sums


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
    totals, home, indices = Sums(len(sources)), sources[0], range(len(sources))
    parts = [Part(link.place(position), list(grads)) for position, grads in zip(positions, per_device, strict=True)]
    with link.on(home):
        for part in parts:
            if part.place == home:
                totals.add(indices, part.grads)
    add_from_afar([part for part in parts if part.place != home], link, home, totals, indices)
    return totals.values


def _add_up_differentiably(
    per_device: Sequence[Sequence[Tensor | None]], link: Link, sources: Sequence[Any]
) -> list[Tensor | None]:
    totals: list[Tensor | None] = []
    for source, *grads in zip(sources, *per_device, strict=True):
        sent = [apply(_Send, link, source, grad) for grad in grads if grad is not None]
        totals.append(sum(sent[1:], sent[0]) if sent else None)
    return totals
