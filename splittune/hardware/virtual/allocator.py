"""The CUDA caching allocator's arithmetic: how requested bytes become reserved ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from splittune.units import MIB

# torch's c10/core/AllocatorConfig.h and CUDACachingAllocator.cpp, as of 2.13 (large_segment_size at
# its default)
MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_HUGE_REQUEST_BYTES = 10 * MIB
HUGE_ROUNDING_BYTES = 2 * MIB


@dataclass(eq=False, slots=True)
class Block:
    """A piece of one segment. `previous` and `following` are its neighbours there."""

    size: int
    is_small: bool
    serial: int
    """Orders blocks of one size by age: the oldest is taken first, so that runs repeat."""
    is_free: bool = False
    previous: Block | None = None
    following: Block | None = None

    @property
    def is_whole_segment(self) -> bool:
        return self.previous is None and self.following is None


class CachingAllocator:
    """Tracks allocated and reserved bytes of one device, as torch's caching allocator would.

    Sizes are rounded up to 512 bytes. Requests up to 1 MiB are cut from segments of 2 MiB, those
    below 10 MiB from segments of 20 MiB, larger ones get a segment of their own, rounded up to 2
    MiB. The smallest free block that fits is taken, and freed neighbours merge. Before giving up,
    segments that are wholly free are handed back. Example: one request of 3 MiB leaves
    ``allocated_bytes`` at 3 MiB and ``reserved_bytes`` at 20 MiB.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_retries = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._serial = 0

    def allocate(self, num_bytes: int) -> Block | None:
        """A block of at least `num_bytes` (above 0); None when the capacity does not allow it."""
        size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        block = self._take_free(size) or self._new_segment(size)
        if block is None and self.hand_back():
            self.num_retries += 1
            block = self._new_segment(size)
        if block is None:
            return None
        self._split(block, size)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def free(self, block: Block) -> None:
        """Return a block to the cache; it merges with free neighbours of its segment."""
        self.allocated_bytes -= block.size
        for neighbour in (block.previous, block.following):
            if neighbour is not None and neighbour.is_free:
                self._forget(neighbour)
                self._absorb(block, neighbour)
        self._cache(block)

    def hand_back(self) -> int:
        """Give the wholly free segments back (``empty_cache``); the bytes that were returned."""
        returned = 0
        for blocks in self._free.values():
            whole = [entry for entry in blocks if entry[2].is_whole_segment]
            returned += sum(size for size, _, _ in whole)
            blocks[:] = [entry for entry in blocks if not entry[2].is_whole_segment]
        self.reserved_bytes -= returned
        return returned

    def reset_peaks(self) -> None:
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _take_free(self, size: int) -> Block | None:
        blocks = self._free[size <= SMALL_REQUEST_BYTES]
        index = bisect_left(blocks, size, key=lambda entry: entry[0])
        if index == len(blocks):
            return None
        block = blocks.pop(index)[2]
        block.is_free = False
        return block

    def _new_segment(self, size: int) -> Block | None:
        is_small = size <= SMALL_REQUEST_BYTES
        if is_small:
            segment = SMALL_SEGMENT_BYTES
        elif size < MIN_HUGE_REQUEST_BYTES:
            segment = LARGE_SEGMENT_BYTES
        else:
            segment = -(-size // HUGE_ROUNDING_BYTES) * HUGE_ROUNDING_BYTES
        if self.reserved_bytes + segment > self.capacity_bytes:
            return None
        self.reserved_bytes += segment
        return self._block(segment, is_small)

    def _split(self, block: Block, size: int) -> None:
        """Cut off what `size` does not need, where torch would: small remainders stay."""
        remainder = block.size - size
        splits = remainder >= MIN_BLOCK_BYTES if block.is_small else remainder > SMALL_REQUEST_BYTES
        if not splits:
            return
        rest = self._block(remainder, block.is_small)
        block.size = size
        rest.previous, rest.following = block, block.following
        if rest.following is not None:
            rest.following.previous = rest
        block.following = rest
        self._cache(rest)

    def _absorb(self, block: Block, neighbour: Block) -> None:
        block.size += neighbour.size
        if neighbour is block.previous:
            block.previous = neighbour.previous
            if block.previous is not None:
                block.previous.following = block
        else:
            block.following = neighbour.following
            if block.following is not None:
                block.following.previous = block

    def _block(self, size: int, is_small: bool) -> Block:
        self._serial += 1
        return Block(size=size, is_small=is_small, serial=self._serial)

    def _cache(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.size, block.serial, block))

    def _forget(self, block: Block) -> None:
        block.is_free = False
        blocks = self._free[block.is_small]
        del blocks[bisect_left(blocks, (block.size, block.serial), key=lambda entry: entry[:2])]
