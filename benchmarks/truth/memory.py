"""What a traced step needs of a card: its allocations, replayed through the allocator's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.truth.trace import Trace
from splittune.hardware.virtual.allocator import Block, CachingAllocator
from splittune.units import GIB, MIB

RESOLUTION_BYTES = 128 * MIB
"""To which what is needed is found: half a percent of the card."""
_TOTAL_BYTES = 24 * GIB


def needed_bytes(trace: Trace) -> int:
    """The least capacity at which two steps run, to `RESOLUTION_BYTES`.

    Below the peak of reserved bytes the allocator hands its cache back before it gives up, so less is enough.
    """
    roomy = CachingAllocator(1 << 60)
    _runs(trace, roomy)
    low, high = roomy.peak_allocated_bytes, roomy.peak_reserved_bytes
    if high <= 0.8 * _TOTAL_BYTES or low >= _TOTAL_BYTES:  # far from where it is decided
        return high if high <= 0.8 * _TOTAL_BYTES else low
    while high - low > RESOLUTION_BYTES:
        middle = (low + high) // 2
        if _runs(trace, CachingAllocator(middle)):
            high = middle
        else:
            low = middle
    return high


def usable_bytes(needed: Sequence[int]) -> int:
    """What a card of 24 GB lets torch have, from what steps need that did run on it.

    The least capacity, in steps of 512 MiB, at which 99.5 % of them fit: all did, and the rest is the replay's error.
    """
    capacities = range(16 * GIB, 24 * GIB, 512 * MIB)
    enough = (each for each in capacities if sum(n <= each for n in needed) >= 0.995 * len(needed))
    return next(enough, 24 * GIB)


def _runs(trace: Trace, allocator: CachingAllocator, num_steps: int = 2) -> bool:
    """Whether the allocator has room for what is there before the step, and for so many steps."""
    blocks: dict[int, Block] = {}
    before, step = trace.events[: trace.num_before].tolist(), trace.events[trace.num_before :].tolist()
    num_before = sum(event > 0 for event in before)
    for number, events in enumerate([before, *[step] * num_steps]):
        next_request = num_before if number else 0
        for event in events:
            if event <= 0:
                block = blocks.pop(-event, None)  # what was there before is freed once
                if block is not None:
                    allocator.free(block)
                continue
            block = allocator.allocate(event)
            if block is None:
                return False
            blocks[next_request] = block
            next_request += 1
    return True
