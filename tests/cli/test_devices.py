"""devices: what can be tuned on, and planned with."""

from __future__ import annotations

from splittune.hardware.virtual.catalog import GPUS
from tests.cli.command_line import Run


def test_devices_lists_every_virtual_gpu(run: Run) -> None:
    """devices names all GPUs that can be planned with, and exits with 0 where there is no real one."""
    ended = run("devices")
    assert ended.code == 0
    assert all(gpu.name in ended.out for gpu in GPUS)
