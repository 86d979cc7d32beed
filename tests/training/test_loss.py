"""What of a batch goes to the model, what of its output is the loss, and which losses are refused."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from splittune.errors import ConfigError
from splittune.training.loss import TARGET_KEYS, call_for, check_loss, infer_loss

X, Y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 2])
LOSS = torch.tensor(1.5)


# call_for


@pytest.mark.parametrize(
    ("batch", "args", "kwargs", "targets"),
    [
        ((X, Y), (X,), {}, Y),
        ([X, Y], (X,), {}, Y),
        ((X, X, Y), (X, X), {}, Y),
        (((X, X), Y), (X, X), {}, Y),
        (([X, 3], Y), (X, 3), {}, Y),
        (({"a": X, "b": X}, Y), (), {"a": X, "b": X}, Y),
        ((X, {"ids": Y}), (X,), {}, {"ids": Y}),
        (({"a": X}, X, Y), ({"a": X}, X), {}, Y),
        ((X, None), (X,), {}, None),
        (X, (X,), {}, None),
        ((X,), (X,), {}, None),
        ([X], (X,), {}, None),
        ({"input_ids": X, "labels": Y}, (), {"input_ids": X, "labels": Y}, None),
        (UserDict({"input_ids": X}), (), {"input_ids": X}, None),
    ],
    ids=[
        "pair", "list", "three entries", "inputs a tuple", "inputs a list", "inputs a dict", "targets a dict",
        "a dict among inputs", "no targets", "tensor", "tuple of one", "list of one", "dict", "UserDict",
    ],
)  # fmt: skip
def test_a_batch_becomes_a_call(batch: Any, args: Any, kwargs: Any, targets: Any) -> None:
    """Each way in which a loader nests a batch becomes the arguments of the model and the targets of the loss."""
    call = call_for(batch, has_loss_fn=False)
    assert len(call.args) == len(args)
    assert all(got is expected or got == expected for got, expected in zip(call.args, args, strict=True))
    assert call.kwargs.keys() == kwargs.keys()
    assert all(call.kwargs[name] is kwargs[name] for name in kwargs)
    assert call.targets is targets or call.targets == targets


@pytest.mark.parametrize("key", TARGET_KEYS)
def test_targets_of_a_dict_are_found_by_name(key: str) -> None:
    """With a loss_fn the targets of a dict are its entry of a known name, and the model gets the others."""
    call = call_for({"x": X, key: Y}, has_loss_fn=True)
    assert list(call.kwargs) == ["x"]
    assert call.targets is Y


def test_a_dict_without_known_targets_is_refused() -> None:
    """With a loss_fn a dict without targets is refused, with its entries and the names that are known."""
    with pytest.raises(ConfigError, match=r"entries \['x', 'answer'\].*'labels'.*step_fn"):
        call_for({"x": X, "answer": Y}, has_loss_fn=True)


def test_the_batch_is_left_alone() -> None:
    """The user's dict is never the one whose entries are taken out."""
    batch = {"x": X, "labels": Y}
    call_for(batch, has_loss_fn=True)
    assert list(batch) == ["x", "labels"]


# infer_loss


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


@pytest.mark.parametrize(
    "output",
    [
        Output(loss=LOSS, logits=X),
        SimpleNamespace(loss=LOSS),
        {"loss": LOSS, "logits": X},
        OrderedDict(loss=LOSS),
        UserDict({"loss": LOSS}),
    ],
    ids=["dataclass", "attribute", "dict", "OrderedDict", "UserDict"],
)
def test_a_loss_that_the_output_carries_is_taken(output: Any) -> None:
    """An output with .loss or ["loss"] carries the loss, whatever the targets are."""
    loss, origin = infer_loss(output, Y)
    assert loss is LOSS
    assert "carries" in origin


def test_a_scalar_output_is_the_loss() -> None:
    """A model that returns a scalar has computed its loss itself."""
    assert infer_loss(LOSS, None)[0] is LOSS


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize(
    ("output_shape", "targets_shape"),
    [((6, 4), (6,)), ((3, 5, 4), (3, 5)), ((2, 3, 5, 4), (2, 3, 5)), ((1, 2), (1,))],
    ids=["N,C", "N,T,V", "N,H,W,C", "one sample"],
)
def test_integer_targets_mean_cross_entropy_over_the_last_dimension(
    output_shape: tuple[int, ...], targets_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Integers with the output's shape but for its last dimension: cross-entropy, averaged over all of them."""
    output, targets = torch.randn(output_shape), torch.randint(0, output_shape[-1], targets_shape).to(dtype)
    loss, origin = infer_loss(output, targets)
    expected = functional.cross_entropy(output.reshape(-1, output_shape[-1]), targets.long().reshape(-1))
    torch.testing.assert_close(loss, expected)
    assert "cross-entropy" in origin


@pytest.mark.parametrize(
    ("output_shape", "targets_shape"), [((2, 4, 5, 6), (2, 5, 6)), ((2, 4, 7), (2, 7))], ids=["N,C,H,W", "N,C,L"]
)
def test_integer_targets_mean_cross_entropy_over_dimension_1(
    output_shape: tuple[int, ...], targets_shape: tuple[int, ...]
) -> None:
    """Integers with the output's shape but for dimension 1: the classes lie there, as in segmentation."""
    output, targets = torch.randn(output_shape), torch.randint(0, 4, targets_shape)
    torch.testing.assert_close(infer_loss(output, targets)[0], functional.cross_entropy(output, targets))


@pytest.mark.parametrize("shape", [(6,), (6, 1), (2, 3, 4)])
def test_float_targets_of_the_outputs_shape_mean_mse(shape: tuple[int, ...]) -> None:
    """Floats of the output's shape: mean squared error."""
    output, targets = torch.randn(shape), torch.randn(shape)
    loss, origin = infer_loss(output, targets)
    torch.testing.assert_close(loss, functional.mse_loss(output, targets))
    assert origin == "mean squared error"


@pytest.mark.parametrize(
    ("output", "targets", "words"),
    [
        (torch.zeros(4), torch.zeros(4, 1), [r"\(4,\)", r"\(4, 1\)", "float32"]),
        (torch.zeros(4, 3), torch.zeros(5, dtype=torch.int64), [r"\(4, 3\)", r"\(5,\)", "int64"]),
        (torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64), [r"\(4, 1\)", r"\(4,\)", "int64"]),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int64), [r"\(4,\)", "int64"]),
        (torch.zeros(4, 2), torch.zeros(4, dtype=torch.bool), [r"\(4, 2\)", "bool"]),
        (torch.zeros(4, 2), None, [r"\(4, 2\)", "no targets"]),
        (torch.zeros(4, 2), {"y": Y}, [r"\(4, 2\)", "the targets, a dict"]),
        ((torch.zeros(4, 2), LOSS), Y, ["the output, a tuple", r"\(3,\)"]),
        (Output(loss=None, logits=X), Y, ["the output, a Output", r"\(3,\)"]),
        ({"loss": None, "logits": X}, None, ["the output, a dict", "no targets"]),
        (None, Y, ["no output"]),
    ],
    ids=[
        "N against N,1", "sizes differ", "a single class", "no classes", "bools", "no targets", "targets a dict",
        "output a tuple", "loss is None", "dict whose loss is None", "no output",
    ],
)  # fmt: skip
def test_what_cannot_be_inferred_is_refused(output: Any, targets: Any, words: list[str]) -> None:
    """Anything else is refused with what both are, and with the two ways to say the loss."""
    with pytest.raises(ConfigError, match=r"loss_fn=.*step_fn=") as caught:
        infer_loss(output, targets)
    for word in words:
        assert caught.match(word)


# check_loss


def weight() -> Tensor:
    return torch.ones(3, requires_grad=True)


def test_a_finite_scalar_with_gradient_passes() -> None:
    """A finite scalar that depends on a parameter is handed back."""
    loss = weight().sum()
    assert check_loss(loss, "the job") is loss


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (2.5, r"step_fn gave a float: expected a tensor"),
        (None, r"step_fn gave a NoneType: expected a tensor"),
        ((weight().sum(), 1), r"step_fn gave a tuple"),
        (weight() * 2, r"shape \(3,\): expected a scalar.*mean"),
        (weight()[:1] * 2, r"shape \(1,\): expected a scalar"),
        (torch.tensor(1.0), r"without gradient.*detach\(\), no_grad\(\)"),
        (weight().sum() * float("nan"), r"loss of nan: expected a finite number"),
        (weight().sum() * float("inf"), r"loss of inf: expected a finite number"),
    ],
    ids=["float", "none", "tuple", "one a sample", "one entry", "no gradient", "nan", "inf"],
)
def test_other_losses_are_refused(loss: Any, match: str) -> None:
    """A loss that is no tensor, no scalar, without gradient or not finite is refused by what it is."""
    with pytest.raises(ConfigError, match=match):
        check_loss(loss, "step_fn")
