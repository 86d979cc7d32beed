"""A rank's side of a launch: it joins the group, ends with its launcher, and is ended where a trial takes too long."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from splittune.cards import kind_of_cards
from splittune.errors import ConfigError
from splittune.runners.launch.attempts import EXIT_TOO_LONG
from splittune.runners.launch.place import Place
from splittune.runners.launch.start import store_of_start
from splittune.runners.ranks.crew import Member
from splittune.runners.ranks.orders import Answer, Order, WholeSteps
from splittune.runners.worker.main import end_with

# Seconds that ranks may arrive apart: the slowest reads its model and its data. As for a worker, a limit for what would
# never end.
ARRIVAL_S = 1800.0
# Seconds beyond a trial's limit after which a collective gives up: by then the rank that hangs was ended, and said what
# it was doing. A choice.
GRACE_S = 30.0
# Seconds until a process that holds Python's lock is ended all the same. A choice: enough for a thread to get the lock
# where others only use it much.
LOCK_GRACE_S = 3.0


@contextmanager
def joined(place: Place, *, on_cards: bool, collective_timeout_s: float) -> Iterator[None]:
    """Meanwhile this process is a rank of the default group: gloo for the CPU, and NCCL for cards where there are any.

    It ends when its launcher has, whatever it is doing. A collective in which somebody is missing gives up after
    `collective_timeout_s`.
    """
    end_with(place.launcher_pid)
    faulthandler.enable()
    backend = (
        f"cpu:gloo,{kind_of_cards()}:{dist.get_default_backend_for_device(kind_of_cards())}" if on_cards else "gloo"
    )
    timeout = timedelta(seconds=collective_timeout_s)
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        # in the launcher's own store ranks may find an ended one's address
        store = store_of_start(store, rank, world_size, timeout_s=collective_timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise ConfigError(
            f"rank {place.rank} of {place.world_size} cannot join the process group: {error}. Expected the addresses "
            "of torchrun in the environment, and every rank to be started."
        ) from error
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if sys.exc_info()[1] is None:
            dist.destroy_process_group()


@contextmanager
def at_most(limit_s: float) -> Iterator[None]:
    """Meanwhile this process is ended if it takes longer than `limit_s`, and shows what each thread is doing.

    Code that never gives back Python's lock is ended a few seconds later, by a thread that does without: it shows the
    stacks as well, but may crash where they change meanwhile.
    """
    timer = threading.Timer(limit_s, _end_of_patience)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(limit_s + LOCK_GRACE_S, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _end_of_patience() -> None:
    faulthandler.dump_traceback(all_threads=True)
    end_now(EXIT_TOO_LONG)


class Bounded:
    """A rank's part in trials, its process ended where one takes longer than `limit_s`.

    Trials in whole steps may take as many times that as they accumulate.
    """

    def __init__(self, member: Member, limit_s: float) -> None:
        self._member, self._limit_s = member, limit_s

    def obey(self, order: Order) -> Answer:
        num_limits = order.split.accumulation_steps if isinstance(order, WholeSteps) else 1
        with at_most(self._limit_s * num_limits):
            return self._member.obey(order)

    def close(self) -> None:
        self._member.close()


def end_now(code: int) -> NoReturn:
    """Leave without the interpreter's own farewell: a group that is lost may hold its threads for minutes."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
