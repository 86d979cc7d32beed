"""What comes back: every container nn.DataParallel knows and more, joined in order, averaged by shard, or refused."""

from __future__ import annotations

import re
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody writes it

from splittune.parallel import BalancedDataParallel
from splittune.parallel.outputs import combine_outputs
from tests.parallel.models import CPU, Call, ThreadedLink, assert_same, mlp, vectors


def wrap(function: Callable[..., Any], *shard_sizes: int, dim: int = 0) -> BalancedDataParallel:
    return BalancedDataParallel(
        module=Call(function), shard_sizes=shard_sizes, device_ids=["cpu"] * len(shard_sizes), dim=dim
    )


def combine(*outputs: Any, shard_sizes: tuple[int, ...] = (1, 2), dim: int = 0) -> Any:
    return combine_outputs(outputs, shard_sizes, ThreadedLink(len(outputs)), CPU, dim)


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
