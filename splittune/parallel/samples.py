"""A batch by its samples: how many it has, where they are, and a part of them.

Samples are stacked, every tensor with one row for each along the batch's dimension, or listed:
lists or tuples with one tensor or record for each, as detection has its images and targets. A
record is a mapping, a dataclass or a named tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splittune.errors import ConfigError
from splittune.parallel.caches import is_cache, items_of, made_of
from splittune.parallel.nesting import children_of, is_record, rebuild_like, tensors_of

# Counts what the whole batch holds, and transformers divides a sum by it: a part of the batch gets
# its part of the count.
TOTALS = ("num_items_in_batch",)


class Samples(NamedTuple):
    """How a batch holds its samples."""

    size: int
    are_listed: bool
    """Whether lists of tensors or records have one entry a sample."""
    is_certain: bool = False
    """Whether the batch could be read both ways and something decided: what to expect of the next
    one."""


def read_samples(
    tree: Any, dim: int = 0, *, expected: int | None = None, listed: bool | None = None, is_call: bool = False
) -> Samples:
    """How many samples a batch holds, and whether stacked or listed.

    All tensors of one size along `dim` are stacked samples, as many as that. Where sizes differ,
    lists of tensors or records are listed samples, as many as their length; tensors outside of such
    lists agree with it. A list of 16 images of (3, 8, 8) can be both: it is read as the one before
    was, `listed` or not, where that is known; else as what has the `expected` size; else as
    listed where they are records of samples (`are_records_of_samples`), and as stacked otherwise. A
    batch that is itself a list of tensors is inputs and targets, not samples; with `is_call`,
    `tree` is a call's arguments, ``(args, kwargs)``, and each of those may be samples.

    Tensors of fewer dimensions, such as 0-dim ones, belong to no sample and are left out. Example:
    ``([image, image], [{"boxes": ...}, {"boxes": ...}])`` with unlike boxes holds 2 samples,
    listed.

    Raises:
        ConfigError: no tensor has the dimension, or their sizes differ; the message lists every
            path with its size.
    """
    sizes = {tensor.size(dim) for _, tensor in tensors_of(tree) if _has_dim(tensor, dim)}
    roots = [*tree[0], *tree[1].values()] if is_call else _roots_of(tree)
    lengths = {len(found) for root in roots for found in _lists_in(root)}
    fitting = {length for length in lengths if all(_has_samples(root, length, dim) for root in roots)}
    if len(sizes) != 1:
        # One list of one tensor is no evidence: mostly, sizes that differ are a mistake
        fitting -= set() if listed or expected == 1 or _has_records(roots) else {1}
        if not fitting:
            raise _no_samples(tree, dim)
        return Samples(expected if expected in fitting else max(fitting), are_listed=True, is_certain=bool(sizes))
    (size,) = sizes
    if not fitting:
        return Samples(size, are_listed=False)
    length = expected if expected in fitting else max(fitting)
    is_certain = False
    if listed is None and size != length and expected in (size, length):
        listed, is_certain = expected == length, True
    elif listed is None:
        listed = is_certain = any(are_records_of_samples(found) for root in roots for found in _lists_in(root))
    return Samples(length if listed else size, are_listed=listed, is_certain=is_certain)


def batch_size_of(tree: Any, dim: int = 0, expected: int | None = None) -> int:
    """How many samples a batch holds, see `read_samples`.

    Example: ``{"x": torch.zeros(8, 3), "scale": torch.tensor(2.0)}`` has 8.

    Raises:
        ConfigError: no tensor has the dimension, or their sizes differ; the message lists every
            path with its size.
    """
    return read_samples(tree, dim, expected=expected).size


def slice_batch(
    tree: Any, start: int, stop: int, dim: int = 0, batch_size: int | None = None, listed: bool | None = None
) -> Any:
    """Samples `start` to `stop` (exclusive) of a batch of `batch_size`, nested as the batch is.

    - A tensor whose size along `dim` is `batch_size` is narrowed: a view, nothing is copied.
    - A tensor without that dimension (0-dim, say) passes as it is: all samples share it.
    - A list or tuple of one plain leaf a sample is sliced as well: its length is `batch_size`,
      above 1, and its elements are strings, numbers, None, 0-dim tensors, or records of such. A
      named tuple never is.
    - Where samples are `listed`, a list or tuple of `batch_size` tensors or records is sliced.
    - A count of what the batch holds (`TOTALS`, in a mapping) becomes the part's: of 40 tokens in 4
      samples, 1 has 10.
    - Every other leaf passes as it is.

    `batch_size` None means what `read_samples` says; `listed` None, listed only where the tensors'
    sizes differ. Example: ``slice_batch((torch.arange(4), ["a", "b", "c", "d"]), 1, 3)`` gives
    ``(tensor([1, 2]), ["b", "c"])``.

    Raises:
        ConfigError: a tensor has another size along `dim`; the message names its path.
        ValueError: not ``0 <= start <= stop <= batch_size``.
    """
    size, are_listed = _size_and_form(tree, dim, batch_size, listed)
    if not 0 <= start <= stop <= size:
        raise ValueError(f"samples {start} to {stop} of a batch of {size}: expected 0 <= start <= stop <= {size}.")
    return _cut(tree, _slice(start, stop, dim, size), _Cut(dim, size, are_listed), "")


def slice_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], start: int, stop: int, dim: int, samples: Samples
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments for samples `start` to `stop`, each cut as `slice_batch` does.

    Save for a tuple of numbers, which passes: as an argument, ``(224, 224)`` is a size and not two
    samples.
    """
    part = _slice(start, stop, dim, samples.size)
    pick = part._replace(sequence=lambda found: list(found if _is_setting(found) else part.sequence(found)))
    cut = _Cut(dim, samples.size, samples.are_listed)
    cut_args = tuple(_cut(arg, pick, cut, f"argument {index}") for index, arg in enumerate(args))
    return cut_args, {name: _cut_entry(name, arg, pick, cut, name) for name, arg in kwargs.items()}


def select_batch(
    tree: Any, indices: Sequence[int], dim: int = 0, batch_size: int | None = None, listed: bool | None = None
) -> Any:
    """The samples at `indices`, in that order and as often as they are there.

    All else is as in `slice_batch`. Example: ``select_batch((torch.arange(2), ["a", "b"]), [0, 1, 0])``
    gives ``(tensor([0, 1, 0]), ["a", "b", "a"])``.

    Raises:
        ConfigError: a tensor has another size along `dim`; the message names its path.
    """
    size, are_listed = _size_and_form(tree, dim, batch_size, listed)
    chosen = torch.tensor(indices, dtype=torch.long)
    pick = _Pick(
        tensor=lambda tensor: tensor.index_select(dim, chosen.to(tensor.device)),
        sequence=lambda sequence: [sequence[index] for index in indices],
        fraction=len(indices) / max(size, 1),
    )
    return _cut(tree, pick, _Cut(dim, size, are_listed), "")


def has_rows(tree: Any, num_rows: int, dim: int) -> bool:
    """Whether there are tensors, 0-dim ones aside, and all have that many rows along `dim`."""
    tensors = [tensor for _, tensor in tensors_of(tree) if tensor.dim()]
    return bool(tensors) and all(_has_dim(tensor, dim) and tensor.size(dim) == num_rows for tensor in tensors)


def are_records_of_samples(tree: Any) -> bool:
    """Whether it is a list of records, each with a label, a number or a name beside its tensors.

    That is what a loader gives that collates nothing: ``[{"image": image, "file": "a.png"}, ...]``.
    Of stacked tensors such an entry would belong to no sample.
    """
    if not _is_list_of_samples(tree) or isinstance(tree[0], Tensor):
        return False
    return all(any(_is_own(entry) for _, entry in children_of(record) or ()) for record in tree)


class _Pick(NamedTuple):
    """How samples are picked from a tensor and a sequence, and which part of all they are."""

    tensor: Callable[[Tensor], Tensor]
    sequence: Callable[[Sequence[Any]], list[Any]]
    fraction: float


class _Cut(NamedTuple):
    """What is cut."""

    dim: int
    batch_size: int
    are_listed: bool


def _slice(start: int, stop: int, dim: int, batch_size: int) -> _Pick:
    return _Pick(
        tensor=lambda tensor: tensor.narrow(dim, start, stop - start),
        sequence=lambda sequence: list(sequence[start:stop]),
        fraction=(stop - start) / max(batch_size, 1),
    )


def _size_and_form(tree: Any, dim: int, batch_size: int | None, listed: bool | None) -> tuple[int, bool]:
    if batch_size is None:
        samples = read_samples(tree, dim, listed=listed)
        return samples.size, samples.are_listed
    if listed is None:
        tensors = [tensor for _, tensor in tensors_of(tree) if _has_dim(tensor, dim)]
        are_stacked = all(tensor.size(dim) == batch_size for tensor in tensors)
        listed = not are_stacked and all(_has_samples(root, batch_size, dim) for root in _roots_of(tree))
    return batch_size, listed


def _cut(tree: Any, pick: _Pick, cut: _Cut, path: str) -> Any:
    if isinstance(tree, Tensor):
        if not _has_dim(tree, cut.dim):
            return tree
        if tree.size(cut.dim) != cut.batch_size:
            raise ConfigError(
                f"{_name(path)} has size {tree.size(cut.dim)} along dimension {cut.dim} (shape {tuple(tree.shape)}): "
                f"expected {cut.batch_size}, the samples of the batch. Give it one entry a sample; what all samples "
                "share, pass as a 0-dim tensor or keep inside the model."
            )
        return pick.tensor(tree)
    if is_cache(tree):
        return made_of(tree, [_cut(item, pick, cut, path) for item in items_of(tree)])
    children = children_of(tree)
    if children is None:
        return tree
    if _is_entry_a_sample(tree, cut):
        return rebuild_like(tree, pick.sequence(tree))
    keys = [*tree] if isinstance(tree, Mapping) else []
    keys += [None] * (len(children) - len(keys))
    parts = [_cut_entry(key, child, pick, cut, path + step) for key, (step, child) in zip(keys, children, strict=True)]
    return rebuild_like(tree, parts, path)


def _cut_entry(key: Any, entry: Any, pick: _Pick, cut: _Cut, path: str) -> Any:
    is_number = isinstance(entry, int | float) or (isinstance(entry, Tensor) and not entry.dim())
    if key in TOTALS and is_number:
        return entry if pick.fraction == 1 else entry * pick.fraction
    return _cut(entry, pick, cut, path)


def _is_entry_a_sample(tree: Any, cut: _Cut) -> bool:
    if not _is_sequence(tree) or len(tree) != cut.batch_size:
        return False
    if cut.are_listed and _is_list_of_samples(tree):
        return True
    return cut.batch_size > 1 and all(_is_plain(element) for element in tree)


def _is_plain(element: Any) -> bool:
    """A leaf that belongs to one sample, or a record of such: nothing in it has rows of its own."""
    if isinstance(element, torch.Size):
        return False
    if isinstance(element, Tensor):
        return not element.dim()
    return children_of(element) is None or (_is_entry(element) and not any(t.dim() for _, t in tensors_of(element)))


def _is_own(entry: Any) -> bool:
    return isinstance(entry, str | int | float) or (isinstance(entry, Tensor) and not entry.dim())


def _is_setting(sequence: Sequence[Any]) -> bool:
    return isinstance(sequence, tuple) and all(isinstance(element, int | float) for element in sequence)


def _roots_of(batch: Any) -> Sequence[Any]:
    """Where samples may be listed: the batch, or its parts where it is a list of tensors."""
    is_parts = _is_sequence(batch) and all(isinstance(part, Tensor) for part in batch)
    return list(batch) if is_parts else [batch]


def _lists_in(tree: Any) -> Iterator[Any]:
    """Every list or tuple in `tree` that may be of samples, none inside another."""
    if _is_list_of_samples(tree):
        yield tree
    elif not isinstance(tree, Tensor):
        for _, child in children_of(tree) or ():
            yield from _lists_in(child)


def _has_samples(tree: Any, size: int, dim: int) -> bool:
    """Whether all that is in it is of `size` samples, where lists of that length are of samples."""
    if isinstance(tree, Tensor):
        return not _has_dim(tree, dim) or tree.size(dim) == size
    if _is_list_of_samples(tree) and len(tree) == size:
        return True
    return all(_has_samples(child, size, dim) for _, child in children_of(tree) or ())


def _has_records(roots: Sequence[Any]) -> bool:
    return any(not isinstance(found[0], Tensor) for root in roots for found in _lists_in(root))


def _is_list_of_samples(tree: Any) -> bool:
    """Tensors, or records of one kind that hold one: a pair of two unlike mappings is none."""
    if not _is_sequence(tree) or not tree:
        return False
    if all(isinstance(element, Tensor) for element in tree):
        return any(element.dim() for element in tree)
    first = tree[0]
    return (
        _is_entry(first)
        and all(type(element) is type(first) for element in tree)
        and (not isinstance(first, Mapping) or all(element.keys() == first.keys() for element in tree))
        and any(tensor.dim() for _, tensor in tensors_of(tree))
    )


def _is_entry(element: Any) -> bool:
    return isinstance(element, Mapping) or is_dataclass(element) or (isinstance(element, tuple) and is_record(element))


def _is_sequence(tree: Any) -> bool:
    return isinstance(tree, list | tuple) and not isinstance(tree, torch.Size) and not is_record(tree)


def _no_samples(tree: Any, dim: int) -> ConfigError:
    tensors = tensors_of(tree)
    sizes = {path: tensor.size(dim) for path, tensor in tensors if _has_dim(tensor, dim)}
    if sizes:
        listed = ", ".join(f"{_name(path)} has {size}" for path, size in sizes.items())
        return ConfigError(
            f"tensors whose size along dimension {dim} differs: {listed}. Expected one size, the number of samples, "
            "for inputs and targets alike, or lists of one tensor or dict a sample, all of one length. Give every "
            "tensor one entry a sample; what all samples share, pass as a 0-dim tensor or keep inside the model."
        )
    got = (
        f"tensors with no dimension {dim}: {', '.join(f'{_name(p)} of shape {tuple(t.shape)}' for p, t in tensors)}"
        if tensors
        else f"no tensor in {type(tree).__name__}"
    )
    return ConfigError(
        f"a batch with no tensor to count samples by: got {got}. Expected at least one tensor whose dimension "
        f"{dim} is the batch. Give the samples as tensors (torch.as_tensor converts arrays and lists of numbers)."
    )


def _name(path: str) -> str:
    return path or "the tensor"


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()
