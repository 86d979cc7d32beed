"""Trees of tensors as models take and give them: walked, rebuilt and zipped.

Containers are tuples, lists, named tuples, mappings and dataclass instances, nested at will.
Everything else is a leaf: tensors, numbers, strings, None, ``torch.Size``, arrays, sets. A path
names a place in a tree as Python would reach it: ``"['input_ids']"``, ``"[0].mask"``, and ``""``
for a tree that is itself a leaf.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` with `function` applied to every tensor; its containers are new, of the same types.

    Named tuples, dict order, ``OrderedDict``, ``defaultdict`` and the like are kept. Leaves other
    than tensors are returned as they are. A dataclass (frozen, with slots, or an ``OrderedDict`` at
    the same time) is rebuilt field by field without calling its ``__init__``: attributes that are
    no fields are carried over, cached properties are not.

    Example: ``map_tensors(len, {"x": torch.zeros(3, 2), "n": 7})`` gives ``{"x": 3, "n": 7}``.

    Raises:
        TypeError: a mapping that is neither a dict nor a ``UserDict`` and cannot be built from a
            dict.
    """
    return _map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def leaves_of(tree: Any) -> list[tuple[str, Any]]:
    """Every leaf with its path, in order.

    Example: ``{"a": (1, None)}`` gives ``[("['a'][0]", 1), ("['a'][1]", None)]``.
    """
    leaves: list[tuple[str, Any]] = []
    _collect(tree, "", leaves)
    return leaves


def tensors_of(tree: Any) -> list[tuple[str, Tensor]]:
    """Every tensor with its path, in order: ``[ids, "a"]`` gives ``[("[0]", ids)]``."""
    return [(path, leaf) for path, leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


DESCEND = object()
"""What `zip_map`'s `whole` returns for trees that are to be zipped part by part."""


def zip_map(
    function: Callable[[str, list[Any]], Any],
    trees: Sequence[Any],
    whole: Callable[[str, list[Any]], Any] = lambda *_: DESCEND,
) -> Any:
    """One tree built from several of the same structure.

    Each leaf is ``function(path, [leaf of each tree])``.

    `whole(path, [container of each tree])` is asked first, for every container: what it returns
    stands in the result, save for `DESCEND`.

    Mappings are matched by key, whatever their order; the result has the first tree's containers.
    What the leaves are is `function`'s business: only containers are compared here.

    Example: ``zip_map(lambda path, leaves: sum(leaves), [{"a": 1}, {"a": 2}])`` gives ``{"a": 3}``.

    Raises:
        TypeError: the trees differ in structure; the message names the path and both structures.
        ValueError: there is no tree.
    """
    if not trees:
        raise ValueError("zip_map got no tree: expected at least one.")
    return _zip(function, list(trees), "", whole)


def _map(function: Callable[[Any], Any], tree: Any, path: str = "") -> Any:
    children = children_of(tree)
    if children is None:
        return function(tree)
    return rebuild_like(tree, [_map(function, child, path + step) for step, child in children], path)


def _collect(tree: Any, path: str, leaves: list[tuple[str, Any]]) -> None:
    children = children_of(tree)
    if children is None:
        leaves.append((path, tree))
        return
    for step, child in children:
        _collect(child, path + step, leaves)


def _zip(
    function: Callable[[str, list[Any]], Any], trees: list[Any], path: str, whole: Callable[[str, list[Any]], Any]
) -> Any:
    first = trees[0]
    expected = children_of(first)
    if expected is not None and (made := whole(path, trees)) is not DESCEND:
        return made
    steps = [] if expected is None else [step for step, _ in expected]
    rows: list[list[Any]] = []
    for index, tree in enumerate(trees):
        children = children_of(tree)
        if (children is None) != (expected is None) or (children is not None and type(tree) is not type(first)):
            raise _mismatch(path, index, type(first).__name__, type(tree).__name__)
        if children is None:
            continue
        own_steps = [step for step, _ in children]
        if sorted(own_steps) != sorted(steps):
            raise _mismatch(path, index, _describe(first, steps), _describe(tree, own_steps))
        # another order of the same steps is a mapping's, and is matched by key
        ordered = children if own_steps == steps else sorted(children, key=lambda pair: steps.index(pair[0]))
        rows.append([child for _, child in ordered])
    if expected is None:
        return function(path, trees)
    columns = zip(steps, *rows, strict=True)
    return rebuild_like(first, [_zip(function, list(column), path + step, whole) for step, *column in columns], path)


def _mismatch(path: str, index: int, expected: str, got: str) -> TypeError:
    where = f"at {path}" if path else "at the top"
    return TypeError(
        f"structures differ {where}: tree 0 has {expected}, tree {index} has {got}. "
        "Expected the same containers with the same keys and lengths in all of them."
    )


def _describe(tree: Any, steps: list[str]) -> str:
    if isinstance(tree, list | tuple):
        return f"{type(tree).__name__} of length {len(steps)}"
    return f"{type(tree).__name__} with {', '.join(steps) or 'nothing'}"


def is_record(tree: Any) -> bool:
    """A tuple whose positions have names: a named one, or C's, as ``torch.return_types.max``."""
    return hasattr(tree, "_fields") or hasattr(tree, "n_sequence_fields")


def _field_names(tree: Any) -> list[str]:
    """The fields that are set of a dataclass instance; none for anything else."""
    if not is_dataclass(tree) or isinstance(tree, type):
        return []
    return [field.name for field in fields(tree) if hasattr(tree, field.name)]


def children_of(tree: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, each with its step of the path; None for a leaf."""
    if isinstance(tree, Tensor | torch.Size | str | bytes):
        return None
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", child) for name, child in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, list | tuple):
        return [(f"[{index}]", child) for index, child in enumerate(tree)]
    if is_dataclass(tree) and not isinstance(tree, type | dict):
        return [(f".{name}", getattr(tree, name)) for name in _field_names(tree)]
    if isinstance(tree, Mapping):
        # A dataclass that is a dict too (a model's output) may have fields that are no items: None,
        # mostly.
        beyond = [(f".{name}", getattr(tree, name)) for name in _field_names(tree) if name not in tree]
        return [(f"[{key!r}]", child) for key, child in tree.items()] + beyond
    return None


def rebuild_like(tree: Any, children: list[Any], path: str = "") -> Any:
    """A container like `tree` that holds `children`, given in the order of `children_of`."""
    cls = type(tree)
    if cls in (list, tuple) or (isinstance(tree, tuple) and hasattr(tree, "n_sequence_fields")):
        return cls(children)
    if isinstance(tree, tuple):  # not cls(...): a named tuple's and a subclass's constructor takes what it likes
        return _with_attributes_of(tree, tuple.__new__(cls, children))
    if isinstance(tree, list):
        rebuilt = _with_attributes_of(tree, list.__new__(cls))
        list.extend(rebuilt, children)
        return rebuilt
    if is_dataclass(tree) and not isinstance(tree, dict):
        return _with_fields(
            _with_attributes_of(tree, object.__new__(cls)), dict(zip(_field_names(tree), children, strict=True))
        )
    return _rebuild_mapping(tree, children, path)


def _rebuild_mapping(tree: Any, children: list[Any], path: str) -> Any:
    cls: Any = type(tree)
    items = dict(zip(tree, children, strict=False))
    if cls is dict:
        return items
    if isinstance(tree, dict | UserDict):
        rebuilt = _with_attributes_of(tree, cls.__new__(cls))  # not cls(): it may demand arguments
        if isinstance(tree, UserDict):
            rebuilt.data = {}
        if isinstance(tree, defaultdict):
            rebuilt.default_factory = tree.default_factory
        for key, child in items.items():
            rebuilt[key] = child
        names = _field_names(tree)
        beyond = dict(zip([name for name in names if name not in tree], children[len(items) :], strict=True))
        return _with_fields(rebuilt, beyond | {name: items[name] for name in names if name in items})
    # Copying and assigning would be wrong here: a shallow copy may share its storage with the
    # user's mapping.
    try:
        return cls(items)
    except TypeError as error:
        where = f" at {path}" if path else ""
        raise TypeError(
            f"cannot rebuild the {cls.__name__}{where}: {cls.__name__}(dict) raised {error}. Expected a "
            "dict, a subclass of dict or UserDict, or a mapping that is built from one. Pass a dict instead."
        ) from error


def _with_attributes_of(tree: Any, rebuilt: Any) -> Any:
    """`rebuilt` with the attributes of `tree`, but for cached properties of the old contents."""
    for name, value in getattr(tree, "__dict__", {}).items():
        if not isinstance(getattr(type(tree), name, None), cached_property):
            rebuilt.__dict__[name] = value
    return rebuilt


def _with_fields(rebuilt: Any, values: dict[str, Any]) -> Any:
    for name, value in values.items():
        object.__setattr__(rebuilt, name, value)  # frozen dataclasses refuse the ordinary assignment
    return rebuilt
