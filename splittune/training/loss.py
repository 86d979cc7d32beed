"""The loss of one micro-batch: how the model is called, and what its output says of the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from splittune.errors import ConfigError

LossFunction = Callable[..., Tensor]
TARGET_KEYS = ("labels", "label", "targets", "target", "y")
_STEP_FN = "Give loss_fn=, or step_fn=lambda model, batch: ... for a step of your own."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A batch as the model takes it: ``model(*args, **kwargs)``, and what the loss compares with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any


def call_for(batch: Any, *, has_loss_fn: bool) -> ModelCall:
    """How a loader's batch becomes a call.

    - ``(inputs, targets)``: ``model(inputs)``; of three or more entries the last is the targets. `inputs` that are
      themselves a tuple or list are spread as positional arguments, a dict as keywords;
    - a dict: ``model(**batch)``, whose output must carry the loss; with a `loss_fn`, the targets are its entry
      'labels', 'label', 'targets', 'target' or 'y', and the model gets the others;
    - a tensor, or a tuple of one: ``model(tensor)``, whose output must be or carry the loss.

    Raises:
        ConfigError: a dict with a `loss_fn` and no such entry.
    """
    if isinstance(batch, Mapping):
        if not has_loss_fn:
            return ModelCall(args=(), kwargs=dict(batch), targets=None)
        key = next((key for key in TARGET_KEYS if key in batch), None)
        if key is None:
            raise ConfigError(
                f"the batch has the entries {list(batch)}, none of which names the targets: expected one of "
                f"{list(TARGET_KEYS)} for loss_fn. Rename it, or use step_fn(model, batch) -> loss."
            )
        return ModelCall(args=(), kwargs={k: v for k, v in batch.items() if k != key}, targets=batch[key])
    if not isinstance(batch, tuple | list):
        return ModelCall(args=(batch,), kwargs={}, targets=None)
    if len(batch) == 1:
        return ModelCall(args=(batch[0],), kwargs={}, targets=None)
    *inputs, targets = batch
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return ModelCall(args=(), kwargs=dict(inputs[0]), targets=targets)
    if len(inputs) == 1 and isinstance(inputs[0], tuple | list):
        inputs = list(inputs[0])
    return ModelCall(args=tuple(inputs), kwargs={}, targets=targets)


def infer_loss(output: Any, targets: Any) -> tuple[Tensor, str]:
    """The loss where the user gave no function, and what was inferred, in words.

    A scalar output is the loss; an output with ``.loss`` or ``["loss"]`` carries it; else cross-entropy for integer
    targets (two or more classes, along the last dimension where the targets have the output's other ones, else along
    dimension 1), and mean squared error for floating targets of the output's shape.

    Raises:
        ConfigError: none of these applies; the message shows both shapes.
    """
    carried = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(carried, Tensor):
        return carried, "the loss that the model's output carries"
    if isinstance(output, Tensor) and output.dim() == 0:
        return output, "the model's output, a scalar"
    if isinstance(output, Tensor) and isinstance(targets, Tensor):
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
    raise ConfigError(
        f"no loss can be inferred from {_describe(output, 'the output')} and {_describe(targets, 'the targets')}: expected "
        "a scalar output, one with .loss, integer targets for cross-entropy, or floats of the output's shape for MSE. "
        + _STEP_FN
    )


def check_loss(loss: Any, origin: str) -> Tensor:
    """The loss, if it is a finite scalar that gradients flow from.

    Raises:
        ConfigError: it is no tensor, not of 0 dimensions, does not require a gradient, or is not finite.
    """
    if not isinstance(loss, Tensor):
        raise ConfigError(f"{origin} gave a {type(loss).__name__}: expected a tensor, the loss. {_STEP_FN}")
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
    if not torch.isfinite(loss.detach()):
        raise ConfigError(
            f"{origin} gave a loss of {loss.item()}: expected a finite number. A model that diverges cannot be measured: "
            "check the inputs, the initialisation and the learning rate."
        )
    return loss


def _describe(value: Any, name: str) -> str:
    if isinstance(value, Tensor):
        return f"{name} of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    return f"{name}, a {type(value).__name__}" if value is not None else f"no {name.removeprefix('the ')}"
