"""Joining the replicas' outputs into one, wherever tensors are nested in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from splittune.parallel.link import Link
from splittune.parallel.nesting import zip_map
from splittune.parallel.transfer import gather, send


def combine_outputs(outputs: Sequence[Any], shard_sizes: Sequence[int], link: Link, place: Any, dim: int) -> Any:
    """One output as if the whole micro-batch had run on one device, at `place`.

    - tensors with dimensions are joined along `dim`, in the order of the devices;
    - 0-dim floating tensors and Python floats are taken for means over samples, and averaged weighted by shard size:
      losses of 1.0 and 4.0 over 1 and 2 samples give 3.0;
    - 0-dim tensors of integers (counts) are stacked, one entry a replica, as nn.DataParallel does;
    - anything else must be equal in all replicas, and is returned once.

    Raises:
        TypeError: the outputs differ in structure, or in a value that cannot be combined; the message names its path.
    """
    total = sum(shard_sizes)
    weights = [shard / total if total else 1 / len(shard_sizes) for shard in shard_sizes]

    def combine(path: str, leaves: list[Any]) -> Any:
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            return _combine_tensors(leaves, weights, link, place, dim)
        if all(isinstance(leaf, float) for leaf in leaves):
            return sum(weight * leaf for weight, leaf in zip(weights, leaves, strict=True))
        return _only_value(path, leaves)

    return zip_map(combine, outputs)


def _combine_tensors(leaves: list[Tensor], weights: Sequence[float], link: Link, place: Any, dim: int) -> Tensor:
    if any(leaf.dim() for leaf in leaves):
        return gather(leaves, link, place, dim)
    sent = [send(leaf, link, place) for leaf in leaves]
    if not (leaves[0].is_floating_point() or leaves[0].is_complex()):
        return torch.stack(sent) if len(sent) > 1 else sent[0]
    if len(sent) == 1:
        return sent[0]
    return torch.stack([leaf * weight for leaf, weight in zip(sent, weights, strict=True)]).sum()


def _only_value(path: str, leaves: list[Any]) -> Any:
    first = leaves[0]
    for number, leaf in enumerate(leaves[1:], start=1):
        if type(leaf) is not type(first) or not (leaf is first or leaf == first):
            raise TypeError(
                f"the replicas' outputs cannot be combined at {path or 'the top'}: replica 0 returned {first!r}, "
                f"replica {number} returned {leaf!r}. Expected tensors (joined), floats (averaged) or equal values. "
                "Return such values as tensors, or leave them out of the model's output."
            )
    return first
