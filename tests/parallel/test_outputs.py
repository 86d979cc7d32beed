"""What comes back: every container nn.DataParallel knows and more, joined in order, averaged by shard, or refused."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody writes it

from splittune.errors import ConfigError
from splittune.parallel import BalancedDataParallel
from splittune.parallel.outputs import Joiner
from tests.parallel.models import CPU, Call, ThreadedLink, assert_same, mlp, vectors


def wrap(function: Callable[..., Any], *shard_sizes: int, dim: int = 0) -> BalancedDataParallel:
    return BalancedDataParallel(
        module=Call(function), shard_sizes=shard_sizes, device_ids=["cpu"] * len(shard_sizes), dim=dim
    )


def combine(*outputs: Any, shard_sizes: tuple[int, ...] = (1, 2), dim: int = 0) -> Any:
    link = ThreadedLink(len(outputs))
    return Joiner(shards=shard_sizes, weights=shard_sizes, link=link, place=CPU, dim=dim).join(outputs)


class Pair(NamedTuple):
    logits: Tensor
    loss: Tensor


@dataclass
class Record:
    logits: Tensor
    note: str


@dataclass(frozen=True, slots=True)
class Frozen:
    logits: Tensor
    note: str


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """As Hugging Face's are."""

    logits: Any = None
    loss: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for name in ("logits", "loss", "hidden"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


# every kind of output


@pytest.mark.parametrize("shards", [(2, 1, 2), (0, 3, 2), (5, 0, 0), (0, 0, 5), (4, 1, 1)])
@pytest.mark.parametrize(
    "build",
    [
        lambda x: {"logits": x, "loss": x.mean()},
        lambda x: (x, [x + 1, None], "kept", 3),
        lambda x: Pair(x, x.mean()),
        lambda x: Record(x, "kept"),
        lambda x: Frozen(x, "kept"),
        lambda x: ModelOutput(logits=x, loss=x.mean()),
        lambda x: ModelOutput(logits=(x, x * 2)),
        lambda x: OrderedDict(b=x, a=x),
        lambda x: UserDict(b=x, a={"deep": [x]}),
        lambda x: x.max(dim=1),
        lambda x: (x, float(x.mean()), True),
        lambda x: [],
        lambda x: None,
    ],
    ids=range(13),
)
def test_outputs_are_those_of_one_device(build: Callable[[Tensor], Any], shards: tuple[int, ...]) -> None:
    """Whatever holds the tensors, it comes back with its type and keys, and with the whole batch in it, in order."""
    x = torch.arange(15.0).view(5, 3)
    expected = build(x)
    got = wrap(lambda module, x: build(x), *shards)(x)
    assert type(got) is type(expected)
    torch.testing.assert_close(_plain(got), _plain(expected))


def _plain(tree: Any) -> Any:
    if isinstance(tree, Record | Frozen):
        return (tree.logits, [ord(letter) for letter in tree.note])
    if isinstance(tree, dict | UserDict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return [_plain(value) for value in tree]
    return 0.0 if tree is None or isinstance(tree, str) else tree


def test_fields_of_a_model_output_agree_with_its_items() -> None:
    """Of an output that is a dict and a dataclass at once, both sides hold the joined tensors; None stays None."""
    got = wrap(lambda module, x: ModelOutput(logits=x, loss=x.mean()), 1, 3)(vectors(4))
    assert got["logits"] is got.logits
    assert len(got.logits) == 4
    assert got.loss.dim() == 0
    assert got.hidden is None
    assert list(got) == ["logits", "loss"]


@given(shards=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any), dim=st.sampled_from([0, 1, -1, -2]))
def test_every_sample_goes_to_one_device_in_order(shards: list[int], dim: int) -> None:
    """Each device sees its own samples and no other, as many as its share, along any dimension."""
    seen: list[Tensor] = []
    model = wrap(lambda module, x: seen.append(x) or x * 1, *shards, dim=dim)
    samples = torch.arange(sum(shards)).view(-1, 1) if dim in (0, -2) else torch.arange(sum(shards)).view(1, -1)
    assert torch.equal(model(samples), samples)
    assert torch.equal(torch.cat(seen, dim), samples)
    assert [part.size(dim) for part in seen] == [shard for shard in shards if shard]


def test_integers_and_booleans_are_joined_as_they_are() -> None:
    """Outputs that cannot have gradients keep their dtypes."""
    labels, mask, z = wrap(lambda module, x: (x.argmax(1), x > 0, x.to(torch.complex64)), 1, 3)(vectors(4))
    assert (labels.dtype, mask.dtype, z.dtype) == (torch.int64, torch.bool, torch.complex64)
    assert len(labels) == len(mask) == len(z) == 4


def test_an_output_with_as_many_rows_as_it_likes_is_joined() -> None:
    """Boxes found in images, any number a sample and maybe none, are put one behind the other."""
    got = wrap(lambda module, x: x[x[:, 0] > 1], 2, 3)(torch.arange(5.0).view(5, 1))
    assert got.tolist() == [[2], [3], [4]]


# means


def test_means_are_weighted_by_shard_size() -> None:
    """The docstring's worked number: losses of 1.0 and 4.0 over 1 and 2 samples are 3.0 together."""
    assert combine(torch.tensor(1.0), torch.tensor(4.0)).item() == 3.0
    assert combine(1.0, 4.0) == pytest.approx(3.0)


@given(shards=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
def test_a_mean_loss_inside_the_model_is_the_whole_batchs(shards: list[int]) -> None:
    """A loss computed by the replicas, and its gradients, are those of one device, however uneven the shards."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.body(x), labels)}

    torch.manual_seed(0)
    model = WithLoss()
    x, labels = vectors(sum(shards)), torch.randint(3, (sum(shards),))
    expected = model(x, labels)["loss"]
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected_grads = dict(zip(names, torch.autograd.grad(expected, parameters), strict=True))
    loss = BalancedDataParallel(module=model, shard_sizes=shards, device_ids=["cpu"] * len(shards))(x, labels=labels)
    loss["loss"].backward()
    assert_same({"loss": loss["loss"]}, {"loss": expected})
    assert_same({name: parameter.grad for name, parameter in model.named_parameters()}, expected_grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_a_mean_keeps_its_dtype(dtype: torch.dtype) -> None:
    """A loss in half precision comes back in half precision, under autocast too."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert combine(torch.tensor(1.0, dtype=dtype), torch.tensor(4.0, dtype=dtype)).dtype == dtype


def test_counts_are_listed_not_added() -> None:
    """A 0-dim integer has no mean: one entry for each replica is returned, as nn.DataParallel does."""
    assert combine(torch.tensor(3), torch.tensor(5)).tolist() == [3, 5]


# what cannot be one output


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((torch.zeros(1, 4), torch.zeros(2, 1)), "joined at the top along dimension 0: got replica 0 (1, 4) of"),
        (({"x": torch.zeros(1, 4)}, {"x": torch.zeros(2, 5)}), "joined at ['x'] along dimension 0"),
        ((torch.zeros(1), torch.zeros(2, 1)), "replica 0 (1,) of torch.float32, replica 1 (2, 1) of"),
        ((torch.zeros(()), torch.zeros(2)), "Pad to a size that does not depend on the shard"),
        ((torch.zeros(1), torch.zeros(2, dtype=torch.int64)), "replica 1 (2,) of torch.int64"),
        ((torch.tensor(1), torch.tensor(1.5)), "Expected one dtype"),
        ((None, torch.zeros(1)), "combined at the top: replica 0 returned None, replica 1 returned tensor"),
        (({"n": 1}, {"n": 2}), "combined at ['n']: replica 0 returned 1, replica 1 returned 2"),
        ((True, 1), "replica 0 returned True, replica 1 returned 1"),
        (([np.zeros(2)], [np.zeros(3)]), "combined at [0]: replica 0 returned array"),
        (([np.zeros(2)], [np.zeros(2)]), "combined at [0]: replica 0 returned array"),
        ((SimpleNamespace(a=1), SimpleNamespace(a=2)), "Return such values as tensors"),
        (([1, 2], [1]), "structures differ at the top: tree 0 has list of length 2"),
    ],
)
def test_outputs_that_are_no_one_output_are_refused_by_name(outputs: tuple[Any, Any], message: str) -> None:
    """Nothing is cast, broadcast or dropped: the message says where, and what each replica returned."""
    with pytest.raises(TypeError, match=re.escape(message)):
        combine(*outputs)


def test_a_dimension_that_outputs_lack_is_refused() -> None:
    """With dim=1 an output of one dimension cannot be joined."""
    with pytest.raises(TypeError, match=re.escape("along dimension 1: got replica 0 (1,)")):
        combine(torch.zeros(1), torch.zeros(1), dim=1)


def test_samples_that_are_compared_with_one_another_are_recognised() -> None:
    """A matrix of a shard's samples by its samples is refused with what it seems to be, and the way out."""
    similarities = [torch.zeros(size, size) for size in (1, 3)]
    with pytest.raises(TypeError, match=r"\['logits'\].*in-batch negatives.*Return the embeddings"):
        combine(*({"logits": matrix} for matrix in similarities), shard_sizes=(1, 3))


def test_the_output_of_one_replica_is_returned_as_it_is() -> None:
    """With one active device the model's own object comes back, whatever it is."""
    own = object()
    kept = [own, torch.zeros(2)]
    assert wrap(lambda module, x: kept, 4)(torch.zeros(4)) is kept
    assert wrap(lambda module, x: kept, 0, 4)(torch.zeros(4)) is kept


def test_equal_objects_are_returned_once() -> None:
    """A value all replicas agree on is the output's, NaN in a float included."""
    assert combine({"mode": "train", "shape": torch.Size([3])}, {"mode": "train", "shape": torch.Size([3])}) == {
        "mode": "train",
        "shape": torch.Size([3]),
    }
    assert np.isnan(combine(float("nan"), 1.0))


def test_gradients_flow_through_joined_outputs_alone() -> None:
    """A joined output whose parts partly need no gradient passes one to those that do."""
    left, right = torch.ones(1, 2, requires_grad=True), torch.ones(2, 2)
    joined = combine(left, right)
    (joined * torch.arange(6.0).view(3, 2)).sum().backward()
    assert left.grad is not None
    assert left.grad.tolist() == [[0, 1]]
    assert right.grad is None


# rows that are samples, and rows that are not


@given(
    shards=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    per_sample=st.integers(1, 3),
    width=st.integers(1, 4),
)
def test_any_number_of_rows_a_sample_is_joined(shards: list[int], per_sample: int, width: int) -> None:
    """Tokens flattened out of their sequences come back in order, as many a sample as they are, however wide."""
    tokens = torch.arange(sum(shards) * per_sample * width).view(sum(shards), per_sample, width)
    model = wrap(lambda module, x: x.reshape(-1, width), *shards)
    assert torch.equal(model(tokens), tokens.reshape(-1, width))


@pytest.mark.parametrize("shards", [(2, 2), (1, 3), (3, 3, 3), (1, 1)])
@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(3, 5, batch_first=True, num_layers=4),
        nn.GRU(3, 5, batch_first=True, bidirectional=True, num_layers=2),
        Call(lambda module, x: torch.zeros(5, len(x), 3, 4, 5) * module.scale),
        Call(lambda module, x: torch.stack([x.mean()] * 5) * module.scale),
        Call(lambda module, x: x.mean(0, keepdim=True) * module.scale),
    ],
    ids=["LSTM", "GRU", "presents", "five losses", "mean of the features"],
)
def test_rows_that_are_no_samples_are_refused_whatever_the_shards(module: nn.Module, shards: tuple[int, ...]) -> None:
    """As many rows from each card, whatever its samples: no order of the whole batch. The message says what to do."""
    model = BalancedDataParallel(module=module, shard_sizes=shards, device_ids=["cpu"] * len(shards))
    one_each = max(shards) == 1  # then it may be one row, or five, of each card's single sample
    if one_each and isinstance(module, Call):
        model(torch.randn(sum(shards), 6, 3))
        return
    with pytest.raises(TypeError, match=r"not one row a sample at|cannot be joined at"):
        model(torch.randn(sum(shards), 6, 3))


def test_the_refusal_says_where_the_samples_lie() -> None:
    """The path, all shapes, the shards, and the dimension that is as long as a shard."""
    with pytest.raises(TypeError) as caught:
        combine({"h": torch.zeros(4, 2, 5)}, {"h": torch.zeros(4, 2, 5)}, shard_sizes=(2, 2))
    for part in ("['h']", "[(4, 2, 5), (4, 2, 5)]", "shards of [2, 2] samples", "lie along dimension 1", "0-dim means"):
        assert part in str(caught.value)


def test_experts_probabilities_are_rows_however_many_experts() -> None:
    """(tokens, experts) of equal shards of as many samples as experts: flattened tokens, and joined."""
    assert combine(torch.zeros(8 * 5, 8), torch.zeros(8 * 5, 8), shard_sizes=(8, 8)).shape == (80, 8)


# one number a replica


@given(shards=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(lambda shards: max(shards) > 1))
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_with_a_dimension_is_weighed_as_one_without(shape: tuple[int, ...], shards: list[int]) -> None:
    """``loss.unsqueeze(0)``, as nn.DataParallel's users return it, then ``.mean()``: value and
    gradient of one device."""
    x = vectors(sum(shards))
    model = wrap(lambda module, part: (module.scale * part).square().mean().view(shape), *shards)
    loss = model(x)
    assert loss.shape == shape
    loss.mean().backward()
    scale = model.unwrap().scale
    torch.testing.assert_close(loss.view(()), x.square().mean())
    torch.testing.assert_close(scale.grad, 2 * x.square().mean())


def test_a_row_of_each_cards_single_sample_is_its_own() -> None:
    """Where every card has one sample, one number each is one row a sample, and is joined."""
    assert combine(torch.ones(1), torch.zeros(1), shard_sizes=(1, 1)).tolist() == [1, 0]


def test_counts_with_a_dimension_are_listed() -> None:
    """``correct.sum().unsqueeze(0)``: one entry a replica, whose sum is the whole batch's."""
    assert combine(torch.tensor([3]), torch.tensor([5]), shard_sizes=(4, 8)).tolist() == [3, 5]


# lists of one entry a sample


@given(num_boxes=st.lists(st.integers(0, 3), min_size=1, max_size=8), data=st.data())
def test_lists_in_and_lists_out(num_boxes: list[int], data: st.DataObject) -> None:
    """However images are spread, the entry of each comes back in its place, as one device gives it."""
    images = [torch.full((3, 4, n + 1), float(n)) for n in num_boxes]
    targets = [{"boxes": torch.full((n, 4), float(n)), "name": str(n)} for n in num_boxes]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(images)), max_size=3)))
    shards = [after - before for before, after in pairwise([0, *cuts, len(images)])]

    def detect(images: list[Tensor], targets: list[dict[str, Any]]) -> Any:
        found = [
            {"boxes": t["boxes"] + i.mean(), "labels": torch.zeros(len(t["boxes"]))}
            for i, t in zip(images, targets, strict=True)
        ]
        return found, [i.mean((1, 2)) for i in images], [t["name"] for t in targets]

    model = wrap(lambda module, *args: detect(*args), *shards)
    model.lists_samples = True  # as earlier batches have told
    got, expected = model(images, targets), detect(images, targets)
    assert len(got[0]) == len(got[1]) == len(images)
    torch.testing.assert_close(got[:2], expected[:2])
    if len(set(filter(None, shards))) > 1 or len(set(num_boxes)) > 1 or len(list(filter(None, shards))) == 1:
        assert got[2] == expected[2]


@pytest.mark.parametrize("shards", [(2, 2), (1, 3), (1, 1, 1, 1), (4, 0)])
def test_a_dict_for_each_row_of_a_tensor(shards: tuple[int, ...]) -> None:
    """Stacked images in, one dict an image out: as many entries as images, in order."""
    got = wrap(lambda module, x: [{"score": row[None] * module.scale} for row in x], *shards)(torch.arange(4.0))
    assert [entry["score"].tolist() for entry in got] == [[0], [1], [2], [3]]


def test_a_dict_of_losses_is_averaged() -> None:
    """Detection in training: each loss is a mean over images."""
    images = [torch.full((n + 1, 2), float(n)) for n in range(4)]
    losses = wrap(lambda module, x: {"box": torch.stack([i.mean() for i in x]).mean() * module.scale}, 1, 3)(images)
    assert losses["box"].item() == 1.5


def test_lists_of_stacked_tensors_stay_what_they_are() -> None:
    """Two layers of states from shards of two samples: the lists are layers, whatever they are as long as."""
    layers = wrap(lambda module, x: ([x, x + 1], [{"x": x}, {"x": x + 1}]), 2, 2)(torch.arange(4.0))
    assert [layer.tolist() for layer in layers[0]] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert [layer["x"].tolist() for layer in layers[1]] == [[0, 1, 2, 3], [1, 2, 3, 4]]


# caches, and other objects of tensors


class Cache:
    """As transformers' are: layers of keys and values, made of what iterating over one gives."""

    def __init__(self, layers: Any = ()) -> None:
        self.layers = [tuple(layer) for layer in layers]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def get_seq_length(self) -> int:
        return self.layers[0][0].size(1) if self.layers else 0

    def update(self, keys: Tensor, values: Tensor) -> None:
        before = self.layers.pop() if self.layers else (keys[:, :0], values[:, :0])
        self.layers.append((torch.cat([before[0], keys], 1), torch.cat([before[1], values], 1), torch.tensor(7)))


def remember(module: nn.Module, x: Tensor, past: Cache | None = None) -> dict[str, Any]:
    past = Cache() if past is None else past
    past.update(x * module.scale, x + 1)
    return {"total": past.layers[0][0].sum(1), "past": past}


@pytest.mark.parametrize("shards", [(1, 3), (2, 2), (1, 1, 1, 1)])
def test_a_cache_is_joined_and_taken_up_again(shards: tuple[int, ...]) -> None:
    """Where no gradients are recorded: tokens one after another give what one device gives, settings kept."""
    model, x = wrap(remember, *shards), torch.randn(4, 3)
    with torch.no_grad():
        first = model(x)
        second = model(x, past=first["past"])
    assert second["past"].get_seq_length() == 6
    torch.testing.assert_close(second["total"], 2 * x.sum(1))
    assert second["past"].layers[0][2].item() == 7


def test_a_training_step_leaves_caches_out() -> None:
    """GPU 0 holds no cache that nobody asked for; whoever does is told how to get one, and nothing is silently None."""
    output = wrap(remember, 1, 3)(torch.randn(4, 3))
    output["total"].sum().backward()
    left = output["past"]
    message = "left out.*Under torch.no_grad.. it is joined.*begin with an empty one"
    for use in (
        lambda: left.get_seq_length,
        lambda: list(left),
        lambda: len(left),
        lambda: left[0],
        lambda: bool(left),
        lambda: wrap(remember, 1, 3)(torch.randn(4, 3), past=left),
    ):
        with pytest.raises((AttributeError, TypeError), match=message):
            use()
    assert repr(copy.deepcopy(left)) == repr(left)
    assert repr(left) == "LeftOutCache()"


def test_a_cache_that_is_given_comes_back_with_its_gradient() -> None:
    """Training through a cache begins with an empty one: the gradient is that of one device."""
    x = torch.randn(4, 3)
    model = wrap(remember, 1, 3)
    model(x, past=model(x, past=Cache())["past"])["total"].sum().backward()
    torch.testing.assert_close(model.unwrap().scale.grad, 2 * x.sum())


@pytest.mark.parametrize("shards", [(1, 3), (0, 4)])
def test_a_gradient_that_comes_back_through_any_object_arrives(shards: tuple[int, ...]) -> None:
    """Tensors inside an object that is no container keep what their backward needs, with one active card as well."""
    x = torch.randn(4, 3)

    def inside(module: nn.Module, x: Tensor) -> Any:
        kept = Several([x * module.scale])
        return kept if shards[0] else SimpleNamespace(several=kept)

    model = wrap(inside, *shards)
    output = model(x)
    (output if shards[0] else output.several).items[0].sum().backward()
    torch.testing.assert_close(model.unwrap().scale.grad, x.sum())


class Fixed(Cache):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.layers = [(torch.zeros(4, size), None)]


def test_a_cache_of_another_make_is_refused() -> None:
    """What cannot be made of its items is told before any replica shares it with another."""
    with pytest.raises(ConfigError, match=r"a Fixed cannot be split over devices or joined.*use_cache=False"):
        wrap(remember, 1, 3)(torch.randn(4, 3), past=Fixed(9))


class Several:
    """Neither a list nor a dict: iterated over, and made of its items."""

    def __init__(self, items: Any) -> None:
        self.items = list(items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def test_what_dataparallel_would_join_is_joined() -> None:
    """An object that is made of its items, tensors and means among them."""
    got = wrap(lambda module, x: Several([x, {"mean": x.mean()}]), 1, 3)(torch.arange(4.0))
    assert isinstance(got, Several)
    assert got.items[0].tolist() == [0, 1, 2, 3]
    assert got.items[1]["mean"].item() == 1.5


def test_what_cannot_be_made_again_is_refused() -> None:
    """An object of tensors whose class takes something else is named, with what it raised."""

    class Keyed(Several):
        def __init__(self, *, items: Any) -> None:
            super().__init__(items)

    with pytest.raises(TypeError, match=r"a Keyed holds tensors, and Keyed.items. raised"):
        wrap(lambda module, x: Keyed(items=[x]), 1, 3)(torch.arange(4.0))
