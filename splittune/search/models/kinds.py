"""Kinds of devices where trials do not say how long each device worked: what tells them apart is each kind alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splittune.search.choices import MOST_UNLIKE, TOLERANCE
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.groups import grouped
from splittune.search.models.step_trials import totals_of
from splittune.split import SplitSpace

# Devices that nothing tells apart are measured one by one up to this many. A choice, less than half of
# the default number of trials of a search: the rest is left for the splits themselves.
MAX_KINDS = 8
# Devices that took as long alone, up to this part, are of one kind: either may be off by `TOLERANCE`.
ALIKE = 2 * TOLERANCE
# A device whose largest share takes up to this part longer than a smaller one has told nothing of its speed: launches
# took longest. A choice, five times the tolerance of busy times that count as equal.
LEAST_GROWTH = 0.1


def separable_kinds(space: SplitSpace, trials: Sequence[JudgedTrial]) -> tuple[int, ...] | None:
    """A number for each device, the same for those that are never told apart; None before one ran.

    Where GPU 0's share alone is varied, the others are alike. Else each device is a kind of its own,
    and where there are more than `MAX_KINDS`, each size of memory.
    """
    if space.shares == "gpu0":
        return (0, *[1] * (space.num_devices - 1))
    ran = next((trial.measurement for trial in trials if trial.ran), None)
    if ran is None:
        return None
    return tuple(range(space.num_devices)) if space.num_devices <= MAX_KINDS else totals_of(ran)


def kinds_of(space: SplitSpace, trials: Sequence[JudgedTrial]) -> tuple[int, ...] | None:
    """The `separable_kinds`, and as one those that took as long when each was alone; None before a trial ran.

    They did so with a share that took longer than smaller ones did. Worked: two devices take 103 ms alone with 6
    samples each, and one sample on each takes 109: they may differ in speed.
    """
    kinds = separable_kinds(space, trials)
    if kinds is None or space.shares == "gpu0":
        return kinds
    alone = seconds_alone(kinds, trials)

    def agreement(one: int, other: int) -> int:
        """The largest share that tells, with which both took as long; 0 where they did not with any."""
        common = alone[one].keys() & alone[other].keys()
        agree = all(abs(np.log(alone[one][share] / alone[other][share])) < ALIKE for share in common)
        telling = [share for share in common if is_longer_than_smaller(share, alone[one][share], trials)]
        return max(telling, default=0) if agree else 0

    number = {kind: group[0] for group in grouped(sorted(alone), agreement) for kind in group}
    return tuple(number[kind] for kind in kinds)


def seconds_alone(kinds: Sequence[int], trials: Sequence[JudgedTrial]) -> dict[int, dict[int, float]]:
    """For each kind, by its largest share, the seconds of a micro-step in which it was alone; the latest counts."""
    alone: dict[int, dict[int, float]] = {kind: {} for kind in kinds}
    for trial in trials:
        kind, step_s = kind_alone(trial.split.shard_sizes, kinds), trial.measurement.step_time_s
        if kind is not None and step_s is not None:
            alone[kind][max(trial.split.shard_sizes)] = step_s / trial.split.accumulation_steps
    return alone


def is_longer_than_smaller(share: int, seconds: float, trials: Sequence[JudgedTrial]) -> bool:
    """Whether a micro-step of `seconds` took longer, by `LEAST_GROWTH`, than one whose largest share was smaller.

    True where none was tried that was smaller, and False of a single sample: nothing is.
    """
    smaller = [
        step_s / trial.split.accumulation_steps
        for trial in trials
        if (step_s := trial.measurement.step_time_s) is not None and max(trial.split.shard_sizes) < share
    ]
    return share > 1 and seconds > (1 + LEAST_GROWTH) * min(smaller, default=0.0)


def kind_alone(shards: Sequence[int], kinds: Sequence[int]) -> int | None:
    """The only kind with shares over `MOST_UNLIKE` times those of the others; None where there is none."""
    least = max(shards) / MOST_UNLIKE
    took_part = {kind for kind, shard in zip(kinds, shards, strict=True) if shard > least}
    return took_part.pop() if len(took_part) == 1 else None
