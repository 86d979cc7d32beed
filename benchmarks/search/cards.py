"""Cards that problems are drawn on, what else is on them, and what must stay free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.split import Shares
from splittune.units import GIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A kind of card, by its makers' figures, rounded."""

    name: str
    total_bytes: int
    flops_per_s: float
    """Of products in half precision."""
    bandwidth_bytes_per_s: float
    link_bytes_per_s: float
    num_sms: int
    """Streaming multiprocessors: a kernel runs in waves of as many blocks, or of a small multiple."""

    @property
    def speed(self) -> float:
        """As a multiple of a card of 100 TFLOP/s and 1 TB/s: the geometric mean of both."""
        return float(np.sqrt(self.flops_per_s / 100e12 * self.bandwidth_bytes_per_s / 1e12))


def _card(name: str, gib: int, tflops: float, gb_per_s: float, link: float, num_sms: int) -> Card:
    return Card(
        name=name,
        total_bytes=gib * GIB,
        flops_per_s=tflops * 1e12,
        bandwidth_bytes_per_s=gb_per_s * 1e9,
        link_bytes_per_s=link * 1e9,
        num_sms=num_sms,
    )


CARDS = (
    # name, GiB, TFLOP/s, GB/s, link GB/s, SMs
    _card("T4", 16, 65, 300, 15.75, 40),
    _card("V100", 16, 125, 900, 15.75, 80),
    _card("RTX 2080 Ti", 11, 54, 616, 15.75, 68),
    _card("RTX 3060", 12, 25, 360, 31.5, 28),
    _card("RTX 3090", 24, 71, 936, 31.5, 82),
    _card("RTX 4090", 24, 165, 1008, 31.5, 128),
    _card("A100", 40, 312, 1555, 31.5, 108),
    _card("L4", 24, 121, 300, 31.5, 58),
    _card("H100", 80, 989, 3350, 63.0, 132),
)


def drawn_cards(rng: np.random.Generator, cards: tuple[Card, ...]) -> tuple[tuple[Card, ...], Shares, list[str]]:
    """Two to eight cards: alike, GPU 0 another kind than the rest, or mixed, in which case each has its own share."""
    count = int(rng.choice([2, 2, 3, 4, 4, 4, 5, 6, 7, 8]))
    form = rng.choice(["alike", "odd first", "mixed"], p=[0.5, 0.2, 0.3])
    kinds = [cards[index] for index in rng.permutation(len(cards))[: int(rng.integers(2, 4))]]
    if form == "alike":
        return (kinds[0],) * count, "gpu0", []
    if form == "odd first" or count == 2:
        return (kinds[0],) + (kinds[1],) * (count - 1), "gpu0", ["another GPU 0"]
    mixed = [kinds[int(rng.integers(len(kinds)))] for _ in range(count)]
    return tuple(mixed), "each", ["mixed cards"]


def drawn_outside(rng: np.random.Generator, cards: tuple[Card, ...]) -> tuple[tuple[int, ...], list[str]]:
    """Contexts and libraries on every card; other programs on some, on GPU 0 most often."""
    outside = [int(rng.uniform(300, 900) * MIB)] * len(cards)
    unusual = []
    if rng.random() < 0.35:
        outside[0] += int(rng.uniform(0.02, 0.5) * cards[0].total_bytes)
        unusual.append("a program on GPU 0")
    if rng.random() < 0.12:
        card = int(rng.integers(len(cards)))
        outside[card] = min(
            outside[card] + int(rng.uniform(0.05, 0.4) * cards[card].total_bytes), cards[card].total_bytes * 3 // 4
        )
        unusual.append("a program on one card")
    return tuple(outside), unusual


def drawn_headrooms(rng: np.random.Generator, cards: tuple[Card, ...], outside: tuple[int, ...]) -> tuple[int, ...]:
    """Mostly 5 % of each card, or of what others leave of it; else a fixed size, or a byte: as good as none.

    With that byte a card that handed memory back for want of any more has not kept what it should.
    """
    form = rng.choice(["of card", "of rest", "fixed", "none"], p=[0.5, 0.25, 0.15, 0.1])
    if form == "of card":
        return tuple(card.total_bytes // 20 for card in cards)
    if form == "of rest":
        return tuple((card.total_bytes - held) // 20 for card, held in zip(cards, outside, strict=True))
    return (512 * MIB if form == "fixed" else 1,) * len(cards)
