"""Published figures of real GPUs, and the notation in which virtual ones are asked for."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from splittune.errors import DeviceError
from splittune.units import GIB, MIB, format_bytes

MAX_DEVICES = 64
"""A bound on typing errors: no machine holds more."""
MAX_RANKS = 16_384
"""A bound on typing errors for ranks, which need not be on one machine: as many trained Llama 3 ("The Llama 3 Herd of
Models", 2024), and few jobs have had more."""

_EXAMPLE = '"4xV100-16GB" or "1xRTX3090:occupied=20GiB,3xRTX3090"'
_UNITS = {"gib": GIB, "mib": MIB}
_GROUP = re.compile(r"(?:(?P<count>[+-]?\d+)\s*x\s*)?(?P<name>[a-z][\w -]*)(?::(?P<option>.*))?", re.IGNORECASE)
_OCCUPIED = re.compile(
    r"\s*occupied\s*=\s*(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(?P<unit>[a-z]+)\s*", re.IGNORECASE
)

_PCIE_GEN3_X16 = 15.75e9  # per direction: 16 lanes x 8 GT/s x 128/130 bits / 8, and twice that with each generation
_PCIE_GEN4_X16 = 31.5e9
_PCIE_GEN5_X16 = 63e9


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """What a vendor publishes of one GPU: peaks, which no real program reaches.

    Example: an RTX 3090 has 24 GiB, 936e9 bytes/s of memory bandwidth and 35.6e12 FLOP/s in
    float32.
    """

    name: str
    """As a specification spells it, ``"V100-16GB"``."""
    total_bytes: int
    """The advertised GB, taken as GiB. The driver keeps some of it: see the option `occupied`."""
    memory_bandwidth_bytes_per_s: float
    fp32_flops_per_s: float
    """Float32 on the ordinary cores, as torch computes by default; not TF32."""
    half_flops_per_s: float
    """Dense (no sparsity) float16 or bfloat16 products, summed in float32 as torch sums them.

    It is the tensor cores' rate, which GeForce cards halve for float32 sums. Without tensor cores
    it is the plain float16 rate, or the float32 rate where that is higher: torch then computes in
    float32.
    """
    link_bandwidth_bytes_per_s: float
    """The PCIe slot in one direction, in theory."""
    source: str
    """Where the figures were published."""

    def __post_init__(self) -> None:
        for field in (
            "total_bytes",
            "memory_bandwidth_bytes_per_s",
            "fp32_flops_per_s",
            "half_flops_per_s",
            "link_bandwidth_bytes_per_s",
        ):
            value = getattr(self, field)
            if not value > 0:
                raise ValueError(f"GpuModel.{field} of {self.name} is {value}: expected more than 0.")


def _gpu(
    name: str, gib: int, bandwidth_gb_per_s: float, fp32_tflops: float, half_tflops: float, *, link: float, source: str
) -> GpuModel:
    return GpuModel(
        name=name,
        total_bytes=gib * GIB,
        memory_bandwidth_bytes_per_s=bandwidth_gb_per_s * 1e9,
        fp32_flops_per_s=fp32_tflops * 1e12,
        half_flops_per_s=half_tflops * 1e12,
        link_bandwidth_bytes_per_s=link,
        source=source,
    )


_P100 = "NVIDIA, Tesla P100 for PCIe-based servers, datasheet, 2016 (16 GB)"
_GTX_1080_TI = (
    "NVIDIA, GeForce GTX 1080 Ti specifications, 2017 (3584 cores at 1.582 GHz, 11 Gbit/s x 352 bits); "
    "float16 runs at 1/64 of the float32 rate, so the float32 rate stands for both"
)
_V100 = "NVIDIA, V100 Tensor Core GPU datasheet, 2020 (SXM2)"
_T400 = "NVIDIA, T400 4GB datasheet, 2021 (no tensor cores; float16 at twice the float32 rate)"
_T4 = "NVIDIA, T4 Tensor Core GPU datasheet, 2019"
_TURING = "NVIDIA, Turing GPU Architecture whitepaper WP-09183, 2018 (reference card, FP16 tensor with FP32 accumulate)"
_GA102 = "NVIDIA, Ampere GA102 GPU Architecture whitepaper V2.0, 2020 (FP16 tensor with FP32 accumulate, dense)"
_RTX_3060 = (
    "NVIDIA, GeForce RTX 3060 announcement, 2021 (3584 cores at 1.78 GHz, 192 bits of 15 Gbit/s GDDR6, 101 tensor "
    "TFLOPS: a quarter of it dense with FP32 accumulate)"
)
_ADA = "NVIDIA, Ada GPU Architecture whitepaper, 2022 (FP16 tensor with FP32 accumulate, dense)"
_BLACKWELL = (
    "NVIDIA, RTX Blackwell GPU Architecture whitepaper, 2025 (FP16 tensor with FP32 accumulate, dense: a quarter of "
    "838 TFLOPS)"
)
_A10 = "NVIDIA, A10 Tensor Core GPU datasheet, 2021"
_A100 = "NVIDIA, A100 Tensor Core GPU datasheet, 2021 (SXM4)"
_L4 = "NVIDIA, L4 Tensor Core GPU datasheet, 2023 (242 TFLOPS with sparsity, half of it dense)"
_L40S = "NVIDIA, L40S datasheet, 2023 (362 TFLOPS dense)"
_H100 = "NVIDIA, H100 Tensor Core GPU datasheet, 2023 (SXM5; 1,979 TFLOPS with sparsity, half of it dense)"
_H200 = "NVIDIA, H200 Tensor Core GPU datasheet, 2024 (SXM; 1,979 TFLOPS with sparsity, half of it dense)"

GPUS: tuple[GpuModel, ...] = (
    # name, GiB, memory GB/s, float32 TFLOPS, half TFLOPS
    _gpu("P100-16GB", 16, 732, 9.3, 18.7, link=_PCIE_GEN3_X16, source=_P100),
    _gpu("GTX1080Ti", 11, 484, 11.3, 11.3, link=_PCIE_GEN3_X16, source=_GTX_1080_TI),
    _gpu("V100-16GB", 16, 900, 15.7, 125, link=_PCIE_GEN3_X16, source=_V100),
    _gpu("V100-32GB", 32, 900, 15.7, 125, link=_PCIE_GEN3_X16, source=_V100),
    _gpu("T400-4GB", 4, 80, 1.094, 2.188, link=_PCIE_GEN3_X16, source=_T400),
    _gpu("T4", 16, 300, 8.1, 65, link=_PCIE_GEN3_X16, source=_T4),
    _gpu("RTX2080Ti", 11, 616, 13.4, 53.8, link=_PCIE_GEN3_X16, source=_TURING),
    _gpu("RTX3060-12GB", 12, 360, 12.7, 25.3, link=_PCIE_GEN4_X16, source=_RTX_3060),
    _gpu("RTX3070", 8, 448, 20.3, 40.6, link=_PCIE_GEN4_X16, source=_GA102),
    _gpu("RTX3080-10GB", 10, 760, 29.8, 59.5, link=_PCIE_GEN4_X16, source=_GA102),
    _gpu("RTX3090", 24, 936, 35.6, 71, link=_PCIE_GEN4_X16, source=_GA102),
    _gpu("RTXA6000", 48, 768, 38.7, 154.8, link=_PCIE_GEN4_X16, source=_GA102),
    _gpu("A10", 24, 600, 31.2, 125, link=_PCIE_GEN4_X16, source=_A10),
    _gpu("A100-40GB", 40, 1555, 19.5, 312, link=_PCIE_GEN4_X16, source=_A100),
    _gpu("A100-80GB", 80, 2039, 19.5, 312, link=_PCIE_GEN4_X16, source=_A100),
    _gpu("RTX4080", 16, 716.8, 48.7, 97.5, link=_PCIE_GEN4_X16, source=_ADA),
    _gpu("RTX4090", 24, 1008, 82.6, 165.2, link=_PCIE_GEN4_X16, source=_ADA),
    _gpu("L4", 24, 300, 30.3, 121, link=_PCIE_GEN4_X16, source=_L4),
    _gpu("L40S", 48, 864, 91.6, 362, link=_PCIE_GEN4_X16, source=_L40S),
    _gpu("H100-80GB", 80, 3350, 67, 989.5, link=_PCIE_GEN5_X16, source=_H100),
    _gpu("H200", 141, 4800, 67, 989.5, link=_PCIE_GEN5_X16, source=_H200),
    _gpu("RTX5090", 32, 1792, 104.8, 209.5, link=_PCIE_GEN5_X16, source=_BLACKWELL),
)


def find_gpu(name: str) -> GpuModel:
    """The GPU of this name; case, spaces, hyphens and underscores do not count.

    ``"rtx 3090"`` is ``RTX3090``.

    Raises:
        DeviceError: the name is not in the catalog, or leaves open which memory is meant
            (``"V100"``).
    """
    wanted = _key(name)
    by_key = {_key(gpu.name): gpu for gpu in GPUS}
    if wanted in by_key:
        return by_key[wanted]
    variants = [gpu.name for gpu in GPUS if _key(gpu.name.rpartition("-")[0]) == wanted]
    if wanted and variants:
        raise DeviceError(f"GPU {name!r} leaves its memory open: expected {_either(variants)}. Say which.")
    near = [by_key[key].name for key in difflib.get_close_matches(wanted, by_key, n=3)]
    hint = f" Did you mean {_either(near)}?" if near else ""
    raise DeviceError(
        f"GPU {name!r} is not in the catalog: expected one of {', '.join(gpu.name for gpu in GPUS)}.{hint}"
    )


def parse_gpus(spec: str, *, max_devices: int = MAX_DEVICES) -> tuple[tuple[GpuModel, int], ...]:
    """Every virtual device a specification asks for, in order: its model, and bytes occupied.

    A specification is groups of ``[COUNTx]NAME[:occupied=SIZE]`` with commas between; SIZE, in GiB
    or MiB, is occupied on each GPU of its group. ``"1xRTX3090:occupied=20GiB,3xRTX3090"`` gives
    four devices, the first with 21474836480 bytes occupied.

    Raises:
        DeviceError: a group is malformed, a name unknown, a count outside 1 to `max_devices`, or
            more is occupied than the GPU has.
    """
    devices: list[tuple[GpuModel, int]] = []
    for group in spec.split(","):
        devices += _parse_group(group.strip(), spec, max_devices)
    if len(devices) > max_devices:
        raise DeviceError(f"{spec!r} asks for {len(devices)} devices: expected at most {max_devices}. Ask for fewer.")
    return tuple(devices)


def _parse_group(group: str, spec: str, max_devices: int) -> list[tuple[GpuModel, int]]:
    match = _GROUP.fullmatch(group)
    if match is None:
        raise DeviceError(
            f"{group!r} in the devices {spec!r} names no GPU: expected groups of [COUNTx]NAME[:occupied=SIZE] with "
            f"commas between, such as {_EXAMPLE}."
        )
    count = 1 if match["count"] is None else int(match["count"])
    if not 1 <= count <= max_devices:
        raise DeviceError(
            f"{group!r} in the devices {spec!r} asks for {count} GPUs: expected 1 to {max_devices}, as in {_EXAMPLE}."
        )
    gpu = find_gpu(match["name"])
    return [(gpu, _parse_occupied(match["option"], gpu, group))] * count


def _parse_occupied(option: str | None, gpu: GpuModel, group: str) -> int:
    if option is None:
        return 0
    match = _OCCUPIED.fullmatch(option)
    unit = None if match is None else _UNITS.get(match["unit"].lower())
    if match is None or unit is None:
        raise DeviceError(
            f"{option!r} in {group!r} is no option: expected occupied=SIZE in GiB or MiB, as in "
            f'"{gpu.name}:occupied=1.5GiB".'
        )
    occupied_bytes = int(float(match["number"]) * unit)
    if occupied_bytes >= gpu.total_bytes:
        raise DeviceError(
            f"{group!r} occupies {format_bytes(occupied_bytes)} of the {format_bytes(gpu.total_bytes)} a {gpu.name} "
            "has: expected less, so that some is left to train in."
        )
    return occupied_bytes


def _key(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).lower()


def _either(names: list[str]) -> str:
    return " or ".join(names)
