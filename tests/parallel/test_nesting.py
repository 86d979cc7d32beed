"""Trees of tensors: containers keep their types, paths name places, batches are cut where they should be."""

from __future__ import annotations

import re
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from splittune.errors import ConfigError
from splittune.parallel.nesting import (
    batch_size_of,
    leaves_of,
    map_tensors,
    select_batch,
    slice_batch,
    tensors_of,
    zip_map,
)


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


def add_one(tensor: Tensor) -> Tensor:
    return tensor + 1


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


# round trips


@given(tree=trees)
def test_mapping_the_identity_gives_an_equal_tree(tree: Any) -> None:
    """Whatever is nested in whatever, mapping the identity keeps containers, order, paths and leaves."""
    assert same(map_tensors(lambda tensor: tensor, tree), tree)


@given(tree=trees)
def test_mapping_touches_every_tensor_and_nothing_else(tree: Any) -> None:
    """Each tensor is replaced at its own path; every other leaf is the very same object; the tree given is unchanged."""
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


@given(tree=trees, cuts=st.lists(st.integers(0, 4), max_size=3))
def test_slices_put_together_again_are_the_batch(tree: Any, cuts: list[int]) -> None:
    """Wherever a batch is cut, the tensors of its parts concatenate to the whole."""
    edges = [0, *sorted(cuts), 4]
    parts = [slice_batch(tree, start, stop, batch_size=4) for start, stop in pairwise(edges)]
    of_parts = [[tensor for _, tensor in tensors_of(part)] for part in parts]
    for index, (_, whole) in enumerate(tensors_of(tree)):
        assert torch.equal(torch.cat([tensors[index] for tensors in of_parts]), whole)


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
    assert slice_batch(batch, 0, 1).total == 1


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


# batch_size_of


def test_the_batch_size_is_what_all_tensors_share() -> None:
    """Tensors without the dimension are left out; the rest agree."""
    tree = {"x": torch.zeros(8, 3), "scale": torch.tensor(2.0), "y": (torch.zeros(8), "name")}
    assert batch_size_of(tree) == 8
    assert batch_size_of({"x": torch.zeros(3, 8), "y": torch.zeros(3)}, dim=1) == 8
    assert batch_size_of(torch.zeros(3, 8), dim=-1) == 8
    assert batch_size_of(torch.zeros(0, 8)) == 0


@pytest.mark.parametrize("tree", [{"x": "text"}, [], None, {"x": torch.tensor(1.0)}])
def test_a_batch_with_no_tensor_is_refused(tree: Any) -> None:
    """Without a tensor that has the dimension there is nothing to count, and the message says what was there."""
    with pytest.raises(ConfigError, match=r"a batch with no tensor.*got .*Expected at least one tensor"):
        batch_size_of(tree)


def test_a_batch_of_scalars_lists_them() -> None:
    """Tensors that lack the dimension are named with their shapes."""
    with pytest.raises(ConfigError, match=re.escape("tensors with no dimension 1: ['x'] of shape (4,)")):
        batch_size_of({"x": torch.zeros(4)}, dim=1)


def test_sizes_that_differ_are_listed_by_path() -> None:
    """Targets of another length than the inputs are refused with the size of each."""
    batch = [torch.zeros(8, 3), {"labels": torch.zeros(7)}]
    with pytest.raises(ConfigError, match=re.escape("size along dimension 0 differs: [0] has 8, [1]['labels'] has 7")):
        batch_size_of(batch)


# slice_batch


def test_slice_batch_example() -> None:
    """The docstring's worked number."""
    numbers, letters = slice_batch((torch.arange(4), ["a", "b", "c", "d"]), 1, 3)
    assert (numbers.tolist(), letters) == ([1, 2], ["b", "c"])


def test_a_slice_is_a_view() -> None:
    """Nothing is copied: a part's tensors share the batch's storage."""
    whole = torch.arange(6)
    assert slice_batch({"x": whole}, 2, 4)["x"].data_ptr() == whole[2:].data_ptr()


def test_what_belongs_to_no_sample_passes() -> None:
    """0-dim tensors, numbers, strings and sizes are shared by all parts."""
    scale, size = torch.tensor(2.0), torch.Size([4, 4, 4, 4])
    part = slice_batch({"x": torch.zeros(4), "scale": scale, "n": 4, "name": "abcd", "size": size}, 0, 1)
    assert part["scale"] is scale
    assert part["size"] is size
    assert (part["n"], part["name"]) == (4, "abcd")


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (["a", "b", "c", "d"], ["b", "c"]),
        (("a", None, 2, Path("d")), (None, 2)),
        ([b"a", 1.5, "c", None], [1.5, "c"]),
        (["a", "b", "c"], ["a", "b", "c"]),
        ([["a", "b", "c", "d"], 1], [["b", "c"], 1]),
        ([[1], [2], [3], [4]], [[1], [2], [3], [4]]),
        (Box(1, 2, 3, 4), (1, 2, 3, 4)),
    ],
)
def test_a_list_of_one_leaf_a_sample_is_sliced_and_no_other(samples: Any, expected: Any) -> None:
    """A list or tuple is cut if it has one plain leaf a sample; of another length, nested or named, it is not."""
    part = slice_batch({"x": torch.zeros(4), "samples": samples}, 1, 3)["samples"]
    assert part == expected
    assert type(part) is type(samples)


def test_a_list_is_not_sliced_in_a_batch_of_one() -> None:
    """With one sample a list of one element says nothing about samples, and passes."""
    assert slice_batch([torch.zeros(1), ["only"]], 0, 0)[1] == ["only"]


def test_tensors_are_cut_along_the_dimension_asked_for() -> None:
    """`dim` may be another than 0, also counted from the end; tensors without it pass."""
    tree = {"x": torch.arange(6).view(2, 3), "bias": torch.zeros(2)}
    assert slice_batch(tree, 1, 2, dim=1)["x"].tolist() == [[1], [4]]
    assert slice_batch(tree["x"], 1, 2, dim=-1).tolist() == [[1], [4]]


def test_a_tensor_of_another_size_is_refused_by_name() -> None:
    """The message has the path, the size, the shape, what was expected and what to do."""
    with pytest.raises(ConfigError) as caught:
        slice_batch({"x": torch.zeros(4), "mask": torch.zeros(7, 7)}, 0, 2, batch_size=4)
    for part in ("['mask'] has size 7 along dimension 0", "(shape (7, 7))", "expected 4", "0-dim tensor"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 5)])
def test_a_slice_beyond_the_batch_is_refused(start: int, stop: int) -> None:
    """Positions outside the batch are an error, never silently clipped."""
    with pytest.raises(ValueError, match="expected 0 <= start <= stop <= 4"):
        slice_batch(torch.zeros(4), start, stop)


@given(tree=trees, chosen=st.lists(st.integers(0, 3), max_size=6))
def test_selected_samples_are_the_slices_of_one(tree: Any, chosen: list[int]) -> None:
    """Selecting samples, in any order and repeated, is putting together slices of one sample each."""
    selected = tensors_of(select_batch(tree, torch.tensor(chosen, dtype=torch.int64), batch_size=4))
    slices = [tensors_of(slice_batch(tree, index, index + 1, batch_size=4)) for index in chosen]
    for place, (_, tensor) in enumerate(selected):
        assert tensor.shape[0] == len(chosen)
        assert all(torch.equal(tensor[row], part[place][1][0]) for row, part in enumerate(slices))


def test_select_batch_example() -> None:
    """The docstring's worked number: strings of the samples are selected along with them."""
    numbers, letters = select_batch((torch.arange(2), ["a", "b"]), torch.tensor([0, 1, 0]))
    assert (numbers.tolist(), letters) == ([0, 1, 0], ["a", "b", "a"])


def test_selecting_refuses_a_tensor_of_another_size() -> None:
    """The tensor that has no entry for every sample is named."""
    with pytest.raises(ConfigError, match=re.escape("['mask'] has size 7 along dimension 0")):
        select_batch({"x": torch.zeros(4), "mask": torch.zeros(7)}, torch.tensor([0]), batch_size=4)


def test_gradients_flow_through_a_slice_and_a_map() -> None:
    """A sliced and mapped tree is still connected to the tensors it came from."""
    x = torch.ones(4, requires_grad=True)
    part = map_tensors(lambda tensor: tensor * 3, slice_batch({"x": x}, 1, 3))
    part["x"].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 3, 3, 0]
