"""Generator three: a network drawn layer by layer, its kernels timed in waves, its tensors replayed.

Nothing here is a formula of the share: time is a sum over kernels that wait for their launch, memory
is what a caching allocator reserves when every tensor of a step is taken and given back.
"""

from __future__ import annotations

import numpy as np

from benchmarks.search.cards import CARDS, Card, drawn_cards, drawn_headrooms, drawn_outside
from benchmarks.search.network import WITHOUT_LIMIT, Network, Replay, drawn_network
from benchmarks.search.noise import drawn_noise
from benchmarks.search.tabled import Bytes, Floats, Machine, TabledProblem
from splittune.split import SplitSpace

MOST_SAMPLES = {"gpu0": 256, "each": 40}
"""Of a global batch: where each card has a share of its own, every share of every card is replayed."""


class LayeredMachine(Machine):
    """A `Network` on cards."""

    def __init__(
        self,
        *,
        network: Network,
        cards: tuple[Card, ...],
        space: SplitSpace,
        links_bytes_per_s: tuple[float, ...],
        input_bytes: int,
        outside_bytes: tuple[int, ...],
        min_headroom_bytes: tuple[int, ...],
    ) -> None:
        self.network, self.cards, self.space = network, cards, space
        self.links_bytes_per_s = links_bytes_per_s
        self.total_bytes = tuple(card.total_bytes for card in cards)
        self.outside_bytes = outside_bytes
        self.min_headroom_bytes = min_headroom_bytes
        self.host_s = network.launches_s
        most = space.global_batch_size
        compute_s = {card: network.replica_s(card, most) for card in dict.fromkeys(cards)}
        copied_s = [input_bytes * np.arange(most + 1) / link for link in links_bytes_per_s]
        self._busy_s = np.array([compute_s[card] + copy_s for card, copy_s in zip(cards, copied_s, strict=True)])
        self._replays: dict[tuple[bool, int, int, int], Replay] = {}

    def busy_s(self, micro_batch_size: int) -> Floats:
        """Inputs over the link, then all kernels."""
        return self._busy_s[:, : micro_batch_size + 1]

    def tail_s(self, micro_batch_size: int) -> float:
        """Outputs come to GPU 0 over the slowest link, and the loss reads and writes them a few times."""
        gathered = self.network.output_bytes * micro_batch_size
        moves_s = 6 / self.cards[0].bandwidth_bytes_per_s + 2 / min(self.links_bytes_per_s)
        return 100e-6 + gathered * (moves_s if len(self.cards) > 1 else 0.0)

    def update_s(self, num_active: int) -> float:
        """An optimizer that moves every state, and parameters and gradients that cross the slowest link in turn."""
        num_bytes = self.network.parameter_bytes
        update_s = 150e-6 + num_bytes * (3 + 2 * self.network.state_parts) / self.cards[0].bandwidth_bytes_per_s
        return update_s + 2 * max(num_active - 1, 0) * num_bytes / min(self.links_bytes_per_s)

    def reserved_bytes(self, micro_batch_size: int) -> Bytes:
        """By replay; where even the least is more than a card has, that least."""
        least = self.least_reserved_bytes(micro_batch_size)
        free = [total - outside for total, outside in zip(self.total_bytes, self.outside_bytes, strict=True)]
        return np.array(
            [
                [num if num > free[card] else self.reserved_by(card, share, micro_batch_size) for share, num in row]
                for card, row in enumerate(map(enumerate, least.tolist()))
            ],
            dtype=np.int64,
        )

    def least_reserved_bytes(self, micro_batch_size: int) -> Bytes:
        """What is alive when backward begins."""
        shares = np.arange(micro_batch_size + 1)
        is_held = micro_batch_size < self.space.global_batch_size
        first, other = (
            self.network.least_bytes(shares, micro_batch_size, is_first=is_first, is_held=is_held)
            for is_first in (True, False)
        )
        return np.array([first, *[other] * (len(self.cards) - 1)])

    def reserved_by(self, card: int, share: int, micro_batch_size: int) -> int:
        """A full card hands free segments back before it runs out of memory, as torch's allocator does.

        Then all of it counts as reserved: such steps lose time, which is not modelled, so no best split may be one.
        """
        replay, free = self._replay(card, share, micro_batch_size), self.total_bytes[card] - self.outside_bytes[card]
        if replay.reserved_bytes > free and self._replay(card, share, micro_batch_size, free).ran:
            return free
        return replay.reserved_bytes

    def phases(self, card: int, share: int, micro_batch_size: int) -> dict[str, int]:
        return self._replay(card, share, micro_batch_size).peaks

    def _replay(self, card: int, share: int, m: int, capacity_bytes: int = WITHOUT_LIMIT) -> Replay:
        """Cards beyond the first do not see the rest of the micro-batch, nor does the first if nothing is gathered."""
        is_first, is_held = card == 0, m < self.space.global_batch_size
        depends_on = m if is_first and self.network.output_bytes else int(is_held) - 2
        key = (is_first, share, depends_on, capacity_bytes)
        if key not in self._replays:
            self._replays[key] = Replay(
                self.network, share, m, is_first=is_first, is_held=is_held, capacity_bytes=capacity_bytes
            )
        return self._replays[key]


def draw(seed: int) -> TabledProblem:
    """The problem of this seed; the same seed gives the same one."""
    rng = np.random.default_rng([seed, 3])
    cards, shares, unusual = drawn_cards(rng, CARDS)
    global_batch_size = round(8 * (MOST_SAMPLES[shares] / 8) ** rng.uniform())
    outside_bytes, more = drawn_outside(rng, cards)
    unusual += more
    headrooms = drawn_headrooms(rng, cards, outside_bytes)
    free = min(
        card.total_bytes - outside - headroom
        for card, outside, headroom in zip(cards, outside_bytes, headrooms, strict=True)
    )
    reach = 10 ** rng.uniform(-1.3, 0.15)
    share = max(reach * global_batch_size / len(cards), 1.5 if rng.random() < 0.2 else 4.0)
    parameter_bytes = 0.2 * free * rng.beta(0.8, 1.5)
    sample_bytes = (free - 3 * parameter_bytes) / share
    if rng.random() < 0.1:
        sample_bytes, parameter_bytes = sample_bytes / 300, parameter_bytes / 30
        unusual.append("bound by launches")
    network, form = drawn_network(rng, sample_bytes, parameter_bytes)
    if shares == "each" and network.output_bytes:
        network, form = network.with_own_losses(), form.replace(", outputs gathered", "")
    unusual.insert(0, form)
    # statistics of a batch norm need two samples; where a card holds fewer, nobody trains with one
    has_norms = form.startswith("convolutions") and share >= 4 and global_batch_size >= 2 * len(cards)
    space = SplitSpace(
        global_batch_size=global_batch_size,
        num_devices=len(cards),
        shares=shares,
        min_shard_size=2 if has_norms else 0,
    )
    links = [card.link_bytes_per_s * 0.75 for card in cards]
    if rng.random() < 0.15:
        links[int(rng.integers(len(cards)))] /= 4
        unusual.append("a slow link")
    noise, more = drawn_noise(rng)
    unusual += more
    machine = LayeredMachine(
        network=network,
        cards=cards,
        space=space,
        links_bytes_per_s=tuple(links),
        input_bytes=int(10 ** rng.uniform(3, 6.3)),
        outside_bytes=outside_bytes,
        min_headroom_bytes=headrooms,
    )
    tells_busy = bool(rng.random() < 0.85)
    unusual += [] if tells_busy else ["no busy times"]
    return TabledProblem(seed=seed, kind=", ".join(unusual), machine=machine, noise=noise, tells_busy=tells_busy)
