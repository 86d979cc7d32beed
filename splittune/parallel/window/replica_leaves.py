"""The parameters that replicas run on, as leaves of their own devices that gradients arrive at."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from splittune.parallel.link import Link


class ReplicaLeaves:
    """What a module's parameters, the originals, were copied to, device by device.

    The leaves are held weakly: they live as long as the copies of a window hold them, or a graph
    that will leave gradients with them. That graph may be all that is left of a forward: of a
    gradient penalty, say, whose output is gone before its slope is differentiated. So every leaf
    that `on_arrival` was called for keeps this object alive in turn, and with it the way home.
    """

    def __init__(self, originals: Sequence[Tensor], leaves: Mapping[int, Sequence[Tensor]], link: Link) -> None:
        self.originals, self.link, self.home = tuple(originals), link, link.place(0)
        self.is_last = True
        """Whether the backward of the latest forward on them ends the window."""
        self.graph_task: int | None = None
        """The backward pass whose end has been asked for on their behalf, by torch's number."""
        self._leaves = {position: [weakref.ref(leaf) for leaf in own] for position, own in leaves.items()}

    def on_arrival(self, hook: Callable[[ReplicaLeaves], None]) -> None:
        """Have `hook` called with this object whenever a gradient arrives at a leaf."""
        for _, leaf in self._alive():
            if leaf.requires_grad:
                leaf.register_hook(lambda _grad: hook(self))

    def alive(self) -> list[Tensor]:
        """The leaves that somebody holds: whoever keeps the list holds them too."""
        return [leaf for _, leaf in self._alive()]

    def at_home(self, index: int) -> Tensor | None:
        """The first device's leaf of ``originals[index]``, where that takes part."""
        return self._leaves[0][index]() if 0 in self._leaves else None

    def has_gradient(self, index: int) -> bool:
        """Whether any replica holds a gradient of ``originals[index]``."""
        leaves = (own[index]() for own in self._leaves.values())
        return any(leaf is not None and leaf.grad is not None for leaf in leaves)

    def take_gradients_at_home(self) -> list[Tensor | None]:
        """The first device's gradients, or as many None, taken off its leaves."""
        return self._take(0) if 0 in self._leaves else [None] * len(self.originals)

    def take_gradients_elsewhere(self) -> list[tuple[int, list[Tensor | None]]]:
        """The other devices' gradients, ``(position, gradients)``, taken off their leaves."""
        return [(position, self._take(position)) for position in sorted(self._leaves) if position != 0]

    def drop_gradients(self, of: Tensor | None = None) -> None:
        """The replicas' gradients of that original, or of all."""
        for index, leaf in self._alive():
            if of is None or self.originals[index] is of:
                leaf.grad = None

    def _take(self, position: int) -> list[Tensor | None]:
        taken: list[Tensor | None] = []
        for leaf in (reference() for reference in self._leaves[position]):
            taken.append(None if leaf is None else leaf.grad)
            if leaf is not None:
                leaf.grad = None
        return taken

    def _alive(self) -> Iterator[tuple[int, Tensor]]:
        for own in self._leaves.values():
            for index, reference in enumerate(own):
                leaf = reference()
                if leaf is not None:
                    yield index, leaf
