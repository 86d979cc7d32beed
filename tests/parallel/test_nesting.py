"""Trees of tensors: containers keep their types, paths name places."""

from __future__ import annotations

import re
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from splittune.parallel.nesting import leaves_of, map_tensors, tensors_of, zip_map
from tests.parallel.trees import FrozenRecord, ModelOutput, Pair, Record, SlottedRecord, same, trees


def add_one(tensor: Tensor) -> Tensor:
    return tensor + 1


# round trips


@given(tree=trees)
def test_mapping_the_identity_gives_an_equal_tree(tree: Any) -> None:
    """Whatever is nested in whatever, mapping the identity keeps containers, order, paths and leaves."""
    assert same(map_tensors(lambda tensor: tensor, tree), tree)


@given(tree=trees)
def test_mapping_touches_every_tensor_and_nothing_else(tree: Any) -> None:
    """Each tensor is replaced at its own path; every other leaf is the very same object; the tree
    given is unchanged."""
    before = [(path, leaf.clone() if isinstance(leaf, Tensor) else leaf) for path, leaf in leaves_of(tree)]
    mapped = leaves_of(map_tensors(add_one, tree))
    assert [path for path, _ in mapped] == [path for path, _ in before]
    for (_, old), (_, new), (_, now) in zip(before, mapped, leaves_of(tree), strict=True):
        if isinstance(old, Tensor):
            assert torch.equal(new, old + 1)
            assert torch.equal(now, old)
        else:
            assert new is old


@given(tree=trees)
def test_zipping_copies_of_a_tree_meets_every_leaf_once(tree: Any) -> None:
    """Zipping a tree with its copy hands over both leaves of each path, in order, and rebuilds the tree."""
    met: list[str] = []

    def first(path: str, leaves: list[Any]) -> Any:
        met.append(path)
        assert same(leaves[0], leaves[1])
        return leaves[0]

    assert same(zip_map(first, [tree, map_tensors(torch.clone, tree)]), tree)
    assert met == [path for path, _ in leaves_of(tree)]


# containers


@pytest.mark.parametrize(
    "tree",
    [
        {"b": torch.zeros(2), "a": 1},
        OrderedDict(b=torch.zeros(2), a=1),
        Pair(torch.zeros(2), 1),
        Record(torch.zeros(2), 1),
        FrozenRecord(torch.zeros(2), 1),
        SlottedRecord(torch.zeros(2), 1),
        [torch.zeros(2), 1],
        (torch.zeros(2), 1),
        UserDict(b=torch.zeros(2), a=1),
        MappingProxyType({"b": torch.zeros(2), "a": 1}),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_a_container_keeps_its_type_and_order(tree: Any) -> None:
    """Every kind of container comes back as what it was, its parts in their order, as a new object."""
    mapped = map_tensors(add_one, tree)
    assert type(mapped) is type(tree)
    assert mapped is not tree
    assert [leaf.tolist() if isinstance(leaf, Tensor) else leaf for _, leaf in leaves_of(mapped)] == [[1, 1], 1]


def test_a_defaultdict_keeps_its_factory() -> None:
    """A rebuilt defaultdict still makes what it made, and nothing was made on the way."""
    mapped = map_tensors(add_one, defaultdict(list, a=torch.zeros(1)))
    assert list(mapped) == ["a"]
    assert mapped["new"] == []


def test_a_model_output_keeps_items_and_fields_in_step() -> None:
    """A dataclass that is an OrderedDict is rebuilt once for both; a field that is None stays no item."""
    mapped = map_tensors(add_one, ModelOutput(logits=torch.zeros(2)))
    assert type(mapped) is ModelOutput
    assert list(mapped) == ["logits"]
    assert mapped.logits is mapped["logits"]
    assert mapped.logits.tolist() == [1, 1]
    assert mapped.loss is None


def test_a_dataclass_dict_that_does_not_sync_is_updated_in_both_places() -> None:
    """Where the class itself does not keep fields and items in step, the rebuilt one still agrees with itself."""

    @dataclass
    class Loose(dict[str, Any]):
        logits: Any

        def __post_init__(self) -> None:
            self["logits"] = self.logits

    mapped = map_tensors(add_one, Loose(torch.zeros(1)))
    assert mapped["logits"].tolist() == mapped.logits.tolist() == [1]


def test_a_dataclass_is_not_initialised_again() -> None:
    """Fields that __init__ does not take, required arguments and checks in __post_init__ do not stand in the way."""

    @dataclass
    class Guarded:
        ids: Any
        mask: Any = field(init=False)
        unset: Any = field(init=False)

        def __post_init__(self) -> None:
            if not isinstance(self.ids, Tensor):
                raise TypeError("ids must be a tensor")
            self.mask = self.ids != 0
            self.note = "kept"

    mapped = map_tensors(lambda tensor: tensor.tolist(), Guarded(torch.tensor([0, 3])))
    assert (mapped.ids, mapped.mask, mapped.note) == ([0, 3], [False, True], "kept")
    assert not hasattr(mapped, "unset")


def test_a_cached_property_is_computed_anew() -> None:
    """What a dataclass has cached about its old tensors is not carried into the rebuilt one."""

    @dataclass
    class Cached:
        ids: Tensor

        @cached_property
        def total(self) -> float:
            return float(self.ids.sum())

    batch = Cached(torch.ones(4))
    assert batch.total == 4
    assert map_tensors(lambda tensor: tensor[:1], batch).total == 1


def test_subclasses_of_list_and_tuple_keep_type_and_attributes() -> None:
    """A subclass whose constructor takes something else is rebuilt with its type and attributes."""

    class Named(list[Any]):
        def __init__(self, name: str, *items: Any) -> None:
            super().__init__(items)
            self.name = name

    class Two(tuple[Any, ...]):
        __slots__ = ()

        def __new__(cls, left: Any, right: Any) -> Two:
            return super().__new__(cls, (left, right))

    mapped = map_tensors(add_one, Named("n", torch.zeros(1), Two(torch.zeros(1), "r")))
    assert (type(mapped), mapped.name, type(mapped[1])) == (Named, "n", Two)
    assert mapped[1][0].tolist() == [1]


def test_what_torch_returns_as_a_record_is_rebuilt() -> None:
    """``torch.return_types.max`` and its like keep their type and their named positions."""
    mapped = map_tensors(add_one, torch.zeros(2, 3).max(dim=1))
    assert type(mapped) is torch.return_types.max
    assert mapped.values.tolist() == [1, 1]


def test_a_mapping_of_its_own_kind_is_left_untouched() -> None:
    """A mapping that is no dict is built anew from a dict: its storage is never shared with the copy's."""

    class Own(Mapping[str, Any]):
        def __init__(self, items: dict[str, Any]) -> None:
            self._items = items

        def __getitem__(self, key: str) -> Any:
            return self._items[key]

        def __iter__(self) -> Iterator[str]:
            return iter(self._items)

        def __len__(self) -> int:
            return len(self._items)

    own = Own({"a": torch.zeros(1)})
    assert map_tensors(add_one, own)["a"].tolist() == [1]
    assert own["a"].tolist() == [0]


def test_a_mapping_that_cannot_be_built_from_a_dict_says_so() -> None:
    """The error names the place, the type, and what to pass instead."""

    class Stubborn(Mapping[str, Any]):
        def __init__(self) -> None:
            pass

        def __getitem__(self, key: str) -> Any:
            return 1

        def __iter__(self) -> Iterator[str]:
            return iter(["a"])

        def __len__(self) -> int:
            return 1

    with pytest.raises(TypeError, match=r"cannot rebuild the Stubborn at \[0\].*Pass a dict instead"):
        map_tensors(add_one, [Stubborn()])


@pytest.mark.parametrize("leaf", [None, 1, 2.5, "text", b"b", {1, 2}, torch.Size([2, 3]), Record, Path("x"), range(3)])
def test_anything_else_is_a_leaf(leaf: Any) -> None:
    """What is no container comes back as the very object, a dataclass that is no instance and torch.Size included."""
    assert map_tensors(add_one, leaf) is leaf
    assert leaves_of(leaf) == [("", leaf)]


# paths


def test_paths_read_as_python_reaches_the_place() -> None:
    """Keys, positions, fields and named positions each show as Python writes them."""
    x = torch.zeros(1)
    tree = ({"input_ids": x, 3: [x]}, Record(x, Pair("no tensor", x)))
    assert [path for path, _ in tensors_of(tree)] == ["[0]['input_ids']", "[0][3][0]", "[1].left", "[1].right.right"]
    assert tensors_of(x) == [("", x)]


# zip_map


def test_zip_map_example() -> None:
    """The docstring's worked number."""
    assert zip_map(lambda path, leaves: sum(leaves), [{"a": 1}, {"a": 2}]) == {"a": 3}


def test_mappings_are_matched_by_key() -> None:
    """The same keys in another order are the same structure; the first tree's order is kept."""
    zipped = zip_map(lambda path, leaves: tuple(leaves), [{"a": 1, "b": 2}, {"b": 20, "a": 10}])
    assert list(zipped.items()) == [("a", (1, 10)), ("b", (2, 20))]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([1, 2], [1], "at the top: tree 0 has list of length 2, tree 1 has list of length 1"),
        ({"a": [1]}, {"a": (1,)}, "at ['a']: tree 0 has list, tree 1 has tuple"),
        ({"a": 1}, {"b": 1}, "tree 0 has dict with ['a'], tree 1 has dict with ['b']"),
        ({"a": 1}, {}, "tree 0 has dict with ['a'], tree 1 has dict with nothing"),
        ({}, {"a": 1}, "tree 0 has dict with nothing, tree 1 has dict with ['a']"),
        ([{"a": 1}], [2], "at [0]: tree 0 has dict, tree 1 has int"),
        ([2], [{"a": 1}], "at [0]: tree 0 has int, tree 1 has dict"),
        (
            ModelOutput(loss=1, logits=2),
            ModelOutput(logits=2),
            "ModelOutput with ['loss'], ['logits'], tree 1 has ModelOutput with ['logits'], .loss",
        ),
    ],
)
def test_a_mismatch_names_the_place_and_what_differs(first: Any, second: Any, message: str) -> None:
    """Trees of different structure are refused with the path and both structures."""
    with pytest.raises(TypeError, match=re.escape(message)):
        zip_map(lambda path, leaves: leaves, [first, second])


def test_a_mismatch_counts_the_tree() -> None:
    """The message says which of the trees differs from the first."""
    with pytest.raises(TypeError, match="tree 2 has tuple"):
        zip_map(lambda path, leaves: leaves, [[1], [1], (1,)])


def test_zipping_no_tree_is_refused() -> None:
    """There is nothing to build without a tree."""
    with pytest.raises(ValueError, match="expected at least one"):
        zip_map(lambda path, leaves: leaves, [])
