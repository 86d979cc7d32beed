"""Key-value caches of decoders, as transformers has them: split, joined, or left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from splittune.errors import ConfigError


def is_cache(value: Any) -> bool:
    """Whether it has what transformers asks of a cache: a sequence's length, and an update."""
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


def items_of(cache: Any) -> list[Any]:
    """What iterating over it gives: for each layer its keys and values, None where it has none yet.

    Raises:
        ConfigError: it cannot be iterated over, as a static one cannot.
    """
    try:
        return list(cache)
    except (TypeError, AttributeError) as error:
        raise _not_splittable(cache, error) from error


def made_of(cache: Any, items: Sequence[Any]) -> Any:
    """A cache of the same class that holds `items`: ``type(cache)(items)``, as nn.DataParallel's.

    Raises:
        ConfigError: its class cannot be made so.
    """
    try:
        return type(cache)(items)
    except (TypeError, ValueError) as error:
        raise _not_splittable(cache, error) from error


def _not_splittable(cache: Any, error: Exception) -> ConfigError:
    return ConfigError(
        f"a {type(cache).__name__} cannot be split over devices or joined: {error}. Expected a cache that is made of "
        "what iterating over it gives, as transformers' DynamicCache is. Pass use_cache=False (or set it in the "
        "configs of the model and of its decoder), or run the wrapped module itself: model.module."
    )


class LeftOutCache:
    """Stands for the cache of a forward that records gradients.

    Training has no use for it, and GPU 0 would hold it all. Whatever is asked of it is an error
    that says how to get the cache.
    """

    def __init__(self, path: str, kind: str) -> None:
        self._message = (
            f"the {kind} at {path or 'the top'} of the model's output was left out: it would take memory on the output "
            "device in every training step. Under torch.no_grad() it is joined, and where the call is given one: pass "
            "cache=DynamicCache() to begin with an empty one (past_key_values= before transformers 5.24). "
            "use_cache=False computes none."
        )

    def __repr__(self) -> str:
        return "LeftOutCache()"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # what Python and its tools ask of any object
            raise AttributeError(name)
        raise AttributeError(self._message)

    def __iter__(self) -> NoReturn:
        raise TypeError(self._message)

    def __len__(self) -> NoReturn:
        raise TypeError(self._message)

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(self._message)
