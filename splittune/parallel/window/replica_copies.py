"""A module's parameters and buffers as they were copied out, and module trees around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# Private; tests/hardware/virtual/test_shapes.py fails loudly should it change.
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from splittune.parallel.collectives import Spread, copy_to_each
from splittune.parallel.link import Link, buckets_of, flatten, unflatten
from splittune.parallel.modules import modules_of
from splittune.parallel.replicas import HOOK_TABLES, rebuild, unique_tensors
from splittune.parallel.window.replica_gradients import Arrival, ReplicaGradients

# What every module has: tables, whose contents are looked at, and constants.
_TABLES = frozenset(vars(nn.Module())) - {"training"}


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
        parameters: list[Tensor] = []
        buffers: list[Tensor] = []
        for child in modules_of(module):
            parts.append(child)
            parts += [value for name, value in child.__dict__.items() if name not in _TABLES]
            parts += child._modules.values()
            for name in HOOK_TABLES:
                if table := child.__dict__.get(name):
                    parts += table.values()
            parameters += [parameter for parameter in child._parameters.values() if parameter is not None]
            buffers += [buffer for buffer in child._buffers.values() if buffer is not None]
        learning = tuple((id(p), *version_of(p), p.requires_grad) for p in parameters)
        return cls(
            fixed=(learning, *map(id, parts)),
            buffers=tuple((id(b), *version_of(b), b.requires_grad) for b in buffers),
            held=(*parts, *parameters, *buffers),
        )


def version_of(tensor: Tensor) -> tuple[Any, ...]:
    """Storage and version. Inference tensors have none of the latter, and no gradient; fake ones have no address."""
    pointer = tensor.data_ptr() if tensor.layout == torch.strided and not isinstance(tensor, FakeTensor) else 0
    return pointer, None if tensor.is_inference() else tensor._version


class ReplicaCopies:
    """The copies that one or several forwards of a window run on.

    Position 0 is where the module lives: the replica there works on the module's storage, and its
    gradients are told apart all the same.
    """

    def __init__(
        self, module: nn.Module, link: Link, positions: Iterable[int], on_arrival: Arrival | None = None
    ) -> None:
        self.home_was_idle = False
        self.is_inference = torch.is_inference_mode_enabled()
        self.positions = frozenset(positions)
        parameters, buffers = unique_tensors(module.parameters()), unique_tensors(module.buffers())
        originals = [*parameters, *(buffer for buffer in buffers if buffer.requires_grad)]
        self._elsewhere = [position for position in sorted(self.positions) if position != 0]
        with torch.no_grad():
            moved = copy_to_each(originals, link, self._elsewhere)
            copied = dict(zip(self._elsewhere, moved, strict=True))
            if 0 in self.positions:
                copied[0] = [original.detach() for original in originals]  # and no copies
        self.gradients = ReplicaGradients(originals, self.positions, link, on_arrival)
        if torch.is_grad_enabled():
            copied = {position: self.gradients.as_parameters(position, own) for position, own in copied.items()}
        self._parameters = copied
        self.trees: dict[int, nn.Module] = {}
        self._rebuild(module, link)
        self.state = ModuleState.of(module)

    def renew_buffers(self, module: nn.Module, link: Link, state: ModuleState) -> None:
        """Copy the buffers out again, for a module that is in this state now.

        Where all that changed are statistics of BatchNorm in training, new values are written over
        the copies that are there: such statistics are part of no gradient, and BatchNorm's own
        update is not seen by autograd either. Around other buffers the trees are built anew, for a
        graph may have saved the old ones.
        """
        if self._may_differ_by_statistics_alone(module, state):
            self._statistics.renew()
        else:
            self._rebuild(module, link)
        self.state = state

    def take_trees(self, module: nn.Module) -> dict[int, nn.Module]:
        """The trees, for one forward alone: the next one gets new ones, and what this one sets on them is gone."""
        if not self.trees:
            self._build_trees(module)
        trees, self.trees = self.trees, {}
        return trees

    def _rebuild(self, module: nn.Module, link: Link) -> None:
        """New copies of the buffers, and trees around them; at home they are the module's own."""
        buffers = {id(buffer): buffer for buffer in module.buffers() if not buffer.requires_grad}
        statistics = {id(buffer): buffer for buffer in _statistics_of(module) if id(buffer) in buffers}
        others = [buffer for buffer in buffers.values() if id(buffer) not in statistics]
        self._buffers = {0: [*statistics.values(), *others]}
        self._statistics = Statistics(list(statistics.values()), link, self._elsewhere)
        copied = copy_to_each(others, link, self._elsewhere)
        for position, own, copies in zip(self._elsewhere, self._statistics.copies, copied, strict=True):
            self._buffers[position] = [*own, *copies]
        self._build_trees(module)

    def _build_trees(self, module: nn.Module) -> None:
        originals = [*self.gradients.originals, *self._buffers[0]]
        for position, parameters in self._parameters.items():
            copies = [*parameters, *self._buffers[position]]
            self.trees[position] = rebuild(module, dict(zip(map(id, originals), copies, strict=True)))

    def _may_differ_by_statistics_alone(self, module: nn.Module, state: ModuleState) -> bool:
        """Whether the same buffers are there, and all but statistics are as they were copied."""
        if len(state.buffers) != len(self.state.buffers) or not self._statistics.are(_statistics_of(module)):
            return False
        own = {id(buffer) for buffer in self._statistics.originals}
        if self.home_was_idle and len(own) < len(self._buffers[0]):
            return False  # a replica's were written to the module's without a trace
        return all(
            now == before or (now[0] == before[0] and now[0] in own)
            for now, before in zip(state.buffers, self.state.buffers, strict=True)
        )


class Statistics:
    """BatchNorm's statistics, and copies of them that are written over: they lie in a few flat tensors."""

    def __init__(self, originals: list[Tensor], link: Link, positions: Sequence[int]) -> None:
        self.originals, self._link = originals, link
        self._places = [link.place(position) for position in positions]
        self._shapes = [original.shape for original in originals]
        self.copies: list[list[Tensor]] = [[None] * len(originals) for _ in positions]  # type: ignore[list-item]
        """By position, then as `originals`."""
        self._buckets: list[tuple[list[Tensor], Tensor, list[Tensor], list[Tensor]]] = []
        if not originals or not positions:
            return
        with torch.no_grad(), self._spread() as spread:
            for bucket in buckets_of(originals):
                members = [originals[index] for index in bucket]
                with link.on(link.place_of(members[0])):
                    flat = flatten(members).clone() if len(members) == 1 else flatten(members)
                spread.send(flat, flats := spread.empty(flat))
                for own, there in zip(self.copies, flats, strict=True):
                    for index, copied in zip(bucket, unflatten(there, members), strict=True):
                        own[index] = copied
                self._buckets.append((members, flat, unflatten(flat, members), flats))

    def _spread(self) -> Spread:
        return Spread(self._link, self._link.place_of(self.originals[0]), self._places)

    def are(self, statistics: Sequence[Tensor]) -> bool:
        """Whether these are the originals, with the shapes they had."""
        return len(statistics) == len(self.originals) and all(
            now is before and now.shape == shape
            for now, before, shape in zip(statistics, self.originals, self._shapes, strict=True)
        )

    def renew(self) -> None:
        """Write the originals' values over the copies."""
        if not self._buckets:
            return
        with torch.no_grad(), self._spread() as spread:
            for members, flat, parts, flats in self._buckets:
                with self._link.on(self._link.place_of(members[0])):
                    torch._foreach_copy_(parts, members)
                spread.send(flat, [there.data for there in flats])


def _statistics_of(module: nn.Module) -> list[Tensor]:
    """The statistics that BatchNorm keeps while it trains, each once."""
    norms = (child for child in modules_of(module) if isinstance(child, _BatchNorm) and child.training)
    return unique_tensors(buffer for norm in norms for buffer in norm._buffers.values() if buffer is not None)
