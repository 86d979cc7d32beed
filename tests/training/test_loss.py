"""What of a model's output is the loss, and which losses are refused."""

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
from splittune.training.loss import check_loss, infer_loss

X, Y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 2])
LOSS = torch.tensor(1.5)


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
        ((torch.zeros(4, 2), None), Y, ["the output, a tuple", r"\(3,\)"]),
        ((LOSS, LOSS), Y, ["the output, a tuple"]),
        ({"a": LOSS, "b": X}, Y, ["the output, a dict"]),
        ({"a": LOSS.clone().requires_grad_(), "accuracy": LOSS}, Y, ["the output, a dict"]),
        ({"a": torch.tensor(3)}, Y, ["the output, a dict"]),
        ({}, Y, ["the output, a dict"]),
        (Output(loss=None, logits=X), Y, ["the output, a Output", r"\(3,\)"]),
        ({"loss": None, "logits": X}, None, ["the output, a dict", "no targets"]),
        (None, Y, ["no output"]),
    ],
    ids=[
        "N against N,1",
        "sizes differ",
        "a single class",
        "no classes",
        "bools",
        "no targets",
        "targets a dict",
        "no scalar in a tuple",
        "two scalars",
        "losses and logits",
        "a loss and a metric",
        "a count",
        "an empty dict",
        "loss is None",
        "dict whose loss is None",
        "no output",
    ],
)
def test_what_cannot_be_inferred_is_refused(output: Any, targets: Any, words: list[str]) -> None:
    """Anything else is refused with what both are, and with the two ways to say the loss."""
    with pytest.raises(ConfigError, match=r"loss_fn=.*step_fn=") as caught:
        infer_loss(output, targets)
    for word in words:
        assert caught.match(word)


@pytest.mark.parametrize("output", [(X, LOSS), (LOSS, X), [X, LOSS, None], (X, {"past": X}, LOSS)])
def test_the_one_scalar_of_a_tuple_is_the_loss(output: Any) -> None:
    """A tuple with one scalar among its entries, as models with (logits, loss) return it, carries the loss."""
    loss, origin = infer_loss(output, None)
    assert loss is LOSS
    assert f"the one scalar among {len(output)}" in origin


def test_a_dict_of_losses_is_their_sum() -> None:
    """Detectors return their losses by name: what is trained on is the sum, and its names are told."""
    losses = {"classifier": LOSS.clone().requires_grad_(), "box": (2 * LOSS).requires_grad_()}
    loss, origin = infer_loss(losses, None)
    assert loss.item() == 3 * LOSS.item()
    assert loss.requires_grad
    assert origin.endswith("classifier, box")


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
