"""Fake tensors have shapes and no values: virtual GPUs account for them as for real ones, to the byte and the digit."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

# Private: torch.compile and torch.export trace with them, and splittune's virtual GPUs plan with them.
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor

from splittune.fakes import ShapeMode
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual.allocator import CachingAllocator
from splittune.split import BatchSplit
from tests.parallel.models import MODELS, loss_of

SPLIT = BatchSplit(global_batch_size=18, accumulation_steps=2, shard_sizes=(2, 3, 4))
# Why a model's account, or its copy, is another one:
EXCEPTIONS = {
    "lstm": "its kernel on the CPU keeps what the gradient needs in one block; without values it is taken apart",
    "odd parameters": "the copy has no gaps and no repeated elements where the original's tensors have",
    "sparse embedding": "how many rows the sum of sparse gradients has depends on their values",
    "weight norm and parametrizations": "a weight that is computed from others cannot be copied",
}


class Account(NamedTuple):
    """What virtual GPUs say of two optimizer steps."""

    allocations: list[tuple[int, int]]
    peaks: list[tuple[int, int]]
    seconds: float
    link_bytes: tuple[int, ...]


def account_of(model: nn.Module, batch: Tensor, monkeypatch: pytest.MonkeyPatch) -> Account:
    """Two AdamW steps of two micro-batches each."""
    hardware = resolve_hardware("3xRTX3090")
    allocations: list[tuple[int, int]] = []
    allocate = CachingAllocator.allocate

    def noted(self: CachingAllocator, num_bytes: int) -> object:
        allocations.append((id(self), num_bytes))
        return allocate(self, num_bytes)

    with monkeypatch.context() as patched, hardware.metered():
        patched.setattr(CachingAllocator, "allocate", noted)
        order = [id(allocator) for allocator in hardware._ledger.allocators]
        wrapped = hardware.wrap(model, SPLIT)
        optimizer = torch.optim.AdamW(model.parameters())
        hardware.prepare_optimizer(optimizer)
        for _ in range(2):
            for number, micro in enumerate(batch.chunk(2)):
                with wrapped.no_sync() if number == 0 else nullcontext():
                    loss_of(wrapped(micro)).backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks = [(each.peak_allocated_bytes, each.peak_reserved_bytes) for each in hardware.memory()]
        in_order = [(order.index(allocator), num_bytes) for allocator, num_bytes in allocations]
        return Account(in_order, peaks, hardware.clock(), hardware.link_bytes())


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, draw_inputs = MODELS[name]
    return build(), draw_inputs(18)


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(EXCEPTIONS)))
def test_fake_equals_real(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations in order, peaks, modelled time and bytes over links; the model that was copied is as it was."""
    real = account_of(*made(name), monkeypatch)
    model, batch = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    mode = ShapeMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        copied = copy.deepcopy(model)
    with warnings.catch_warnings(), mode:
        warnings.simplefilter("error")
        assert all(isinstance(parameter, FakeTensor) for parameter in copied.parameters())
        fake = account_of(copied, mode.from_tensor(batch), monkeypatch)
    assert len(real.allocations) > 100
    assert fake == real
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
