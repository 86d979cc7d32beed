"""The loss where the data is: each replica computes it on its device, and only scalars travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from splittune.errors import ConfigError
from splittune.parallel.link import Link
from splittune.parallel.replicas import replicate

LossFunction = Callable[[Any, Any], Tensor]
WeightFunction = Callable[[Any], Any]
# What a mapping calls its targets, in the order they are looked for.
TARGET_KEYS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True, slots=True)
class ReplicaLoss:
    """``loss_fn(output, targets)`` for every replica, and what its mean is a mean over.

    `weight_fn(targets)` says how much a shard counts: its tokens, where the mean is over tokens.
    Without it a shard counts as its samples. Example: losses of 1.0 and 4.0 over shards of 2 and 6
    tokens are 3.25 together.
    """

    loss_fn: LossFunction
    weight_fn: WeightFunction | None = None

    def __post_init__(self) -> None:
        for name in ("loss_fn", "weight_fn"):
            function: object = getattr(self, name)
            if function is not None and not callable(function):
                raise ConfigError(f"{name} is {function!r}: expected a function.")

    def on(self, positions: Sequence[int], link: Link) -> dict[int, LossFunction]:
        """The loss function for each position; one that is a module is copied there."""
        if not isinstance(self.loss_fn, nn.Module):
            return dict.fromkeys(positions, self.loss_fn)
        return dict(zip(positions, replicate(self.loss_fn, link, positions), strict=True))

    def arranged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments, the last of the positional ones the targets, which `loss_fn` gets.

        They are that in ``model(inputs, targets)``, the entry of that name in ``model(inputs,
        labels=targets)`` and ``model(**batch)`` (`TARGET_KEYS`), and the only positional argument
        in ``model(targets, **inputs)``.

        Raises:
            ConfigError: there are none.
        """
        if len(args) >= 2:
            return args, kwargs
        key = next((key for key in TARGET_KEYS if key in kwargs), None)
        if key is not None:
            return (*args, kwargs[key]), {name: value for name, value in kwargs.items() if name != key}
        if not (args and kwargs):
            raise ConfigError(
                f"the wrapper has a loss_fn and was called with {len(args)} positional arguments and {list(kwargs)}: "
                "expected the model's inputs and then the targets, loss = model(inputs, targets), or targets named one "
                f"of {list(TARGET_KEYS)}, loss = model(**batch)."
            )
        return args, kwargs

    def weight_of_batch(self, batch: Any, num_samples: int) -> float:
        """How much a loader's batch counts, ``(inputs, targets)`` or a mapping that names them.

        Raises:
            ConfigError: `weight_fn` finds no targets in it, or gave something other than a number
                of at least 0.
        """
        if self.weight_fn is None:
            return float(num_samples)
        if isinstance(batch, Mapping):
            return self.weight_of(self.arranged((), dict(batch))[0][-1], num_samples)
        if not isinstance(batch, tuple | list):
            raise ConfigError(
                f"weight_fn needs batches of inputs and targets, and this one is a {type(batch).__name__}: expected "
                f"(inputs, targets), or a dict with one of {list(TARGET_KEYS)}."
            )
        return self.weight_of(self.arranged(tuple(batch), {})[0][-1], num_samples)

    def weight_of(self, targets: Any, num_samples: int) -> float:
        """How much a shard or a micro-batch with these targets counts.

        Raises:
            ConfigError: `weight_fn` gave something other than a number of at least 0.
        """
        if self.weight_fn is None:
            return float(num_samples)
        weight = self.weight_fn(targets)
        try:
            number = float(weight)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"weight_fn gave {weight!r}: expected one number, such as the tokens that count in these targets."
            ) from error
        if not 0 <= number < float("inf"):
            raise ConfigError(f"weight_fn gave {number}: expected a finite number of at least 0.")
        return number
