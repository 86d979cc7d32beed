"""The best shares of a micro-batch over cards whose times and limits are tables, exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def least_makespans(times_s: Floats, min_share: int = 0) -> Floats:
    """For each number of cards that work, the least time in which they finish a micro-batch.

    Args:
        times_s: ``times_s[i, s]`` is what card i takes for s samples, of shape (n, m + 1); infinite
            where its memory does not allow that. It need not grow with s.
        min_share: the fewest samples of any card. At 0 a card may idle, and takes ``times_s[i, 0]``.

    Returns:
        An array of n + 1 times: entry a is the least makespan with *at most* a cards at work, where
        all cards together have m samples; infinite where there is none.

    Example: two cards that take 1 s and 2 s a sample finish 3 samples in 2 s with two of them
    (2 + 1), and in 3 s with one.
    """
    num_cards, width = times_s.shape
    times_s = times_s.copy()
    times_s[:, : min(min_share, width)] = np.inf
    if _is_monotone(times_s[:, min_share:]):
        return _by_threshold(times_s, min_share)
    return _by_every_sum(times_s) if num_cards > 1 else _alone(times_s)


def _is_monotone(times_s: Floats) -> bool:
    """Whether fewer samples never take longer, nor lack memory where more do not."""
    return bool(np.all(times_s[:, 1:] >= times_s[:, :-1]))


def _alone(times_s: Floats) -> Floats:
    return np.array([np.inf, times_s[0, -1]])


def _by_threshold(times_s: Floats, min_share: int) -> Floats:
    """Where times grow with the share, a makespan is possible if the shares within it sum to m or more."""
    num_cards, width = times_s.shape
    least = np.full(num_cards + 1, np.inf)
    if num_cards * min_share > width - 1:
        return least
    candidates = np.unique(times_s[np.isfinite(times_s)])
    candidates = candidates[candidates >= times_s[:, min_share].max()]
    for active in range(num_cards if min_share else 1, num_cards + 1):
        low, high = 0, len(candidates)
        while low < high:
            middle = (low + high) // 2
            most = [int(np.searchsorted(row[min_share:], candidates[middle], "right")) - 1 for row in times_s]
            if sum(sorted(most)[-active:]) + num_cards * min_share >= width - 1:
                high = middle
            else:
                low = middle + 1
        if low < len(candidates):
            least[active] = candidates[low]
    return np.minimum.accumulate(least)


def _by_every_sum(times_s: Floats) -> Floats:
    """Card after card, the least makespan for every number of samples and of cards at work."""
    num_cards, width = times_s.shape
    least = np.full((num_cards + 1, width), np.inf)
    least[0, 0] = 0.0
    for row in times_s:
        after = np.maximum(least, row[0])
        for share in range(1, width):
            if np.isfinite(row[share]):
                busier = np.maximum(least[:-1, : width - share], row[share])
                np.minimum(after[1:, share:], busier, out=after[1:, share:])
        least = after
    return np.minimum.accumulate(least[:, -1])
