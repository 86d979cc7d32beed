"""What ranks of DistributedDataParallel tell one another in a step: buckets of gradients, round a ring, modelled."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2

from splittune.hardware.virtual.timeline import TRANSFER_LATENCY_S
from splittune.units import MIB

# Bytes at which a bucket is closed. Both are torch's defaults: `bucket_cap_mb` of DistributedDataParallel, and
# `torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`, for a first one that is ready soon.
BUCKET_BYTES = 25 * MIB
FIRST_BUCKET_BYTES = 1 * MIB
# The part of forward and backward that is backward: a product of the forward has two in the backward, for its input's
# and its weight's gradient (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1).
BACKWARD_PART = 2 / 3


def bucket_sizes(gradients: Iterable[tuple[Hashable, int]]) -> tuple[int, ...]:
    """Bytes of each bucket, in the order in which they are ready, as torch rebuilds them after the first step.

    `gradients` are the dtype and bytes of each parameter that wants one, as the module registers them: the last is
    ready first. A bucket holds one dtype, and is closed by the gradient that reaches its limit.

    Worked: gradients of 4, 30, 1 and 0.5 MiB give buckets of 1.5, 30 and 4 MiB.
    """
    buckets: list[int] = []
    is_open: dict[Hashable, int] = {}
    closed: set[Hashable] = set()
    for dtype, num_bytes in reversed(list(gradients)):
        if dtype not in is_open:
            is_open[dtype] = len(buckets)
            buckets.append(0)
        place = is_open[dtype]
        buckets[place] += num_bytes
        if buckets[place] >= (BUCKET_BYTES if dtype in closed else FIRST_BUCKET_BYTES):
            closed.add(dtype)
            del is_open[dtype]
    return tuple(buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Ranks in a ring, each with a card; the slowest link between two of them decides.

    Worked: 100 MB among 4 ranks over links of 10e9 bytes/s take 2 x 3/4 x 10 ms = 15 ms, and 4 steps of 10 us.
    """

    num_ranks: int
    bandwidth_bytes_per_s: float

    def all_reduce_s(self, num_bytes: int) -> float:
        """Seconds until every rank has the sum: each sends ``2 (W - 1) / W`` of the bytes, in slices one after another.

        That many bytes no algorithm goes below (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
        Beyond a few ranks NCCL has trees instead of the ring, with its bandwidth and a latency that grows with the
        logarithm (NVIDIA, "Massively Scale Your Deep Learning Training with NCCL 2.4", 2019): that latency is taken.
        """
        if self.num_ranks == 1:
            return 0.0
        moved = 2 * (self.num_ranks - 1) / self.num_ranks * num_bytes
        return 2 * self._num_hops * TRANSFER_LATENCY_S + moved / self.bandwidth_bytes_per_s

    def broadcast_s(self, num_bytes: int) -> float:
        """Seconds until every rank has what rank 0 has; 0 for nothing."""
        if self.num_ranks == 1 or not num_bytes:
            return 0.0
        return self._num_hops * TRANSFER_LATENCY_S + num_bytes / self.bandwidth_bytes_per_s

    @property
    def _num_hops(self) -> int:
        """From one rank to all others along a tree; of two ranks it is the ring's."""
        return ceil(log2(self.num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class LastMicroStep:
    """When a rank begins its step's last forward, in seconds of that step, and how long it takes with its backward."""

    start_s: float
    duration_s: float

    def ready_s(self, part: float) -> float:
        """When this part of its gradients is there, 0 to 1: the backward makes them evenly, and is `BACKWARD_PART`."""
        return self.start_s + self.duration_s * (1 - BACKWARD_PART * (1 - part))


def all_reduce_end_s(buckets: Sequence[int], ring: Ring, ranks: Sequence[LastMicroStep]) -> float:
    """When every rank has all gradients: buckets are added up one after another, each once all ranks have it.

    So the all-reduce runs beside the last backward, and what cannot, at least its last bucket, comes after it.
    Worked: ranks that are done at 100 ms, of which 60 ms were a backward, and two equal buckets of 10 ms: the first is
    ready at 70 ms, the second at 100 ms, and the end is 110 ms. Buckets of 50 ms end at 70 + 2 x 50 = 170 ms.
    """
    end_s = max(rank.ready_s(1.0) for rank in ranks)
    if ring.num_ranks == 1:
        return end_s
    sent_s = 0.0
    for part, num_bytes in _parts(buckets):
        sent_s = max(sent_s, *(rank.ready_s(part) for rank in ranks)) + ring.all_reduce_s(num_bytes)
    return max(end_s, sent_s)


def _parts(buckets: Sequence[int]) -> Iterator[tuple[float, int]]:
    """Each bucket with the part of all bytes that is there once it is full."""
    total, so_far = sum(buckets), 0
    for num_bytes in buckets:
        so_far += num_bytes
        yield so_far / total, num_bytes
