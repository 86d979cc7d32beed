from __future__ import annotations

import pytest
import torch
from torch import nn

from splittune.cards import module_of
from splittune.errors import NvmlUnavailableError
from splittune.hardware import CudaHardware, is_out_of_memory, resolve_hardware
from splittune.hardware.cuda.nvml import Nvml
from splittune.parallel import BalancedDataParallel
from splittune.split import BatchSplit
from splittune.units import GIB, MIB

pytestmark = [pytest.mark.gpu, pytest.mark.standin]


@pytest.fixture
def hardware(card):
    hardware = CudaHardware([card])
    torch.zeros(1, device=card)  # the context exists from here on
    hardware.recover()
    yield hardware
    hardware.recover()


@pytest.fixture
def capped(card, hardware):
    """The process may take 1 GiB more than it holds."""
    fraction = (module_of(card).memory_reserved(card) + 1 * GIB) / hardware.devices[0].total_bytes
    module_of(card).set_per_process_memory_fraction(fraction, card)
    yield hardware
    module_of(card).set_per_process_memory_fraction(1.0, card)


@pytest.fixture
def nvml(card):
    if card.type != "cuda":
        pytest.skip("NVML knows NVIDIA's cards alone")
    with Nvml() as nvml:
        try:
            nvml.list_devices()
        except NvmlUnavailableError as error:
            pytest.skip(str(error))
        yield nvml


def test_peaks_grow_with_an_allocation_and_start_anew(card, hardware):
    """An allocation shows in both peaks, stays there when freed, and is gone after a reset."""
    hardware.reset_peaks()
    before = hardware.memory()[0]
    tensor = torch.empty(256 * MIB, dtype=torch.uint8, device=card)
    del tensor
    after = hardware.memory()[0]
    assert after.peak_allocated_bytes - before.peak_allocated_bytes == 256 * MIB
    assert after.peak_reserved_bytes - before.peak_reserved_bytes >= 256 * MIB
    hardware.recover()
    assert hardware.memory()[0].peak_allocated_bytes == before.peak_allocated_bytes


def test_something_is_always_outside(hardware):
    """The CUDA context alone is outside our allocator, and all figures together fit on the card."""
    memory = hardware.memory()[0]
    assert 50 * MIB < memory.outside_bytes < memory.total_bytes
    assert memory.headroom_bytes > 0


def test_our_own_allocation_is_not_outside(card, hardware):
    """What our allocator takes moves 'used' and 'reserved' alike: outside stays, and headroom shrinks."""
    before = hardware.memory()[0]
    tensor = torch.empty(1 * GIB, dtype=torch.uint8, device=card)
    after = hardware.memory()[0]
    assert abs(after.outside_bytes - before.outside_bytes) < 64 * MIB
    assert before.headroom_bytes - after.headroom_bytes == pytest.approx(tensor.nbytes, abs=64 * MIB)


def test_a_cap_bounds_the_headroom(capped):
    """Under set_per_process_memory_fraction the headroom is what the process may still take."""
    assert capped.memory()[0].headroom_bytes <= 1 * GIB


def failure_of(action) -> RuntimeError | None:
    """What `action` raises, without the traceback, whose frames would hold its tensors."""
    try:
        action()
    except RuntimeError as error:
        return error.with_traceback(None)
    return None


def test_an_oom_under_a_cap_is_recognised_and_recovered(card, capped):
    """A step that exceeds the cap fails with what is_out_of_memory knows, and leaves nothing behind."""
    allocated, reserved = module_of(card).memory_allocated(card), module_of(card).memory_reserved(card)
    error = failure_of(lambda: [torch.empty(64 * MIB, dtype=torch.uint8, device=card) for _ in range(64)])
    assert error is not None, "64 x 64 MiB do not fit in 1 GiB"
    assert is_out_of_memory(error)
    capped.recover()
    assert module_of(card).memory_allocated(card) == allocated
    assert module_of(card).memory_reserved(card) == reserved


def test_an_oom_of_the_driver_is_recognised(card, hardware):
    """An allocation no card can hold is an out-of-memory error too, without any cap."""
    num_bytes = hardware.devices[0].total_bytes * 2
    error = failure_of(lambda: torch.empty(num_bytes, dtype=torch.uint8, device=card))
    assert error is not None
    assert is_out_of_memory(error)


def test_free_memory_goes_where_memory_is_taken(card, hardware):
    """What the driver can still give falls by what is allocated, and stays low while torch keeps it for the next."""
    hardware.recover()
    (before,) = hardware.free_bytes()
    held = torch.empty(256 * MIB, dtype=torch.uint8, device=card)
    (during,) = hardware.free_bytes()
    del held
    (kept,) = hardware.free_bytes()
    hardware.recover()
    assert before - during >= 200 * MIB, "another program may have freed some meanwhile"
    assert before - kept >= 200 * MIB
    assert hardware.free_bytes()[0] - kept >= 200 * MIB


def test_nvml_finds_the_same_card_by_uuid(hardware, nvml):
    """The device torch calls cuda:0 and the one NVML finds by its UUID have one name and one size."""
    device = hardware.devices[0]
    listed = {card.uuid: card for card in nvml.list_devices()}
    if device.uuid not in listed:
        pytest.skip("cuda:0 is a MIG instance, which NVML lists under its card")
    assert listed[device.uuid].name == device.name
    total_bytes = nvml.device_memory(uuid=device.uuid).total_bytes
    assert total_bytes == pytest.approx(device.total_bytes, rel=0.1)


def test_nvml_and_torch_agree_on_what_is_left(card, hardware, nvml):
    """The two sources of device-wide memory differ by no more than what changes between two readings."""
    free_bytes, _ = module_of(card).mem_get_info(card)
    memory = nvml.device_memory(uuid=hardware.devices[0].uuid)
    assert memory.free_bytes == pytest.approx(free_bytes, abs=512 * MIB)


def test_a_wrapped_model_trains_on_the_card(card, hardware):
    """The wrapped model moves to the card, runs a step there, and the clock waits for it."""
    model = nn.Linear(16, 4)
    wrapped = hardware.wrap(model, BatchSplit.even(global_batch_size=8, accumulation_steps=1, num_devices=1))
    assert isinstance(wrapped, BalancedDataParallel)
    with hardware.metered():
        start = hardware.clock()
        wrapped(torch.randn(8, 16)).sum().backward()
        assert hardware.clock() > start
    assert model.weight.grad.device == card


def test_the_replicas_work_is_within_the_steps_time(card, hardware):
    """Events on the card's own stream: a step's busy time is above 0 and no more than the clock says of the step."""
    width = 2048 if card.type == "cuda" else 128  # enough work for a card's clock to see
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
    wrapped = hardware.wrap(model, BatchSplit.even(global_batch_size=512, accumulation_steps=1, num_devices=1))
    x = torch.randn(512, width, device=card)
    with hardware.metered():
        for _ in range(3):  # the first learns which parameter comes last
            before, start = hardware.busy_s(), hardware.clock()
            wrapped(x).sum().backward()
            step_s = hardware.clock() - start
            after = hardware.busy_s()
            assert before is not None
            assert after is not None
            assert 0 < after[0] - before[0] <= step_s
    assert hardware.busy_s() is None
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_work_outside_the_replica_is_not_busy_time(card, hardware):
    """What the card does between forward and backward, a loss say, is not the replica's: only the step's time grows."""
    model = nn.Linear(64, 64)
    wrapped = hardware.wrap(model, BatchSplit.even(global_batch_size=8, accumulation_steps=1, num_devices=1))
    x = torch.randn(8, 64, device=card)
    with hardware.metered():
        for _ in range(3):
            before, start = hardware.busy_s(), hardware.clock()
            output = wrapped(x)
            module_of(card)._sleep(500_000_000)
            output.sum().backward()
            step_s = hardware.clock() - start
            after = hardware.busy_s()
        assert after is not None
        assert before is not None
        assert after[0] - before[0] < step_s / 2


def test_allocations_come_back_after_a_thorough_recovery(card, hardware):
    """cuBLAS's workspaces and all: after a product and its recovery as much is allocated as before, within 1 MiB."""
    hardware.recover(thoroughly=True)
    (before,) = hardware.allocated_bytes()
    x = torch.randn(1024, 1024, device=card)
    x = x @ x
    assert hardware.allocated_bytes()[0] > before
    del x
    hardware.recover(thoroughly=True)
    assert hardware.allocated_bytes()[0] == pytest.approx(before, abs=1 * MIB)


def test_an_allocator_that_tries_again_is_counted(card, capped):
    """Cached blocks of another size are handed back when the cap is reached: one retry, and no error."""
    (before,) = capped.num_alloc_retries()
    blocks = [torch.empty(64 * MIB, dtype=torch.uint8, device=card) for _ in range(12)]
    del blocks
    kept = torch.empty(900 * MIB, dtype=torch.uint8, device=card)
    assert capped.num_alloc_retries() == (before + 1,)
    assert kept.nbytes == 900 * MIB


def test_an_optimizers_state_moves_to_the_card(card, hardware):
    """State made on the host follows its parameters to the card, and the next step runs."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.to(card)
    hardware.prepare_optimizer(optimizer)
    assert optimizer.state[model.weight]["exp_avg"].device == card
    model(torch.randn(2, 4, device=card)).sum().backward()
    optimizer.step()


def test_all_visible_cards_are_resolved(card):
    """Without devices the hardware is every card torch sees, each under its own UUID."""
    devices = resolve_hardware(None).devices
    assert [device.torch_device for device in devices] == [f"{card.type}:{index}" for index in range(len(devices))]
    assert len(devices) == module_of(card).device_count()
    assert len({device.uuid for device in devices}) == len(devices)
