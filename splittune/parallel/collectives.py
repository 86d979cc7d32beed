"""One place's tensors copied to several, and several places' gradients added up at one, in buckets.

Where NCCL serves the cards it does both. Otherwise a bucket passes from card to card, out as a copy and home as a
growing sum, while the next one follows: every link carries each byte once in each direction, for any number of cards.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splittune.parallel.link import (
    ALIGNMENT_BYTES,
    BUCKET_BYTES,
    Link,
    as_flat,
    buckets_of,
    flatten,
    is_joinable,
    unflatten,
)
from splittune.parallel.sums import Sums

# Of each card: one that is being sent and one that is being filled.
_NUM_IN_FLIGHT = 2


class _InFlight:
    """What hops still read or write at each place: two tensors at most, neither freed nor written meanwhile."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._held: defaultdict[Any, deque[tuple[Tensor, Any]]] = defaultdict(deque)

    def hold(self, place: Any, tensor: Tensor, mark: Any) -> None:
        """A hop that ends with this mark has been given the tensor."""
        self._held[place].append((tensor, mark))
        self._wait(place, _NUM_IN_FLIGHT)

    def make_room(self, place: Any) -> None:
        """Have memory at `place` for one more."""
        self._wait(place, _NUM_IN_FLIGHT - 1)

    def land(self) -> None:
        """What every place is given from now on begins after all hops to and from it."""
        for place in self._held:
            self._wait(place, 0)

    def _wait(self, place: Any, num_left: int) -> None:
        held = self._held[place]
        while len(held) > num_left:
            self._link.wait(place, held[0][1])
            held.popleft()  # and with it the memory, not before


class Spread:
    """Copies flat tensors from one place to several; enter it as a context, which ends when all is on its way.

    Args:
        home: where the tensors are.
        places: where they go, in the order of the targets; `home` and repetitions are copies at that place.
    """

    def __init__(self, link: Link, home: Any, places: Sequence[Any]) -> None:
        self._link, self._home, self._places = link, home, tuple(places)
        self._stops = tuple(dict.fromkeys(place for place in places if place != home))
        self._nccl = link.nccl((home, *self._stops)) if self._stops else None
        self._in_flight = _InFlight(link)

    def __enter__(self) -> Spread:
        return self

    def __exit__(self, *_error: object) -> None:
        self._in_flight.land()

    def joined(self, members: Sequence[Tensor]) -> Tensor:
        """All their elements in one flat tensor; of a single one it is the very memory."""
        self._in_flight.make_room(self._home)
        with self._link.on(self._home):
            return flatten(members)

    def empty(self, flat: Tensor) -> list[Tensor]:
        """Targets for it, one for each place."""
        targets = []
        for place in self._places:
            with self._link.on(place):
                targets.append(self._link.empty(flat.shape, flat, place))
        return targets

    def send(self, flat: Tensor, targets: Sequence[Tensor]) -> None:
        """Copy `flat` into every target. Who writes to it later does so after leaving the context."""
        first: dict[Any, Tensor] = {}
        for place, target in zip(self._places, targets, strict=True):
            if place != self._home:
                first.setdefault(place, target)
        if self._nccl is not None:
            self._nccl.broadcast([flat, *(first[place] for place in self._stops)])
        else:
            self._pass_on(flat, first)
        for place, target in zip(self._places, targets, strict=True):
            source = flat if place == self._home else first[place]
            if target is not source:
                with self._link.on(place):
                    target.copy_(source)

    def _pass_on(self, flat: Tensor, targets: dict[Any, Tensor]) -> None:
        """From each place to the next, a piece of a large tensor after the other."""
        step = max(BUCKET_BYTES // flat.element_size(), 1)
        for begin in range(0, flat.numel(), step):
            source, at = flat[begin : begin + step], self._home
            for place in self._stops:
                piece = targets[place][begin : begin + step]
                mark = self._link.hop(source, at, piece, place)
                self._link.wait(place, mark)
                self._in_flight.hold(at, source, mark)
                source, at = piece, place


def copy_to_each(tensors: Sequence[Tensor], link: Link, positions: Sequence[int]) -> list[list[Tensor]]:
    """Copies of all `tensors`, which share a place, on the devices at `positions`; nothing is recorded.

    ``result[i][j]`` is tensor j on device ``positions[i]``. What can be joined travels in coalesced buckets.
    """
    copies: list[list[Any]] = [[None] * len(tensors) for _ in positions]
    if not tensors or not positions:
        return copies
    home, places = link.place_of(tensors[0]), [link.place(position) for position in positions]
    with torch.no_grad(), Spread(link, home, places) as spread:
        for bucket in buckets_of(tensors):
            members = [tensors[index] for index in bucket]
            if not is_joinable(members[0]):
                arrived = [[link.copy(members[0], place)] for place in places]
            else:
                flat = spread.joined(members)
                spread.send(flat, targets := spread.empty(flat))
                arrived = [unflatten(target, members) for target in targets]
            for own, parts in zip(copies, arrived, strict=True):
                for index, part in zip(bucket, parts, strict=True):
                    own[index] = part
    return copies


class Part(NamedTuple):
    """What one position has to add: a gradient, or None, for each index of the sums."""

    place: Any
    grads: list[Tensor | None]
    """Given away: each is dropped, and its memory free, once it is on its way."""


def add_from_afar(parts: Sequence[Part], link: Link, home: Any, totals: Sums, indices: Sequence[int]) -> None:
    """Add the parts, none of which is at `home`, to the totals with these indices, which are there.

    The sum is made on the way: the last card's gradients are added to those of the one before it, and so on. A bucket
    is added at home once the next one is under way. Example: with 3 on card 1 and 4 on card 2, card 1 sends 7.
    """
    if not parts:
        return
    relay = _Relay(parts, link, home)
    pending: tuple[_Bucket, Tensor, Any] | None = None
    with torch.no_grad():
        try:
            for bucket in _buckets_of(parts, totals, indices):
                arriving = (bucket, *relay.bring(bucket))
                if pending is not None:
                    _add_at_home(*pending, link, home, totals, indices)
                pending = arriving
            if pending is not None:
                _add_at_home(*pending, link, home, totals, indices)
        finally:
            relay.in_flight.land()
        _add_one_by_one(parts, link, home, totals, indices)


def _add_one_by_one(parts: Sequence[Part], link: Link, home: Any, totals: Sums, indices: Sequence[int]) -> None:
    """Add what is left: gradients that are sparse, or stored in another way on each card."""
    for place, grads in parts:
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            grads[index] = None
            # Autograd's thread of another device has its streams, and of this one the default alone.
            with link.on(home), link.on(place):
                arrived = link.copy(grad, home)
            with link.on(home):
                totals.add([indices[index]], [arrived], are_ours=True)


class _Stretch(NamedTuple):
    """Elements `begin` to `end` of one gradient, as they are stored."""

    of: int
    """Which gradient."""
    begin: int
    end: int
    shape: torch.Size
    strides: tuple[int, ...]
    """Shape and strides are the whole gradient's."""

    @property
    def is_last(self) -> bool:
        """Whether no more of this gradient follows."""
        return self.end == self.shape.numel()

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the gradient."""
        return self.is_last and self.begin == 0


class _Bucket(NamedTuple):
    """Stretches of gradients that travel together, each at a multiple of 256 bytes."""

    contributors: tuple[int, ...]
    """Which parts have these gradients."""
    like: Tensor
    """One of their dtype, and without memory."""
    stretches: tuple[_Stretch, ...]
    offsets: tuple[int, ...]
    """Where each begins."""
    length: int
    """Elements of all, with what is between them."""

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The stretches in a flat tensor of this bucket."""
        return [
            flat[offset : offset + stretch.end - stretch.begin]
            for stretch, offset in zip(self.stretches, self.offsets, strict=True)
        ]


def _buckets_of(parts: Sequence[Part], totals: Sums, indices: Sequence[int]) -> Iterator[_Bucket]:
    """Buckets of the gradients that can be added as they are stored: all parts that have one store it alike."""
    groups: dict[tuple[tuple[int, ...], torch.dtype], list[_Stretch]] = {}
    for index, total in enumerate(indices):
        grads = {number: grad for number, part in enumerate(parts) if (grad := part.grads[index]) is not None}
        if not grads or not all(map(is_joinable, grads.values())) or not totals.can_join(total):
            continue
        if len(forms := {(grad.dtype, grad.shape, grad.stride()) for grad in grads.values()}) == 1:
            ((dtype, shape, strides),) = forms
            whole = _Stretch(index, 0, shape.numel(), shape, strides)
            groups.setdefault((tuple(grads), dtype), []).append(whole)
    grads = {}  # or the last ones would live until the end
    for (contributors, dtype), wholes in groups.items():
        size, like = dtype.itemsize, torch.empty(0, dtype=dtype, device="meta")
        limit, align = max(BUCKET_BYTES // size, 1), max(ALIGNMENT_BYTES // size, 1)
        stretches: list[_Stretch] = []
        offsets: list[int] = []
        filled = 0
        for stretch in (part for whole in wholes for part in _cut(whole, limit)):
            length = stretch.end - stretch.begin
            offset = -(-filled // align) * align
            if stretches and offset + length > limit:
                yield _Bucket(contributors, like, tuple(stretches), tuple(offsets), filled)
                stretches, offsets, offset = [], [], 0
            stretches.append(stretch)
            offsets.append(offset)
            filled = offset + length
        yield _Bucket(contributors, like, tuple(stretches), tuple(offsets), filled)


def _cut(whole: _Stretch, limit: int) -> Iterator[_Stretch]:
    """Stretches of `limit` elements at most; one of an empty gradient."""
    for begin in range(0, max(whole.end, 1), limit):
        yield whole._replace(begin=begin, end=min(begin + limit, whole.end))


class _Relay:
    """Brings buckets home, each card adding its own part to what comes from the one before it."""

    def __init__(self, parts: Sequence[Part], link: Link, home: Any) -> None:
        self._parts, self._link, self._home = parts, link, home
        self._stops = tuple(dict.fromkeys(part.place for part in parts))
        self._nccl = link.nccl((home, *self._stops))
        self.in_flight = _InFlight(link)

    def bring(self, bucket: _Bucket) -> tuple[Tensor, Any]:
        """Their sum at home, flat, and the mark to wait for before it is read. The gradients are dropped."""
        stops = tuple(dict.fromkeys(self._parts[number].place for number in bucket.contributors))
        if self._nccl is not None and stops == self._stops and self._nccl.can_add(bucket.like.dtype):
            flats = [self._empty(bucket, self._home)]
            with self._link.on(self._home):
                flats[0].zero_()
            for place in stops:
                flats.append(self._empty(bucket, place))
                self._add_own(bucket, flats[-1], place, is_first=True)
            self._nccl.add_up(flats)
            return flats[0], None
        so_far, at = None, None
        for place in reversed(stops):
            flat = self._empty(bucket, place)
            if so_far is not None:
                self._link.wait(place, self._hop(so_far, at, flat, place))
            self._add_own(bucket, flat, place, is_first=so_far is None)
            so_far, at = flat, place
        assert so_far is not None
        arriving = self._empty(bucket, self._home)
        mark = self._hop(so_far, at, arriving, self._home)
        self.in_flight.hold(self._home, arriving, mark)
        return arriving, mark

    def _hop(self, source: Tensor, start: Any, target: Tensor, end: Any) -> Any:
        mark = self._link.hop(source, start, target, end)
        self.in_flight.hold(start, source, mark)
        return mark

    def _empty(self, bucket: _Bucket, place: Any) -> Tensor:
        self.in_flight.make_room(place)
        with self._link.on(place):
            return self._link.empty((bucket.length,), bucket.like, place)

    def _add_own(self, bucket: _Bucket, flat: Tensor, place: Any, *, is_first: bool) -> None:
        """Add what the parts at that place have to the bucket, or begin it with that."""
        views = bucket.views_of(flat)
        for number in bucket.contributors:
            if self._parts[number].place != place:
                continue
            grads = self._parts[number].grads
            own = [as_flat(grad)[s.begin : s.end] for s in bucket.stretches if (grad := grads[s.of]) is not None]
            with self._link.on(self._home), self._link.on(place):
                if is_first:
                    torch._foreach_copy_(views, own)
                else:
                    torch._foreach_add_(views, own)
            is_first = False
            for stretch in bucket.stretches:
                if stretch.is_last:
                    grads[stretch.of] = None


def _add_at_home(
    bucket: _Bucket, arrived: Tensor, mark: Any, link: Link, home: Any, totals: Sums, indices: Sequence[int]
) -> None:
    """Once it has come, add each stretch to its total, or make it the total where there is none."""
    link.wait(home, mark)
    with link.on(home):
        sums, added, begun = [], [], []
        for stretch, offset, view in zip(bucket.stretches, bucket.offsets, bucket.views_of(arrived), strict=True):
            index = indices[stretch.of]
            if totals.values[index] is None and stretch.is_whole:
                # .data: nobody is to take it for a view
                totals.put(index, arrived.as_strided(stretch.shape, stretch.strides, offset).data)
                continue
            total, is_new = totals.stored_as(
                index, stretch.shape, stretch.strides, lambda length: link.empty((length,), bucket.like, home)
            )
            if is_new:
                begun.append(as_flat(total))
            sums.append(as_flat(total)[stretch.begin : stretch.end])
            added.append(view)
        if begun:
            torch._foreach_zero_(begun)
        if sums:
            torch._foreach_add_(sums, added)
