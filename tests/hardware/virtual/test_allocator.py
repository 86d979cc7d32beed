from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.hardware.virtual.allocator import Block, CachingAllocator
from splittune.units import GIB, KIB, MIB


def allocated(allocator: CachingAllocator, num_bytes: int) -> Block:
    block = allocator.allocate(num_bytes)
    assert block is not None
    return block


@pytest.mark.parametrize(
    ("num_bytes", "size", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # a segment of its own: what rounding leaves over stays with the block where it is no more than 1 MiB
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (33 * MIB, 34 * MIB, 34 * MIB),
    ],
)
def test_a_request_is_rounded_and_takes_a_segment_of_its_class(num_bytes, size, segment):
    """512-byte rounding; 2 MiB segments up to 1 MiB, 20 MiB below 10 MiB, above that whole multiples of 2 MiB."""
    allocator = CachingAllocator(GIB)
    assert allocated(allocator, num_bytes).size == size
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (size, segment)


def test_what_a_request_leaves_over_serves_the_next_of_its_class():
    """A segment is split: five requests of 3 MiB share 20 MiB, and small ones never take from a large segment."""
    allocator = CachingAllocator(GIB)
    for _ in range(6):
        allocated(allocator, 3 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (18 * MIB, 20 * MIB)
    allocated(allocator, 1)
    assert allocator.reserved_bytes == 22 * MIB
    allocated(allocator, 3 * MIB)
    assert allocator.reserved_bytes == 42 * MIB


@pytest.mark.parametrize(("request_bytes", "size"), [(10 * MIB - 512, 10 * MIB - 512), (10 * MIB, 11 * MIB)])
def test_a_large_block_keeps_a_remainder_of_up_to_one_mebibyte(request_bytes, size):
    """As torch does: of a free block of 11 MiB, 1 MiB + 512 bytes are cut off, and 1 MiB is not."""
    allocator = CachingAllocator(GIB)
    allocated(allocator, 9 * MIB)  # leaves 11 MiB of its segment
    assert allocated(allocator, request_bytes).size == size
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (9 * MIB + size, 20 * MIB)


def test_a_small_block_is_split_to_the_last_512_bytes():
    """Of a segment of 2 MiB, 4096 requests of a byte can be served."""
    allocator = CachingAllocator(2 * MIB)
    for _ in range(4096):
        allocated(allocator, 1)
    assert allocator.allocate(1) is None


def test_the_smallest_free_block_that_fits_is_taken():
    """Best fit: of free blocks of 3, 5 and 7 MiB a request of 4 MiB gets the one of 5."""
    allocator = CachingAllocator(GIB)
    free, fences = [], []
    for size in (7, 3, 5):
        free.append(allocated(allocator, size * MIB))
        fences.append(allocated(allocator, 2 * MIB))  # keeps the free ones from merging
    for block in free:
        allocator.free(block)
    assert allocated(allocator, 4 * MIB) is free[2]
    assert allocated(allocator, 3 * MIB) is free[1]
    assert allocated(allocator, 4 * MIB) is free[0]
    assert all(not fence.is_free for fence in fences)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_free_neighbours_merge_whatever_the_order(order):
    """Three neighbours of one segment, freed in any order, are one block again that a request of the sum fits in."""
    allocator = CachingAllocator(20 * MIB)
    blocks = [allocated(allocator, 5 * MIB) for _ in range(3)]
    for index in order:
        allocator.free(blocks[index])
    assert allocator.allocated_bytes == 0
    assert allocated(allocator, 20 * MIB).is_whole_segment
    assert (allocator.reserved_bytes, allocator.num_retries) == (20 * MIB, 0)


def test_blocks_of_different_segments_do_not_merge():
    """Two free segments of 20 MiB do not make room for 30 MiB in place; they are handed back for it."""
    allocator = CachingAllocator(40 * MIB)
    for block in [allocated(allocator, 9 * MIB) for _ in range(4)]:
        allocator.free(block)
    assert allocator.reserved_bytes == 40 * MIB
    allocated(allocator, 30 * MIB)
    assert (allocator.reserved_bytes, allocator.num_retries) == (30 * MIB, 1)


def test_only_wholly_free_segments_are_handed_back():
    """A segment with one live block stays reserved, and its free rest stays usable."""
    allocator = CachingAllocator(GIB)
    kept, freed = allocated(allocator, 5 * MIB), allocated(allocator, 5 * MIB)
    allocator.free(freed)
    allocator.free(allocated(allocator, 100 * KIB))
    assert allocator.reserved_bytes == 22 * MIB
    assert allocator.hand_back() == 2 * MIB
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (5 * MIB, 20 * MIB)
    allocated(allocator, 15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(kept)


def test_a_request_beyond_the_capacity_gets_nothing_and_changes_nothing():
    """None says that it does not fit; what was there is as it was, and a smaller request still fits."""
    allocator = CachingAllocator(21 * MIB)
    held = allocated(allocator, 9 * MIB)
    assert allocator.allocate(12 * MIB) is None
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (9 * MIB, 20 * MIB)
    assert allocator.allocate(100) is None  # its segment of 2 MiB would exceed 21 MiB
    assert allocated(allocator, 8 * MIB).size == 8 * MIB
    allocator.free(held)


def test_cached_segments_are_given_up_before_a_request_fails():
    """Fragmentation is retried once without the cache, as torch does, and counted as a retry."""
    allocator = CachingAllocator(24 * MIB)
    allocator.free(allocated(allocator, 9 * MIB))
    allocator.free(allocated(allocator, 100))
    assert allocator.reserved_bytes == 22 * MIB
    allocated(allocator, 24 * MIB)
    assert (allocator.num_retries, allocator.reserved_bytes) == (1, 24 * MIB)


def test_peaks_start_anew_from_what_is_held():
    """After a reset the peaks are the present figures, reserved ones included."""
    allocator = CachingAllocator(GIB)
    first, second = allocated(allocator, 9 * MIB), allocated(allocator, 9 * MIB)
    allocator.free(first)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (18 * MIB, 20 * MIB)
    allocator.reset_peaks()
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (9 * MIB, 20 * MIB)
    allocator.free(second)
    assert allocator.peak_allocated_bytes == 9 * MIB


SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(MIB - KIB, MIB + KIB),
    st.integers(10 * MIB - KIB, 10 * MIB + KIB),
    st.integers(1, 30 * MIB),
)
# a size to allocate; a fraction picks which live block is freed; None hands the cache back
STEPS = st.lists(st.one_of(SIZES, st.floats(0, 1, exclude_max=True), st.none()), max_size=60)


@given(steps=STEPS, capacity=st.integers(0, 100 * MIB))
def test_bytes_are_conserved_in_any_sequence(steps, capacity):
    """Allocated is the sum of live blocks, never above reserved, nor reserved above the capacity;
    in the end all is 0."""
    allocator = CachingAllocator(capacity)
    live: list[Block] = []
    peak = 0
    for step in steps:
        if step is None:
            before = allocator.reserved_bytes
            assert before - allocator.hand_back() == allocator.reserved_bytes
        elif isinstance(step, int):
            block = allocator.allocate(step)
            if block is not None:
                assert block.size >= step
                assert block.size % 512 == 0
                live.append(block)
        elif live:
            allocator.free(live.pop(int(step * len(live))))
        peak = max(peak, allocator.allocated_bytes)
        assert allocator.allocated_bytes == sum(block.size for block in live)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.capacity_bytes
    assert allocator.peak_allocated_bytes == peak
    assert len({id(block) for block in live}) == len(live)
    for block in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    allocator.hand_back()
    assert allocator.reserved_bytes == 0


@given(steps=STEPS)
def test_the_same_requests_give_the_same_figures(steps):
    """Two runs of one sequence reserve the same bytes at every step."""

    def history() -> list[tuple[int, int]]:
        allocator, live, figures = CachingAllocator(60 * MIB), [], []
        for step in steps:
            if isinstance(step, int) and (block := allocator.allocate(step)) is not None:
                live.append(block)
            elif isinstance(step, float) and live:
                allocator.free(live.pop(int(step * len(live))))
            figures.append((allocator.allocated_bytes, allocator.reserved_bytes))
        return figures

    assert history() == history()


@given(sizes=st.lists(st.integers(1, 9 * MIB), min_size=1, max_size=20))
def test_freeing_and_asking_again_reserves_nothing_new(sizes):
    """A second step of the same sizes is served from the cache of the first."""
    allocator = CachingAllocator(GIB)
    for block in [allocated(allocator, size) for size in sizes]:
        allocator.free(block)
    reserved = allocator.reserved_bytes
    for size in sizes:
        allocated(allocator, size)
    assert allocator.reserved_bytes == reserved
    assert allocator.num_retries == 0
