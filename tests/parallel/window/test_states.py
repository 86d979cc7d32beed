"""The window's states: where each call leads, as the engine's diagram and table say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from splittune.parallel import BalancedDataParallel
from splittune.parallel.window.engine import WindowEngine, WindowState
from tests.parallel.models import loss_of, mlp, vectors


def begun() -> tuple[BalancedDataParallel, Tensor, WindowEngine]:
    """A wrapper whose engine has been made by a call that left no window."""
    torch.manual_seed(0)
    wrapped, batch = BalancedDataParallel(module=mlp(), shard_sizes=(1, 3), device_ids=["cpu", "cpu"]), vectors(4)
    with torch.no_grad():
        wrapped(batch)
    assert wrapped._window is not None
    return wrapped, batch, wrapped._window


def test_the_states_follow_the_diagram() -> None:
    """Copied by a forward under no_sync, partial after its backward, closed by the last one."""
    wrapped, batch, engine = begun()
    during: list[WindowState] = []
    assert engine.state is WindowState.CLOSED
    for _ in range(2):
        with wrapped.no_sync():
            output = wrapped(batch)
            output.register_hook(lambda grad: during.append(engine.state))
            assert engine.state in (WindowState.COPIED, WindowState.PARTIAL)
            loss_of(output).backward()
        assert engine.state is WindowState.PARTIAL
    output = wrapped(batch)
    assert engine.state is WindowState.PARTIAL
    loss_of(output).backward()
    assert engine.state is WindowState.CLOSED
    assert during == [WindowState.BACKWARD] * 2


def test_a_window_of_one_micro_batch_needs_no_keeping() -> None:
    """A forward outside no_sync leaves the window closed: its graph alone holds the copies."""
    wrapped, batch, engine = begun()
    output = wrapped(batch)
    assert engine.state is WindowState.CLOSED
    loss_of(output).backward()
    assert engine.state is WindowState.CLOSED


@pytest.mark.parametrize("state", [WindowState.COPIED, WindowState.PARTIAL])
def test_discarding_closes(state: WindowState) -> None:
    """Whatever was open is closed, and the parameters show nothing of it."""
    wrapped, batch, engine = begun()
    with wrapped.no_sync():
        output = wrapped(batch)
        if state is WindowState.PARTIAL:
            loss_of(output).backward()
    assert engine.state is state
    engine.discard()
    assert engine.state is WindowState.CLOSED
    assert all(parameter.grad is None for parameter in wrapped.parameters())


def test_zero_grad_leaves_the_copies_for_the_window() -> None:
    """Once every part was dropped, the window is where its first forward had left it."""
    wrapped, batch, engine = begun()
    with wrapped.no_sync():
        loss_of(wrapped(batch)).backward()
        wrapped.zero_grad()
        wrapped(batch)
    assert engine.state is WindowState.COPIED


def test_a_backward_that_raised_is_seen_by_the_next_forward() -> None:
    """It never comes to its end; without gradients to be lost the next forward simply begins anew."""
    wrapped, batch, engine = begun()

    def stop(grad: Tensor) -> None:
        raise ValueError("not finite")

    def trap(module: nn.Module, given: tuple[Tensor], output: Tensor) -> None:
        output.register_hook(stop)

    handle = wrapped.unwrap()[0].register_forward_hook(trap)
    with pytest.raises(ValueError, match="not finite"):
        loss_of(wrapped(batch)).backward()
    handle.remove()
    assert engine.state is WindowState.BACKWARD
    wrapped(batch)
    assert engine.state is WindowState.CLOSED


def test_a_forward_without_gradients_changes_no_state() -> None:
    """Validation inside a window, or after a backward that failed, is nobody's business."""
    wrapped, batch, engine = begun()
    with wrapped.no_sync():
        loss_of(wrapped(batch)).backward()
    with torch.no_grad():
        wrapped(batch)
    assert engine.state is WindowState.PARTIAL
