"""splittune devices: this machine's GPUs, and the virtual ones."""

from __future__ import annotations

from rich.table import Column, Table

from splittune.cli.console import console, say
from splittune.errors import NvmlUnavailableError
from splittune.hardware.cuda.nvml import Nvml
from splittune.hardware.cuda.nvml_calls import NvmlDevice, NvmlInstance
from splittune.hardware.virtual.catalog import GPUS
from splittune.units import GIB, format_bytes

UNKNOWN = "unknown"


def devices() -> None:
    """List this machine's GPUs and MIG instances as NVML sees them, and the virtual ones."""
    try:
        with Nvml() as nvml:
            found = nvml.list_devices()
    except NvmlUnavailableError as error:
        say(f"No real GPU can be listed: {error}")
        found = ()
    if found:
        console.print(_real_devices(found))
    console.print(_virtual_devices())
    say("Sources: splittune/hardware/virtual/catalog.py")


def _real_devices(found: tuple[NvmlDevice, ...]) -> Table:
    table = Table("GPU", "UUID", "memory", "used", "held by", title="This machine (used: by all programs)")
    for card in found:
        table.add_row(card.name or UNKNOWN, *_cells(card))
        for instance in card.instances or ():
            table.add_row(f"  {instance.name or UNKNOWN}", *_cells(instance))
        if card.instances is None:
            table.add_row("  MIG instances", *[UNKNOWN] * 4)
    return table


def _cells(device: NvmlDevice | NvmlInstance) -> tuple[str, str, str, str]:
    """UUID, memory, what is used of it, and by whom."""
    memory, held_by = device.memory, "\n".join(map(str, device.processes or ()))
    total = UNKNOWN if memory is None else format_bytes(memory.total_bytes)
    used = UNKNOWN if memory is None else format_bytes(memory.used_bytes)
    return device.uuid or UNKNOWN, total, used, held_by or "nobody known"


def _virtual_devices() -> Table:
    table = Table(
        Column("name", no_wrap=True),
        "GiB",
        "GB/s",
        "float32 TFLOPS",
        "half TFLOPS",
        title='Virtual GPUs: devices="4xRTX3090", or "1xRTX3090:occupied=8GiB,3xRTX3090"',
    )
    for gpu in GPUS:
        table.add_row(
            gpu.name,
            f"{gpu.total_bytes / GIB:g}",
            f"{gpu.memory_bandwidth_bytes_per_s / 1e9:g}",
            f"{gpu.fp32_flops_per_s / 1e12:g}",
            f"{gpu.half_flops_per_s / 1e12:g}",
        )
    return table
