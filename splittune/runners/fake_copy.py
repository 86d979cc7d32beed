"""A job's copy that has shapes on the host and no values, wherever the job's own tensors live."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from splittune.fakes import FakeTensorMode, ShapeMode
from splittune.parallel.nesting import map_tensors
from splittune.training import SampleBatch, Snapshot, TrainingTask


def without_values(task: TrainingTask, mode: FakeTensorMode) -> TrainingTask:
    """A copy of the job whose model, optimizer and loss have shapes alone; they are only read, and no card is touched.

    What is tied stays tied, and the optimizer's counters keep their values: Adam reads how many steps it did.
    Worked: a model of 1 GiB on cuda:0 whose Adam holds 2 GiB gives a copy on the CPU that takes no memory there or on
    the card.

    Raises:
        NotImplementedError: a tensor on a card is sparse or of a class of its own.
    """
    loss_fn = task.loss_fn if isinstance(task.loss_fn, nn.Module) else None
    optimizer = task.optimizer if isinstance(task.optimizer, Optimizer) else None
    counters = [] if optimizer is None else [(id(one), one.item(), one.dtype) for one in _counters_of(optimizer)]
    with mode:  # which knows the value of what is made of a number
        memo: dict[int, Any] = {key: torch.tensor(number, dtype=dtype) for key, number, dtype in counters}
    with _CopyingShapes(mode):
        model, loss_copy, optimizer_copy = copy.deepcopy((task.model, loss_fn, optimizer), memo)
    return replace(
        task,
        model=model,
        loss_fn=task.loss_fn if loss_fn is None else loss_copy,
        optimizer=task.optimizer if optimizer is None else optimizer_copy,
    )


@contextmanager
def on_shapes(
    task: TrainingTask, samples: SampleBatch, snapshot: Snapshot | None = None
) -> Iterator[tuple[TrainingTask, SampleBatch]]:
    """Inside, the job's copy without values, and its samples: an operation on these does no arithmetic.

    An operation of real tensors alone is done for real, so none of the job's own are used inside. `snapshot` is told of
    those that the job's functions have beside the copy.
    """
    mode = ShapeMode(allow_non_fake_inputs=True)
    if snapshot is not None:
        mode.before_others = snapshot.before_use
    copied = without_values(task, mode)
    batch = map_tensors(lambda tensor: shape_of(tensor, mode), samples.batch)
    try:
        with mode, old_objects_left_alone():
            yield copied, replace(samples, batch=batch)
    finally:
        mode.before_others = None  # torch keeps some fake tensors, those the mode, and that would keep the job's own


def shape_of(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """`tensor` on the CPU and without its values: its size, strides, dtype, and whether it wants a gradient.

    Raises:
        NotImplementedError: it is on a card, and sparse or of a class of its own.
    """
    if tensor.device.type == "cpu":
        return mode.from_tensor(tensor, static_shapes=True)
    # A fake tensor of a card, which could be moved, has torch allocate there.
    if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise NotImplementedError(
            f"a tensor on {tensor.device} is {tensor.layout} and a {type(tensor).__name__}: expected a plain one, "
            "whose shape can be had without its values"
        )
    with mode:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """Inside, the search for cyclic garbage looks at new objects alone; one inside another changes nothing.

    A trial makes some hundred thousand objects, and of those that torch and the job brought, twice as many, none dies
    in it: to look through them all again and again is a fifth of its time.
    """
    is_ours = not gc.get_freeze_count()  # a program that froze its own keeps them frozen
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


class Unkept(Snapshot):
    """The snapshot of such a copy: it is thrown away, and nothing is put back."""

    def __init__(self) -> None:
        pass

    def restore(self, *, on_host_only: bool = False) -> None:
        """Nothing."""

    def restore_gradients(self, *, on_host_only: bool = False) -> None:
        """Nothing."""


def _counters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """What is a single number on the host: Adam's ``step``, unless it is capturable."""
    for state in optimizer.state.values():
        values = state.values() if isinstance(state, Mapping) else ()
        yield from (one for one in values if isinstance(one, Tensor) and one.dim() == 0 and one.device.type == "cpu")


class _CopyingShapes(TorchFunctionMode):
    """Inside, `copy.deepcopy` of a tensor is its shape: of a parameter by way of `clone`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = shape_of(tensor, self._mode)
            return memo[id(tensor)]
        if func is Tensor.clone:
            return func(shape_of(args[0], self._mode), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))
