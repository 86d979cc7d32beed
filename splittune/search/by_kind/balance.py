"""Shares that sum to the micro-batch, the slowest card as fast as can be: cards of a kind are one unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from splittune.split.shards import share_out

# Halvings of the time within which all cards finish: what is left of the longest is below a double's precision.
NUM_HALVINGS = 52
# Times within this part of the least are as good: a tenth of what curves are known to (`study.LEAST_GAIN`). A choice.
SLACK = 0.0002


class CardTimes(Protocol):
    """What is to be known of the cards of a kind."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def most(self) -> int:
        """The largest share that fits on one."""
        ...

    def time_s(self, share: int) -> float:
        """Seconds for a share."""
        ...


def balanced_totals(num_samples: int, kinds: Sequence[CardTimes], *, least: int = 0) -> tuple[int, ...] | None:
    """The samples of each kind's cards together; `spread_evenly` among them. None where the cards cannot take as many.

    The search is for the least time T within which the cards can take all samples, each the largest share that its kind
    can do by then, at most `most` and at least `least`. With straight lines, time = a + b s, that is the closed form
    ``T = (m + sum a / b) / sum 1 / b``, to a sample. What they could do in T beyond all samples is left out in
    proportion: where launches alone take T, the faster kind has the larger share.

    Worked: 101 samples on 2 cards of 1 ms a sample and 4 cards of 2 ms. In 25 ms they do 2 x 25 + 4 x 12 = 98, in 26 ms
    2 x 26 + 4 x 13 = 104; 3 less than that, in proportion, is (50, 51).
    """
    most = [max(kind.most, 0) for kind in kinds]
    room = sum(kind.count * cap for kind, cap in zip(kinds, most, strict=True))
    if room < num_samples or any(cap < least for cap in most) or num_samples < least * sum(k.count for k in kinds):
        return None

    def shares_within(time_s: float) -> list[int]:
        return [largest_within(kind, time_s, least=least, most=cap) for kind, cap in zip(kinds, most, strict=True)]

    def total_of(shares: Sequence[int]) -> int:
        return sum(kind.count * share for kind, share in zip(kinds, shares, strict=True))

    low, high = 0.0, max(map(_longest_s, kinds, most))
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if total_of(shares_within(middle)) >= num_samples else (middle, high)
    enough = shares_within(max(high, *(kind.time_s(least) for kind in kinds)) * (1 + SLACK))
    beyond = [kind.count * (share - least) for kind, share in zip(kinds, enough, strict=True)]
    taken = share_out(num_samples - least * sum(kind.count for kind in kinds), beyond)
    return tuple(kind.count * least + rest for kind, rest in zip(kinds, taken, strict=True))


def _longest_s(kind: CardTimes, most: int) -> float:
    return kind.time_s(most)


def largest_within(kind: CardTimes, time_s: float, *, least: int = 0, most: int) -> int:
    """The largest share from `least` to `most` that the kind can do in that time; `least` where there is none."""
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if kind.time_s(middle) <= time_s else (low, middle - 1)
    return low
