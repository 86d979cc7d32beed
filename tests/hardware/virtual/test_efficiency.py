from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.hardware.virtual.catalog import GPUS, GpuModel, find_gpu
from splittune.hardware.virtual.efficiency import EFFICIENCIES, KERNEL_S, Kind
from splittune.hardware.virtual.roofline import Work, kernel_time_s

SIZES = st.integers(min_value=0, max_value=10**15)
DIMENSIONS = st.integers(min_value=1, max_value=10**5)


@st.composite
def works(draw: st.DrawFn) -> Work:
    return Work(
        kind=draw(st.sampled_from(get_args(Kind))),
        num_flops=draw(SIZES),
        num_bytes=draw(SIZES),
        is_half=draw(st.booleans()),
        depth=draw(DIMENSIONS),
        num_columns=draw(DIMENSIONS),
    )


@given(work=works(), gpu=st.sampled_from(GPUS), more=SIZES)
def test_more_work_never_takes_less_time(work: Work, gpu: GpuModel, more: int) -> None:
    """Neither more FLOPs nor more bytes, on any card, in any class."""
    time_s = kernel_time_s(work, gpu)
    assert kernel_time_s(work._replace(num_flops=work.num_flops + more), gpu) >= time_s
    assert kernel_time_s(work._replace(num_bytes=work.num_bytes + more), gpu) >= time_s


@given(work=works(), gpu=st.sampled_from(GPUS), more=DIMENSIONS)
def test_longer_sums_and_more_columns_use_a_card_better(work: Work, gpu: GpuModel, more: int) -> None:
    """The same FLOPs never take longer for it."""
    time_s = kernel_time_s(work, gpu)
    assert kernel_time_s(work._replace(depth=work.depth + more), gpu) <= time_s
    assert kernel_time_s(work._replace(num_columns=work.num_columns + more), gpu) <= time_s


@given(work=works(), gpu=st.sampled_from(GPUS))
def test_nothing_is_faster_than_published_bandwidth(work: Work, gpu: GpuModel) -> None:
    """And each kernel takes its start beside."""
    assert kernel_time_s(work, gpu) >= KERNEL_S + work.num_bytes / gpu.memory_bandwidth_bytes_per_s


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_no_product_beats_a_card_by_more_than_its_clock(gpu: GpuModel) -> None:
    """A product of 8,192 x 8,192 matrices in half precision stays under 1.18 times the published peak."""
    size = 8192
    work = Work("product", 2 * size**3, 3 * 2 * size**2, is_half=True, depth=size, num_columns=size)
    assert work.num_flops / kernel_time_s(work, gpu) <= 1.18 * gpu.half_flops_per_s


def test_every_class_has_its_factors() -> None:
    """None is forgotten, and none is there that no operation belongs to."""
    assert set(EFFICIENCIES) == set(get_args(Kind))


def test_arithmetic_and_memory_of_products_overlap() -> None:
    """Of times of 3 and 4 a product takes 5 and a convolution 7."""
    gpu = find_gpu("RTX3090")

    def parts(kind: Kind) -> tuple[float, float, float]:
        flops = Work(kind, num_flops=10**12, num_bytes=0, depth=100, num_columns=100)
        memory = Work(kind, num_flops=0, num_bytes=10**10, depth=100, num_columns=100)
        both = flops._replace(num_bytes=10**10)
        first, second, together = (kernel_time_s(work, gpu) - KERNEL_S for work in (flops, memory, both))
        return first, second, together

    flops_s, bytes_s, both_s = parts("product")
    assert both_s**2 == pytest.approx(flops_s**2 + bytes_s**2)
    flops_s, bytes_s, both_s = parts("convolution")
    assert both_s == pytest.approx(flops_s + bytes_s)
