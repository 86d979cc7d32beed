"""Rank 0 gives orders and takes part in them; the other ranks follow."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from splittune.errors import RanksError
from splittune.runners.ranks.control import ControlGroup
from splittune.runners.ranks.orders import Answer, End, Order
from splittune.runners.worker.errors import describe_error, rebuild_error


class Member(Protocol):
    """What a rank does of an order, with its own card; a probe has no collective in it."""

    def obey(self, order: Order) -> Answer: ...

    def close(self) -> None:
        """Leave the job as it was found."""
        ...


class Crew:
    """All ranks, as rank 0 has them."""

    def __init__(self, control: ControlGroup, member: Member) -> None:
        self._control, self._own = control, _Own(member)

    def obey(self, order: Order) -> list[Answer]:
        """What each rank answers to the order, by rank, once all have.

        An exception of the user's on some rank is raised here: the one of this rank itself, or one like it.

        Raises:
            RanksError: a rank was lost, or synchronised steps cannot be gone on with.
        """
        self._control.broadcast(order)
        answers = self._control.gather(self._own.obey(order))
        for answer in answers:
            if answer.error is not None:
                raise self._own.raised or rebuild_error(answer.error)
        lost = [f"rank {rank}, {answer.lost}" for rank, answer in enumerate(answers) if answer.lost]
        if lost:
            raise RanksError(
                f"a synchronised step could not be finished: {'; '.join(lost)}. Its group is given up. Start the ranks "
                "again: with a storage the search goes on, and leaves this split alone."
            )
        return answers

    def dismiss(self, *, result: Any = None, error: BaseException | None = None) -> None:
        """Have every rank end with this result, or this error; nothing where the ranks are lost anyway."""
        if not self._control.is_broken:
            self._control.broadcast(End(result=result, error=None if error is None else describe_error(error)))

    def close(self) -> None:
        """Leave this rank's job as it was found."""
        self._own.member.close()


def follow(control: ControlGroup, member: Member) -> Any:
    """Take part in what rank 0 orders until it ends; gives its result, and raises its error.

    What this rank itself raised in a trial is raised as it was. The job is left as it was found in any case.

    Raises:
        RanksError: a rank was lost.
    """
    own = _Own(member)
    try:
        while not isinstance(order := own.next_order(control), End):
            control.gather(own.obey(order))
    finally:
        member.close()
    if own.raised is not None:
        raise own.raised
    if order.error is not None:
        raise rebuild_error(order.error)
    return order.result


class _Own:
    """This rank's part, and what it raised in it."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.raised: BaseException | None = None

    def next_order(self, control: ControlGroup) -> Any:
        try:
            return control.broadcast()
        except RanksError:
            raise
        except BaseException as error:  # noqa: BLE001  Ctrl-C: the order has come all the same, and wants an answer
            self.raised = error
            return control.heard

    def obey(self, order: Order) -> Answer:
        if self.raised is not None:
            return Answer(error=describe_error(self.raised))
        try:
            return self.member.obey(order)
        except BaseException as error:  # noqa: BLE001  Ctrl-C too: the others must not wait for this rank
            self.raised = error
            return Answer(error=describe_error(error))


@contextmanager
def speaking(speaks: bool) -> Iterator[None]:
    """Have splittune log on one rank only, as each would say the same: nothing inside where this one does not."""
    logger = logging.getLogger("splittune")
    level = logger.level
    try:
        if not speaks:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        logger.setLevel(level)
