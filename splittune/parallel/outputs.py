"""Joining the replicas' outputs into one, wherever tensors are nested in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from splittune.parallel.caches import LeftOutCache, is_cache, items_of, made_of
from splittune.parallel.link import Link
from splittune.parallel.nesting import DESCEND, is_record, leaves_of, map_tensors, rebuild_like, tensors_of, zip_map
from splittune.parallel.samples import has_rows
from splittune.parallel.transfer import gather, send


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """One output as if the whole micro-batch had run on one device, at `place`.

    - Tensors with dimensions are joined along `dim`, in the order of the devices: one row a sample,
      as many rows a sample as it likes, or rows that vary. A single number a replica,
      ``loss.unsqueeze(0)`` say, is a mean as below.
    - 0-dim floating tensors and Python floats are taken for means over samples, and averaged by
      `weights`: losses of 1.0 and 4.0 over 1 and 2 samples give 3.0.
    - 0-dim tensors of integers (counts) are stacked, one entry a replica, as nn.DataParallel does.
    - Lists with one entry a sample follow one another: strings, dicts, tensors without a row for
      each sample.
    - Caches are joined item by item, or left out (`caches.LeftOutCache`).
    - Other objects that can be iterated over, with tensors inside, are made anew of their joined
      items, as nn.DataParallel does.
    - Anything else must be equal in all replicas, and is returned once.

    Rows that are no samples' are refused, or the order of the whole would be another than one
    device's: as many from each replica whatever its shard, an LSTM's (layers, samples, features)
    say. Of equal shards that is told by the shape alone: a shard's size along another dimension. It
    cannot be told where there are as many of them as a shard has samples, two layers of two samples
    each; where a table's width is a shard's size, it is taken for rows.
    """

    shards: Sequence[int]
    """The samples of each replica."""
    weights: Sequence[float]
    """How much each replica's means count: its samples, unless the user says otherwise."""
    link: Link
    place: Any
    dim: int
    are_listed: bool = False
    """Whether the inputs had lists of one entry a sample, so that lists as long as the shards are
    the same."""
    keeps_caches: bool = True

    def join(self, outputs: Sequence[Any]) -> Any:
        """The replicas' outputs as one; that of a single replica is moved and returned as it is.

        Raises:
            TypeError: the outputs differ in structure, in a value that cannot be combined, or in
                the dtype or shape of tensors that are to be joined, or their rows are no samples';
                the message names the path.
            ConfigError: a cache that cannot be joined.
        """
        if len(outputs) == 1:
            return self._moved(outputs[0])
        return zip_map(self._combine, outputs, self._join_lists)

    def _moved(self, output: Any) -> Any:
        if all(self.link.place_of(tensor) == self.place for _, tensor in tensors_of(output)):
            return output  # the model's own object, whatever it is
        return map_tensors(lambda tensor: send(tensor, self.link, self.place), output)

    @property
    def _shares(self) -> list[float]:
        total = sum(self.weights)
        return [weight / total if total else 1 / len(self.weights) for weight in self.weights]

    def _combine(self, path: str, leaves: list[Any]) -> Any:
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            return self._combine_tensors(path, leaves)
        if all(isinstance(leaf, float) for leaf in leaves):
            return sum(share * leaf for share, leaf in zip(self._shares, leaves, strict=True) if share)
        if all(is_cache(leaf) for leaf in leaves):
            return (
                self._join_caches(path, leaves) if self.keeps_caches else LeftOutCache(path, type(leaves[0]).__name__)
            )
        if all(type(leaf) is type(leaves[0]) and _holds_tensors(leaf) for leaf in leaves):
            return _made_of(path, leaves[0], zip_map(self._combine, [list(leaf) for leaf in leaves]))
        return _only_value(path, leaves)

    def _combine_tensors(self, path: str, leaves: list[Tensor]) -> Tensor:
        _check_alike(path, leaves, self.dim, self.shards)
        is_number = leaves[0].is_floating_point() or leaves[0].is_complex()
        if leaves[0].dim() and not (is_number and self._is_one_a_replica(leaves)):
            self._check_rows(path, leaves)
            return gather(leaves, self.link, self.place, self.dim)
        sent = [send(leaf, self.link, self.place) for leaf in leaves]
        if not is_number:
            return torch.stack(sent)
        wide = torch.promote_types(leaves[0].dtype, torch.float32)  # half precision is rounded once, at the end
        # What counts nothing is left out: a mean over no tokens is NaN, and so would 0 times it be,
        # and its gradient.
        pairs = zip(sent, self._shares, strict=True)
        weighted = [leaf.to(wide) * share for leaf, share in pairs if share]
        return sum(weighted[1:], weighted[0]).to(leaves[0].dtype)

    def _is_one_a_replica(self, leaves: Sequence[Tensor]) -> bool:
        return all(leaf.numel() == 1 for leaf in leaves) and any(shard != 1 for shard in self.shards)

    def _check_rows(self, path: str, leaves: Sequence[Tensor]) -> None:
        """Whether the rows, one replica's after another's, are in the order of the samples."""
        rows = [leaf.size(self.dim) for leaf in leaves]
        shape, shards = tuple(leaves[0].shape), self.shards
        per_sample = rows[0] // max(shards[0], 1)
        if rows == [per_sample * shard for shard in shards]:
            is_flat = len(shape) < 3 or (
                shards[0] == 1 and len(shape) > 3
            )  # tokens by features, or images of a channel
            if per_sample <= 1 or is_flat or len(set(shards)) > 1 or not self._other_dims(shape):
                return
        elif len(set(rows)) > 1 or (leaves[0].numel() == 1 and not leaves[0].is_floating_point()):
            return
        along = self._other_dims(shape) if len(set(shards)) == 1 else []
        where = f" The samples seem to lie along dimension {along[0]}." if along else ""
        raise TypeError(
            f"the replicas' outputs are not one row a sample at {path or 'the top'}: got shapes "
            f"{[tuple(leaf.shape) for leaf in leaves]} of shards of {list(shards)} samples, joined along dimension "
            f"{self.dim}.{where} Expected the samples along dimension {self.dim}, or 0-dim means over them. Return the "
            "transposed tensor (batch_first=True does not turn an LSTM's h_n and c_n), or leave it out of the output."
        )

    def _other_dims(self, shape: Sequence[int]) -> list[int]:
        """The dimensions besides `dim` that are as long as the first shard."""
        return [d for d, size in enumerate(shape) if size == self.shards[0] and d != self.dim % len(shape)]

    def _join_caches(self, path: str, caches: list[Any]) -> Any:
        def combine(place: str, leaves: list[Any]) -> Any:
            is_setting = all(isinstance(leaf, Tensor) and not leaf.dim() for leaf in leaves)  # a window's length
            return leaves[0] if is_setting else self._combine(place, leaves)

        return made_of(caches[0], zip_map(combine, [items_of(cache) for cache in caches]))

    def _join_lists(self, path: str, trees: list[Any]) -> Any:
        """Lists of one entry a sample, one behind the other."""
        are_lists = all(isinstance(tree, list | tuple) and not is_record(tree) for tree in trees)
        if not are_lists or any(type(tree) is not type(trees[0]) for tree in trees):
            return DESCEND
        if [len(tree) for tree in trees] != list(self.shards) or not self._are_of_samples(trees):
            return DESCEND
        return rebuild_like(trees[0], [self._moved(entry) for tree in trees for entry in tree])

    def _are_of_samples(self, trees: Sequence[Any]) -> bool:
        """Whether lists are of samples, or as long as the shards by chance."""
        if len(set(self.shards)) > 1:
            return True
        entries = [entry for tree in trees for entry in tree]
        is_list, are_records = isinstance(trees[0], list), all(isinstance(entry, Mapping) for entry in entries)
        if any(tensor.dim() for _, tensor in tensors_of(entries)):
            if has_rows(entries, self.shards[0], self.dim):  # of a single sample, rows are no evidence
                return (are_records and self.shards[0] == 1) or (is_list and self.are_listed)
            return are_records or (is_list and all(isinstance(entry, Tensor) for entry in entries))
        # numbers are means, and what all replicas agree on is no sample's
        if any(isinstance(leaf, float | Tensor) for _, leaf in leaves_of(entries)):
            return False
        return self.are_listed or any(list(tree) != list(trees[0]) for tree in trees)


def all_tensors_of(output: Any) -> list[Tensor]:
    """Every tensor of an output, also those inside objects that are no containers.

    A gradient may come back through any of them.
    """
    found: list[Tensor] = []
    seen: dict[int, Any] = {}
    waiting = [output]
    while waiting:
        for _, leaf in leaves_of(waiting.pop()):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif id(leaf) not in seen and not isinstance(leaf, nn.Module | type) and hasattr(leaf, "__dict__"):
                seen[id(leaf)] = leaf
                waiting.append(list(vars(leaf).values()))
    return found


def _holds_tensors(leaf: Any) -> bool:
    """Whether it can be iterated over and gives tensors: nn.DataParallel joins such objects."""
    if isinstance(leaf, Tensor | str | bytes | Iterator | AbstractSet) or not isinstance(leaf, Iterable):
        return False
    return bool(tensors_of(list(leaf)))


def _made_of(path: str, first: Any, items: list[Any]) -> Any:
    try:
        return type(first)(items)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the replicas' outputs cannot be combined at {path or 'the top'}: a {type(first).__name__} holds tensors, "
            f"and {type(first).__name__}(items) raised {error}. Expected what can be made of its own items, as "
            "nn.DataParallel expects. Return a dict, a tuple or a dataclass instead."
        ) from error


def _check_alike(path: str, leaves: list[Tensor], dim: int, shards: Sequence[int]) -> None:
    """One tensor has one dtype, and one shape but for `dim`: nothing is cast or broadcast."""
    shapes = [tuple(leaf.shape) for leaf in leaves]
    dtypes = [leaf.dtype for leaf in leaves]
    if _can_be_joined(shapes, dim) and len(set(dtypes)) == 1:
        return
    got = ", ".join(f"replica {n} {s} of {d}" for n, (s, d) in enumerate(zip(shapes, dtypes, strict=True)))
    raise TypeError(
        f"the replicas' outputs cannot be joined at {path or 'the top'} along dimension {dim}: got {got}. Expected one "
        f"dtype, and shapes that differ in dimension {dim} only, the samples. {_way_out(shapes, shards)}"
    )


def _way_out(shapes: Sequence[tuple[int, ...]], shards: Sequence[int]) -> str:
    if all(shape[:2] == (shard, shard) for shape, shard in zip(shapes, shards, strict=True)):
        return (
            "Each replica seems to compare the samples of its own shard with one another, as for in-batch negatives: "
            "that is another output, and another loss, than one device's. Return the embeddings, and compare them "
            "outside of the model, in step_fn or the training loop."
        )
    return "Pad to a size that does not depend on the shard, or return a 0-dim mean over the samples."


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
