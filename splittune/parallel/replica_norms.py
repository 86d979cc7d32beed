"""BatchNorm in the replicas of one process, by the statistics of the whole micro-batch.

Replicas run at once, in threads, and wait for one another at every such layer; where the link wants
no threads they run in turn, each as far as the next layer (`Meeting`). In backward nobody waits: the
exchange is a part of the graph, and autograd runs it when all gradients are there. The user's own
module is not touched: only replicas are given another forward.

Limits: no BatchNorm in a checkpoint, which would wait in backward; none that is compiled, for
compiled replicas run one after another; no gradient of the gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from splittune.errors import ConfigError
from splittune.parallel.batch_norm import batch_norm, pooled, refuse_single_value, uses_batch_statistics
from splittune.parallel.compiled import holds_compiled
from splittune.parallel.link import Link
from splittune.parallel.meeting import Meeting, Seat
from splittune.parallel.replicas import ReplicaCall
from splittune.parallel.transfer import apply, send


def refuse_unsynchronisable(module: nn.Module, engine: str) -> None:
    """Raise where a BatchNorm layer of the module could not be given the statistics of all replicas.

    Raises:
        ConfigError: one has a forward of its own, the module is compiled, or the engine is "torch".
    """
    if engine != "window":
        raise ConfigError(
            f'sync_batch_norm is asked for with engine={engine!r}: expected engine="window", with which the first '
            "device runs a replica as well, and the module itself is not touched."
        )
    norms = [(name, norm) for name, norm in module.named_modules() if isinstance(norm, _BatchNorm)]
    if norms:
        _refuse_compiled(module)
    for name, norm in norms:
        if type(norm).forward not in _TORCHS_FORWARDS or "forward" in norm.__dict__:
            raise ConfigError(
                f"layer {name or '(root)'} is a {type(norm).__name__}, whose forward is its own: expected torch's "
                "BatchNorm1d, 2d, 3d, SyncBatchNorm or a subclass that leaves forward alone. Replace it, or wrap "
                "without sync_batch_norm."
            )


_TORCHS_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def _refuse_compiled(module: nn.Module) -> None:
    if holds_compiled(module):
        raise ConfigError(
            "the module is compiled and has BatchNorm: expected one that is not where sync_batch_norm is asked for, "
            "for replicas that are compiled run one after another and cannot wait for each other's statistics."
        )


def seat_replicas(calls: Sequence[ReplicaCall], link: Link) -> Meeting | None:
    """Have BatchNorm in these replicas normalise by the samples of all; None where there is nothing to exchange.

    It holds until the next call. No module among them is the user's own.

    Raises:
        ConfigError: they were compiled since the module was wrapped.
    """
    meeting = Meeting(len(calls), in_turn=not link.threaded) if len(calls) > 1 else None
    norms = [
        (index, name, norm)
        for index, call in enumerate(calls)
        for name, norm in call.module.named_modules()
        if isinstance(norm, _BatchNorm)
    ]
    for index, name, norm in norms:
        norm.__dict__.pop("forward", None)
        if meeting is not None and uses_batch_statistics(norm):
            norm.__dict__["forward"] = _Forward(norm, name or "the module", meeting.seats[index], link)
    if norms:
        _refuse_compiled(calls[0].module)
    return meeting if norms else None


class _Forward:
    """The forward of one BatchNorm layer of a replica, which it does not keep alive."""

    def __init__(self, layer: _BatchNorm, name: str, seat: Seat, link: Link) -> None:
        self._layer, self._name, self._seat, self._link = weakref.ref(layer), name, seat, link

    def __call__(self, x: Tensor) -> Tensor:
        layer = self._layer()
        assert layer is not None, "a layer's forward was kept, and the layer was not"
        if not self._seat.is_taken:
            raise RuntimeError(
                f"BatchNorm {self._name} was run again after its replica's forward, in a checkpoint's backward say, "
                "where the other replicas' statistics cannot be had: expected one run, in forward. Leave BatchNorm "
                "out of the checkpoint, or wrap without sync_batch_norm."
            )
        return batch_norm(layer, x, partial(self._pool, tuple(x.shape)))

    def _pool(self, shape: tuple[int, ...], part: Tensor) -> Tensor:
        combine = partial(_combine, link=self._link)
        num_values = torch.Size(shape).numel() // max(shape[1], 1)
        whole: Tensor = self._seat.exchange(f"BatchNorm {self._name}", _Payload(part, num_values), combine)
        return whole


class _Payload(NamedTuple):
    """What a replica brings: its part, and the values of each channel in it, as the host knows it."""

    part: Tensor
    num_values: int


def _combine(payloads: Sequence[_Payload], link: Link) -> list[Tensor]:
    """The whole's statistics on each replica's device, out of the parts of all."""
    refuse_single_value(sum(payload.num_values for payload in payloads), "all replicas together")
    parts = [payload.part for payload in payloads]
    places = tuple(link.place_of(part) for part in parts)
    return list(apply(_Exchange, link, places, *parts))


class _Exchange(torch.autograd.Function):
    """Every place's part to the first place, and the whole's statistics back to each.

    One node for all of them, which runs once the gradients of all are there: were each part a node of its own, the
    first place's queue could be made to wait for another's before it is given its own share of the work.
    """

    @staticmethod
    def forward(ctx: Any, link: Link, places: tuple[Any, ...], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.link, ctx.places = link, places
        with _on_all(link, places):
            whole, ctx.shares = pooled(torch.stack(_brought(parts, link, places[:1] * len(places))))
            return whole, *(link.copy(whole, place) for place in places[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        link, places = ctx.link, ctx.places
        with _on_all(link, places):
            grad = torch.stack(_brought(grads, link, places[:1] * len(places))).sum(0)
            return None, None, *_brought(ctx.shares.gradients(grad).unbind(0), link, places)


def _brought(tensors: Sequence[Tensor], link: Link, places: Sequence[Any]) -> list[Tensor]:
    """Each at its place: a copy, if it is at another."""
    return [send(tensor, link, place) for tensor, place in zip(tensors, places, strict=True)]


@contextmanager
def _on_all(link: Link, places: Sequence[Any]) -> Iterator[None]:
    """Work inside is queued where that of each place is; what is made of nothing is the first one's."""
    with ExitStack() as stack:
        for place in dict.fromkeys(reversed(places)):
            stack.enter_context(link.on(place))
        yield
