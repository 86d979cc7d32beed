"""The optimizer state that every rank holds, and what sharing it out would free."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from splittune.fakes import ShapeMode
from splittune.ranks.zero import describe_zero, state_bytes_of
from splittune.runners.fake_copy import without_values
from splittune.training import TrainingTask


@dataclass(frozen=True)
class OptimizerState:
    """What a job's optimizer keeps of each parameter, once it has done a step; found without doing its arithmetic."""

    task: TrainingTask

    @functools.cached_property
    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Bytes of each parameter's state, elements of each, and parameters in each group.

        Worked: AdamW's state of a float32 matrix of 1,024 x 1,024 has 8 MiB. Of a job that cannot be copied without
        its values, or whose optimizer needs a closure or a loss to do a step, all are empty.
        """
        mode = ShapeMode(allow_non_fake_inputs=True)
        try:
            copied = without_values(self.task, mode)
            with mode:
                optimizer = copied.make_optimizer()
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
        except (RuntimeError, NotImplementedError, TypeError):
            return (), (), ()
        sizes = tuple(one.numel() for group in optimizer.param_groups for one in group["params"])
        return state_bytes_of(optimizer), sizes, tuple(len(group["params"]) for group in optimizer.param_groups)

    @property
    def total_bytes(self) -> int:
        """Of all parameters: what each rank holds under DistributedDataParallel."""
        return sum(self.parts[0])

    def if_dealt_out(self, num_ranks: int) -> str:
        """What ZeroRedundancyOptimizer would free, in a sentence; empty where it would free nothing."""
        state_bytes, sizes, lengths = self.parts
        return describe_zero(state_bytes, sizes, num_ranks, group_lengths=lengths) if sizes else ""
