"""From taped trials to any other: which events they share, and how the amounts follow from the shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import combinations, count
from typing import Any, NamedTuple

from splittune.hardware.virtual.allocator import Block
from splittune.hardware.virtual.catalog import MAX_DEVICES
from splittune.hardware.virtual.ledger import Ledger
from splittune.hardware.virtual.roofline import Work
from splittune.hardware.virtual.tape import Event, Kind, Tape

# No shard of a tape is smaller: of 1 sample, some operations take another way than of several. A choice.
_SMALLEST_SHARD = 3
# Sizes of layers seldom have a prime factor above this one. A choice.
_LARGE_PRIME = 100


class Amount(NamedTuple):
    """``constant + each * variable``; the variables are the shards, and behind them their sum."""

    constant: int
    each: int = 0
    variable: int = 0

    def at(self, variables: Sequence[int]) -> int:
        return self.constant + self.each * variables[self.variable] if self.each else self.constant


class Cue(NamedTuple):
    """An `Event` for any shards."""

    kind: Kind
    where: tuple[Any, ...]
    """As in `Event`; an allocation and a hop have their own ordinal behind their devices."""
    amounts: tuple[Any, ...]
    """An `Amount` for each that is a number, others as they are."""


class NotAffineError(Exception):
    """Taped trials differ by more than amounts that grow in proportion; the message says where."""


class Lines:
    """How amounts follow from the shards, as two tapes show it, one of which may be the beginning of the other.

    What a step does to a device seldom depends on how many samples it has: the same operations run on larger tensors,
    and bytes and FLOPs are ``a + b x`` of one shard, or of the whole micro-batch. The shards of the tapes differ by
    distinct large primes, their sums by what has one too (`shards_to_tape`). So what grows by a whole number with one
    of them does not with another, for that number is made of sizes of layers. Nor can anything be less than nothing for
    no samples: what grows faster than in proportion, as their square, would be. Whether the lines hold elsewhere is
    seen where a trial is run in full (`runners/replay.py`).

    Worked: with first shards of 3 and 104, 12,288 and 425,984 bytes are ``0 + 4096 s``. Values of 9 and 10,816, the
    squares, would begin at -312.

    Args:
        tapes: of one job, both with a shard on every device.
        shard_sizes: of each tape.

    Raises:
        NotAffineError: the events differ, or an amount follows no line.
    """

    def __init__(self, tapes: Sequence[Tape], shard_sizes: Sequence[Sequence[int]]) -> None:
        self._variables = list(zip(*map(_variables, shard_sizes), strict=True))
        self._between: dict[tuple[int, int], Amount | None] = {}
        self._found: dict[tuple[Kind, tuple[Any, ...], tuple[Any, ...]], None] = {}
        # the part behind the last cut is empty
        for first, second in zip(*(tape.parts[:-1] for tape in tapes), strict=False):
            if len(first) != len(second):
                raise NotAffineError(f"a part of the step has {len(first)} or {len(second)} events")
            for one, other in zip(first, second, strict=True):
                self._learn(one, other)

    def at(self, shard_sizes: Sequence[int]) -> dict[tuple[Kind, tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]]:
        """For events as they are with these shards, how their amounts follow from any."""
        variables = _variables(shard_sizes)
        known: dict[tuple[Kind, tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]] = {}
        for kind, where, amounts in self._found:
            here = tuple(each.at(variables) if isinstance(each, Amount) else each for each in amounts)
            known.setdefault((kind, where, here), amounts)
        return known

    def _learn(self, one: Event, other: Event) -> None:
        if (one.kind, one.where) != (other.kind, other.where):
            said = f"{one.kind} at {one.where} or {other.kind} at {other.where}"
            raise NotAffineError(f"at the same place stands {said}")
        if one.amounts:
            amounts = tuple(self._amount(one.kind, *values) for values in zip(one.amounts, other.amounts, strict=True))
            self._found[one.kind, one.where, amounts] = None

    def _amount(self, kind: Kind, one: Any, other: Any) -> Any:
        if type(one) is not int and one == other:
            return one
        line = self._line(one, other) if type(one) is int else None
        if line is not None:
            return line
        if kind == "launch":  # what a kernel counts as may turn with its size: its time errs, and nothing else
            return other
        raise NotAffineError(f"amounts of {kind} are {one} and {other}, which is no line")

    def _line(self, one: int, other: int) -> Amount | None:
        key = one, other
        if key not in self._between:
            self._between[key] = self._line_between(*key)
        return self._between[key]

    def _line_between(self, one: int, other: int) -> Amount | None:
        if one == other:
            return Amount(one)
        for index, (before, after) in enumerate(self._variables):
            each, rest = divmod(other - one, after - before)
            if not rest and each * before <= one:
                return Amount(one - each * before, each, index)
        return None


class Script:
    """The events of a trial, part by part, for any shards of the devices that have one on its tape.

    An amount that the lines do not know is taken to be the same for any shards: gradients that accumulate, say, of
    which tapes of a single accumulation step have none.

    Args:
        tape: the trial.
        shard_sizes: of the tape; large ones, as `shards_to_tape` gives last, of which few are like another amount.
        lines: of the same job.
    """

    def __init__(self, tape: Tape, shard_sizes: Sequence[int], lines: Lines) -> None:
        known = lines.at(shard_sizes)
        ordinals = {"allocate": count(), "hop": count()}
        self.parts: list[list[Cue]] = []
        for part in tape.parts[:-1]:
            cues = []
            for kind, where, amounts in part:
                ordinal = (next(ordinals[kind]),) if kind in ordinals else ()
                found = known.get((kind, where, tuple(amounts))) if amounts else ()
                if found is None:
                    found = tuple(Amount(each) if type(each) is int else each for each in amounts)
                cues.append(Cue(kind, where + ordinal, found))
            self.parts.append(cues)


def _variables(shard_sizes: Sequence[int]) -> tuple[int, ...]:
    return (*shard_sizes, sum(shard_sizes))


class Player:
    """Plays a script's parts on a ledger's devices, for one set of shards.

    Args:
        script: what happens.
        ledger: where; it raises `torch.OutOfMemoryError` where the script does not fit.
        shard_sizes: above 0 for the devices that have a shard on its tape.
    """

    def __init__(self, script: Script, ledger: Ledger, shard_sizes: Sequence[int]) -> None:
        self._script, self._ledger = script, ledger
        self._variables = _variables(shard_sizes)
        self._blocks: dict[int, Block | None] = {}
        """By ordinal, as long as they are not free."""
        self._marks_s: dict[int, float] = {}
        self._works: dict[tuple[Any, ...], Work] = {}
        self._replicas: dict[int, AbstractContextManager[None]] = {}

    def play(self, part: int, before_backward: Callable[[], object]) -> None:
        """One part of the script, `before_backward` called where a forward ended.

        Raises:
            torch.OutOfMemoryError: a device's capacity does not allow it.
        """
        ledger, timeline = self._ledger, self._ledger.timeline
        for kind, where, amounts in self._script.parts[part]:
            if kind == "launch":
                ledger.launch(where[0], self._work(amounts))
            elif kind == "allocate":
                self._blocks[where[1]] = ledger.allocate(where[0], amounts[0].at(self._variables))
            elif kind == "free":
                block = self._blocks.pop(where[1])
                if block is not None:
                    ledger.free(where[0], block)
            elif kind == "transfer":
                timeline.transfer(where[0], where[1], amounts[0].at(self._variables))
            elif kind == "hop":
                self._marks_s[where[2]] = timeline.hop(where[0], where[1], amounts[0].at(self._variables))
            elif kind == "collective":
                timeline.collective(where, amounts[0].at(self._variables))
            elif kind == "wait_until":
                timeline.wait_until(where[0], self._marks_s[where[1]])
            elif kind == "wait_for":
                timeline.wait_for(where[0])
            elif kind == "before_backward":
                before_backward()
            elif kind == "enter":
                self._replicas[where[0]] = entered = timeline.replica(*where)
                entered.__enter__()
            else:
                self._replicas.pop(where[0]).__exit__(None, None, None)

    def _work(self, amounts: tuple[Any, ...]) -> Work:
        work = self._works.get(amounts)
        if work is None:
            fields = (each.at(self._variables) if isinstance(each, Amount) else each for each in amounts)
            work = Work._make(fields)
            self._works[amounts] = work
        return work


def shards_to_tape(num_devices: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shards of two trials that tell apart what follows which device's shard, and what their sum.

    Worked: two devices have (3, 3) and (104, 116): the shards differ by the primes 101 and 113, their sum by 2 x 107.
    """
    primes = [number for number in range(_LARGE_PRIME, 12 * MAX_DEVICES) if _largest_factor(number) == number]
    moves = next(
        found
        for found in combinations(primes, num_devices)
        if num_devices == 1 or (_largest_factor(sum(found)) > _LARGE_PRIME and _largest_factor(sum(found)) not in found)
    )
    return (_SMALLEST_SHARD,) * num_devices, tuple(_SMALLEST_SHARD + move for move in moves)


def _largest_factor(number: int) -> int:
    """The largest prime that divides `number`, which is above 1."""
    factor = 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            number //= factor
    return number
