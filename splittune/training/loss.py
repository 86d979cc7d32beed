"""The loss of one micro-batch: what the model's output says of it, and which losses can be trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from splittune.errors import ConfigError
from splittune.fakes import FakeTensor

LossFunction = Callable[..., Tensor]
_STEP_FN = "Give loss_fn=, or step_fn=lambda model, batch: ... for a step of your own."


def infer_loss(output: Any, targets: Any) -> tuple[Tensor, str]:
    """The loss where the user gave no function, and what was inferred, in words.

    A scalar output is the loss; an output with ``.loss`` or ``["loss"]`` carries it, and so does a
    tuple with one scalar in it, ``(logits, loss)``; of a dict of nothing but losses, a detector's,
    it is the sum. Else cross-entropy for integer targets (two or more classes, along the last
    dimension where the targets have the output's other ones, else along dimension 1), and mean
    squared error for floating targets of the output's shape.

    Raises:
        ConfigError: none of these applies; the message shows both shapes.
    """
    found = _carried_by(output)
    if found is None and isinstance(output, Tensor) and isinstance(targets, Tensor):
        found = _computed_from(output, targets)
    if found is not None:
        return found
    raise ConfigError(
        f"no loss can be inferred from {_describe(output, 'the output')} and {_describe(targets, 'the targets')}: "
        "expected a scalar output, one with .loss, a tuple with one scalar, a dict of losses, integer targets for "
        "cross-entropy, or floats of the output's shape for MSE. " + _STEP_FN
    )


def _carried_by(output: Any) -> tuple[Tensor, str] | None:
    """The loss that the model itself has computed."""
    carried = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(carried, Tensor):
        return carried, "the loss that the model's output carries"
    if isinstance(output, Tensor) and output.dim() == 0:
        return output, "the model's output, a scalar"
    if isinstance(output, tuple | list):
        scalars = [index for index, entry in enumerate(output) if _is_scalar(entry)]
        if len(scalars) == 1:
            return output[scalars[0]], f"entry {scalars[0]} of the model's output, the one scalar among {len(output)}"
    if isinstance(output, Mapping) and output and all(map(_is_scalar, output.values())):
        losses: list[Tensor] = list(output.values())
        if len({loss.requires_grad for loss in losses}) == 1:  # else some of them are metrics
            names = ", ".join(map(str, output))
            return sum(losses[1:], losses[0]), f"the sum of the losses in the model's output: {names}"
    return None


def _computed_from(output: Tensor, targets: Tensor) -> tuple[Tensor, str] | None:
    """The usual loss of such an output and such targets."""
    is_index = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    if is_index and output.dim() >= 2:
        # Of a single class the loss is 0 whatever the output: that is some other loss, a binary one say
        if targets.shape == output.shape[:-1] and output.shape[-1] > 1:
            loss = functional.cross_entropy(output.flatten(0, -2), targets.flatten().long())
            return loss, "cross-entropy, classes last"
        if targets.shape == output.shape[:1] + output.shape[2:] and output.shape[1] > 1:
            return functional.cross_entropy(output, targets.long()), "cross-entropy, classes along dimension 1"
    if targets.is_floating_point() and targets.shape == output.shape:
        return functional.mse_loss(output, targets), "mean squared error"
    return None


def check_loss(loss: Any, origin: str) -> Tensor:
    """The loss, if it is a finite scalar that gradients flow from; of one without a value that is not asked.

    Raises:
        ConfigError: it is no tensor, not of 0 dimensions, does not require a gradient, or is not finite.
    """
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"{origin} gave a {type(loss).__name__}: expected a tensor, the loss that gradients flow from. Return that "
            "itself, neither nothing nor loss.item()."
        )
    if loss.dim() != 0:
        raise ConfigError(
            f"{origin} gave a loss of shape {tuple(loss.shape)}: expected a scalar, the mean over the samples. "
            "Add .mean() to it."
        )
    if not loss.requires_grad:
        raise ConfigError(
            f"{origin} gave a loss without gradient: expected one that depends on the model's trainable parameters. "
            "Check for detach(), no_grad() or .item() on its way."
        )
    if not isinstance(loss, FakeTensor) and not torch.isfinite(loss.detach()):
        raise ConfigError(
            f"{origin} gave a loss of {loss.item()}: expected a finite number. A model that diverges cannot be "
            "measured: check the inputs, the initialisation and the learning rate."
        )
    return loss


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def _describe(value: Any, name: str) -> str:
    if isinstance(value, Tensor):
        return f"{name} of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    return f"{name}, a {type(value).__name__}" if value is not None else f"no {name.removeprefix('the ')}"
