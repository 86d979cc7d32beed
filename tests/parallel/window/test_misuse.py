"""What goes wrong in a window: the next step is one device's, or an error says clearly what was misused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splittune.errors import WindowError
from splittune.parallel import BalancedDataParallel, accumulate
from tests.parallel.models import Call, assert_same, gradients, loss_of, mlp, vectors, whole_batch
from tests.parallel.wrapped import in_threads, make, on_the_cpu, window

SHARDS = [(1, 3), (0, 1, 3)]
"""The last device has three of four samples; GPU 0 takes part, or has nothing."""


class Trouble:
    """Raises in the forward or the backward of the replica that has three samples, while it is armed."""

    armed: str | None = None

    def strike(self, when: str, num_samples: int) -> None:
        if self.armed == when and num_samples == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def __call__(self, module: Any, x: Tensor) -> Tensor:
        self.strike("forward", len(x))
        hidden = module.body[0](x)
        hidden.register_hook(lambda grad: self.strike("backward", len(grad)))
        output: Tensor = module.body[2](module.body[1](hidden))
        return output * module.scale


def troubled(wrap: Callable[..., Any], shards: tuple[int, ...]) -> tuple[Trouble, BalancedDataParallel, Tensor, Any]:
    torch.manual_seed(0)
    trouble = Trouble()
    model, batch = Call(trouble), vectors(12)
    model.body = mlp()
    return trouble, wrap(model, shards), batch, whole_batch(model, batch)


def half_a_window(wrapped: BalancedDataParallel, batch: Tensor) -> None:
    """The first micro-batch of three, of a batch that is not the one to come."""
    with wrapped.no_sync():
        loss_of(wrapped(1 - batch[:4])).backward()


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("wrap", [on_the_cpu, in_threads])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_batch_that_runs_out_of_memory_can_be_skipped(
    position: int, when: str, set_to_none: bool, wrap: Callable[..., Any], shards: tuple[int, ...]
) -> None:
    """After an OOM in a replica, in any micro-batch of the window, zero_grad() and the next batch
    give one device's step."""
    trouble, wrapped, batch, expected = troubled(wrap, shards)
    window(wrapped, batch, [4, 4, 4])
    wrapped.zero_grad(set_to_none=set_to_none)

    def unlucky() -> None:
        for index, micro in enumerate(batch.split(4)):
            trouble.armed = when if index == position else None
            if index < 2:
                with wrapped.no_sync():
                    loss_of(wrapped(micro)).backward()
            else:
                loss_of(wrapped(micro)).backward()

    with pytest.raises(torch.OutOfMemoryError):
        unlucky()
    trouble.armed = None
    wrapped.zero_grad(set_to_none=set_to_none)
    if shards[0] == 0 and not set_to_none and when == "forward" and position:
        with pytest.raises(WindowError, match="zero_grad"):  # zeros written over zeros: it could be clipping as well
            window(wrapped, batch, [4, 4, 4])
        wrapped.zero_grad()
    assert_same(window(wrapped, batch, [4, 4, 4]), expected)


@pytest.mark.parametrize("shards", SHARDS)
def test_going_on_after_a_failed_backward_is_refused(shards: tuple[int, ...]) -> None:
    """A batch that goes on as if its backward had not failed would train on part of the gradient: it is told so."""
    trouble, wrapped, batch, expected = troubled(on_the_cpu, shards)
    half_a_window(wrapped, batch)
    trouble.armed = "backward"
    with wrapped.no_sync(), pytest.raises(torch.OutOfMemoryError):
        loss_of(wrapped(batch[:4])).backward()
    trouble.armed = None
    with pytest.raises(WindowError, match=r"(?s)backward pass failed .*zero_grad\(\) and begin the batch again"):
        wrapped(batch[:4])
    wrapped.zero_grad()
    assert_same(window(wrapped, batch, [4, 4, 4]), expected)


@pytest.mark.parametrize("shards", SHARDS)
def test_a_hook_that_raises_leaves_the_next_step_right(shards: tuple[int, ...]) -> None:
    """A hook of the user's that raises as gradients come home ends that window, and the next one is one device's."""
    model, batch = make("mlp", 12)
    expected, wrapped = whole_batch(model, batch), on_the_cpu(model, shards)

    def stop(grad: Tensor) -> None:
        raise ValueError("not finite")

    handle = model[2].weight.register_hook(stop)
    with pytest.raises(ValueError, match="not finite"):
        window(wrapped, batch, [4, 4, 4])
    handle.remove()
    wrapped.zero_grad()
    assert_same(window(wrapped, batch, [4, 4, 4]), expected)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("forward_first", [True, False])
@pytest.mark.parametrize("num_backwards", [1, 2])
def test_a_window_that_is_given_up_leaves_nothing(
    num_backwards: int, forward_first: bool, shards: tuple[int, ...]
) -> None:
    """zero_grad() half-way, before a forward or between a forward and its backward, drops what every device holds."""
    model, batch = make("mlp", 12)
    expected, wrapped = whole_batch(model, batch), on_the_cpu(model, shards)
    for _ in range(num_backwards):
        half_a_window(wrapped, batch)
    if not forward_first:
        wrapped.zero_grad()
        assert_same(window(wrapped, batch, [4, 4, 4]), expected)
        return
    with wrapped.no_sync():
        loss = loss_of(wrapped(batch[:4])) / 3
        wrapped.zero_grad()
        loss.backward()
    (loss_of(wrapped(batch[4:8])) / 3).backward()
    (loss_of(wrapped(batch[8:])) / 3).backward()
    assert_same(gradients(wrapped), expected)


@pytest.mark.parametrize("grads_exist", [True, False])
@pytest.mark.parametrize("forward_first", [True, False])
def test_zeros_in_place_give_a_window_up_as_well(forward_first: bool, grads_exist: bool) -> None:
    """zero_grad(set_to_none=False) half-way drops what every device holds."""
    model, batch = make("mlp", 4)
    expected, wrapped = whole_batch(model, batch), on_the_cpu(model, (1, 3))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if grads_exist else None
    half_a_window(wrapped, batch)
    loss = loss_of(wrapped(batch)) if forward_first else None
    wrapped.zero_grad(set_to_none=False)
    (loss_of(wrapped(batch)) if loss is None else loss).backward()
    assert_same(gradients(wrapped), expected)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("then_zero", [True, False])
def test_an_optimizer_step_inside_a_window_is_refused(then_zero: bool, shards: tuple[int, ...]) -> None:
    """With every micro-batch inside no_sync, the forward after step() says so, and the batch after that is right."""
    model, batch = make("mlp", 12)
    wrapped = on_the_cpu(model, shards)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    half_a_window(wrapped, batch)
    half_a_window(wrapped, batch)
    optimizer.step()
    if then_zero:
        optimizer.zero_grad()
    with pytest.raises(WindowError, match="parameters changed inside an accumulation window") as error:
        wrapped(batch[:4])
    assert "Run the last micro-batch outside no_sync()" in str(error.value)
    plain = copy.deepcopy(model)
    plain.zero_grad()
    assert_same(window(wrapped, batch, [4, 4, 4]), whole_batch(plain, batch))


def clip_in_place(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def scale_anew(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad * 0.5


@pytest.mark.parametrize("grads_exist", [True, False])
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("change", [clip_in_place, scale_anew])
def test_clipping_inside_a_window_is_refused(
    change: Callable[[nn.Module], None], shards: tuple[int, ...], grads_exist: bool
) -> None:
    """Gradients changed before the window's last backward were a part of them: the next forward says so."""
    model, batch = make("mlp", 12)
    expected, wrapped = whole_batch(model, batch), on_the_cpu(model, shards)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if grads_exist else None
    half_a_window(wrapped, batch)
    change(wrapped)
    with pytest.raises(WindowError, match="Clip or scale them after the window's last backward"):
        wrapped(batch[:4])
    wrapped.zero_grad()
    assert_same(window(wrapped, batch, [4, 4, 4]), expected)


def test_a_step_between_a_forward_and_its_backward_is_refused() -> None:
    """Even there parameters may not change while the window holds gradients: its backward says so."""
    model, batch = make("mlp", 8)
    wrapped = on_the_cpu(model, (0, 1, 3))
    optimizer = torch.optim.Adam(wrapped.parameters())
    half_a_window(wrapped, batch)
    loss = loss_of(wrapped(batch[:4]))
    optimizer.step()
    with pytest.raises(WindowError, match="parameters changed"):
        loss.backward()
    wrapped.zero_grad()
    plain = copy.deepcopy(model)
    assert_same(window(wrapped, batch, [4, 4]), whole_batch(plain, batch))


def test_frozen_parameters_may_change_inside_a_window() -> None:
    """An average of the weights that is kept up in a frozen submodule is nobody's misuse, and the
    next forward has it."""
    torch.manual_seed(0)
    batch = vectors(12)
    both = Call(lambda self, x: (self.nets["net"](x) - self.nets["target"](x)) * self.scale)
    both.nets = nn.ModuleDict({"net": mlp(), "target": mlp().requires_grad_(False)})
    plain = copy.deepcopy(both)
    wrapped = on_the_cpu(both, (1, 3))
    for each, inner in ((wrapped, both), (plain, plain)):
        for micro in accumulate(each, batch.split(4)):
            loss_of(each(micro)).backward()
            with torch.no_grad():
                for parameter in inner.nets["target"].parameters():
                    parameter.mul_(0.5)
    assert_same(gradients(both), gradients(plain))


def test_a_second_backward_through_a_finished_window_adds_to_it() -> None:
    """With retain_graph the last micro-batch's graph may be gone through again: its gradient is added once more."""
    model, batch = make("mlp", 8)
    plain = copy.deepcopy(model)
    wrapped = on_the_cpu(model, (1, 3))
    half_a_window(wrapped, batch)
    loss = loss_of(wrapped(batch[:4]))
    loss.backward(retain_graph=True)
    loss.backward()
    loss_of(plain(1 - batch[:4])).backward()
    (2 * loss_of(plain(batch[:4]))).backward()
    assert_same(gradients(model), gradients(plain))
