"""The ring: torch's own buckets, the formula's worked numbers, and what of it a backward hides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn

from splittune.hardware.virtual.ring import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    LastMicroStep,
    Ring,
    all_reduce_end_s,
    bucket_sizes,
)
from splittune.hardware.virtual.timeline import TRANSFER_LATENCY_S
from splittune.units import MIB


def test_buckets_close_with_the_gradient_that_reaches_their_limit() -> None:
    """The first is small, the last registered parameter is ready first, and a dtype has buckets of its own."""
    sizes = [("float32", int(mib * MIB)) for mib in (4, 30, 1, 0.5)]
    assert [size / MIB for size in bucket_sizes(sizes)] == [1.5, 30, 4]
    assert bucket_sizes([("float32", 8), ("float16", 4), ("float32", 16)]) == (24, 4)
    assert bucket_sizes([]) == ()


def test_the_limits_are_torchs() -> None:
    """Private names, looked at here alone: should they go, or change, so must the model."""
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == FIRST_BUCKET_BYTES
    limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES]
    shapes = [(3000, 3000), (7,), (512, 1024), (4000, 2000), (10,), (700, 700), (300, 900), (4000,)]
    tensors = [torch.empty(shape, dtype=torch.float32) for shape in reversed(shapes)]
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors))
    theirs = tuple(sum(tensors[index].nbytes for index in bucket) for bucket in buckets)
    assert bucket_sizes((tensor.dtype, tensor.nbytes) for tensor in reversed(tensors)) == theirs
    assert len(theirs) > 2


def test_buckets_are_those_of_distributed_data_parallel() -> None:
    """After a few steps of a module in a group of one rank torch says which buckets it has rebuilt."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layers = nn.Sequential(nn.Linear(64, 4000), nn.Linear(4000, 2000), nn.Linear(2000, 1000), nn.Linear(1000, 8))
        layers[1].bias.requires_grad_(False)
        model = nn.parallel.DistributedDataParallel(layers)
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
        logged = model._get_ddp_logging_data()
    finally:
        dist.destroy_process_group()
    ours = bucket_sizes((p.dtype, p.nbytes) for p in layers.parameters() if p.requires_grad)
    assert ", ".join(map(str, ours)) == logged["rebuilt_bucket_sizes"]
    assert len(ours) > 2


def test_an_all_reduce_moves_twice_the_bytes_less_a_ranks_part() -> None:
    """100 MB among 4 ranks over 10e9 bytes/s: 15 ms, and 4 latencies; one rank has nobody to send to."""
    ring = Ring(num_ranks=4, bandwidth_bytes_per_s=10e9)
    assert ring.all_reduce_s(100_000_000) == pytest.approx(15e-3 + 4 * TRANSFER_LATENCY_S)
    assert ring.broadcast_s(100_000_000) == pytest.approx(10e-3 + 2 * TRANSFER_LATENCY_S)
    alone = Ring(num_ranks=1, bandwidth_bytes_per_s=10e9)
    assert alone.all_reduce_s(100_000_000) == alone.broadcast_s(100_000_000) == ring.broadcast_s(0) == 0


def test_a_thousand_ranks_take_twice_the_bytes_of_a_ring_and_few_latencies() -> None:
    """1,024 ranks: 2 x 1023/1024 of the bytes, and 2 x 10 steps along a tree."""
    ring = Ring(num_ranks=1024, bandwidth_bytes_per_s=1e9)
    assert ring.all_reduce_s(10**9) == pytest.approx(2 * 1023 / 1024 + 20 * TRANSFER_LATENCY_S)


def worked(bucket_s: float) -> float:
    """The end for two equal buckets that each take so long, of ranks that are done at 100 ms after 60 ms backward."""
    bandwidth = 1e9
    ring = Ring(num_ranks=2, bandwidth_bytes_per_s=bandwidth)
    num_bytes = round((bucket_s - 2 * TRANSFER_LATENCY_S) * bandwidth)
    last = LastMicroStep(start_s=0.01, duration_s=0.09)
    return all_reduce_end_s([num_bytes] * 2, ring, [last, last])


def test_the_backward_hides_all_but_the_last_bucket() -> None:
    """The first of two is ready at half the backward, 70 ms; where links are slow, both wait in line."""
    assert worked(0.010) == pytest.approx(0.110)
    assert worked(0.050) == pytest.approx(0.170)


def test_a_bucket_waits_for_the_slowest_rank() -> None:
    """Two ranks, one done at 60 ms, the other at 100 ms: the end is that of the slower one, and its last bucket."""
    ring = Ring(num_ranks=2, bandwidth_bytes_per_s=1e12)
    ranks = [LastMicroStep(start_s=0.0, duration_s=0.06), LastMicroStep(start_s=0.0, duration_s=0.1)]
    assert all_reduce_end_s([1000], ring, ranks) == pytest.approx(0.1 + 2 * TRANSFER_LATENCY_S, rel=1e-6)
    assert all_reduce_end_s([], ring, ranks) == pytest.approx(0.1)


@given(
    buckets=st.lists(st.integers(1, 10**8), max_size=8),
    num_ranks=st.integers(1, 1024),
    durations=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=4),
)
def test_an_end_lies_between_all_hidden_and_none(buckets: list[int], num_ranks: int, durations: list[float]) -> None:
    """It is no sooner than the slowest rank and its last bucket, and no later than all buckets after one another."""
    ring = Ring(num_ranks=num_ranks, bandwidth_bytes_per_s=1e10)
    end_s = all_reduce_end_s(buckets, ring, [LastMicroStep(start_s=0.0, duration_s=each) for each in durations])
    least = ring.all_reduce_s(buckets[-1]) if buckets else 0.0
    assert max(durations) + least <= end_s + 1e-12
    assert end_s <= max(durations) + sum(map(ring.all_reduce_s, buckets)) + 1e-9
