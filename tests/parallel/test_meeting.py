"""Replicas wait for one another, and never for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from splittune.parallel.meeting import Meeting, PartedError, Seat
from splittune.parallel.threads import ReplicaThreads
from tests.processes import DEADLINE_S


def together(payloads: Sequence[int]) -> list[int]:
    return [sum(payloads)] * len(payloads)


@pytest.mark.parametrize("in_turn", [False, True])
def test_each_gets_its_own_of_what_all_made(in_turn: bool) -> None:
    """Payloads are in the order of the seats, whoever comes last; exchange after exchange."""
    meeting, got = Meeting(3, in_turn=in_turn), {}

    def work(index: int) -> None:
        with meeting.seats[index] as seat:
            first = seat.exchange("a", index, lambda all_of: [[*all_of, own] for own in all_of])
            got[index] = (first, seat.exchange("b", 10**index, together))

    ReplicaThreads().run({index: lambda index=index: work(index) for index in range(3)})
    assert got == {index: ([0, 1, 2, index], 111) for index in range(3)}


def test_in_turn_the_order_is_the_same_every_time() -> None:
    """One runs at a time, to the next exchange, outside its context while it waits."""
    meeting, happened = Meeting(3, in_turn=True), []

    @contextmanager
    def inside(index: int) -> Iterator[None]:
        happened.append(f"in {index}")
        yield
        happened.append(f"out {index}")

    def work(index: int) -> None:
        with meeting.seats[index].taken(lambda: inside(index)) as seat:
            seat.exchange("a", index, together)
            happened.append(f"{index}")

    ReplicaThreads().run({index: lambda index=index: work(index) for index in (2, 1, 0)})
    first = [f"{did} {index}" for index in range(3) for did in ("in", "out")]
    assert happened == first + [each for index in range(3) for each in (f"in {index}", f"{index}", f"out {index}")]


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("when", ["before", "while it combines", "after"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_who_fails_sends_all_home(failing: int, when: str, in_turn: bool) -> None:
    """Wherever the others are: all end, with its error and theirs."""
    meeting, errors = Meeting(3, in_turn=in_turn), {}

    def combine(payloads: Sequence[int]) -> list[int]:
        if when == "while it combines":
            raise KeyError("mine")
        return together(payloads)

    def run(index: int, seat: Seat) -> None:
        if (when, index) == ("before", failing):
            raise KeyError("mine")
        seat.exchange("a", index, combine)
        if index == failing:
            raise KeyError("mine")
        seat.exchange("b", index, together)

    def work(index: int) -> None:
        try:
            with meeting.seats[index] as seat:
                run(index, seat)
        except (KeyError, PartedError) as error:
            errors[index] = type(error)

    ReplicaThreads().run({index: lambda index=index: work(index) for index in range(3)})
    assert sorted(error.__name__ for error in errors.values()) == ["KeyError", "PartedError", "PartedError"]


def test_whoever_waits_for_one_that_never_began_is_sent_home() -> None:
    """Ctrl-C may come between giving out two tasks: the first then waits for the second, and must not for ever."""
    threads, meeting = ReplicaThreads(), Meeting(2, in_turn=False)
    ended = threading.Event()

    def first() -> None:
        with pytest.raises(PartedError), meeting.seats[0] as seat:
            seat.exchange("a", 0, together)
        ended.set()

    class CutShort(dict[int, object]):
        """Tasks whose second is never given out."""

        def __iter__(self) -> Iterator[int]:
            yield 0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        threads.run(CutShort({0: first, 1: first}), if_cut_short=meeting.break_up)
    assert ended.wait(DEADLINE_S)
