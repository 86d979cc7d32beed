"""A job of every shape the search has to cope with, made by hand; time and memory each break the line in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.problems.problem import CardMemory, CardTime
from tests.search.problem import MIB, Job, card_memory, job


def cards(
    count: int, *, gpu0_outside: float = 0.0, outside: float = 0.0, output: float = 0.0, **memory: float
) -> list[CardMemory]:
    """Cards of one kind, MiB; GPU 0 has so much more that other programs hold, and all outputs."""
    first = card_memory(is_first=True, outside=outside + gpu0_outside, output=output, **memory)  # type: ignore[arg-type]
    return [first, *[card_memory(outside=outside, **memory)] * (count - 1)]  # type: ignore[arg-type]


def curved(memories: list[CardMemory], **shape: float) -> list[CardMemory]:
    """The same, with what no line foresees."""
    return [replace(one, **shape) for one in memories]  # type: ignore[arg-type]


def two_kinds(B: int, **more: float) -> Job:
    """Four cards, two of them twice as fast and with half the memory; each has its own share."""
    slow, fast = CardTime(launch_s=0.004, sample_s=0.002), CardTime(launch_s=0.003, sample_s=0.001)
    large, small = {"total": 24_000}, {"total": 12_000}
    memories = [
        card_memory(is_first=True, parameters=400, state=800, sample=150, **large),
        card_memory(parameters=400, sample=150, **large),
        *[card_memory(parameters=400, sample=150, **small)] * 2,
    ]
    return job(memories, B=B, times=[slow, slow, fast, fast], shares="each", **more)  # type: ignore[arg-type]


# Memory is affine in every phase.
AFFINE: dict[str, Callable[[], Job]] = {
    "room for all": lambda: job(4, B=96),
    "GPU 0 almost full": lambda: job(cards(4, sample=60, total=3000, gpu0_outside=2200), B=128),
    "outputs on GPU 0": lambda: job(cards(4, sample=40, output=30, total=4000), B=256),
    "optimizer state on GPU 0": lambda: job(cards(3, parameters=500, state=1000, sample=50, total=4000), B=200),
    "gradients that stay": lambda: job(cards(2, parameters=800, stays=0.8, sample=100, total=6000), B=100),
    "one sample fills a card": lambda: job(cards(4, sample=2500, total=4500, gpu0_outside=500), B=40),
    "two cards, few samples": lambda: job(cards(2, sample=300, total=2000), B=20),
    "eight cards, many samples": lambda: job(cards(8, sample=12, output=2, total=2000, gpu0_outside=600), B=1000),
    "costly launches": lambda: job(
        cards(4, sample=40, output=10, total=5000), B=400, times=[CardTime(launch_s=0.08, sample_s=0.001)] * 4
    ),
    "the card is not full below 12 samples": lambda: job(
        cards(4, sample=90, total=3000), B=150, times=[CardTime(launch_s=0.002, sample_s=0.001, knee=12)] * 4
    ),
    "tiles of 8": lambda: job(
        cards(3, sample=70, total=2500),
        B=144,
        times=[CardTime(launch_s=0.003, sample_s=0.001, tile=8, tile_weight=0.9)] * 3,
    ),
    "a slower kernel from 20 samples on": lambda: job(
        cards(4, sample=60, total=3000),
        B=220,
        times=[CardTime(launch_s=0.003, sample_s=0.001, switch_at=20, switch_factor=1.1)] * 4,
    ),
    "two kinds of cards": lambda: two_kinds(160),
    "two kinds of cards, noise": lambda: two_kinds(250, noise=0.02),
    "noise": lambda: job(cards(4, sample=60, total=3000, gpu0_outside=1000), B=180, noise=0.02),
    "no busy times": lambda: job(
        cards(4, sample=60, total=3000, gpu0_outside=1000), B=180, noise=0.01, tells_busy=False
    ),
}

NOT_AFFINE: dict[str, Callable[[], Job]] = {
    "memory jumps at 10 samples": lambda: job(
        curved(cards(4, sample=100, total=3000), jump_at=10, jump=150.0 * MIB), B=120
    ),
    "memory grows faster than the share": lambda: job(curved(cards(3, sample=90, total=6000), power=1.05), B=240),
    "the allocator's excess varies": lambda: job(curved(cards(4, sample=120, total=5000), reserve=0.07), B=160),
    "two kinds of cards, memory that is not affine": lambda: replace(
        two_kinds(200), memories=tuple(curved(list(two_kinds(200).memories), power=1.04, reserve=0.05))
    ),
}

JOBS = AFFINE | NOT_AFFINE
