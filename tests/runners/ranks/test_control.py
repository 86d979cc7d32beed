"""What ranks tell one another on their control group."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch.distributed as dist

from splittune.runners.ranks.control import SLOT_BYTES, ControlGroup
from splittune.runners.ranks.crew import Crew, follow
from splittune.runners.ranks.orders import Answer, Order, Probe
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
