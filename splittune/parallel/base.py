"""What tuner, hardware, profiler, training and config need of a wrapped model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from splittune.parallel.state_dict import PREFIX, fits_better


class SplitModule(nn.Module, ABC):
    """A module that runs on several devices at once, each with its own share of every micro-batch.

    `Hardware.wrap` and `SplitConfig.wrap` give one; whoever trains it names this class and no
    wrapper. It is a module rather than a protocol, so that a loop that was written for an nn.Module
    takes it, for a type checker as well. `BalancedDataParallel` is one.
    """

    module: nn.Module
    """The user's own module, which holds the parameters: the same object that was wrapped."""
    devices: tuple[torch.device, ...]
    """Where its shards run, in the order of the shares; the first is 'GPU 0'."""
    output_device: torch.device
    """Where outputs are joined."""
    lists_samples: bool | None = None
    """Whether batches hold lists with an entry for each sample; None until a batch has told."""

    @property
    @abstractmethod
    def computes_loss(self) -> bool:
        """Whether calling it, ``model(inputs, targets)``, gives the loss rather than outputs."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Forwards inside leave their gradients in place; the next one outside brings all home."""

    @abstractmethod
    def to_output(self, tree: Any) -> Any:
        """`tree` with every tensor where the outputs are: for targets."""

    @abstractmethod
    def weight_of(self, batch: Any, num_samples: int) -> float:
        """How much a batch of the loader, or a part, counts: its samples, unless told otherwise."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's, for keys with or without the wrapper's ``module.`` prefix."""
        if fits_better((PREFIX + key for key in state_dict), state_dict, self.state_dict(keep_vars=True)):
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def unwrap(self) -> nn.Module:
        """The module that was wrapped: the same object, with its parameters."""
        return self.module
