"""How the model is called with a loader's batch: what of it are inputs, and what the loss compares with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from splittune.errors import ConfigError
from splittune.parallel.replica_loss import TARGET_KEYS
from splittune.parallel.samples import are_records_of_samples

# A forward with one of these, optional, computes its loss where it is given: transformers, nanoGPT. A choice: not "y",
# which is a condition as often.
LOSS_PARAMETERS = ("labels", "label", "targets", "target")
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A batch as the model takes it: ``model(*args, **kwargs)``, and what the loss compares with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any
    said: tuple[str, ...] = ()
    """What was inferred beyond the usual reading of such a batch, a plain clause each."""

    def with_targets_as(self, name: str) -> ModelCall:
        """The call that hands the targets to the model, under this name, for it to compute the loss."""
        return replace(self, kwargs={**self.kwargs, name: self.targets}, targets=None)


class Forward:
    """What a module's forward takes; where that cannot be told, a wrapper of hooks say, it takes anything."""

    def __init__(self, module: nn.Module | None) -> None:
        self._signature: inspect.Signature | None = None
        self.name = f"{type(module).__name__}.forward"
        # hooks may change the arguments on their way, and a __call__ of the module's own may do anything
        if module is not None and not module._forward_pre_hooks and type(module).__call__ is nn.Module.__call__:
            try:
                self._signature = inspect.signature(module.forward)
            except (TypeError, ValueError):  # of what is not written in Python
                self._signature = None

    def why_not(self, *args: Any, **kwargs: Any) -> str | None:
        """Why it cannot be called so, in Python's words; None where it can."""
        if self._signature is None:
            return None
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            return str(error)
        return None

    def takes(self, name: str) -> bool:
        """Whether it takes a keyword of this name."""
        if self._signature is None:
            return True
        parameters = self._signature.parameters
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return True
        return name in parameters and parameters[name].kind in _BY_KEYWORD

    def loss_parameter(self) -> str | None:
        """The optional parameter for which it computes its loss, by its name; None without one."""
        parameters = {} if self._signature is None else self._signature.parameters
        named = (name for name in LOSS_PARAMETERS if name in parameters)
        return next((name for name in named if parameters[name].default is not inspect.Parameter.empty), None)

    def __str__(self) -> str:
        """``"Net.forward(x, mask=...)"``: its parameters' names, those that may be left out marked."""
        parameters = [] if self._signature is None else list(self._signature.parameters.values())
        return f"{self.name}({', '.join(map(_spelled, parameters)) if parameters else '...'})"


def _spelled(parameter: inspect.Parameter) -> str:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return str(parameter.replace(annotation=inspect.Parameter.empty))
    return parameter.name if parameter.default is inspect.Parameter.empty else f"{parameter.name}=..."


_ANYTHING = Forward(None)


def call_for(batch: Any, *, has_loss_fn: bool, forward: Forward = _ANYTHING) -> ModelCall:
    """How a loader's batch becomes a call.

    - ``(inputs, targets)``: ``model(inputs)``; of three or more entries the last is the targets.
      `inputs` that are themselves a tuple or list are spread as positional arguments, a dict as
      keywords. Without a `loss_fn` a model that demands the targets as well gets them last, and its
      output must carry the loss;
    - a dict: ``model(**batch)``, whose output must carry the loss; with a `loss_fn`, or where `forward` takes no such
      keyword, the targets are its entry 'labels', 'label', 'targets', 'target' or 'y', and the model gets the others;
    - a tensor, or a tuple of one: ``model(tensor)``, whose output must be or carry the loss;
    - a list of records, one a sample with a label or a name in it: ``model(list)``, likewise.

    Entries of a dict that `forward` takes no keyword for are left out, and `said` tells so.

    Raises:
        ConfigError: a dict with a `loss_fn` and no such entry; or `forward` cannot be called so.
    """
    call = usual = _usual_call(batch, has_loss_fn, forward)
    left_out = [name for name in call.kwargs if not forward.takes(name)]
    if left_out:
        words = f"entries of the batch that {forward} does not take are left out: {', '.join(map(repr, left_out))}"
        kwargs = {name: value for name, value in call.kwargs.items() if name not in left_out}
        call = replace(call, kwargs=kwargs, said=(*call.said, words))
    if "num_items_in_batch" in call.kwargs:
        raise ConfigError(
            "the batch has an entry 'num_items_in_batch', by which a model divides the sum of its losses: every device "
            "would divide its own part by the count of all, and the parts are then averaged. Expected a mean. Leave "
            "the entry out; for a mean over tokens train with config.wrap(model, loss_fn, weight_fn=...)."
        )
    why_not = forward.why_not(*call.args, **call.kwargs)
    if why_not is None:
        return call
    with_targets = replace(call, args=(*call.args, call.targets), targets=None)
    wants_them = call.args and forward.why_not(*with_targets.args, **call.kwargs) is None  # targets are never the first
    if not has_loss_fn and call.targets is not None and wants_them:
        return replace(with_targets, said=(*call.said, f"{forward} is given the targets too, and computes the loss"))
    raise ConfigError(_describe_misfit(usual, forward, why_not))


def _usual_call(batch: Any, has_loss_fn: bool, forward: Forward) -> ModelCall:
    if isinstance(batch, Mapping):
        return _call_by_name(batch, has_loss_fn, forward)
    if not isinstance(batch, tuple | list) or (isinstance(batch, list) and are_records_of_samples(batch)):
        return ModelCall(args=(batch,), kwargs={}, targets=None)
    if len(batch) == 1:
        return ModelCall(args=(batch[0],), kwargs={}, targets=None)
    *inputs, targets = batch
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return ModelCall(args=(), kwargs=dict(inputs[0]), targets=targets)
    if len(inputs) == 1 and isinstance(inputs[0], tuple | list):
        inputs = list(inputs[0])
    return ModelCall(args=tuple(inputs), kwargs={}, targets=targets)


def _call_by_name(batch: Mapping[Any, Any], has_loss_fn: bool, forward: Forward) -> ModelCall:
    key = next((key for key in TARGET_KEYS if key in batch), None)
    if has_loss_fn and key is None:
        raise ConfigError(
            f"the batch has the entries {list(batch)}, none of which names the targets: expected one of "
            f"{list(TARGET_KEYS)} for loss_fn. Rename it, or use step_fn(model, batch) -> loss."
        )
    if key is None or (not has_loss_fn and forward.takes(key)):
        return ModelCall(args=(), kwargs=dict(batch), targets=None)
    inputs = {name: value for name, value in batch.items() if name != key}
    said = () if has_loss_fn else (f"the batch's entry {key!r} is the targets: {forward} does not take it",)
    return ModelCall(args=(), kwargs=inputs, targets=batch[key], said=said)


def _describe_misfit(call: ModelCall, forward: Forward, why_not: str) -> str:
    passed = [*("an input" for _ in call.args), *(f"{name}=..." for name in call.kwargs)]
    read_as = f"model({', '.join(passed)})" + ("" if call.targets is None else ", the last entry kept for the loss")
    example = "model(**batch)" if call.kwargs else "model(*batch)"
    return (
        f"the model cannot be called with what the loader gives: {why_not}. The batch was read as {read_as}; {forward} "
        "expects other arguments. Give step_fn=lambda model, batch: ..., which calls the model itself and returns the "
        f"loss: {example}.loss, or loss_fn({example}, batch[...])."
    )
