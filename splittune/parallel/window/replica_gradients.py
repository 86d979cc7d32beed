"""The gradients of a module's replicas, taken as they arrive and kept until they are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from splittune.parallel.link import Link, buckets_of
from splittune.parallel.sums import Sums
from splittune.parallel.transfer import apply

Arrival = Callable[["ReplicaGradients"], None]


class ReplicaGradients:
    """What the replicas' backward passes leave behind, position by position.

    `as_parameters` makes a position's copies into what its replica trains. A backward pass hands
    their gradients over here, and nowhere else. The graph holds this object, and with it the way
    home: it may be all that is left of a forward, of a gradient penalty say.

    Copies are no leaves of the graph, so nothing but the replica and what a graph saved holds them,
    and once a window is over their memory is free though somebody keeps the loss. Their gradients
    arrive a bucket at a time, when the pass has nothing else to do on that device. Position 0 works
    on the module's own storage: there the parameters are leaves, whose gradients arrive one by one
    and as early as can be, so that the fullest device never holds two of each.

    Args:
        originals: the module's own tensors that learn, in the order of all lists here.
        positions: where they were copied to.
        on_arrival: called with this object before gradients are taken, in the thread and pass that
            brings them, unless its end has been asked for (`graph_tasks`).
    """

    def __init__(
        self, originals: Sequence[Tensor], positions: Iterable[int], link: Link, on_arrival: Arrival | None = None
    ) -> None:
        self.originals, self.link, self.home = tuple(originals), link, link.place(0)
        self.is_last = True
        """Whether the backward of the latest forward on them ends the window."""
        self.graph_tasks: set[int] = set()
        """The backward passes whose end has been asked for on their behalf, by torch's numbers."""
        self._on_arrival = on_arrival or (lambda _: None)
        self._strides = [_strides_of(original) for original in self.originals]
        self._held = {position: Sums(len(self.originals)) for position in positions}

    def as_parameters(self, position: int, copies: Sequence[Tensor]) -> list[Tensor]:
        """`copies` of the originals at `position`, so that their gradients come here."""
        if position == 0:
            return [self._leaf(index, copied) for index, copied in enumerate(copies)]
        parameters = list(copies)
        for indices in self._buckets:
            recorded = apply(_Parameters, _anchor(), self, position, indices, [copies[index] for index in indices])
            for index, parameter in zip(indices, recorded, strict=True):
                parameters[index] = parameter
        return parameters

    @cached_property
    def _buckets(self) -> list[list[int]]:
        """What learns, in groups whose gradients arrive together: one list for all devices, for copies are alike."""
        learning = [index for index, original in enumerate(self.originals) if original.requires_grad]
        buckets = buckets_of([self.originals[index] for index in learning])
        return [[learning[member] for member in bucket] for bucket in buckets]

    def _leaf(self, index: int, copied: Tensor) -> Tensor:
        leaf = copied.detach().requires_grad_(self.originals[index].requires_grad)
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(partial(self._take_off, index))
        return leaf

    def take(self, position: int, indices: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Add gradients that have arrived to those that are held."""
        self._arrive()
        self._held[position].add(indices, map(self._laid_out, indices, grads))

    def _take_off(self, index: int, leaf: Tensor) -> None:
        """Take a gradient that nobody else has, and that is laid out as the parameter: there are many."""
        self._arrive()
        grad, leaf.grad = leaf.grad, None
        if grad is not None:
            # of a complex parameter it may be conjugated in name alone, and torch adds no lists of such
            self._held[0].add_ours(index, (grad.detach() if grad.requires_grad else grad).resolve_conj())

    def _arrive(self) -> None:
        if torch._C._current_graph_task_id() not in self.graph_tasks:
            self._on_arrival(self)

    def at_home(self, index: int) -> Tensor | None:
        """The first device's gradient of ``originals[index]``."""
        return self._held[0].values[index] if 0 in self._held else None

    def own_at_home(self, index: int) -> Tensor | None:
        """`at_home`, as a tensor that nobody else has: the next gradient is added to it in place."""
        return self._held[0].own(index)

    def put_at_home(self, index: int, grad: Tensor) -> None:
        """Have the first device's gradient be this tensor, which may be added to in place."""
        self._held[0].put(index, grad)

    def has_gradient(self, index: int) -> bool:
        """Whether any replica has left a gradient of ``originals[index]``."""
        return any(held.values[index] is not None for held in self._held.values())

    def hand_over(self) -> list[tuple[int, Sums]]:
        """All gradients, ``(position, sums)``; none are held afterwards."""
        given = sorted(self._held.items())
        self._held = {position: Sums(len(self.originals)) for position in self._held}
        return given

    def drop(self, of: Tensor | None = None) -> None:
        """Forget the gradients of that original, or all."""
        for held in self._held.values():
            for index, original in enumerate(self.originals):
                if of is None or original is of:
                    held.drop(index)

    def _laid_out(self, index: int, grad: Tensor | None) -> Tensor | None:
        """The gradient with the strides of its parameter, as autograd itself would leave it there."""
        strides = self._strides[index]
        if grad is None or grad.layout != torch.strided:
            return grad
        grad = grad.resolve_conj()
        if grad.is_contiguous() if strides is None else grad.stride() == strides:
            return grad
        if strides is None:
            return grad.contiguous()
        return torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)


def _strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides of its gradient: its own if it is dense; None for contiguous."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return None
    return torch.empty_like(tensor, device="meta").stride()


class _Parameters(torch.autograd.Function):
    """A replica's parameters, out of copies of them; backward hands their gradients over."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, taker: ReplicaGradients, position: int, indices: Sequence[int], copies: list[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.taker, ctx.position, ctx.indices = taker, position, indices
        ctx.set_materialize_grads(False)
        # in a list autograd does not see them: they are returned as they are, and not as views of inputs
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        with torch.no_grad():
            ctx.taker.take(ctx.position, ctx.indices, grads)
        return (None,) * 5


def _anchor() -> Tensor:
    """An input that needs a gradient, and gets none: without one torch would record nothing."""
    return torch.empty(0, requires_grad=True)
