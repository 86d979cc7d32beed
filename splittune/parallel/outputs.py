"""Joining the replicas' outputs into one, wherever tensors are nested in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from splittune.parallel.link import Link
from splittune.parallel.nesting import map_tensors, tensors_of, zip_map
from splittune.parallel.transfer import gather, send


def combine_outputs(outputs: Sequence[Any], weights: Sequence[float], link: Link, place: Any, dim: int) -> Any:
    """One output as if the whole micro-batch had run on one device, at `place`.

    - tensors with dimensions are joined along `dim`, in the order of the devices;
    - 0-dim floating tensors and Python floats are taken for means over samples, and averaged by `weights`, the shard sizes:
      losses of 1.0 and 4.0 over 1 and 2 samples give 3.0;
    - 0-dim tensors of integers (counts) are stacked, one entry a replica, as nn.DataParallel does;
    - anything else must be equal in all replicas, and is returned once.

    The output of a single replica is moved to `place` and returned as it is.

    Raises:
        TypeError: the outputs differ in structure, in a value that cannot be combined, or in the dtype or shape of
            tensors that are to be joined; the message names the path.
    """
    if len(outputs) == 1:
        return _moved(outputs[0], link, place)
    total = sum(weights)
    shares = [weight / total if total else 1 / len(weights) for weight in weights]

    def combine(path: str, leaves: list[Any]) -> Any:
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            return _combine_tensors(path, leaves, shares, link, place, dim)
        if all(isinstance(leaf, float) for leaf in leaves):
            return sum(share * leaf for share, leaf in zip(shares, leaves, strict=True) if share)
        return _only_value(path, leaves)

    return zip_map(combine, outputs)


def _moved(output: Any, link: Link, place: Any) -> Any:
    if all(link.place_of(tensor) == place for _, tensor in tensors_of(output)):
        return output  # the model's own object, whatever it is
    return map_tensors(lambda tensor: send(tensor, link, place), output)


def _combine_tensors(
    path: str, leaves: list[Tensor], shares: Sequence[float], link: Link, place: Any, dim: int
) -> Tensor:
    _check_alike(path, leaves, dim)
    if leaves[0].dim():
        return gather(leaves, link, place, dim)
    sent = [send(leaf, link, place) for leaf in leaves]
    if not (leaves[0].is_floating_point() or leaves[0].is_complex()):
        return torch.stack(sent)
    wide = torch.promote_types(leaves[0].dtype, torch.float32)  # half precision is rounded once, at the end
    # What counts nothing is left out: a mean over no tokens is NaN, and so would 0 times it be, and its gradient.
    pairs = zip(sent, shares, strict=True)
    weighted = [leaf.to(wide) * share for leaf, share in pairs if share]
    return sum(weighted[1:], weighted[0]).to(leaves[0].dtype)


def _check_alike(path: str, leaves: list[Tensor], dim: int) -> None:
    """What is to be one tensor must agree in dtype, and in shape but for `dim`: nothing is cast or broadcast."""
    shapes = [tuple(leaf.shape) for leaf in leaves]
    dtypes = [leaf.dtype for leaf in leaves]
    if _can_be_joined(shapes, dim) and len(set(dtypes)) == 1:
        return
    got = ", ".join(f"replica {n} {s} of {d}" for n, (s, d) in enumerate(zip(shapes, dtypes, strict=True)))
    raise TypeError(
        f"the replicas' outputs cannot be joined at {path or 'the top'} along dimension {dim}: got {got}. Expected one "
        f"dtype, and shapes that differ in dimension {dim} only, the samples. Pad to a size that does not depend on the "
        "shard, or return a 0-dim mean over the samples."
    )


def _can_be_joined(shapes: Sequence[tuple[int, ...]], dim: int) -> bool:
    ranks = {len(shape) for shape in shapes}
    rank = max(ranks)
    if rank == 0:
        return True  # these are averaged or stacked
    if len(ranks) > 1 or not -rank <= dim < rank:
        return False
    return len({shape[: dim % rank] + shape[dim % rank + 1 :] for shape in shapes}) == 1


def _only_value(path: str, leaves: list[Any]) -> Any:
    first = leaves[0]
    for number, leaf in enumerate(leaves[1:], start=1):
        if not _are_equal(first, leaf):
            raise TypeError(
                f"the replicas' outputs cannot be combined at {path or 'the top'}: replica 0 returned {first!r}, "
                f"replica {number} returned {leaf!r}. Expected tensors (joined), floats (averaged) or equal values. "
                "Return such values as tensors, or leave them out of the model's output."
            )
    return first


def _are_equal(first: Any, other: Any) -> bool:
    if first is other:
        return True
    try:
        return type(first) is type(other) and bool(first == other)
    except (TypeError, ValueError, RuntimeError):  # arrays of several elements are neither true nor false
        return False
