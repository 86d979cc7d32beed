"""What a job's own code sends to a card stays on the host, where its copy without values is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from splittune.cards import is_card, kind_of_cards


class OwnAutocastError(Exception):
    """The job's code turns autocast on for cards by itself, which has no effect on a copy on the host."""


class CardsAsHost(TorchFunctionMode):
    """Inside, torch's functions take a card for the CPU: ``images.to("cuda:0")`` and ``labels.cuda()`` stay there.

    Raises, from whatever function is called first under it:
        OwnAutocastError: ``torch.autocast("cuda")`` is on and the CPU's is not, so that everything would be float32.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kind = kind_of_cards()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.is_autocast_enabled(self._kind) and not torch.is_autocast_enabled("cpu"):
            raise OwnAutocastError(
                f"the step turns autocast on for {self._kind} itself: give autocast_dtype= instead, and it is foretold"
            )
        if func is Tensor.cuda or getattr(func, "__name__", "") == self._kind:  # ``labels.xpu()`` where those are
            return args[0]
        if func is Tensor.to and len(args) > 1 and type(args[1]) is int:  # a card by its number
            args = (args[0], "cpu", *args[2:])
        return func(*map(self._on_host, args), **{name: self._on_host(value) for name, value in (kwargs or {}).items()})

    def _on_host(self, value: Any) -> Any:
        """The CPU for a card, under any name; anything else as it is."""
        if isinstance(value, torch.device):
            return torch.device("cpu") if is_card(value) else value
        return "cpu" if isinstance(value, str) and value.partition(":")[0] == self._kind else value
