"""Going through the micro-batches of one optimizer step: only the last one's backward reduces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TypeVar

from torch import nn

Item = TypeVar("Item")


def accumulate(model: nn.Module, micro_batches: Iterable[Item]) -> Iterator[Item]:
    """Yield each of `micro_batches`, all but the last inside ``model.no_sync()``.

    Forward and backward of an item belong into the loop's body, ``optimizer.step()`` after the
    loop. A model without `no_sync`, one that is not wrapped say, is simply iterated. Example::

        for micro in accumulate(model, micro_batches):
            (loss_of(model, micro.batch) * micro.weight).backward()
        optimizer.step()
    """
    no_sync = getattr(model, "no_sync", nullcontext)
    iterator = iter(micro_batches)
    try:
        upcoming = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        with no_sync():
            yield upcoming
        upcoming = following
    yield upcoming
