"""Trees of every container there is, for the tests of what walks, joins and cuts them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from splittune.parallel.nesting import leaves_of


class Pair(NamedTuple):
    left: Any
    right: Any


class Box(NamedTuple):
    x0: int
    y0: int
    x1: int
    y1: int


@dataclass
class Record:
    left: Any
    right: Any


@dataclass(frozen=True)
class FrozenRecord:
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class SlottedRecord:
    left: Any
    right: Any


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """As Hugging Face's are: fields that are not None are items too, and the two are kept in step."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def same(a: Any, b: Any) -> bool:
    """Equal in structure, types and leaves; tensors by value."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    mine, others = leaves_of(a), leaves_of(b)
    if mine and mine[0][0] == "":
        return bool(a == b)
    return [path for path, _ in mine] == [path for path, _ in others] and all(
        same(x, y) for (_, x), (_, y) in zip(mine, others, strict=True)
    )


plain_leaves = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.binary(max_size=2))
tensor_leaves = st.integers(min_value=0, max_value=9).map(lambda value: torch.full((4, 2), value))


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    two = st.tuples(children, children)
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
        st.dictionaries(st.text(max_size=2), children, max_size=3).map(OrderedDict),
        st.dictionaries(st.integers(0, 9), children, max_size=3).map(lambda items: defaultdict(list, items)),
        st.dictionaries(st.text(max_size=2), children, max_size=3).map(UserDict),
        two.map(lambda pair: Pair(*pair)),
        two.map(lambda pair: Record(*pair)),
        two.map(lambda pair: FrozenRecord(*pair)),
        two.map(lambda pair: SlottedRecord(*pair)),
        two.map(lambda pair: ModelOutput(*pair)),
    )


trees = st.recursive(st.one_of(plain_leaves, tensor_leaves), containers, max_leaves=12)
