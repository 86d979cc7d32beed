"""What ranks tell one another on their control group."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from splittune.runners.ranks import control as control_module
from splittune.runners.ranks.control import SLOT_BYTES, ControlGroup
from splittune.runners.ranks.crew import Crew, follow
from splittune.runners.ranks.orders import Answer, Order, Probe
from tests.processes import DEADLINE_S
from tests.ranks.pool import Pool


def told(group: dist.ProcessGroup | None, lengths: list[tuple[int, int]]) -> list[Any]:
    """What a rank hears, when they say texts of these lengths: first rank 0 alone, then each."""
    control, heard = ControlGroup(wait_s=30.0), []
    for each in lengths:
        heard.append(control.broadcast("x" * each[0] if control.rank == 0 else None))
        heard.append(control.gather("x" * each[control.rank]))
    control.close()
    return heard


def test_all_hear_the_same_whatever_its_length(pool: Pool) -> None:
    """Up to a slot in one collective, beyond in two, also where only one of them has much to say."""
    full = SLOT_BYTES
    lengths = [(0, 3), (full - 40, full), (full + 1, 2), (1, 3 * full), (100 * full, full)]
    first, second = pool.run(told, lengths)
    assert first == second
    assert [len(text) for text in first[::2]] == [each[0] for each in lengths]
    assert [tuple(map(len, texts)) for texts in first[1::2]] == lengths


class Idle:
    """A member that has nothing to do."""

    def obey(self, order: Order) -> Answer:
        return Answer()

    def close(self) -> None: ...


def interrupted(group: dist.ProcessGroup | None) -> tuple[str, bool]:
    """What a rank raises when Ctrl-C is pressed on rank 1, which waits for an order; and whether the group holds."""
    control, raised = ControlGroup(wait_s=30.0), ""
    try:
        if control.rank == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            follow(control, Idle())
        else:
            time.sleep(1.0)
            crew = Crew(control, Idle())
            try:
                crew.obey(Probe(shares=(1, 1), accumulation_steps=1, in_full=(False, False)))
            except BaseException as error:
                crew.dismiss(error=error)
                raise
    except BaseException as error:  # noqa: BLE001  it is what is asked for
        raised = type(error).__name__
    control.close()
    return raised, not control.is_broken


def test_ctrl_c_on_a_rank_that_waits_ends_all(pool: Pool) -> None:
    """It takes part to the end of the trial, so nobody waits for it."""
    assert pool.run(interrupted) == [("KeyboardInterrupt", True)] * 2


def raise_mine(*_: object) -> None:
    raise LookupError("mine")


def slot_where(raises: str, control: ControlGroup) -> Any:
    """`control._slot_of`, or what raises instead: for lack of memory, or the job's own handler of a signal."""
    if raises == "MemoryError":

        def slot_of(packed: bytes, room_bytes: int) -> Any:
            raise MemoryError("no room for an answer")

        return slot_of
    signal.signal(signal.SIGUSR1, raise_mine)
    gathered = dist.all_gather

    def all_gather(slots: Any, own: Any, group: Any = None) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return gathered(slots, own, group=group)

    return all_gather


def left(group: dist.ProcessGroup | None, rank: int, raises: str) -> tuple[str, bool]:
    """What a rank raises where `rank` raises in the second trial's agreement; and whether the default group works."""
    place = (control_module, "_slot_of") if raises == "MemoryError" else (dist, "all_gather")
    control, raised = ControlGroup(wait_s=10 * DEADLINE_S), ""  # longer than the test may take
    order = Probe(shares=(1, 1), accumulation_steps=1, in_full=(False, False))
    handler = signal.getsignal(signal.SIGUSR1)

    class Setting(Idle):
        num_orders = 0

        def obey(self, order: Order) -> Answer:
            self.num_orders += 1
            if self.num_orders == 2 and control.rank == rank:
                patch.setattr(*place, slot_where(raises, control))
            return Answer()

    with pytest.MonkeyPatch.context() as patch:
        try:
            if control.rank:
                follow(control, Setting())
            else:
                crew = Crew(control, Setting())
                try:
                    for _ in range(3):
                        crew.obey(order)
                except BaseException as error:
                    crew.dismiss(error=error)
                    raise
        except Exception as error:  # noqa: BLE001  it is what is asked for
            raised, kept = type(error).__name__, error  # as a caller may keep it
            control.close()
            del kept
        signal.signal(signal.SIGUSR1, handler)
    total = torch.ones(())
    dist.all_reduce(total)
    return raised, total.item() == dist.get_world_size()


@pytest.mark.parametrize("raises", ["MemoryError", "LookupError"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_in_an_agreement_frees_the_others(pool: Pool, rank: int, raises: str) -> None:
    """At once, though it lives on: it gives the control group up, and neither waits out the time that it may."""
    found = pool.run(left, rank, raises)
    assert found[rank] == (raises, True)
    assert found[1 - rank] == ("RanksError", True)
