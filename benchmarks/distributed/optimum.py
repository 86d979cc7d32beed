"""How near a plan for many cards comes to the best there is: a judge that has nothing of the search.

Every card of a kind is asked for its time with 1, 2, 3 and so on samples, as far as they fit. In a time T a card does
what its curve says, so the least T in which all of them do a micro-batch is the best that any shares reach: water
filled into vessels. To that comes what no shares hide: the buckets that are left after the slowest card's backward, and
the slowest update. The best number of accumulation steps counts. Shares are real numbers here, which whole samples
rarely reach; the best of whole shares stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from splittune import Outcome, TrainingTask
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.ring import LastMicroStep, Ring, all_reduce_end_s
from splittune.options import headroom_for
from splittune.runners.modelled_ranks.kinds import CardKind, kinds_of
from splittune.runners.modelled_ranks.one_card import OneCardTrials

MAX_CARDS = 16_384
# Above this share only every 64th part is asked for: straight lines lie between. A choice.
DENSE = 256
# A card's memory is full once all of this part of its largest share so far fail: the allocator's rounding leaves gaps.
GAP_PART = 0.2
# Bisections of T: to a double's precision.
NUM_HALVINGS = 60
# Once launches have made a step so much longer than the best, more accumulation steps are not looked at. A choice.
WORSE = 1.25
# The first, the last and one between: a longer row has no other micro-steps.
KINDS_OF_ROWS = 3


@dataclass(frozen=True, kw_only=True)
class Vessel:
    """The cards of a kind: seconds of a micro-step with each of these shares that fit, in ascending order."""

    count: int
    shares: np.ndarray
    times_s: np.ndarray

    def real(self, time_s: float) -> float:
        """The most that one of them does in that time, in real numbers; below one sample a card waits for the rest."""
        return self._filled(time_s, between=True)

    def whole(self, time_s: float) -> float:
        """The same in whole samples."""
        return self._filled(time_s, between=False)

    def _filled(self, time_s: float, *, between: bool) -> float:
        done = np.flatnonzero(self.times_s <= time_s)
        if not len(done):
            return 0.0
        last = int(done[-1])
        if not between or last + 1 == len(self.shares):
            return float(self.shares[last])
        pair = slice(last, last + 2)
        return float(np.interp(time_s, self.times_s[pair], self.shares[pair]))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Cards that do a step together: what they do by themselves, and what comes once a step."""

    vessels: tuple[tuple[Vessel, ...], ...]
    """Of each kind of card in a step of 1, 2, and 3 or more micro-steps."""
    buckets: tuple[int, ...]
    ring: Ring
    first_s: float
    update_s: float

    @property
    def num_cards(self) -> int:
        return sum(vessel.count for vessel in self.vessels[0])

    def best_step_s(self, global_batch_size: int, *, whole: bool = False) -> float:
        """Seconds of the fastest step of that many samples, by any shares and any number of accumulation steps.

        Raises:
            ValueError: not even with a sample a card in each micro-step it fits.
        """
        best_s = float("inf")
        for steps in range(1, global_batch_size + 1):
            vessels = self.vessels[min(steps, KINDS_OF_ROWS) - 1]
            micro_batch_size = -(-global_batch_size // steps) if whole else global_batch_size / steps
            if sum(vessel.count * vessel.shares[-1] for vessel in vessels) < micro_batch_size:
                continue
            micro_step_s = _filled_at(vessels, micro_batch_size, Vessel.whole if whole else Vessel.real)
            step_s = self._step_s(steps, micro_step_s)
            best_s = min(best_s, step_s)
            if step_s > best_s * WORSE:
                break
        if best_s == float("inf"):
            raise ValueError(f"{global_batch_size} samples do not fit in any number of accumulation steps.")
        return best_s

    def _step_s(self, steps: int, micro_step_s: float) -> float:
        start_s = self.first_s + (steps - 1) * micro_step_s
        slowest = LastMicroStep(start_s=start_s, duration_s=micro_step_s)
        return all_reduce_end_s(self.buckets, self.ring, [slowest]) + self.update_s


def _filled_at(vessels: Sequence[Vessel], num_samples: float, level: Callable[[Vessel, float], float]) -> float:
    """The least time in which the cards do that many samples; every rank runs at least a sample that stands in."""
    low = max(float(vessel.times_s[0]) for vessel in vessels)
    high = max(low, *(float(vessel.times_s.max()) for vessel in vessels))
    if sum(vessel.count * level(vessel, low) for vessel in vessels) >= num_samples:
        return low
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        enough = sum(vessel.count * level(vessel, middle) for vessel in vessels) >= num_samples
        low, high = (low, middle) if enough else (middle, high)
    return high


def machine_of(task: TrainingTask, devices: str, *, largest: int) -> Machine:
    """These virtual cards, each kind asked for shares of up to `largest`."""
    hardware = resolve_hardware(devices, max_devices=MAX_CARDS)
    assert isinstance(hardware, VirtualHardware)
    cards = OneCardTrials(task, hardware)
    try:
        job = cards.open(hardware)
        kinds = kinds_of(hardware, headroom_for(job.cards, None))
        vessels = tuple(
            tuple(_vessel(cards, kind, steps, largest) for kind in kinds) for steps in range(1, KINDS_OF_ROWS + 1)
        )
        updates = [cards.measure(kind, 1, accumulation_steps=1).update_time_s or 0.0 for kind in kinds]
    finally:
        cards.close()
    slowest = min(gpu.link_bandwidth_bytes_per_s for gpu in hardware.gpus)
    ring = Ring(num_ranks=len(hardware.gpus), bandwidth_bytes_per_s=slowest)
    return Machine(
        vessels=vessels,
        buckets=cards.buckets,
        ring=ring,
        first_s=ring.broadcast_s(cards.buffer_bytes),
        update_s=max(updates),
    )


def _vessel(cards: OneCardTrials, kind: CardKind, steps: int, largest: int) -> Vessel:
    shares, times_s, share = [], [], 1
    while share <= largest and not (shares and share > shares[-1] * (1 + GAP_PART) + 1):
        found = cards.measure(kind, share, accumulation_steps=steps)
        if found.outcome is Outcome.OK:
            shares.append(share)
            times_s.append(found.micro_step_time_s or 0.0)
        share += max(1, share // 64) if share >= DENSE else 1
    return Vessel(count=kind.count, shares=np.array(shares), times_s=np.array(times_s))
