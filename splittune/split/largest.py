"""The largest size that fits, found in few runs: pure integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

# The search ends once the largest size that keeps the headroom and the smallest that does not
# differ
# by a 20th part. A choice: a 40th would take a run more.
PRECISION = 20
# Runs at most. A choice: ten doublings, and the five halvings that a 20th part takes.
MAX_RUNS = 15


def find_largest(
    measure: Callable[[int], tuple[bool, Sequence[int]]],
    *,
    start: int,
    limit: int,
    capacities: Sequence[int],
) -> int:
    """The largest batch size up to `limit` that keeps the headroom, to within 5 %; 0 if none does.

    Sizes double from `start`, then the gap is halved. Allocated bytes grow along a line: a size at
    which the line through the two largest that ran exceeds a device's capacity is not run.

    Worked: a sample takes 1 MiB of 100. From 16 on, 16, 32 and 64 run, 128 cannot fit, 96 runs, 112
    and 104 cannot fit, and 100 runs. It is at most 4 % from what does not fit: the answer.

    Args:
        measure: whether a size keeps the headroom, and each device's peak allocated bytes, none
            where memory ran out.
        start: the first size.
        limit: the largest size.
        capacities: bytes, one number for each device.
    """
    ran: dict[int, Sequence[int]] = {}
    keeps, fails, size, num_runs = 0, limit + 1, min(start, limit), 0
    while num_runs < MAX_RUNS and fails - keeps > max(1, keeps // PRECISION):
        if _cannot_fit(size, ran, capacities):
            fails = size
        else:
            num_runs += 1
            is_kept, allocated = measure(size)
            if allocated:
                ran[size] = allocated
            keeps, fails = (size, fails) if is_kept else (keeps, size)
        size = min(2 * keeps, limit) if fails > limit else (keeps + fails) // 2
    return keeps


def _cannot_fit(size: int, ran: Mapping[int, Sequence[int]], capacities: Sequence[int]) -> bool:
    if len(ran) < 2:
        return False
    smaller, larger = sorted(ran)[-2:]
    growth = (size - larger) / (larger - smaller)
    lines = zip(ran[smaller], ran[larger], capacities, strict=True)
    return any(high + growth * (high - low) > capacity for low, high, capacity in lines)
