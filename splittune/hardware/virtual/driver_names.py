"""What drivers call the cards of the catalog: from the name of a card that is there to its published figures."""

from __future__ import annotations

from splittune.hardware.virtual.catalog import GpuModel, find_gpu

# The advertised GB, taken as GiB, is never all there: error correction takes a sixteenth where memory has it as
# an option (an L4 has 23,034 of 24,576 MiB), and driver and runtime keep up to as much again of small cards (torch sees
# 22.0 GiB of an A10). No other edition of a card in the catalog has between 7/8 and all of its memory: 8 of 12 GB, 10
# of 12, 16 of 32.
LEAST_PART_THERE = 7 / 8

# Without the "NVIDIA " that drivers before 465 left out. From the list of products of NVIDIA's open kernel modules
# 560.31.02 (README.md, "Compatible GPUs"); cards before Turing, and the RTX 5090, as nvidia-smi names them.
# A card of the same chip that is slower, or of which that was not looked up, is another one: "A100 80GB PCIe",
# "H100 PCIe", "RTX 3080 Laptop GPU", "RTX 4090 D", "A10G".
_BY_DRIVER = {
    "Tesla P100-PCIE-16GB": "P100-16GB",
    "GeForce GTX 1080 Ti": "GTX1080Ti",
    "Tesla V100-SXM2-16GB": "V100-16GB",
    "Tesla V100-SXM2-32GB": "V100-32GB",
    "T400 4GB": "T400-4GB",
    "Tesla T4": "T4",
    "GeForce RTX 2080 Ti": "RTX2080Ti",
    "GeForce RTX 3060": "RTX3060-12GB",
    "GeForce RTX 3070": "RTX3070",
    "GeForce RTX 3080": "RTX3080-10GB",
    "GeForce RTX 3090": "RTX3090",
    "RTX A6000": "RTXA6000",
    "A10": "A10",
    "A100-SXM4-40GB": "A100-40GB",
    "A100-SXM4-80GB": "A100-80GB",
    "GeForce RTX 4080": "RTX4080",
    "GeForce RTX 4090": "RTX4090",
    "L4": "L4",
    "L40S": "L40S",
    "H100 80GB HBM3": "H100-80GB",
    "H200": "H200",
    "GeForce RTX 5090": "RTX5090",
}


def gpu_called(name: str, total_bytes: int) -> GpuModel | None:
    """The catalog's GPU of a card that its driver calls `name`; None where the catalog has no such card.

    Worked: "NVIDIA GeForce RTX 3090" of 25,438,126,080 bytes (23.7 GiB) is ``RTX3090``; "NVIDIA GeForce RTX 3080" of
    12 GiB is none, for the catalog's has 10.
    """
    known = _BY_DRIVER.get(name.strip().removeprefix("NVIDIA "))
    if known is None:
        return None
    gpu = find_gpu(known)
    return gpu if LEAST_PART_THERE * gpu.total_bytes <= total_bytes <= gpu.total_bytes else None
