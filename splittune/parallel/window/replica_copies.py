"""A module's parameters and buffers as they were copied out, and module trees around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from splittune.fakes import FakeTensor
from splittune.parallel.collectives import Spread, copy_to_each
from splittune.parallel.link import Link, buckets_of, flatten, unflatten
from splittune.parallel.modules import modules_of
from splittune.parallel.replicas import HOOK_TABLES, rebuild, unique_tensors
from splittune.parallel.window.replica_gradients import Arrival, ReplicaGradients

# What hangs on a module beside its attributes. Buffers are looked at by themselves.
_TABLES = ("_modules", "_parameters", *HOOK_TABLES)


class ModuleState:
    """What copies were made of: as long as the module still is that, no new ones are needed.

    Example: after ``optimizer.step()`` the parameters' versions differ, so it is not current; after
    a forward of BatchNorm it is, and only `buffers` differ from `buffers_now`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = modules_of(module)
        self.parameters = [p for child in self.modules for p in child._parameters.values() if p is not None]
        self.buffers = self.buffers_now()
        """Apart from the rest: a forward pass may change them, and they are few. They are renewed by themselves, but
        for those that learn: those are copied as parameters are."""
        tables = [child.__dict__[name] for child in self.modules for name in _TABLES if name in child.__dict__]
        self._tables, self._empty_tables = [each for each in tables if each], [each for each in tables if not each]
        self._lengths = list(map(len, self._tables))
        self._parts, self._versions = self._parts_now(), self._versions_now()

    def is_current(self) -> bool:
        """Whether all but the buffers is as it was."""
        parts = self._parts_now()
        return (
            not any(self._empty_tables)  # most tables are, and nothing else is asked of them
            and list(map(len, self._tables)) == self._lengths  # or a part could move from one table to the next
            and len(parts) == len(self._parts)
            and all(map(is_, parts, self._parts))
            and self._versions_now() == self._versions
        )

    def buffers_now(self) -> Buffers:
        """The buffers of these modules as they are now."""
        buffers = [buffer for child in self.modules for buffer in child._buffers.values() if buffer is not None]
        return Buffers(buffers, [(id(buffer), *version_of(buffer), buffer.requires_grad) for buffer in buffers])

    def _parts_now(self) -> list[Any]:
        """All that hangs on the modules. To hold it is to know it again: no other object gets its id.

        The modules and tables of before will do: whoever adds or takes away one of them changes what is in another.
        """
        return list(chain.from_iterable(map(dict.values, chain(map(vars, self.modules), self._tables))))

    def _versions_now(self) -> list[tuple[Any, ...]]:
        buffers = (buffer for child in self.modules for buffer in child._buffers.values() if buffer is not None)
        return [
            *((version_of(parameter), parameter.requires_grad) for parameter in self.parameters),
            *((id(buffer), version_of(buffer)) for buffer in buffers if buffer.requires_grad),
        ]


class Buffers(NamedTuple):
    """Buffers at some moment."""

    tensors: list[Tensor]
    versions: list[tuple[Any, ...]]
    """Of each its id, storage and version, and whether it learns."""


def version_of(tensor: Tensor) -> tuple[Any, ...]:
    """Storage and version. Inference tensors have none of the latter, sparse and fake ones none of the former."""
    if type(tensor) is FakeTensor:
        return 0, tensor._version
    try:
        return tensor.data_ptr(), tensor._version
    except RuntimeError:  # by far the most have both: to ask first would take three times as long
        pointer = tensor.data_ptr() if tensor.layout == torch.strided else 0
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
        self._state = ModuleState(module)
        learning = (buffer for buffer in self._state.buffers.tensors if buffer.requires_grad)
        originals = unique_tensors([*self._state.parameters, *learning])
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

    def serve(self, positions: Sequence[int], link: Link) -> bool:
        """Whether a forward on these positions may run on them: buffers aside, they are as new ones would be."""
        return (
            self.positions.issuperset(positions)
            and link.is_in_order_with(self.gradients.link)
            and self.is_inference == torch.is_inference_mode_enabled()
            and self._state.is_current()
        )

    def renew_buffers(self, module: nn.Module, link: Link) -> None:
        """Copy the buffers out again if they may have changed, for copies that `serve` all but for them.

        Where all that changed are statistics of BatchNorm in training, new values are written over
        the copies that are there: such statistics are part of no gradient, and BatchNorm's own
        update is not seen by autograd either. Around other buffers the trees are built anew, for a
        graph may have saved the old ones.
        """
        before, now = self._state.buffers, self._state.buffers_now()
        if not self.home_was_idle and now.versions == before.versions:
            return
        self._state.buffers = now
        if self._may_differ_by_statistics_alone(before, now):
            self._statistics.renew()
        else:
            self._rebuild(module, link)

    def take_trees(self, module: nn.Module) -> dict[int, nn.Module]:
        """The trees, for one forward alone: the next one gets new ones, and what this one sets on them is gone."""
        if not self.trees:
            self._build_trees(module)
        trees, self.trees = self.trees, {}
        return trees

    def _rebuild(self, module: nn.Module, link: Link) -> None:
        """New copies of the buffers, and trees around them; at home they are the module's own."""
        buffers = {id(buffer): buffer for buffer in self._state.buffers.tensors if not buffer.requires_grad}
        statistics = {id(b): b for b in _statistics_of(self._state.modules) if id(b) in buffers}
        others = [buffer for buffer in buffers.values() if id(buffer) not in statistics]
        self._buffers = {0: [*statistics.values(), *others]}
        self._statistics = Statistics(list(statistics.values()), link, self._elsewhere)
        copied = copy_to_each(others, link, self._elsewhere)
        for position, own, copies in zip(self._elsewhere, self._statistics.copies, copied, strict=True):
            self._buffers[position] = [*own, *copies]
        self._build_trees(module)

    def _build_trees(self, module: nn.Module) -> None:
        originals = [*self.gradients.originals, *self._buffers[0]]
        copies = ([*parameters, *self._buffers[position]] for position, parameters in self._parameters.items())
        self.trees = dict(zip(self._parameters, rebuild(module, originals, copies), strict=True))

    def _may_differ_by_statistics_alone(self, before: Buffers, now: Buffers) -> bool:
        """Whether the same buffers are there, and all but statistics are as they were copied."""
        if len(now.versions) != len(before.versions) or not self._statistics.have_their_shapes:
            return False
        own = {id(buffer) for buffer in self._statistics.originals}
        if self.home_was_idle and len(own) < len(self._buffers[0]):
            return False  # a replica's were written to the module's without a trace
        return all(
            is_now == was or (is_now[0] == was[0] and is_now[0] in own)
            for is_now, was in zip(now.versions, before.versions, strict=True)
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

    @property
    def have_their_shapes(self) -> bool:
        """Whether the originals have the shapes that they had."""
        return all(now.shape == shape for now, shape in zip(self.originals, self._shapes, strict=True))

    def _spread(self) -> Spread:
        return Spread(self._link, self._link.place_of(self.originals[0]), self._places)

    def renew(self) -> None:
        """Write the originals' values over the copies."""
        if not self._buckets:
            return
        with torch.no_grad(), self._spread() as spread:
            for members, flat, parts, flats in self._buckets:
                with self._link.on(self._link.place_of(members[0])):
                    torch._foreach_copy_(parts, members)
                spread.send(flat, [there.data for there in flats])


def _statistics_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The statistics that BatchNorm keeps while it trains."""
    norms = (child for child in modules if isinstance(child, _BatchNorm) and child.training)
    return [buffer for norm in norms for buffer in norm._buffers.values() if buffer is not None]
