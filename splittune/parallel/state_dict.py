"""Checkpoints with and without the ``module.`` that wrappers put before every key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

PREFIX = "module."


def load_state_dict(module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """``module.load_state_dict(...)`` for a checkpoint of any strategy, wrapped or plain.

    A wrapper of splittune's takes both kinds of keys by itself; this is for the plain module, which may get
    ``module.head.weight`` where it has ``head.weight``. A module with a child of its own called `module` keeps what
    fits it. Keys that fit neither way are torch's error.
    """
    without = {key.removeprefix(PREFIX) for key in state_dict}
    if fits_better(without, state_dict, module.state_dict(keep_vars=True)):
        bare = OrderedDict(state_dict)
        if hasattr(state_dict, "_metadata"):
            bare._metadata = OrderedDict(state_dict._metadata)  # type: ignore[attr-defined]
        consume_prefix_in_state_dict_if_present(bare, PREFIX)
        state_dict = bare
    return module.load_state_dict(state_dict, strict=strict, assign=assign)


def fits_better(keys: Iterable[str], than: Iterable[str], own: Iterable[str]) -> bool:
    """Whether more of a module's `own` keys are among `keys` than among those of `than`."""
    own = set(own)
    return len(own & set(keys)) > len(own & set(than))
