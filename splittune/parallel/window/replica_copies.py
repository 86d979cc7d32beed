"""A module's parameters and buffers as they were copied out, and module trees around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from splittune.parallel.link import Link
from splittune.parallel.replicas import hook_tables_of, rebuild, unique_tensors
from splittune.parallel.transfer import copy_to_each


@dataclass(frozen=True, slots=True)
class ModuleState:
    """What copies were made of: two equal states need no new copies.

    Example: after ``optimizer.step()`` the parameters' versions differ, so `fixed` differs; after a
    forward of BatchNorm only `buffers` does.
    """

    fixed: tuple[Any, ...]
    """All but the buffers, which a forward pass may change and which are few: they are renewed by
    themselves."""
    buffers: tuple[Any, ...]
    held: tuple[Any, ...] = field(compare=False)
    """All that is told by its id: as long as it is held, no other object gets that."""

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """Versions and storages of tensors, and the identity of all that hangs on the modules."""
        parts: list[Any] = []
        for child in module.modules():
            hooks = [hook for table in hook_tables_of(child).values() for hook in table.values()]
            parts += [child, *child.__dict__.values(), *child._modules.values(), *hooks]
        parameters, buffers = tuple(module.parameters()), tuple(module.buffers())
        learning = tuple((id(p), *version_of(p), p.requires_grad) for p in parameters)
        return cls(
            fixed=(learning, *map(id, parts)),
            buffers=tuple((id(b), *version_of(b), b.requires_grad) for b in buffers),
            held=(*parts, *parameters, *buffers),
        )


def version_of(tensor: Tensor) -> tuple[Any, ...]:
    """Storage and version. Inference tensors have none of the latter, and no gradient."""
    pointer = tensor.data_ptr() if tensor.layout == torch.strided else 0
    return pointer, None if tensor.is_inference() else tensor._version


class ReplicaCopies:
    """The copies that one or several forwards of a window run on.

    Position 0 is where the module lives: its parameters there are leaves of their own on the
    module's storage.
    """

    def __init__(self, module: nn.Module, link: Link, positions: Iterable[int]) -> None:
        self.link, self.home = link, link.place(0)
        self.is_last, self.home_was_idle = True, False
        self.positions = frozenset(positions)
        parameters, buffers = unique_tensors(module.parameters()), unique_tensors(module.buffers())
        self.originals = [*parameters, *(buffer for buffer in buffers if buffer.requires_grad)]
        self._elsewhere = [position for position in sorted(self.positions) if position != 0]
        with torch.no_grad():
            moved = copy_to_each(self.originals, link, self._elsewhere)
            copied = dict(zip(self._elsewhere, moved, strict=True))
            if 0 in self.positions:
                copied[0] = [original.detach() for original in self.originals]
        self.leaves = {position: _leaves(tensors, self.originals) for position, tensors in copied.items()}
        self.trees: dict[int, nn.Module] = {}
        self.renew_buffers(module, link)

    def renew_buffers(self, module: nn.Module, link: Link) -> None:
        """Copy the buffers out again, and build the trees around them.

        At home they are the module's own.
        """
        buffers = [buffer for buffer in unique_tensors(module.buffers()) if not buffer.requires_grad]
        copies = dict(zip(self._elsewhere, copy_to_each(buffers, link, self._elsewhere), strict=True))
        copies[0] = buffers
        for position, leaves in self.leaves.items():
            pairs = zip([*self.originals, *buffers], [*leaves, *copies[position]], strict=True)
            self.trees[position] = rebuild(module, {id(original): copy for original, copy in pairs})
        self.state = ModuleState.of(module)

    def on_arrival(self, hook: Callable[[Tensor], None]) -> None:
        """Have `hook` called with every gradient that arrives at a leaf."""
        for leaf in (leaf for own in self.leaves.values() for leaf in own):
            if leaf.requires_grad:
                leaf.register_hook(hook)

    def has_gradient(self, index: int) -> bool:
        """Whether any replica holds a gradient of ``originals[index]``."""
        return any(leaves[index].grad is not None for leaves in self.leaves.values())

    def take_gradients_at_home(self) -> list[Tensor | None]:
        """The first device's gradients, or as many None, taken off its leaves."""
        return _take(self.leaves[0]) if 0 in self.leaves else [None] * len(self.originals)

    def take_gradients_elsewhere(self) -> list[tuple[int, list[Tensor | None]]]:
        """The other devices' gradients, ``(position, gradients)``, taken off their leaves."""
        return [(position, _take(self.leaves[position])) for position in self._elsewhere]

    def drop_gradients(self, of: Tensor | None = None) -> None:
        """The replicas' gradients of that original, or of all."""
        for leaves in self.leaves.values():
            _take([leaf for leaf, o in zip(leaves, self.originals, strict=True) if of is None or o is of])


def _leaves(copied: Sequence[Tensor], originals: Sequence[Tensor]) -> list[Tensor]:
    return [_leaf(copy, original) for copy, original in zip(copied, originals, strict=True)]


def _leaf(copied: Tensor, original: Tensor) -> Tensor:
    if isinstance(original, nn.Parameter):
        return nn.Parameter(copied, requires_grad=original.requires_grad)
    return copied.requires_grad_(original.requires_grad)


def _take(leaves: Sequence[Tensor]) -> list[Tensor | None]:
    taken = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return taken
