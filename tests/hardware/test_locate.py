"""Which device an out-of-memory error is about, as CudaHardware reads torch's message."""

from __future__ import annotations

import pytest
import torch

from splittune.hardware import CudaHardware

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU {} has a total capacity of 23.68 GiB "
    "of which 1.06 GiB is free."
)


@pytest.fixture
def hardware(monkeypatch):
    hardware = object.__new__(CudaHardware)
    monkeypatch.setattr(hardware, "_torch_devices", (torch.device("cuda:2"), torch.device("cuda:0")), raising=False)
    return hardware


@pytest.mark.parametrize(("ordinal", "index"), [(2, 0), (0, 1), (1, None)])
def test_torch_ordinals_become_indices_of_the_job(hardware, ordinal, index):
    """cuda:2 is GPU 0 where it is named first, and a card that is not the job's is nobody."""
    assert hardware.locate(torch.OutOfMemoryError(MESSAGE.format(ordinal))) == index


def test_a_message_without_a_device_tells_nothing(hardware):
    """cuBLAS, say, names none."""
    assert hardware.locate(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")) is None
