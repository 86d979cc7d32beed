"""After a backward pass that failed, every device's thread of autograd is idle before memory is counted.

torch waits for them only where the thread that called it has nothing to do itself.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from splittune.hardware import resolve_hardware
from splittune.profiling.measurement import Outcome
from splittune.profiling.profiler import Profiler
from splittune.split import BatchSplit
from splittune.training import TrainingTask, read_batches
from splittune.units import MIB

pytestmark = pytest.mark.standin

CARDS = ["standin:0", "standin:1"]
NODE_S = 0.3
"""How long the other device's node goes on after the error."""
NUM_BRANCHES = 3
"""So that when one node ends others wait in the thread's queue, with what they were given."""
SIZE_BYTES = 8 * MIB


class _Fault(torch.autograd.Function):
    """Backward runs out of memory on the first device; on the second it takes its time, with memory in its hands."""

    has_begun, is_raising = threading.Event(), threading.Event()
    num_running = 0
    outlived = False
    """Whether the second device's node was at work when the first device's raised."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        if grad.device.index == 0:
            assert _Fault.has_begun.wait(60)
            _Fault.is_raising.set()
            raise torch.OutOfMemoryError("out of memory. GPU 0 has a total capacity of nothing")
        _Fault.num_running += 1
        _Fault.has_begun.set()
        held = grad.new_empty(SIZE_BYTES // 4)
        _Fault.outlived = _Fault.is_raising.wait(60)
        time.sleep(NODE_S)
        del held
        _Fault.num_running -= 1
        return grad


class _Slow(torch.autograd.Function):
    """Backward is at work on the host, in the thread that called it, when the first device's raises."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        assert _Fault.is_raising.wait(60)
        time.sleep(NODE_S / 3)
        return grad


class _Net(nn.Module):
    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.linear, self.is_checkpointed = nn.Linear(4, 4), is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:  # whose recomputation is a backward pass within the backward pass
            return checkpoint(self.branches, x, use_reentrant=True)  # type: ignore[no-any-return]
        return self.branches(x)

    def branches(self, x: Tensor) -> Tensor:
        return torch.stack([_Fault.apply(self.linear(x)) for _ in range(NUM_BRANCHES)]).sum(0)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    _Fault.has_begun.clear()
    _Fault.is_raising.clear()
    _Fault.num_running, _Fault.outlived = 0, False


@pytest.mark.parametrize("host_is_busy", [False, True])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_memory_is_counted_once_every_thread_is_idle(is_checkpointed, host_is_busy, monkeypatch):
    """One device's thread raises, and another's is in the midst of a node: a trial's clean-up ends after both."""
    hardware, found = resolve_hardware(CARDS), []
    recover = hardware.recover

    def spy(**options):
        recover(**options)
        found.append((_Fault.num_running, hardware.allocated_bytes()))

    monkeypatch.setattr(hardware, "recover", spy)
    batch = torch.randn(8, 4, requires_grad=is_checkpointed), torch.randn(8, 4)

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        loss = (output - targets).square().mean()
        return loss + _Slow.apply(torch.zeros((), requires_grad=True)).to(loss.device) if host_is_busy else loss

    task = TrainingTask(_Net(is_checkpointed=is_checkpointed), [batch], loss_fn=loss_fn)
    profiler = Profiler(task, hardware, read_batches(task.loader), task.snapshot())
    measurement = profiler.measure(BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(4, 4)))
    assert measurement.outcome is Outcome.OUT_OF_MEMORY
    num_running, held = found[0]
    assert num_running == 0
    assert held[1] < SIZE_BYTES
    assert _Fault.outlived
