"""DistributedSplit: torch's DistributedDataParallel for ranks whose shares of the batch differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from splittune.cards import is_card
from splittune.errors import ConfigError
from splittune.parallel.base import SplitModule
from splittune.parallel.nesting import map_tensors
from splittune.parallel.outputs import all_tensors_of
from splittune.parallel.replica_loss import LossFunction, ReplicaLoss, WeightFunction

# What the config and the device decide, and no option may.
_DECIDED = ("module", "device_ids", "output_device", "dim")


# mypy is told to let `output_device` be a torch.device, where DistributedDataParallel has its number.
class DistributedSplit(DistributedDataParallel, SplitModule):  # type: ignore[misc]
    """One rank's DistributedDataParallel, with what splittune's training loop asks of a wrapper.

    It is torch's own class and engine; buckets, hooks, `no_sync` and all options are its. An uneven
    split needs nothing of the engine: torch averages the gradients of W ranks, so a rank that backs
    ``loss * n * W / N``, for the mean loss of its n samples of N, gives the gradient of the whole
    batch. That factor is `MicroBatch.weight`. Worked: 3 ranks with 5, 4 and 1 of 10 samples weigh
    their losses 1.5, 1.2 and 0.3; a third of the sum of the gradients is that of the mean over 10.

    Args:
        module: on any device; it is moved to `device`, in place.
        device: this rank's, where its outputs are.
        loss_fn: computes the loss at the call: ``loss = model(inputs, targets)``; it must not learn.
        weight_fn: ``weight_fn(targets)``, the tokens, where the loss is a mean over tokens. Of a
            micro-batch in which none counts the loss is 0, and so are its gradients.
        ddp_options: DistributedDataParallel's own, such as ``gradient_as_bucket_view=True``. With
            `static_graph` the very first micro-batch is reduced as well as the last of its step,
            for torch's reducer has to see one such backward before any without; the gradient is the
            same.

    Raises:
        ConfigError: an option that the config decides, or a loss with parameters of its own.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device,
        loss_fn: LossFunction | None = None,
        weight_fn: WeightFunction | None = None,
        **ddp_options: Any,
    ) -> None:
        decided = [name for name in _DECIDED if name in ddp_options]
        if decided:
            raise ConfigError(
                f"ddp_options has {', '.join(decided)}: expected none of {', '.join(_DECIDED)}, which the config and "
                "the rank decide. Name another device with devices=."
            )
        if weight_fn is not None and loss_fn is None:
            raise ConfigError("weight_fn is given without loss_fn: it says what the mean of that loss is over.")
        if isinstance(loss_fn, nn.Module) and any(parameter.requires_grad for parameter in loss_fn.parameters()):
            raise ConfigError(
                "loss_fn has parameters that learn: expected none, for only the model's gradients travel between "
                "ranks. Make the loss a part of the model, which then returns it."
            )
        device_ids = [device] if is_card(device) else None
        super().__init__(module.to(device), device_ids=device_ids, **ddp_options)
        self.devices = (device,)
        self.output_device = device  # type: ignore[assignment]
        # held by a plain object: a loss that is a module must not appear in the wrapper's
        # state_dict
        loss = loss_fn.to(device) if isinstance(loss_fn, nn.Module) else loss_fn
        self._loss = None if loss is None else ReplicaLoss(loss, weight_fn)
        self._has_reduced = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._has_reduced = True
        if self._loss is None:
            return self._run(*inputs, **kwargs)
        args, kwargs = self._loss.arranged(inputs, kwargs)
        output = self._run(*args[:-1], **kwargs)
        targets = self.to_output(args[-1])
        if torch.is_grad_enabled() and self._loss.weight_fn is not None and not self._loss.weight_of(targets, 1):
            return _zero_of(output)  # a mean over no tokens is NaN, and a weight of 0 does not help
        return self._loss.loss_fn(output, targets)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.training or torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        # DistributedDataParallel would give out rank 0's buffers: a rank that evaluates alone would wait for ever
        args, kwargs = self.to_output((args, kwargs))
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DistributedDataParallel's: forwards inside leave their gradients with this rank."""
        if self.static_graph and not self._has_reduced:
            yield
            return
        with super().no_sync():
            yield

    @property
    def computes_loss(self) -> bool:
        """Whether calling it gives the loss: it was made with a `loss_fn`."""
        return self._loss is not None

    @property
    def counts_tokens(self) -> bool:
        """Whether the loss is a mean over what `weight_fn` counts, rather than over samples."""
        return self._loss is not None and self._loss.weight_fn is not None

    @property
    def num_ranks(self) -> int:
        """Ranks whose gradients are averaged."""
        return dist.get_world_size(self.process_group)

    def weight_of(self, batch: Any, num_samples: int) -> float:
        """How much a batch of the loader counts: its samples, or what `weight_fn` says of it."""
        return float(num_samples) if self._loss is None else self._loss.weight_of_batch(batch, num_samples)

    def sum_over_ranks(self, number: float) -> float:
        """The sum of every rank's `number`; all ranks have to ask."""
        total = torch.tensor(number, dtype=torch.float64, device=self.output_device)
        dist.all_reduce(total, group=self.process_group)
        return total.item()

    def to_output(self, tree: Any) -> Any:
        """`tree` with every tensor on this rank's device: for targets."""
        return map_tensors(lambda tensor: tensor.to(self.output_device, non_blocking=True), tree)

    def extra_repr(self) -> str:
        return f"rank={dist.get_rank(self.process_group)} of {self.num_ranks}, device={self.output_device}"


def _zero_of(output: Any) -> Tensor:
    """0, whose gradient is 0 for all that the output was computed from, whatever it holds."""
    parts = [tensor for tensor in all_tensors_of(output) if tensor.requires_grad]
    if not parts:
        raise ConfigError("the model's output has no gradient: expected at least one tensor that requires it.")
    everything = torch.ones((), dtype=torch.bool, device=parts[0].device)
    zeros = [tensor.masked_fill(everything, 0).sum() for tensor in parts]
    return torch.stack([zero.to(zeros[0].dtype) for zero in zeros]).sum()
