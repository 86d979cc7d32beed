"""Generator two: an analytic machine, with a formula for every phase of a step on every card.

What a formula says stands in its docstring; which numbers it gets is drawn over the widest range
that real jobs have. `draw` mixes them freely, so most problems have several unusual traits at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.search.cards import CARDS, Card, drawn_cards, drawn_headrooms, drawn_outside
from benchmarks.search.noise import drawn_noise
from benchmarks.search.tabled import Bytes, Floats, Machine, TabledProblem
from splittune.split import SplitSpace
from splittune.units import GIB, MIB

Curve = Literal["straight", "knee", "tiles", "saturating"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a model asks of any card. Times are those of a card of speed 1, bytes are a sample's."""

    sample_s: float
    """Of a sample in a large batch, forward and backward."""
    launch_s: float
    """Least time of a replica with any sample at all: its kernels are launched one after another."""
    curve: Curve
    knee: float
    """Samples below which the card is not full."""
    sharpness: float
    """Of the knee: 1 adds the two regimes, infinity takes the larger."""
    tile: int
    """Samples that the card computes in the time of one of them."""
    head_s: float
    """Of a sample of the whole micro-batch on GPU 0, while the others work: what belongs to its replica."""
    tail_s: float
    """Of a sample of the whole micro-batch on GPU 0, once all have finished: the loss of gathered outputs."""
    parameter_bytes: int
    optimizer_parts: float
    """Optimizer state, in multiples of the parameters."""
    update_parts: float
    """What the update holds for a moment, in multiples of the parameters."""
    sample_bytes: int
    """Activations."""
    gathered_bytes: int
    """Outputs and their gradients, of each sample of the whole micro-batch, on GPU 0."""
    freed_part: float
    """The part of activations that still lives when the last gradients are made."""
    copied_bytes: int
    """Inputs, which go to each card over its link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A workspace that an algorithm takes from one share on, on every card."""

    first_share: int
    last_share: int | None
    """None for all beyond; else another algorithm follows, which needs none."""
    num_bytes: int
    speedup: float
    """That algorithm takes this part of the time that the formula says."""


class AnalyticMachine(Machine):
    """A `Job` on cards, by formulas."""

    def __init__(
        self,
        *,
        job: Job,
        cards: tuple[Card, ...],
        space: SplitSpace,
        links_bytes_per_s: tuple[float, ...],
        outside_bytes: tuple[int, ...],
        min_headroom_bytes: tuple[int, ...],
        host_s: float,
        host_floor_s: float,
        jump: Jump | None,
        waste: float,
    ) -> None:
        self.job, self.cards, self.space = job, cards, space
        self.links_bytes_per_s = links_bytes_per_s
        self.total_bytes = tuple(card.total_bytes for card in cards)
        self.outside_bytes = outside_bytes
        self.min_headroom_bytes = min_headroom_bytes
        self.host_s = host_s
        self.host_floor_s = host_floor_s
        self.jump = jump
        self.waste = waste
        self._busy_s: dict[int, Floats] = {}
        self._reserved_bytes: dict[int, Bytes] = {}

    def busy_s(self, micro_batch_size: int) -> Floats:
        """Work by the job's curve, at least the launches, and inputs that come over the link."""
        if micro_batch_size not in self._busy_s:
            shares = np.arange(micro_batch_size + 1)
            rows = [self._replica_s(card, shares) for card in range(len(self.cards))]
            rows[0] = rows[0] + self.job.head_s / self.cards[0].speed * micro_batch_size
            self._busy_s[micro_batch_size] = np.array(rows)
        return self._busy_s[micro_batch_size]

    def _replica_s(self, card: int, shares: Bytes) -> Floats:
        job = self.job
        speed = self.cards[card].speed
        # a faster card has more cores to fill
        knee = job.knee * max(speed, 0.25)
        filled = shares.astype(np.float64)
        if job.curve == "knee":
            filled = (filled**job.sharpness + knee**job.sharpness) ** (1 / job.sharpness)
        elif job.curve == "tiles":
            filled = np.ceil(filled / job.tile) * job.tile
        elif job.curve == "saturating":
            filled = filled + knee * (1 - np.exp(-filled / knee))
        work_s = job.sample_s / speed * filled
        if self.jump is not None:
            work_s = np.where(self._jumps(shares), self.jump.speedup, 1.0) * work_s
        replica_s = np.maximum(work_s, job.launch_s)
        if card:
            replica_s = replica_s + job.copied_bytes * shares / self.links_bytes_per_s[card]
        return np.where(shares > 0, replica_s, 0.0)

    def tail_s(self, micro_batch_size: int) -> float:
        """A floor of the host, and the loss on GPU 0."""
        return self.host_floor_s + self.job.tail_s / self.cards[0].speed * micro_batch_size

    def update_s(self, num_active: int) -> float:
        """State is read and written once; parameters go out and gradients come home over the slowest link."""
        job = self.job
        moved = job.parameter_bytes * (3 + 2 * job.optimizer_parts)
        update_s = 200e-6 + moved / self.cards[0].bandwidth_bytes_per_s
        copies = np.log2(max(num_active, 1)) if job.parameter_bytes < 64 * MIB else max(num_active - 1, 0)
        return float(update_s + 2 * copies * job.parameter_bytes / min(self.links_bytes_per_s))

    def reserved_bytes(self, micro_batch_size: int) -> Bytes:
        """Allocated peaks, what fragmentation wastes of activations, up to whole segments of 2 MiB."""
        if micro_batch_size not in self._reserved_bytes:
            shares = np.arange(micro_batch_size + 1)
            rows = []
            for card in range(len(self.cards)):
                peaks = self._peaks(card, shares, micro_batch_size)
                allocated = np.maximum.reduce(list(peaks.values()))
                waste = self.waste * (allocated - peaks["resting_bytes"])
                rows.append(-(-(allocated + waste.astype(np.int64)) // (2 * MIB)) * (2 * MIB))
            self._reserved_bytes[micro_batch_size] = np.array(rows)
        return self._reserved_bytes[micro_batch_size]

    def phases(self, card: int, share: int, micro_batch_size: int) -> dict[str, int]:
        peaks = self._peaks(card, np.array([share]), micro_batch_size)
        return {name: int(values[0]) for name, values in peaks.items()}

    def _peaks(self, card: int, shares: Bytes, m: int) -> dict[str, Bytes]:
        """Of each phase, for these shares: what rests, plus the most that is alive beside it.

        Backward starts with all activations and ends with all gradients, so of the two whichever is
        more; gradients that are brought to GPU 0 stand there beside its own.
        """
        job = self.job
        num_bytes = job.parameter_bytes
        is_held = int(m < self.space.global_batch_size)
        works = (shares > 0).astype(np.int64)
        alive = saved = job.sample_bytes * shares
        left = (job.freed_part * alive).astype(np.int64)
        if self.jump is not None:
            alive = alive + np.where(self._jumps(shares), self.jump.num_bytes, 0)
        if card == 0:
            resting = int(num_bytes * (1 + job.optimizer_parts)) + 0 * shares
            held = num_bytes * is_held + 0 * shares
            gathered = job.gathered_bytes * m
            forward = resting + held + saved + gathered
            micro = np.maximum(alive + gathered, np.maximum(left + num_bytes * works, gathered // 2 + 2 * num_bytes))
            update = resting + int(num_bytes * (1 + job.update_parts))
        else:
            resting = 0 * shares
            held = 2 * num_bytes * is_held * works
            copied = (1 - is_held) * num_bytes * works
            forward = resting + held + copied + saved
            micro = copied + np.maximum(alive, left + num_bytes * works)
            update = 0 * shares  # gradients are home, and the replica is gone
        single = resting + micro + (num_bytes * works * is_held if card else 0)
        return {
            "resting_bytes": resting + held,
            "micro_step_peak_bytes": resting + held + micro,
            "single_step_peak_bytes": single,
            "update_peak_bytes": update,
            "before_backward_bytes": forward,
        }

    def _jumps(self, shares: Bytes) -> NDArray[np.bool_]:
        assert self.jump is not None
        last = self.jump.last_share
        return np.asarray((shares >= self.jump.first_share) & ((shares <= last) if last else True))


def draw(seed: int) -> TabledProblem:
    """The problem of this seed; the same seed gives the same one."""
    rng = np.random.default_rng([seed, 2])
    cards, shares, unusual = drawn_cards(rng, CARDS)
    global_batch_size = round(2 ** rng.uniform(3, 11))
    space = SplitSpace(
        global_batch_size=global_batch_size,
        num_devices=len(cards),
        shares=shares,
        min_shard_size=1 if rng.random() < 0.15 and global_batch_size >= len(cards) else 0,
    )
    outside_bytes, more = drawn_outside(rng, cards)
    unusual += more
    headrooms = drawn_headrooms(rng, cards, outside_bytes)
    free = [
        card.total_bytes - outside - headroom
        for card, outside, headroom in zip(cards, outside_bytes, headrooms, strict=True)
    ]
    job, more = _drawn_job(rng, global_batch_size, free)
    unusual += more
    links, more = _drawn_links(rng, cards)
    unusual += more
    typical = job.sample_s * global_batch_size / len(cards)
    host_s = host_floor_s = 0.0
    if rng.random() < 0.35:
        host_floor_s = float(rng.uniform(0.01, 0.2)) * typical
        unusual.append("floor of host time")
    if rng.random() < 0.3:
        host_s = float(rng.uniform(0.05, 1.0)) * max(job.launch_s, 0.05 * typical)
        unusual.append("threads share the host")
    jump = _drawn_jump(rng, global_batch_size, len(cards), min(free))
    if jump is not None:
        unusual.append("jump of memory" if jump.speedup == 1 else "jump of memory and speed")
    noise, more = drawn_noise(rng)
    unusual += more
    machine = AnalyticMachine(
        job=job,
        cards=cards,
        space=space,
        links_bytes_per_s=links,
        outside_bytes=outside_bytes,
        min_headroom_bytes=headrooms,
        host_s=host_s,
        host_floor_s=host_floor_s,
        jump=jump,
        waste=float(rng.choice([0.0, 0.02, 0.06])),
    )
    tells_busy = bool(rng.random() < 0.8)
    unusual += [] if tells_busy else ["no busy times"]
    return TabledProblem(
        seed=seed, kind=", ".join(unusual) or "plain", machine=machine, noise=noise, tells_busy=tells_busy
    )


def _drawn_job(rng: np.random.Generator, global_batch_size: int, free: list[int]) -> tuple[Job, list[str]]:
    """A job whose parameters take up to a part of the smallest card, and whose samples fill the cards at a drawn size.

    `reach` is the micro-batch at which an even split is full, in global batches: 0.05 leaves twenty
    accumulation steps, 3 fits thrice.
    """
    unusual = []
    curve: Curve = rng.choice(np.array(["straight", "knee", "tiles", "saturating"]))
    unusual += [] if curve == "straight" else [str(curve)]
    optimizer_parts = float(rng.choice([0.0, 0.25, 1.0, 2.0, rng.uniform(0, 2)]))
    update_parts = float(rng.choice([0.0, 0.1, 1.0]))
    static_parts = 2 + optimizer_parts + 1
    parameter_bytes = int(rng.beta(1.0, 2.0) * 0.9 * min(free) / static_parts)
    reach = 10 ** rng.uniform(-1.3, 0.5)
    spare = min(free) - (2 + optimizer_parts) * parameter_bytes
    share = reach * global_batch_size / len(free)
    if rng.random() < 0.8:
        share = max(share, 1.2)  # where not even one sample fits there is nothing to search
    sample_bytes = max(4096, int(spare / share))
    # the larger a model, the longer its steps: copies and update take from 1/50 of a step's work to twice as much
    copies_s = 2 * max(len(free) - 1, 1) * parameter_bytes / 15e9 + 200e-6
    sample_s = copies_s / float(10 ** rng.uniform(-1.7, 0.3)) / (global_batch_size / len(free))
    launch_s = 0.0
    if rng.random() < 0.5:
        launch_s = sample_s * float(10 ** rng.uniform(-1, 1))
    if rng.random() < 0.08:
        launch_s = sample_s * global_batch_size / len(free) * float(rng.uniform(0.3, 2))
        unusual.append("bound by launches")
    head_s = tail_s = 0.0
    gathered_bytes = 0
    if rng.random() < 0.45:
        part = float(rng.uniform(0.02, 0.4)) / len(free)
        head_s, tail_s = (part * sample_s, 0.0) if rng.random() < 0.5 else (0.0, part * sample_s)
        gathered_bytes = int(sample_bytes * rng.uniform(0, 0.3))
        unusual.append("head on GPU 0")
    if spare < parameter_bytes:
        unusual.append("parameters fill the card")
    job = Job(
        sample_s=sample_s,
        launch_s=launch_s,
        curve=curve,
        knee=float(rng.uniform(1, 8)),
        sharpness=float(rng.choice([1.5, 2, 4, 16])),
        tile=int(rng.choice([2, 4, 8])),
        head_s=head_s,
        tail_s=tail_s,
        parameter_bytes=parameter_bytes,
        optimizer_parts=optimizer_parts,
        update_parts=update_parts,
        sample_bytes=sample_bytes,
        gathered_bytes=gathered_bytes,
        freed_part=float(rng.uniform(0, 1)) if rng.random() < 0.3 else 0.0,
        copied_bytes=int(10 ** rng.uniform(2, 6.5)),
    )
    return job, unusual


def _drawn_links(rng: np.random.Generator, cards: tuple[Card, ...]) -> tuple[tuple[float, ...], list[str]]:
    """What copies reach in practice; sometimes one slot has fewer lanes."""
    links = [card.link_bytes_per_s * float(rng.uniform(0.6, 0.85)) for card in cards]
    if rng.random() < 0.15:
        links[int(rng.integers(len(cards)))] /= float(rng.choice([2, 4]))
        return tuple(links), ["a slow link"]
    return tuple(links), []


def _drawn_jump(rng: np.random.Generator, global_batch_size: int, num_cards: int, free: int) -> Jump | None:
    """An algorithm with a workspace begins somewhere below twice the even share; some are faster, as they should be."""
    if rng.random() > 0.25:
        return None
    first = int(rng.integers(2, max(3, 2 * global_batch_size // num_cards + 1)))
    return Jump(
        first_share=first,
        last_share=None if rng.random() < 0.8 else 2 * first,
        num_bytes=int(min(free * rng.uniform(0.01, 0.2), 4 * GIB)),
        speedup=1.0 if rng.random() < 0.6 else float(rng.uniform(0.8, 0.97)),
    )
