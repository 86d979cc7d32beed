"""A job on the CPU as every rank's real card, in which one fault happens: on one rank, at one place, in one start.

The environment says which: ``FAULT="SIGKILL, backward, 1"`` has rank 1 killed in the backward of its second trial, the
first time that the ranks are started.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from splittune import TrainingTask, TuneResult, collective
from splittune.profiling import pacing
from splittune.runners.ranks.control import ControlGroup
from splittune.runners.ranks.orders import Probe, WholeSteps
from splittune.runners.ranks.own_card import OwnRealCard
from tests.runners.ranks.host import HostHardware

JOB = "from tests.runners.launch.faulty_job import make_task\n"
"""What the file of the job says: it shares this module with whatever set the trap."""
IN_TRIAL = 2
"""The trial in which it happens: the first is finished then."""


class MineError(Exception):
    """The user's own."""


def raise_mine(*_: object) -> None:
    """The handler that a job has set for a signal, such as that of a cluster which is about to end it."""
    raise MineError("mine")


class Fault:
    """What happens, and where; it does once."""

    def __init__(self) -> None:
        what, place, rank = os.environ.get("FAULT", "none, nowhere, 0").split(", ")
        is_here = rank == os.environ["RANK"] and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        self.what, self.place = what, place if is_here else "nowhere"
        self.order: Any = None
        self.num_probes = 0

    def at(self, place: str) -> None:
        """This place is passed now."""
        if self.place == "synchronised step":
            reached = place == "backward" and isinstance(self.order, WholeSteps)
        elif place in ("writing", "file"):
            reached = place == self.place
        else:
            reached = place == self.place and isinstance(self.order, Probe) and self.num_probes == IN_TRIAL
        if reached:
            self.place = "nowhere"
            Path("fault").touch()
            happens(self.what)


def happens(what: str) -> None:
    if what == "out of memory":
        raise torch.OutOfMemoryError("CUDA out of memory. GPU 0 has a total capacity of 1 MB")
    if what == "out of host memory":
        raise MemoryError("no room for an answer")
    if what == "disk full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if what == "exception":
        raise MineError("mine")
    if what == "exception of a handler":
        signal.signal(signal.SIGUSR1, raise_mine)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0)  # Python runs the handler here at the latest
        return
    if what == "loss of the rendezvous":
        os.kill(int(os.environ["STANDIN_PID"]), signal.SIGKILL)  # it hosts the store, and launched the ranks
        return
    if what == "hang":
        ctypes.PyDLL(None).sleep(600)  # with Python's lock: no thread and no handler of its own runs
    else:
        os.kill(os.getpid(), signal.Signals[what])


FAULT: Fault
CARD: HostHardware


class Model(nn.Module):
    def __init__(self, card: HostHardware) -> None:
        super().__init__()
        self.layer, self.card = nn.Linear(16, 16), [card]

    def forward(self, x: Tensor) -> Tensor:
        self.card[0].took(len(x))
        FAULT.at("forward")
        output: Tensor = self.layer(x)
        if output.requires_grad:
            output.register_hook(lambda _: FAULT.at("backward"))
        return output


class Optimizer(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        FAULT.at("update")
        return super().step(closure)


def before(owner: type, name: str, act: Callable[..., object]) -> None:
    """Have `act` called before a method, with its arguments."""
    method = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return method(*args, **kwargs)

    setattr(owner, name, called)


def note_order(_: OwnRealCard, order: Any) -> None:
    FAULT.order = order
    FAULT.num_probes += isinstance(order, Probe)


def prepare() -> None:
    """Give this rank its card, and set the trap. Rank 1 takes twice as long for a sample."""
    global FAULT, CARD
    rank = int(os.environ["RANK"])
    Path(f"pid{rank}").write_text(str(os.getpid()))
    FAULT, CARD = Fault(), HostHardware(rank, slow_s=1e-4 * (1 + rank))
    collective.card_of_rank = lambda _: CARD  # type: ignore[assignment,return-value]
    pacing.FIRST_WARM_UP_S = pacing.WARM_UP_LIMIT_S = pacing.TRIAL_BUDGET_S = 0.0
    sys.modules["splittune.cli.tune"].GRACE_S = 1.0  # type: ignore[attr-defined]
    before(OwnRealCard, "obey", note_order)
    before(ControlGroup, "gather", lambda *_: FAULT.at("agreement"))
    before(ControlGroup, "_gathered", lambda *_: FAULT.at("agreement's collective"))
    before(TuneResult, "save", lambda *_: FAULT.at("writing"))
    before(Path, "replace", lambda *_: FAULT.at("file") if _is_saving() else None)


def _is_saving() -> bool:
    return any(frame.name == "save" for frame in traceback.extract_stack())


def make_task() -> TrainingTask:
    torch.manual_seed(0)
    model = Model(CARD)
    return TrainingTask(
        model, [(torch.randn(24, 16), torch.randn(24, 16))], optimizer=lambda own: Optimizer(own, lr=0.1)
    )
