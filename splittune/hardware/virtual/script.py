"""From a few taped trials to any other: which events they share, and how the amounts follow from the shards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import combinations, count
from typing import Any, NamedTuple

from splittune.hardware.virtual.allocator import Block
from splittune.hardware.virtual.catalog import MAX_DEVICES
from splittune.hardware.virtual.ledger import Ledger
from splittune.hardware.virtual.roofline import Work
from splittune.hardware.virtual.tape import Event, Kind, Tape

NUM_TAPES = 2
"""So many make a line. Whether it holds elsewhere is seen where a trial is run in full (`runners/replay.py`)."""
# No shard of a tape is smaller: of 1 sample, some operations take another way than of several. A choice.
_SMALLEST_SHARD = 3
# Sizes of layers seldom have a prime factor above this one. A choice.
_LARGE_PRIME = 100


class Amount(NamedTuple):
    """``constant + each * variable``; the variables are the shards, and behind them their sum."""

    constant: int
    each: int = 0
    variable: int = 0


class Cue(NamedTuple):
    """An `Event` for any shards."""

    kind: Kind
    where: tuple[Any, ...]
    """As in `Event`; an allocation and a hop have their own ordinal behind their devices."""
    amounts: tuple[Any, ...]
    """An `Amount` for each that is a number of its own kind, others as they are."""


class NotAffineError(Exception):
    """Taped trials differ by more than amounts that grow in proportion; the message says where."""


class Script:
    """The events of a trial, part by part, for any shards of the devices that took part in the tapes.

    What a step does to a device seldom depends on how many samples it has: the same operations run on larger tensors,
    and bytes and FLOPs are ``a + b x`` of one shard, or of the whole micro-batch. Two tapes show which (`_Lines`).

    Worked: activations of 12,288 bytes under a shard of 3 samples, and of 425,984 under one of 104, are ``0 + 4096 s``.

    Args:
        tapes: `NUM_TAPES` of them, of one job.
        shard_sizes: of each tape; such as `shards_to_tape` gives.

    Raises:
        NotAffineError: the events differ, or an amount follows no line.
    """

    def __init__(self, tapes: Sequence[Tape], shard_sizes: Sequence[Sequence[int]]) -> None:
        self._lines = _Lines(shard_sizes)
        num_parts = {len(tape.parts) for tape in tapes}
        if len(num_parts) > 1:
            raise NotAffineError(f"trials have {' or '.join(map(str, sorted(num_parts)))} parts")
        self._ordinals = {"allocate": count(), "hop": count()}
        self.parts = [self._common(parts) for parts in zip(*(tape.parts for tape in tapes), strict=True)]
        del self._ordinals

    def _common(self, parts: Sequence[Sequence[Event]]) -> list[Cue]:
        lengths = {len(part) for part in parts}
        if len(lengths) > 1:
            raise NotAffineError(f"a part of the step has {' or '.join(map(str, sorted(lengths)))} events")
        return [self._cue(events) for events in zip(*parts, strict=True)]

    def _cue(self, events: Sequence[Event]) -> Cue:
        kind, where, _ = events[0]
        if any(event.kind != kind or event.where != where for event in events):
            said = " or ".join(sorted({f"{event.kind} at {event.where}" for event in events}))
            raise NotAffineError(f"at the same place stands {said}")
        amounts = tuple(self._amount(kind, values) for values in zip(*(event.amounts for event in events), strict=True))
        ordinal = (next(self._ordinals[kind]),) if kind in self._ordinals else ()
        return Cue(kind, where + ordinal, amounts)

    def _amount(self, kind: Kind, values: Sequence[Any]) -> Any:
        if type(values[0]) is int:
            line = self._lines.through(values)
        elif all(value == values[0] for value in values):
            return values[0]
        else:
            line = None
        if line is not None:
            return line
        if (
            kind == "launch"
        ):  # how an operation counts may turn over with its size; how long it takes then errs a little
            return values[-1]
        raise NotAffineError(f"amounts of {kind} are {', '.join(map(str, values))}, which is no line")


class Player:
    """Plays a script's parts on a ledger's devices, for one set of shards.

    Args:
        script: what happens.
        ledger: where; it raises `torch.OutOfMemoryError` where the script does not fit.
        shard_sizes: above 0, of the devices that took part.
    """

    def __init__(self, script: Script, ledger: Ledger, shard_sizes: Sequence[int]) -> None:
        self._script, self._ledger = script, ledger
        self._variables = (*shard_sizes, sum(shard_sizes))
        self._blocks: dict[int, Block | None] = {}
        """By ordinal, as long as they are not free."""
        self._marks_s: dict[int, float] = {}
        self._works: dict[tuple[Any, ...], Work] = {}
        self._replicas: dict[int, AbstractContextManager[None]] = {}

    def play(self, part: int) -> None:
        """One part of the script.

        Raises:
            torch.OutOfMemoryError: a device's capacity does not allow it.
        """
        ledger, timeline = self._ledger, self._ledger.timeline
        for kind, where, amounts in self._script.parts[part]:
            if kind == "launch":
                ledger.launch(where[0], self._work(amounts))
            elif kind == "allocate":
                self._blocks[where[1]] = ledger.allocate(where[0], self._value(amounts[0]))
            elif kind == "free":
                block = self._blocks.pop(where[1])
                if block is not None:
                    ledger.free(where[0], block)
            elif kind == "transfer":
                timeline.transfer(where[0], where[1], self._value(amounts[0]))
            elif kind == "hop":
                self._marks_s[where[2]] = timeline.hop(where[0], where[1], self._value(amounts[0]))
            elif kind == "collective":
                timeline.collective(where, self._value(amounts[0]))
            elif kind == "wait_until":
                timeline.wait_until(where[0], self._marks_s[where[1]])
            elif kind == "wait_for":
                timeline.wait_for(where[0])
            elif kind == "enter":
                self._replicas[where[0]] = entered = timeline.replica(*where)
                entered.__enter__()
            else:
                self._replicas.pop(where[0]).__exit__(None, None, None)

    def _value(self, amount: Amount) -> int:
        constant, each, variable = amount
        return constant + each * self._variables[variable]

    def _work(self, amounts: tuple[Any, ...]) -> Work:
        work = self._works.get(amounts)
        if work is None:
            fields = (self._value(each) if isinstance(each, Amount) else each for each in amounts)
            work = Work._make(fields)
            self._works[amounts] = work
        return work


class _Lines:
    """Lines through the values that two tapes have at one place, by the variable that they follow.

    The variables differ by distinct large primes, their sum too by what has one (`shards_to_tape`). So what grows by a
    whole number with one of them does not with another, for that number is made of sizes of layers. Nor can anything be
    less than nothing for no samples: what grows faster than in proportion, as their square, would be.

    Worked: with shards that differ by 101 and 113, 413,696 bytes more are 4,096 for each sample of the first; for each
    of the second they would be 3,661.03. Values of 9 and 10,816 under 3 and 104, the square, would begin at -312.
    """

    def __init__(self, shard_sizes: Sequence[Sequence[int]]) -> None:
        sums = [sum(shards) for shards in shard_sizes]
        self._variables = [*zip(*shard_sizes, strict=True), tuple(sums)]
        self._known: dict[tuple[int, ...], Amount | None] = {}

    def through(self, values: Sequence[int]) -> Amount | None:
        """The line on which both values lie; None where they lie on none."""
        key = tuple(values)
        if key not in self._known:
            self._known[key] = self._line(*key)
        return self._known[key]

    def _line(self, first: int, second: int) -> Amount | None:
        if first == second:
            return Amount(first)
        for index, (before, after) in enumerate(self._variables):
            each, rest = divmod(second - first, after - before)
            if not rest and each * before <= first:
                return Amount(first - each * before, each, index)
        return None


def shards_to_tape(num_devices: int) -> list[tuple[int, ...]]:
    """Shards of `NUM_TAPES` trials that tell apart what follows which device's shard, and what their sum.

    Worked: two devices have (3, 3) and (104, 116): the shards differ by the primes 101 and 113, their sum by 2 x 107.
    """
    primes = [number for number in range(_LARGE_PRIME, 12 * MAX_DEVICES) if _largest_factor(number) == number]
    moves = next(
        found
        for found in combinations(primes, num_devices)
        if num_devices == 1 or (_largest_factor(sum(found)) > _LARGE_PRIME and _largest_factor(sum(found)) not in found)
    )
    return [(_SMALLEST_SHARD,) * num_devices, tuple(_SMALLEST_SHARD + move for move in moves)]


def _largest_factor(number: int) -> int:
    """The largest prime that divides `number`, which is above 1."""
    factor = 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            number //= factor
    return number
