from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from splittune.errors import DeviceError
from splittune.hardware import CudaHardware, resolve_hardware
from splittune.units import GIB


@pytest.fixture
def cards(monkeypatch):
    """Makes torch see this many cards of 24 GiB."""

    def visible(num_cards: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_cards > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cards)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        properties = SimpleNamespace(name="RTX 3090", total_memory=24 * GIB)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    return visible


def names(devices) -> list[str]:
    hardware = resolve_hardware(devices)
    assert isinstance(hardware, CudaHardware)
    return [device.torch_device for device in hardware.devices]


@pytest.mark.parametrize("num_cards", [1, 3])
def test_none_means_all_visible_cards(cards, num_cards):
    """Without devices every visible CUDA device is used, in torch's order."""
    cards(num_cards)
    assert names(None) == [f"cuda:{index}" for index in range(num_cards)]


def test_none_without_a_card_points_to_virtual_gpus(cards):
    """Where no card is visible the error says why and how to plan without one."""
    cards(0)
    with pytest.raises(DeviceError) as caught:
        resolve_hardware(None)
    assert str(caught.value).endswith(
        "expected at least one CUDA device to tune on. "
        'To plan without one, pass virtual GPUs, such as devices="4xRTX3090".'
    )
    assert "built without CUDA" in str(caught.value) or "no CUDA device is visible" in str(caught.value)


@pytest.mark.parametrize(
    "devices",
    [
        ["cuda:1", "cuda:0"],
        ("cuda:1", "cuda:0"),
        [1, 0],
        ["1", "0"],
        [torch.device("cuda", 1), torch.device("cuda")],
        [1, "cuda:0"],
        "cuda:1,cuda:0",
        " cuda:1 , cuda ",
        "1,0",
    ],
    ids=str,
)
def test_named_cards_are_used_in_their_order(cards, devices):
    """However cards are named, the first is GPU 0."""
    cards(2)
    assert names(devices) == ["cuda:1", "cuda:0"]


def test_one_card_may_be_named_in_a_string(cards):
    """A string with one card is that card."""
    cards(2)
    assert names("cuda:1") == ["cuda:1"]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "no device is named"),
        (["cuda:0", "cuda:5"], r"devices\[1\] is 'cuda:5', which is not there: 2 CUDA devices are visible"),
        ("cuda:5", r"devices\[0\] is 'cuda:5', which is not there"),
        ("2", r"devices\[0\] is 'cuda:2', which is not there"),
        (["cuda:0", 0], r"devices\[1\] is 'cuda:0', which devices\[0\] names already"),
        ("cuda:1,cuda:1", r"devices\[1\] is 'cuda:1', which devices\[0\] names already"),
        (["cpu"], r"devices\[0\] is 'cpu': expected a CUDA device"),
        ("cpu", r"devices\[0\] is 'cpu': expected a CUDA device"),
        ([-1], r"devices\[0\] is -1: expected a CUDA device"),
        ([True], r"devices\[0\] is True: expected a CUDA device"),
        ([0.0], r"devices\[0\] is 0\.0: expected a CUDA device"),
        ([None], r"devices\[0\] is None: expected a CUDA device"),
        ("cuda:x", r"devices\[0\] is 'cuda:x': expected a CUDA device"),
        (["RTX3090"], r"devices\[0\] is 'RTX3090': expected .* Virtual GPUs are named in one string"),
        ("cuda:0,1xRTX3090", "mixes real devices and virtual GPUs: expected one kind"),
        (0, "devices is 0: expected None for all visible CUDA devices, or a sequence or string"),
        (torch.device("cuda", 0), r"devices is device\(type='cuda', index=0\): expected"),
        (b"cuda:0", "devices is b'cuda:0': expected"),
        ("", r"'' in the devices '' names no GPU: expected groups of \[COUNTx\]NAME"),
        ("4xRTX309", "GPU 'RTX309' is not in the catalog"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_an_error_that_says_so(cards, devices, message):
    """What is missing, repeated, of another kind, or nothing at all is named with what was expected."""
    cards(2)
    with pytest.raises(DeviceError, match=message):
        resolve_hardware(devices)


@pytest.fixture
def virtual(monkeypatch):
    """What VirtualHardware would be made with."""
    made = []

    class Recorder:
        def __init__(self, gpus, *, occupied_bytes=None):
            made.append(([gpu.name for gpu in gpus], list(occupied_bytes)))

    monkeypatch.setattr("splittune.hardware.virtual.VirtualHardware", Recorder)
    return made


@pytest.mark.parametrize(
    ("devices", "gpus", "occupied_bytes"),
    [
        ("4xV100-16GB", ["V100-16GB"] * 4, [0] * 4),
        ("1xRTX3090,3xRTX4090", ["RTX3090", *["RTX4090"] * 3], [0] * 4),
        ("1xRTX3090:occupied=20GiB,3xRTX3090", ["RTX3090"] * 4, [20 * GIB, 0, 0, 0]),
        ("T4", ["T4"], [0]),
    ],
)
def test_any_other_string_means_virtual_gpus(virtual, devices, gpus, occupied_bytes):
    """A specification becomes virtual hardware, device by device, with what others hold on each."""
    resolve_hardware(devices)
    assert virtual == [(gpus, occupied_bytes)]


def test_virtual_gpus_need_no_card(cards):
    """Planning works where torch sees no CUDA at all, and says that its times are modelled."""
    cards(0)
    hardware = resolve_hardware("1xRTX3090:occupied=20GiB,1xRTX4090")
    assert [device.name for device in hardware.devices] == ["RTX3090", "RTX4090"]
    assert hardware.is_modelled


@pytest.mark.parametrize("visible", ["MIG-1,MIG-2", "MIG-GPU-1/1/0, MIG-GPU-1/2/0"])
def test_several_mig_instances_are_not_taken_for_the_first(cards, monkeypatch, visible):
    """Of several instances in CUDA_VISIBLE_DEVICES CUDA shows one: all visible devices are then
    refused, not one used."""
    cards(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(DeviceError, match=r"^CUDA_VISIBLE_DEVICES names 2 MIG instances: expected one"):
        resolve_hardware(None)
    assert names(["cuda:0"]) == ["cuda:0"]


@pytest.mark.parametrize("visible", ["MIG-1", "GPU-1,GPU-2", "0,1", ""])
def test_one_mig_instance_or_whole_cards_are_taken(cards, monkeypatch, visible):
    """A single instance in CUDA_VISIBLE_DEVICES is a job, and so are whole cards by any of their names."""
    cards(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert names(None) == ["cuda:0"]
