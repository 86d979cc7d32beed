"""From what the user says of devices to the hardware they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from splittune.cards import all_cards, card
from splittune.checks import as_int
from splittune.errors import DeviceError
from splittune.hardware.cuda.hardware import CudaHardware, count_visible_devices, describe_visible_devices
from splittune.hardware.cuda.mig import refuse_several_instances_in_environment

if TYPE_CHECKING:
    from splittune.hardware.base import Hardware

_EXAMPLES = '["cuda:1", "cuda:0"], "cuda:0,cuda:1", or virtual GPUs such as "4xRTX3090"'


def resolve_hardware(
    devices: str | Sequence[str | int | torch.device] | None = None, *, max_devices: int | None = None
) -> Hardware:
    """The hardware that `devices` means; the first device is 'GPU 0'.

    `max_devices` bounds virtual GPUs, where they need not be on one machine.

    - None: all visible CUDA devices.
    - a sequence, ``["cuda:1", "cuda:0"]`` or ``[1, 0]``: these CUDA devices, in this order.
    - a string of CUDA devices, ``"cuda:0,cuda:1"``: the same.
    - any other string, ``"4xV100-16GB"`` or ``"1xRTX3090:occupied=20GiB,3xRTX4090"``: virtual GPUs,
      which run on the CPU and whose times are modelled; `virtual.catalog.parse_gpus` has the
      notation.

    Raises:
        DeviceError: a card is missing or named twice, a device is not CUDA's, none is named, or a
            virtual GPU is unknown.
    """
    if devices is None:
        return _all_visible()
    if isinstance(devices, str):
        return _from_text(devices, max_devices)
    return CudaHardware([_torch_device(device, position) for position, device in enumerate(_in_a_row(devices))])


def names_virtual_gpus(devices: object) -> bool:
    """Whether `devices`, as `resolve_hardware` takes it, is a string that names no device of torch's."""
    return isinstance(devices, str) and not any(_is_real(name.strip()) for name in devices.split(","))


def _all_visible() -> CudaHardware:
    num_visible = count_visible_devices()
    if num_visible == 0:
        raise DeviceError(
            f"{describe_visible_devices()}: expected at least one CUDA device to tune on. "
            'To plan without one, pass virtual GPUs, such as devices="4xRTX3090".'
        )
    refuse_several_instances_in_environment()
    return CudaHardware(all_cards())


def _from_text(text: str, max_devices: int | None) -> Hardware:
    names = [name.strip() for name in text.split(",")]
    are_real = [_is_real(name) for name in names]
    if all(are_real):
        return CudaHardware([_torch_device(name, position) for position, name in enumerate(names)])
    if any(are_real):
        raise DeviceError(
            f"devices {text!r} mixes real devices and virtual GPUs: expected one kind, such as {_EXAMPLES}. "
            "Tune on one kind at a time."
        )
    # imported late: virtual GPUs are a machinery of their own, which real ones do without
    from splittune.hardware.virtual import VirtualHardware
    from splittune.hardware.virtual.catalog import MAX_DEVICES, parse_gpus

    gpus = parse_gpus(text, max_devices=max_devices or MAX_DEVICES)
    return VirtualHardware([gpu for gpu, _ in gpus], occupied_bytes=[occupied_bytes for _, occupied_bytes in gpus])


def _is_real(name: str) -> bool:
    """True for the name of a torch device, whatever its kind and index: no GPU is called so."""
    kind = name.partition(":")[0].strip()
    return kind.isdecimal() or _is_known_to_torch(kind)


def _is_known_to_torch(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:  # torch's answer to a name it does not know
        return False
    return True


def _torch_device(device: object, position: int) -> torch.device:
    """One device as torch has it; a number counts cards."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, str) and device.isdecimal():
        return card(int(device))
    if isinstance(device, str) and _is_known_to_torch(device):
        return torch.device(device)
    if (index := as_int(device)) is not None and index >= 0:
        return card(index)
    raise DeviceError(
        f"devices[{position}] is {device!r}: expected a CUDA device, as 'cuda:0', 0 or torch.device('cuda', 0). "
        'Virtual GPUs are named in one string: devices="4xRTX3090".'
    )


def _in_a_row(devices: object) -> Sequence[object]:
    if isinstance(devices, Sequence) and not isinstance(devices, bytes):
        return devices
    raise DeviceError(
        f"devices is {devices!r}: expected None for all visible CUDA devices, or a sequence or string such as "
        f"{_EXAMPLES}. A single device goes in a list."
    )
