"""What of a batch goes to the model, and what the loss compares with; calls that the model would refuse."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splittune.errors import ConfigError
from splittune.training.call import TARGET_KEYS, Forward, call_for

X, Y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 2])
UNCOLLATED = [{"image": X, "file": name} for name in "ab"]


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
        (UNCOLLATED, (UNCOLLATED,), {}, None),
        (UNCOLLATED[:1], (UNCOLLATED[:1],), {}, None),
        (tuple(UNCOLLATED[:1]), (UNCOLLATED[0],), {}, None),
    ],
    ids=[
        "pair",
        "list",
        "three entries",
        "inputs a tuple",
        "inputs a list",
        "inputs a dict",
        "targets a dict",
        "a dict among inputs",
        "no targets",
        "tensor",
        "tuple of one",
        "list of one",
        "dict",
        "UserDict",
        "a record a sample",
        "a single sample",
        "a tuple of one record",
    ],
)
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


# what forward takes


class OfX(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class OfBoth(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum()


class OfOptional(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        return x


class OfAnything(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def call(batch: Any, model: nn.Module, *, has_loss_fn: bool = False) -> Any:
    return call_for(batch, has_loss_fn=has_loss_fn, forward=Forward(model))


def test_a_model_that_demands_the_targets_is_given_them() -> None:
    """Without a loss_fn, (x, y) for a model that wants both is model(x, y), and it is said."""
    made = call((X, Y), OfBoth())
    assert made.args == (X, Y)
    assert made.targets is None
    assert made.said == ("OfBoth.forward(x, y) is given the targets too, and computes the loss",)


@pytest.mark.parametrize(
    ("batch", "model", "has_loss_fn", "words"),
    [
        (
            (X, Y),
            OfBoth(),
            True,
            ["missing a required argument: 'y'", r"read as model\(an input\), the last", "step_fn"],
        ),
        ((X, X, Y), OfX(), False, ["too many positional", r"model\(an input, an input\)", r"model\(\*batch\)"]),
        (
            {"mask": X},
            OfX(),
            False,
            ["missing a required argument: 'x'", r"model\(mask=...\); OfX.forward\(x\)", r"\*\*batch"],
        ),
        ({"input": X, "labels": Y}, OfX(), False, ["missing a required argument: 'x'", r"model\(input=...\), the"]),
        (({"input": X}, Y), OfX(), False, ["missing a required argument: 'x'", r"model\(input=...\), the last"]),
        (X, OfBoth(), False, ["missing a required argument: 'y'", r"read as model\(an input\);"]),
    ],
    ids=[
        "both, with a loss_fn",
        "one too many",
        "a dict without it",
        "a dict of another name, and targets",
        "such a dict beside the targets",
        "a tensor alone",
    ],
)
def test_a_call_that_cannot_be_made_tells_the_way_on(
    batch: Any, model: nn.Module, has_loss_fn: bool, words: list[str]
) -> None:
    """Arguments that forward does not take so are refused with how the batch was read, and with step_fn."""
    with pytest.raises(ConfigError, match="the model cannot be called with what the loader gives") as caught:
        call(batch, model, has_loss_fn=has_loss_fn)
    for word in words:
        assert caught.match(word)


@pytest.mark.parametrize("has_loss_fn", [False, True])
def test_entries_that_forward_does_not_take_are_left_out(has_loss_fn: bool) -> None:
    """A dict's further entries, an id say, stay out of the call, which is said by their names."""
    made = call({"x": X, "id": Y, "y": Y}, OfX(), has_loss_fn=has_loss_fn)
    assert list(made.kwargs) == ["x"]
    assert made.targets is Y
    assert "does not take are left out: 'id'" in made.said[-1]
    inside = call(({"x": X, "id": Y}, Y), OfX(), has_loss_fn=has_loss_fn)
    assert list(inside.kwargs) == ["x"]
    assert inside.targets is Y


@pytest.mark.parametrize("key", TARGET_KEYS)
def test_targets_that_forward_does_not_take_are_the_loss_s(key: str) -> None:
    """Without a loss_fn too, a dict's entry 'label' is the targets of a model that takes none."""
    made = call({"x": X, key: Y}, OfX())
    assert made.targets is Y
    assert f"entry {key!r} is the targets" in made.said[0]


def test_labels_that_forward_takes_stay_in_the_call() -> None:
    """A model with a parameter for them gets its labels, and nothing is inferred."""
    made = call({"x": X, "labels": Y}, OfOptional())
    assert list(made.kwargs) == ["x", "labels"]
    assert (made.targets, made.said) == (None, ())


@pytest.mark.parametrize("batch", [{"x": X, "anything": Y}, (X, X, X, Y), X])
def test_a_forward_that_takes_anything_is_given_everything(batch: Any) -> None:
    """With *args and **kwargs, or where hooks may change the arguments, a batch is read as usual."""
    hooked = OfX()
    hooked.register_forward_pre_hook(lambda module, args: args)
    for model in (OfAnything(), hooked):
        made, usual = call(batch, model), call_for(batch, has_loss_fn=False)
        assert len(made.args) == len(usual.args)
        assert list(made.kwargs) == list(usual.kwargs)
        assert made.said == ()


def test_the_parameter_for_the_loss_is_optional() -> None:
    """Only a parameter that may be left out is one that a model computes its loss for; 'y' is a condition as often."""
    assert Forward(OfOptional()).loss_parameter() == "labels"
    assert Forward(OfBoth()).loss_parameter() is None
    assert Forward(OfAnything()).loss_parameter() is None
    assert str(Forward(OfOptional())) == "OfOptional.forward(x, mask=..., labels=...)"
    assert str(Forward(OfAnything())) == "OfAnything.forward(*args, **kwargs)"
    assert call((X, Y), OfOptional()).with_targets_as("labels").kwargs == {"labels": Y}


def test_a_count_to_divide_by_is_refused() -> None:
    """num_items_in_batch makes sums of the devices' losses, which are averaged: it is refused with
    the way to a token mean."""
    with pytest.raises(ConfigError, match=r"num_items_in_batch.*Expected a mean. Leave the entry out.*weight_fn"):
        call({"x": X, "num_items_in_batch": torch.tensor(7)}, OfAnything())
