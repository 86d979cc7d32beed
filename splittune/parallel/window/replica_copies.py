"""A module's parameters and buffers as they were copied out, and module trees around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from splittune.parallel.link import Link
from splittune.parallel.replicas import hook_tables_of, rebuild, unique_tensors
from splittune.parallel.transfer import copy_to_each
from splittune.parallel.window.replica_leaves import ReplicaLeaves


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
        self.home_was_idle = False
        self.positions = frozenset(positions)
        parameters, buffers = unique_tensors(module.parameters()), unique_tensors(module.buffers())
        originals = [*parameters, *(buffer for buffer in buffers if buffer.requires_grad)]
        self._elsewhere = [position for position in sorted(self.positions) if position != 0]
        with torch.no_grad():
            moved = copy_to_each(originals, link, self._elsewhere)
            copied = dict(zip(self._elsewhere, moved, strict=True))
            if 0 in self.positions:
                copied[0] = [original.detach() for original in originals]
        self._held = {
            position: [_leaf(copy, original) for copy, original in zip(tensors, originals, strict=True)]
            for position, tensors in copied.items()
        }
        self.leaves = ReplicaLeaves(originals, self._held, link)
        self.trees: dict[int, nn.Module] = {}
        self.renew_buffers(module, link)

    def renew_buffers(self, module: nn.Module, link: Link) -> None:
        """Copy the buffers out again, and build the trees around them.

        At home they are the module's own.
        """
        buffers = [buffer for buffer in unique_tensors(module.buffers()) if not buffer.requires_grad]
        copies = dict(zip(self._elsewhere, copy_to_each(buffers, link, self._elsewhere), strict=True))
        copies[0] = buffers
        for position, leaves in self._held.items():
            pairs = zip([*self.leaves.originals, *buffers], [*leaves, *copies[position]], strict=True)
            self.trees[position] = rebuild(module, {id(original): copy for original, copy in pairs})
        self.state = ModuleState.of(module)


def _leaf(copied: Tensor, original: Tensor) -> Tensor:
    if isinstance(original, nn.Parameter):
        return nn.Parameter(copied, requires_grad=original.requires_grad)
    return copied.requires_grad_(original.requires_grad)
