"""A batch by its samples: counted, cut and selected, stacked or listed."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from splittune.errors import ConfigError
from splittune.parallel.nesting import map_tensors, tensors_of
from splittune.parallel.samples import batch_size_of, read_samples, select_batch, slice_arguments, slice_batch
from tests.parallel.trees import Box, Record, trees

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


@given(tree=trees, cuts=st.lists(st.integers(0, 4), max_size=3))
def test_slices_put_together_again_are_the_batch(tree: Any, cuts: list[int]) -> None:
    """Wherever a batch is cut, the tensors of its parts concatenate to the whole."""
    edges = [0, *sorted(cuts), 4]
    parts = [slice_batch(tree, start, stop, batch_size=4) for start, stop in pairwise(edges)]
    of_parts = [[tensor for _, tensor in tensors_of(part)] for part in parts]
    for index, (_, whole) in enumerate(tensors_of(tree)):
        assert torch.equal(torch.cat([tensors[index] for tensors in of_parts]), whole)


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
    selected = tensors_of(select_batch(tree, chosen, batch_size=4))
    slices = [tensors_of(slice_batch(tree, index, index + 1, batch_size=4)) for index in chosen]
    for place, (_, tensor) in enumerate(selected):
        assert tensor.shape[0] == len(chosen)
        assert all(torch.equal(tensor[row], part[place][1][0]) for row, part in enumerate(slices))


def test_select_batch_example() -> None:
    """The docstring's worked number: strings of the samples are selected along with them."""
    numbers, letters = select_batch((torch.arange(2), ["a", "b"]), [0, 1, 0])
    assert (numbers.tolist(), letters) == ([0, 1, 0], ["a", "b", "a"])


def test_selecting_refuses_a_tensor_of_another_size() -> None:
    """The tensor that has no entry for every sample is named."""
    with pytest.raises(ConfigError, match=re.escape("['mask'] has size 7 along dimension 0")):
        select_batch({"x": torch.zeros(4), "mask": torch.zeros(7)}, [0], batch_size=4)


def test_gradients_flow_through_a_slice_and_a_map() -> None:
    """A sliced and mapped tree is still connected to the tensors it came from."""
    x = torch.ones(4, requires_grad=True)
    part = map_tensors(lambda tensor: tensor * 3, slice_batch({"x": x}, 1, 3))
    part["x"].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 3, 3, 0]


# samples in lists


def image(height: int, channels: int = 3) -> Tensor:
    return torch.full((channels, height, 4), float(height))


def target(num_boxes: int) -> dict[str, Any]:
    return {"boxes": torch.zeros(num_boxes, 4), "id": torch.tensor(num_boxes), "name": str(num_boxes)}


def detection(*num_boxes: int) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """A batch as collate functions of detection jobs give it."""
    return [image(1 + n) for n in num_boxes], [target(n) for n in num_boxes]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        pytest.param(detection(1, 0, 2, 5), 4, id="images and targets"),
        pytest.param(tuple(map(tuple, detection(1, 0, 2, 5))), 4, id="tuples, as zip gives them"),
        pytest.param((torch.zeros(4, 3, 8, 8), detection(1, 0, 2, 5)[1]), 4, id="stacked images"),
        pytest.param((detection(1, 0, 2, 5)[0], torch.zeros(4)), 4, id="stacked targets"),
        pytest.param([{"image": image(n), **target(n)} for n in (1, 2)], 2, id="one dict a sample"),
        pytest.param({"points": [torch.zeros(n, 3) for n in (5, 2, 9)]}, 3, id="clouds of points"),
        pytest.param([[Record(torch.zeros(5, 3), 1), Record(torch.zeros(2, 3), 2)]], 2, id="records"),
        pytest.param(detection(4), 1, id="one sample"),
    ],
)
def test_lists_of_one_tensor_or_record_a_sample_are_samples(batch: Any, size: int) -> None:
    """Where the tensors have no size in common, lists of one length count the samples."""
    assert read_samples(batch) == (size, True, True)


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(8, 3), torch.zeros(7)],
        {"left": [torch.zeros(8)], "right": [torch.zeros(7)]},
        ({"x": torch.zeros(8)}, {"y": torch.zeros(7)}),
        (detection(1, 0, 2)[0], torch.zeros(4)),
        (detection(1, 0, 2)[0], detection(1, 0)[1]),
    ],
)
def test_a_mistake_in_sizes_is_no_list_of_samples(batch: Any) -> None:
    """Tensors that should have had one size are refused as ever; the message knows of lists."""
    with pytest.raises(ConfigError, match=r"differs: .* or lists of one tensor or dict a sample, all of one length"):
        batch_size_of(batch)


ALIKE = [torch.zeros(3, 8, 8) for _ in range(16)]
SIAMESE = [torch.zeros(5, 8), torch.zeros(5, 8)]
UNCOLLATED = [{"image": image, "label": torch.tensor(1), "file": "a.png"} for image in ALIKE]
VIEWS = [{"image": torch.zeros(5, 8)}, {"image": torch.zeros(5, 8)}]


@pytest.mark.parametrize(
    ("batch", "expected", "listed", "samples"),
    [
        pytest.param((ALIKE,), 16, None, (16, True, True), id="the loader says 16"),
        pytest.param((ALIKE,), None, None, (3, False, False), id="nobody says"),
        pytest.param((ALIKE[:5],), 16, None, (3, False, False), id="a short one, nobody says"),
        pytest.param((ALIKE[:5],), 16, True, (5, True, False), id="a short one, after a full one"),
        pytest.param((ALIKE[:1],), 16, True, (1, True, False), id="of one sample"),
        pytest.param((ALIKE[:3],), 3, True, (3, True, False), id="as many as channels"),
        pytest.param((SIAMESE,), 5, None, (5, False, True), id="two inputs, not two samples"),
        pytest.param((SIAMESE,), 16, False, (5, False, False), id="a short one of those"),
        pytest.param((SIAMESE, torch.zeros(5)), 16, None, (5, False, False), id="and their targets"),
        pytest.param([torch.zeros(1, 3), torch.zeros(1)], 2, None, (1, False, False), id="inputs and targets"),
        pytest.param(([target(3), target(3)],), 2, None, (2, True, True), id="boxes alike"),
        pytest.param((detection(1, 0, 2, 5)[0],), 4, None, (4, True, True), id="images alone"),
        pytest.param(UNCOLLATED, 16, None, (16, True, True), id="records, the loader says 16"),
        pytest.param(UNCOLLATED[:5], None, None, (5, True, True), id="records with labels, nobody says"),
        pytest.param(UNCOLLATED[:3], 3, None, (3, True, True), id="as many of them as channels"),
        pytest.param((VIEWS,), None, None, (5, False, False), id="records of stacked tensors, nobody says"),
        pytest.param(UNCOLLATED[:2], 3, False, (3, False, False), id="records that were stacked before"),
    ],
)
def test_the_batch_size_decides_where_a_batch_can_be_read_in_two_ways(
    batch: Any, expected: int | None, listed: bool | None, samples: tuple[int, bool, bool]
) -> None:
    """16 images of 3 channels are no batch of 3 where 16 is what the loader gives, or what earlier batches were."""
    assert read_samples(batch, expected=expected, listed=listed) == samples


def test_a_calls_argument_may_be_a_list_of_tensors() -> None:
    """Of a call, unlike of a batch, each argument may itself be the samples."""
    clouds = [torch.zeros(5, 3), torch.zeros(2, 3)]
    assert read_samples(((clouds,), {}), is_call=True).size == 2
    assert read_samples(((), {"clouds": clouds, "scale": torch.tensor(2.0)}), is_call=True).size == 2
    with pytest.raises(ConfigError, match="differs"):
        read_samples((tuple(clouds), {}), is_call=True)


@given(num_boxes=st.lists(st.integers(0, 4), min_size=2, max_size=6), cuts=st.lists(st.integers(0, 6), max_size=3))
def test_lists_of_samples_are_cut_and_put_together_again(num_boxes: list[int], cuts: list[int]) -> None:
    """Wherever it is cut, every sample is in one part, the very same object, its image beside its target."""
    batch = (*detection(*num_boxes), [str(n) for n in num_boxes], "all")
    size = len(num_boxes)
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    parts = [slice_batch(batch, *edge, batch_size=size, listed=True) for edge in pairwise(edges)]
    for index in range(3):
        together = [entry for part in parts for entry in part[index]]
        assert all(mine is other for mine, other in zip(together, batch[index], strict=True))
    assert {part[3] for part in parts} == {"all"}
    chosen = [size - 1, 0, 0]
    selected = select_batch(batch, chosen, batch_size=size, listed=True)
    assert selected[2] == [str(num_boxes[index]) for index in chosen]
    assert all(mine is batch[1][index] for mine, index in zip(selected[1], chosen, strict=True))


def test_entries_without_rows_go_with_their_samples() -> None:
    """Beside stacked tensors, 0-dim tensors and records of plain values are cut as strings are;
    inputs of one name not."""
    extra = [{"id": n, "scale": torch.tensor(n)} for n in range(4)]
    labels, pair = [torch.tensor(n) for n in range(4)], [torch.zeros(4, 2), torch.ones(4, 2)]
    part = slice_batch({"x": torch.zeros(4, 3), "extra": extra, "labels": labels, "pair": pair}, 1, 3)
    assert part["extra"] == extra[1:3]
    assert [label.item() for label in part["labels"]] == [1, 2]
    assert [tensor.shape for tensor in part["pair"]] == [(2, 2), (2, 2)]


# counts of the whole batch


@pytest.mark.parametrize("total", [40, 40.0, torch.tensor(40), torch.tensor(40.0)])
def test_a_count_of_the_batchs_items_becomes_the_parts(total: Any) -> None:
    """Each part is given its part of the count, so that means weighted by samples are what one device computes."""
    batch = {"x": torch.zeros(4, 3), "num_items_in_batch": total}
    assert float(slice_batch(batch, 1, 4)["num_items_in_batch"]) == 30
    assert slice_batch(batch, 0, 4)["num_items_in_batch"] is total
    assert float(select_batch(batch, [0, 1, 2, 3] * 2)["num_items_in_batch"]) == 80
    cut = slice_arguments((), batch, 0, 1, 0, read_samples(batch))[1]
    assert float(cut["num_items_in_batch"]) == 10
