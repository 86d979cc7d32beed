"""Memory of the devices that stand in for cards: as torch's caching allocator keeps it."""

from __future__ import annotations

import gc

import pytest
import torch

from splittune.cards import module_of
from splittune.hardware import CudaHardware, is_out_of_memory
from splittune.units import MIB
from tests.standin import devices

pytestmark = pytest.mark.standin

CARD = torch.device("standin", 1)


@pytest.fixture
def module():
    """torch.standin, with a second device of 64 MiB of which others hold 16, and on which nothing is cached."""
    gc.collect()
    module = module_of(CARD)
    module.empty_cache()
    devices.set_capacity(1, 64 * MIB, 16 * MIB)
    module.reset_peak_memory_stats(CARD)
    yield module
    module.set_per_process_memory_fraction(1.0, CARD)
    devices.set_capacity(1, devices.CAPACITY_BYTES, devices.OUTSIDE_BYTES)
    module.empty_cache()


def block(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=CARD)


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (1 * MIB, 1 * MIB, 2 * MIB),
        (1 * MIB + 1, 1 * MIB + 512, 20 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (12 * MIB + 1, 12 * MIB + 512, 14 * MIB),
    ],
)
def test_requests_are_rounded_as_torch_rounds_them(module, num_bytes, allocated, reserved):
    """Blocks of 512 bytes in segments of 2 MiB, of 20 MiB, or of their own."""
    before = module.memory_allocated(CARD), module.memory_reserved(CARD)
    held = block(num_bytes)
    assert module.memory_allocated(CARD) - before[0] == allocated
    assert module.memory_reserved(CARD) - before[1] == reserved
    assert held.device == CARD


def test_peaks_stay_until_they_are_reset(module):
    """What was freed is gone from the figures of now, stays in the peaks, and its segment is kept."""
    before = module.memory_allocated(CARD)
    held = block(12 * MIB)
    del held
    assert module.memory_allocated(CARD) == before
    assert module.max_memory_allocated(CARD) == before + 12 * MIB
    assert module.memory_reserved(CARD) >= 12 * MIB
    module.empty_cache()
    module.reset_peak_memory_stats(CARD)
    assert module.max_memory_allocated(CARD) == before


def test_memory_runs_out_at_the_operation_and_on_its_device_alone(module):
    """The sum that does not fit raises torch's own error, which names the device; the other devices have room."""
    one, other = block(20 * MIB), block(20 * MIB)
    ooms = module.memory_stats(CARD)["num_ooms"]
    with pytest.raises(
        torch.OutOfMemoryError, match=r"Tried to allocate 20.00 MiB. GPU 1 has a total capacity of"
    ) as caught:
        one + other
    assert is_out_of_memory(caught.value)
    assert CudaHardware([torch.device("standin", 0), CARD]).locate(caught.value) == 1
    assert module.memory_stats(CARD)["num_ooms"] == ooms + 1
    assert (one.to("standin:0") + other.to("standin:0")).nbytes == 20 * MIB


def test_memory_runs_out_within_an_operation(module):
    """What a kernel takes for itself, a copy of its input say, counts as well."""
    x = torch.zeros(4 * MIB, device=CARD)
    module.reset_peak_memory_stats(CARD)
    before = module.memory_allocated(CARD)
    x.median()
    assert module.max_memory_allocated(CARD) - before >= x.nbytes
    more = [block(12 * MIB), block(12 * MIB)]
    with pytest.raises(torch.OutOfMemoryError):
        x.median()
    del more


def test_cached_memory_is_handed_back_before_memory_runs_out(module):
    """One retry is counted, and no error, where cached segments are of no use for the request."""
    held = [block(12 * MIB) for _ in range(3)]
    del held
    retries = module.memory_stats(CARD)["num_alloc_retries"]
    large = block(40 * MIB)
    assert large.nbytes == 40 * MIB
    assert module.memory_stats(CARD)["num_alloc_retries"] == retries + 1


def test_a_fraction_caps_the_process(module):
    """Under set_per_process_memory_fraction an allocation beyond the cap fails although the device has room."""
    module.set_per_process_memory_fraction(0.25, CARD)
    with pytest.raises(torch.OutOfMemoryError, match="allowed"):
        block(18 * MIB)
    module.set_per_process_memory_fraction(1.0, CARD)
    assert block(18 * MIB).nbytes == 18 * MIB


def test_torchs_own_accelerator_has_the_same_figures(module):
    """torch.accelerator and the device module tell one truth."""
    held = block(3 * MIB)
    if not hasattr(torch.accelerator, "memory_allocated"):
        pytest.skip("torch.accelerator has no memory figures in this torch")
    assert torch.accelerator.memory_allocated(CARD) == module.memory_allocated(CARD) >= held.nbytes
    assert torch.accelerator.max_memory_reserved(CARD) == module.max_memory_reserved(CARD)


def test_views_and_changes_in_place_share_memory():
    """A view of a tensor has its memory, and what is written through one is seen through the other."""
    x = torch.zeros(4, 3, device=CARD)
    x[1:].t()[0] += 2
    assert x.sum().item() == 6
    assert x[1:].data_ptr() == x.data_ptr() + 12
    x.resize_(5, 3)
    assert x[:4].sum().item() == 6
    out = torch.empty(0, device=CARD)
    torch.add(x, 1, out=out)
    assert out.shape == (5, 3)
    assert out[1, 0].item() == 3
