"""Sums of gradients, in place where a sum is ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


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

    def can_join(self, index: int) -> bool:
        """Whether this sum has elements that lie one after another, or can have them: a sparse one has not."""
        value = self.values[index]
        return value is None or (value.layout == torch.strided and not value.is_nested)

    def stored_as(
        self, index: int, shape: torch.Size, strides: tuple[int, ...], empty: Callable[[int], Tensor]
    ) -> tuple[Tensor, bool]:
        """This sum as a dense tensor that is ours, stored so; and whether it has been begun, of what `empty` gives."""
        value = self.values[index]
        if value is not None and self._are_ours[index] and value.stride() == strides:
            return value, False
        # .data: nobody is to take it for a view
        made = empty(shape.numel()).as_strided(shape, strides).data
        if value is not None:
            made.copy_(value)
        self.put(index, made)
        return made, value is None

    def add_ours(self, index: int, tensor: Tensor) -> None:
        """Add one tensor that is ours."""
        value = self.values[index]
        if value is not None and self._are_ours[index] and value.layout == torch.strided:
            value.add_(tensor)
        else:
            self.add([index], [tensor], are_ours=True)

    def add_sums(self, indices: Sequence[int], others: Sums) -> None:
        """Add each of the other sums to the sum at its index; they are taken out, so that none is held twice."""
        for are_ours in (True, False):
            places = [place for place, is_ours in enumerate(others._are_ours) if is_ours is are_ours]
            given = [others.values[place] for place in places]
            for place in places:
                others.values[place] = None
            self.add([indices[place] for place in places], given, are_ours=are_ours)

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


def plus(total: Tensor | None, grad: Tensor) -> Tensor:
    """Their sum, in place where `total`, which is ours, allows it."""
    if total is None:
        return grad
    if total.layout != torch.strided:
        return grad + total
    return total.add_(grad)
