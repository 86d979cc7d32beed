"""Errors that say nothing of memory, on devices that are nearly full and on devices that are not."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from splittune.cards import module_of
from splittune.hardware import CudaHardware
from splittune.profiling.measurement import Outcome
from splittune.runners.in_process import InProcessRunner
from splittune.split import BatchSplit
from splittune.training import TrainingTask
from splittune.units import GIB, MIB
from tests.standin import devices

pytestmark = pytest.mark.standin

CARDS = [torch.device("standin", index) for index in (0, 1)]
NO_HANDLE = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


class Greedy(nn.Linear):
    """Takes a share of its device's memory, and finds that a library can make no handle of what is left."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(4, 1)
        self.num_bytes = num_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device == CARDS[1]:
            held = torch.empty(self.num_bytes, dtype=torch.uint8, device=x.device)
            raise RuntimeError(NO_HANDLE) if held.nbytes else AssertionError
        return super().forward(x)


@pytest.fixture
def a_small_second_device():
    """1 GiB, of which others hold a quarter; nothing is cached."""
    gc.collect()
    module_of(CARDS[1]).empty_cache()
    devices.set_capacity(1, GIB, GIB // 4)
    yield
    devices.set_capacity(1, devices.CAPACITY_BYTES, devices.OUTSIDE_BYTES)


def outcome_of(num_bytes: int) -> Outcome:
    """Of a trial whose second replica takes so much and then fails."""
    loader = [(torch.randn(8, 4), torch.randn(8, 1))]
    runner = InProcessRunner(TrainingTask(Greedy(num_bytes), loader), CudaHardware(CARDS))
    runner.open(["output"])
    try:
        profiler = runner.profiler(min_headroom_bytes=(0, 0), loss_placement="output")
        return profiler.measure(BatchSplit.even(global_batch_size=8, accumulation_steps=1, num_devices=2)).outcome
    finally:
        runner.close()


def test_a_handle_that_cannot_be_created_on_a_full_device_is_out_of_memory(a_small_second_device):
    """The failed step's memory is still held when the device is asked: some 50 MiB are free."""
    assert outcome_of(GIB - GIB // 4 - 50 * MIB) is Outcome.OUT_OF_MEMORY
    assert min(CudaHardware(CARDS).free_bytes()) > 700 * MIB


def test_a_handle_that_cannot_be_created_on_a_device_with_room_is_an_error(a_small_second_device):
    """With half a GiB free memory is not the cause: the error passes through."""
    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_NOT_INITIALIZED"):
        outcome_of(256 * MIB)
