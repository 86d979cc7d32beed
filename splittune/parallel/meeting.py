"""Where the replicas of one forward wait for one another, in threads or in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

Inside = Callable[[], AbstractContextManager[Any]]
Combine = Callable[[Sequence[Any]], Sequence[Any]]


class PartedError(RuntimeError):
    """Raised in replicas that wait for one that failed: that one's own error is the one to raise."""


class Meeting:
    """A seat for every replica of one forward; at each `Seat.exchange` all wait until the last has come.

    Example: of two replicas the first calls ``exchange("bn", 1, combine)``, the second ``exchange("bn", 2, combine)``;
    one of them runs ``combine([1, 2])``, say ``[3, 3]``, and each returns with its own 3.

    With `in_turn` one replica runs at a time, in the order of the seats: each runs to the next exchange, then the next
    one does, so that what runs in what order is the same every time. Nobody waits for ever: a replica that leaves by an
    exception sends all others home with a `PartedError`, and one that leaves when others wait for it with a
    RuntimeError that says who waited for what.

    Args:
        num_seats: replicas that take part, each from a thread of its own.
        in_turn: one at a time, as a link without threads wants it.
    """

    def __init__(self, num_seats: int, *, in_turn: bool) -> None:
        self.in_turn = in_turn
        self.seats = tuple(Seat(self, index) for index in range(num_seats))
        self._changed = threading.Condition()
        self._turn = 0
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._results: dict[int, Any] = {}
        self._left: set[int] = set()
        self._error: RuntimeError | None = None

    def break_up(self, error: RuntimeError | None = None) -> None:
        """Send home all who wait or will come to wait; the first error stands."""
        with self._changed:
            if self._error is None:
                self._error = error or PartedError("another replica failed")
            self._arrived.clear()
            self._results.clear()
            self._changed.notify_all()

    def take_turn(self, index: int) -> None:
        """Return once this replica may run."""
        with self._changed:
            self._wait_until(lambda: self._is_turn_of(index))

    def exchange(self, index: int, name: str, payload: Any, combine: Combine) -> Any:
        """What `Seat.exchange` returns; the last to come combines."""
        with self._changed:
            self._check_company(index, name)
            self._arrived[index] = (name, payload)
            if len(self._arrived) == len(self.seats):
                self._results = dict(enumerate(combine([self._arrived[seat][1] for seat in sorted(self._arrived)])))
                self._arrived.clear()
            self._pass_on(index)
            self._wait_until(lambda: index in self._results and self._is_turn_of(index))
            return self._results.pop(index)

    def leave(self, index: int, *, failed: bool) -> None:
        """The replica has ended its forward."""
        with self._changed:
            self._left.add(index)
            if failed:
                self.break_up()
            elif self._arrived:
                self.break_up(self._apart(index, "ended its forward", next(iter(self._arrived.items()))))
            else:
                self._pass_on(index)

    def _check_company(self, index: int, name: str) -> None:
        """All who have come are at the same place, and nobody has gone."""
        if self._error is not None:
            raise self._error_for_one()
        other = next((each for each in self._arrived.items() if each[1][0] != name), None)
        if other is not None:
            error = self._apart(index, f"came to {name}", other)
        elif self._left:
            error = self._apart(min(self._left), "ended its forward", (index, (name, None)))
        else:
            return
        self.break_up(error)
        raise self._error_for_one()

    def _apart(self, index: int, did: str, waiting: tuple[int, tuple[str, Any]]) -> RuntimeError:
        seat, (name, _) = waiting
        return RuntimeError(
            f"active replica {index} {did} while active replica {seat} waits for it at {name}, whose statistics are "
            "of all replicas together: expected every replica to run the same BatchNorm layers in the same order. "
            "Wrap without sync_batch_norm, or have forward run the same layers whatever its samples are."
        )

    def _pass_on(self, index: int) -> None:
        seats = len(self.seats)
        following = ((index + step) % seats for step in range(1, seats + 1))
        self._turn = next((seat for seat in following if seat not in self._left), index)
        self._changed.notify_all()

    def _is_turn_of(self, index: int) -> bool:
        return not self.in_turn or self._turn == index

    def _wait_until(self, has_come: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or has_come())
        if self._error is not None:
            raise self._error_for_one()

    def _error_for_one(self) -> RuntimeError:
        """Of its own for each: a replica's name is added to its message."""
        assert self._error is not None
        return type(self._error)(*self._error.args)


class Seat:
    """One replica's place at a `Meeting`. A context once it is `taken`: the replica runs inside."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self._meeting: Meeting | None = meeting
        self._index = index
        self._inside: Inside = nullcontext
        self._context: AbstractContextManager[Any] | None = None

    def taken(self, inside: Inside) -> Seat:
        """Itself, for a replica that runs in what `inside` gives.

        In turn, that is left while the replica waits and entered again when it goes on: there it is what a virtual
        device knows its replica by, and others run meanwhile.
        """
        self._inside = inside
        return self

    def __enter__(self) -> Seat:
        self._at_meeting().take_turn(self._index)
        self._go_in()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        meeting, self._meeting = self._at_meeting(), None
        try:
            self._go_out(kind, error, traceback)
        finally:
            meeting.leave(self._index, failed=error is not None)

    @property
    def is_taken(self) -> bool:
        """Whether its replica's forward has not ended."""
        return self._meeting is not None

    def exchange(self, name: str, payload: Any, combine: Combine) -> Any:
        """This replica's part of ``combine([payload, ...])``, which is given all replicas' payloads by seat.

        Raises:
            PartedError: another replica failed.
            RuntimeError: another one came to another place, or has ended.
        """
        meeting = self._at_meeting()
        if not meeting.in_turn:
            return meeting.exchange(self._index, name, payload, combine)
        self._go_out()
        result = meeting.exchange(self._index, name, payload, combine)
        self._go_in()
        return result

    def _at_meeting(self) -> Meeting:
        if self._meeting is None:
            raise RuntimeError("the meeting of this replica's forward is over.")
        return self._meeting

    def _go_in(self) -> None:
        context = self._inside()
        context.__enter__()
        self._context = context

    def _go_out(self, *raised: Any) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(*(raised or (None, None, None)))
