"""A rank's share of a global batch cut into the micro-batches of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from math import isnan
from typing import Any

import torch
from torch.distributed.constants import default_pg_timeout

from splittune.config.micro_batches import MicroBatch
from splittune.errors import ConfigError
from splittune.parallel.accumulate import accumulate
from splittune.parallel.base import SplitModule
from splittune.parallel.samples import read_samples, slice_batch
from splittune.ranks.agreement import Fact, agree
from splittune.ranks.batch_norm import standing_in
from splittune.ranks.module import DistributedSplit
from splittune.ranks.share import RankShare
from splittune.split import BatchSplit


def cut_share(share: RankShare, split: BatchSplit, model: SplitModule | None) -> Iterator[MicroBatch]:
    """`share` cut into this rank's micro-batches, as many as on every other rank; see `SplitConfig.micro_batches`.

    A rank runs in every one, with the stand-in and weight 0 where it has no sample: whatever ranks do together in a
    forward, synchronised statistics say, all of them do. Worked: 2 ranks, ``sizes=(3, 0)`` of ``num_samples=6`` give
    the weights 3 * 2 / 6 = 1 and 0.

    Raises:
        ConfigError: at the call: `model` is not wrapped for ranks, the batch holds other than the share's samples, or
            nothing in the whole global batch counts by `weight_fn`.
    """
    if model is not None and not isinstance(model, DistributedSplit):
        raise ConfigError(
            f"the batch is a rank's share and the model a {type(model).__name__}: expected the one that "
            "config.wrap(model) gives in the process group."
        )
    if model is not None and share.begins is not None and torch.is_grad_enabled():
        _check_same_place(share.begins, model)
    parts = _parts_of(share, listed=share.are_listed)
    if model is None:
        factor = split.num_devices / share.num_samples
        sized = zip(parts, share.sizes, strict=True)
        return _standing_in(share, (MicroBatch(batch=part, weight=size * factor) for part, size in sized), None)
    counts = [float(size) for size in share.sizes]
    whole = float(share.num_samples)
    if model.counts_tokens:
        counts, whole = _counted(parts, share.sizes, model)
    if not whole:
        raise ConfigError("the batch counts 0 by weight_fn: expected more, there is nothing to learn from. Skip it.")
    factor = model.num_ranks / whole
    cut = [MicroBatch(batch=part, weight=count * factor) for part, count in zip(parts, counts, strict=True)]
    return _standing_in(share, accumulate(model, cut), model)


def _counted(parts: Sequence[Any], sizes: Sequence[int], model: DistributedSplit) -> tuple[list[float], float]:
    """What each of the parts counts by `weight_fn`, and what the global batch does on all ranks together.

    A rank on which that raises gives NaN to the sum, which costs nothing where it does not: so all ranks hear of it.

    Raises:
        ConfigError: `weight_fn` raised on another rank; the message says on which, and what. On that one its own error
            passes through.
    """
    problem: Exception | None = None
    counts: list[float] = []
    try:
        counts = [model.weight_of(part, size) if size else 0.0 for part, size in zip(parts, sizes, strict=True)]
    except Exception as error:  # noqa: BLE001  the user's own, whatever it is; raised again below
        problem = error
    whole = model.sum_over_ranks(float("nan") if problem is not None else sum(counts))
    if not isnan(whole):
        return counts, whole

    def tell() -> tuple[None, list[Fact]]:
        if problem is not None:
            raise ConfigError(f"weight_fn could not count its batch: {type(problem).__name__}: {problem}")
        return None, []

    try:
        agree("config.micro_batches", tell, group=model.process_group)
    except ConfigError:
        if problem is None:
            raise
    raise problem or ConfigError("the ranks' counts by weight_fn sum to no number: expected finite ones.")


def _check_same_place(begins: str, model: DistributedSplit) -> None:
    """That all ranks begin the same epoch: one that has looked at a batch alone is an epoch ahead of the others.

    They wait as long for one another as torch's collectives do by default: rank 0 may have evaluated in between.
    """
    place = Fact(
        name="where their loaders are",
        value=begins,
        advice="Every iter(loader) begins the next epoch: call it on all ranks alike, or set_epoch before it.",
    )
    agree(
        "config.micro_batches",
        lambda: (None, [place]),
        group=model.process_group,
        timeout_s=default_pg_timeout.total_seconds(),
    )


def _standing_in(share: RankShare, micros: Iterator[MicroBatch], model: SplitModule | None) -> Iterator[MicroBatch]:
    """`micros`; while the loop has the stand-in, BatchNorm leaves it out of its statistics."""
    for micro, size in zip(micros, share.sizes, strict=True):
        with nullcontext() if size else standing_in(model):
            yield micro


def _parts_of(share: RankShare, *, listed: bool | None) -> list[Any]:
    """The batch of each micro-batch, the stand-in where the rank has none."""
    num_own = sum(share.sizes)
    num_held = num_own + share.has_stand_in
    samples = read_samples(share.batch, expected=num_held, listed=listed)
    if samples.size != num_held:
        raise ConfigError(
            f"this rank's share holds {samples.size} samples: expected {num_held}, as many as the sharded loader gave "
            "its collate_fn. One that drops, adds or packs samples cannot be sharded: do that in the data set."
        )
    parts, start = [], 0
    for size in share.sizes:
        first, stop = (start, start + size) if size else (num_own, num_held)
        parts.append(slice_batch(share.batch, first, stop, batch_size=num_held, listed=samples.are_listed))
        start += size
    return parts
