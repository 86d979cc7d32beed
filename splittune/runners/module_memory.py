"""The activations that each module of a job keeps for the backward, accounted on shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from splittune.hardware.virtual import VirtualHardware
from splittune.runners.fake_copy import on_shapes
from splittune.split import BatchSplit
from splittune.training import SampleBatch, Snapshot, TrainingTask
from splittune.training.module_memory import ModuleMemory, grouped

# Samples of the forward that is looked at: enough for BatchNorm. What it keeps is told for one.
_SAMPLES = 2
_OUTSIDE = "(outside)"


def memory_by_module(
    task: TrainingTask, samples: SampleBatch, hardware: VirtualHardware, snapshot: Snapshot | None = None
) -> tuple[ModuleMemory, ...]:
    """Parameters, and the activations of a forward on a copy of the job that has shapes and no values.

    Whatever an operation keeps for the backward belongs to the innermost module that runs, and a storage that several
    keep to the first; what is outside of every module, the loss say, to ``(outside)``. `on_shapes` says what `snapshot`
    is for.
    """
    size = min(_SAMPLES, samples.loader_batch_size)
    kept: dict[str, int] = {}
    with on_shapes(task, samples, snapshot) as (job, shapes):
        split = BatchSplit(global_batch_size=size, accumulation_steps=1, shard_sizes=(size,))
        wrapped = VirtualHardware(hardware.gpus[:1]).wrap(job.model, split)
        own = {id(one.untyped_storage()) for one in (*job.model.parameters(), *job.model.buffers())}
        seen: dict[int, Any] = {}  # by address, and held: no address is given out again
        with _running(job.model) as stack:

            def keep(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if id(storage) not in own and id(storage) not in seen:
                    seen[id(storage)] = storage
                    kept[stack[-1]] = kept.get(stack[-1], 0) + storage.nbytes()
                return tensor

            with saved_tensors_hooks(keep, lambda tensor: tensor):
                job.loss_of(wrapped, shapes.micro_batch(size))
        model = job.model
    return grouped(model, {name: num_bytes // size for name, num_bytes in kept.items()})


@contextmanager
def _running(model: nn.Module) -> Iterator[list[str]]:
    """The names of the modules whose forward runs, the innermost last."""
    stack = [_OUTSIDE]
    hooks = []

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        stack.pop()

    for name, module in model.named_modules():

        def enter(_module: nn.Module, _args: Any, name: str = name) -> None:
            stack.append(name)

        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()
