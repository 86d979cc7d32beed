"""Cards that are there are found in the catalog by what their driver calls them, and never mistaken for another."""

from __future__ import annotations

import pytest

from splittune.hardware.virtual.catalog import GPUS
from splittune.hardware.virtual.driver_names import _BY_DRIVER, gpu_called
from splittune.units import MIB

# Names and MiB as torch.cuda.get_device_properties() printed them in logs and reports that people published.
PRINTED = (
    ("GeForce GTX 1080 Ti", 11178, "GTX1080Ti"),
    ("Tesla V100-SXM2-16GB", 16130, "V100-16GB"),
    ("Tesla T4", 15102, "T4"),
    ("Tesla T4", 14930, "T4"),
    ("NVIDIA GeForce RTX 3060", 11931, "RTX3060-12GB"),
    ("NVIDIA GeForce RTX 3080", 10240, "RTX3080-10GB"),
    ("NVIDIA GeForce RTX 3090", 24259, "RTX3090"),
    ("NVIDIA RTX A6000", 48676, "RTXA6000"),
    ("NVIDIA GeForce RTX 4090", 24563, "RTX4090"),
    ("NVIDIA L40S", 45589, "L40S"),
    ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
    ("NVIDIA H100 80GB HBM3", 81090, "H100-80GB"),
    ("NVIDIA H200", 143156, "H200"),
    ("NVIDIA GeForce RTX 3080 Laptop GPU", 8191, None),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 15934, None),
    ("NVIDIA RTX A5000", 24138, None),
    ("NVIDIA H20", 97285, None),
    ("NVIDIA PG506-230", 97457, None),
)
# From the list of products of NVIDIA's open kernel modules 560.31.02, with the memory of the row they resemble.
NEAR = (
    ("NVIDIA GeForce RTX 3090 Ti", 24),
    ("NVIDIA GeForce RTX 3080 Ti", 12),
    ("NVIDIA GeForce RTX 3070 Ti", 8),
    ("NVIDIA GeForce RTX 3070 Laptop GPU", 8),
    ("NVIDIA A10G", 24),
    ("NVIDIA A100-PCIE-40GB", 40),
    ("NVIDIA A100 80GB PCIe", 80),
    ("NVIDIA A800-SXM4-80GB", 80),
    ("NVIDIA H100 PCIe", 80),
    ("NVIDIA H100 NVL", 80),
    ("NVIDIA H100", 80),
    ("NVIDIA T400E", 4),
    ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 40),
    ("Stand-in", 24),
    ("", 24),
)


@pytest.mark.parametrize(("name", "mib", "expected"), PRINTED)
def test_a_card_is_known_by_its_drivers_name(name: str, mib: int, expected: str | None) -> None:
    """With the memory that torch sees of it, which is less than what is advertised; an unknown card is none."""
    found = gpu_called(name, mib * MIB)
    assert (None if found is None else found.name) == expected


@pytest.mark.parametrize(("name", "gib"), NEAR)
def test_a_card_that_only_resembles_one_is_unknown(name: str, gib: int) -> None:
    """A slower edition of the same chip has other figures."""
    assert gpu_called(name, gib * 1024 * MIB) is None


@pytest.mark.parametrize(("name", "gib"), [("NVIDIA GeForce RTX 3080", 12), ("NVIDIA GeForce RTX 3060", 8)])
def test_another_memory_is_another_card(name: str, gib: int) -> None:
    """The RTX 3080 of 12 GB and the RTX 3060 of 8 GB have other figures, and the same name."""
    assert gpu_called(name, gib * 1024 * MIB) is None


def test_every_row_of_the_catalog_is_found() -> None:
    """A new row wants its driver's name; and no name leads nowhere."""
    assert sorted(_BY_DRIVER.values()) == sorted(gpu.name for gpu in GPUS)
    for name, row in _BY_DRIVER.items():
        gpu = next(each for each in GPUS if each.name == row)
        assert gpu_called(f"NVIDIA {name}", gpu.total_bytes) is gpu_called(name, gpu.total_bytes) is gpu
