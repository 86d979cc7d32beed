"""The shares that should fit: what is known of each device's limit, and the most even split within the limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splittune.split import SplitSpace, even_shards, spread_evenly

if TYPE_CHECKING:
    from splittune.search.attempt import Attempt

Group = tuple[int, ...]
"""Devices that share samples evenly among themselves: one device, or under ``shares="gpu0"`` all after GPU 0."""


def groups_of(space: SplitSpace) -> tuple[Group, ...]:
    """``shares="gpu0"`` on 4 devices: ``((0,), (1, 2, 3))``; ``shares="each"``: every device by itself."""
    devices = range(space.num_devices)
    if space.shares == "each" or space.num_devices == 1:
        return tuple((device,) for device in devices)
    return ((0,), tuple(devices[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest share of a device, or of each in a group, that is known to fit, and the smallest that does not.

    `fits` is one below the smallest legal share where none is known, `fails` one above the micro-batch.
    """

    fits: int
    fails: int


def limits_of(
    group: Group, attempts: Sequence[Attempt], accumulation_steps: int, micro_batch_size: int, smallest: int
) -> Limits:
    """What the attempts say about `group` at this many steps; a failure nobody can place counts for its suspects.

    What GPU 0 holds grows with the micro-batch too, and with accumulation by one copy of the gradients; what the
    others hold depends on their shards alone.
    """
    fits, fails = smallest - 1, micro_batch_size + 1
    for attempt in attempts:
        split, short = attempt.split, attempt.suspects & set(group)
        harder = split.micro_batch_size >= micro_batch_size and (
            split.accumulation_steps > 1 or accumulation_steps == 1
        )
        easier = split.micro_batch_size <= micro_batch_size and (
            split.accumulation_steps == 1 or accumulation_steps > 1
        )
        ran = attempt.measurement.throughput is not None
        if ran and not short and (harder or 0 not in group):
            fits = max([fits, *(split.shard_sizes[device] for device in group)])
        if short and (easier or 0 not in group):
            fails = min([fails, *(split.shard_sizes[device] for device in short)])
    return Limits(fits=min(fits, fails - 1), fails=fails)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareFinder:
    """Finds the most even split of a micro-batch that fits, by trying shares between `fits` and `fails`."""

    groups: tuple[Group, ...]
    limits: tuple[Limits, ...]
    guesses: tuple[int | None, ...]
    """A share of each group that fitted elsewhere: the first to try where nothing is known to fit here."""
    micro_batch_size: int
    smallest: int
    resolution: int
    """Samples within which a limit counts as found."""
    num_fitting: int
    """Splits with this many accumulation steps that fitted: each doubles the next step upwards."""

    def wanted(self) -> tuple[int, ...] | None:
        """The shards to try next, or those found; None when no shards can fit.

        A group whose even share is below its limit takes that; a limited one takes a share that is known or hoped to
        fit, and the rest falls to the others.
        """
        amounts: dict[int, int] = {}
        while len(amounts) < len(self.groups):
            shares = self._even_shares(amounts)
            limited = [i for i, share in shares.items() if share >= self.limits[i].fails]
            if not limited:
                break
            for i in limited:
                share = self._share_to_try(i)
                if share is None:
                    return None
                amounts[i] = share * len(self.groups[i])
        else:
            if not self._raise_to_fill(amounts):
                return None
        return self._shards(amounts)

    def _free(self, amounts: dict[int, int]) -> list[int]:
        return [device for i, group in enumerate(self.groups) if i not in amounts for device in group]

    def _even_shares(self, amounts: dict[int, int]) -> dict[int, int]:
        """The largest share in each group that is not yet set, were the rest spread evenly."""
        free = self._free(amounts)
        rest = self.micro_batch_size - sum(amounts.values())
        shards = dict(zip(free, even_shards(rest, len(free)), strict=True))
        return {i: max(shards[device] for device in group) for i, group in enumerate(self.groups) if i not in amounts}

    def _share_to_try(self, i: int) -> int | None:
        fits, fails = self.limits[i].fits, self.limits[i].fails
        if fails <= self.smallest:
            return None
        if fits < self.smallest:
            guess = self.guesses[i]
            if guess is not None and self.smallest <= guess < fails:
                return guess
            return (self.smallest - 1 + fails) // 2
        if fails - fits <= self.resolution:
            return fits
        step = max(self.resolution, fits // 4, 1) << max(0, self.num_fitting - 1)
        return min(fits + step, (fits + fails) // 2)

    def _raise_to_fill(self, amounts: dict[int, int]) -> bool:
        """Every group is limited: place what is missing in proportion to the room below the limits, if it suffices."""
        missing = self.micro_batch_size - sum(amounts.values())
        rooms = {i: (self.limits[i].fails - 1) * len(self.groups[i]) - amounts[i] for i in amounts}
        if missing > sum(rooms.values()):
            return False
        raised = {i: missing * room // max(1, sum(rooms.values())) for i, room in rooms.items()}
        for i in reversed(rooms):
            raised[i] += min(missing - sum(raised.values()), rooms[i] - raised[i])
        for i, amount in raised.items():
            amounts[i] += amount
        return True

    def _shards(self, amounts: dict[int, int]) -> tuple[int, ...]:
        free = self._free(amounts)
        rest = self.micro_batch_size - sum(amounts.values())
        spread = even_shards if 0 in free else spread_evenly
        shards = dict(zip(free, spread(rest, len(free)), strict=True)) if free else {}
        for i, amount in amounts.items():
            shards.update(zip(self.groups[i], spread_evenly(amount, len(self.groups[i])), strict=True))
        return tuple(shards[device] for device in sorted(shards))
