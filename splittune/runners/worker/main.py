"""The worker's own side: builds the job anew, then runs one trial after the other until the tuner hangs up."""

from __future__ import annotations

import ctypes
import faulthandler
import io
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from splittune.errors import ConfigError
from splittune.hardware import Device, DeviceMemory, resolve_hardware
from splittune.hardware.oom import is_sticky
from splittune.profiling.foretold import Foretold
from splittune.profiling.measurement import LossPlacement, Measurement
from splittune.profiling.profiler import Profiler
from splittune.runners.in_process import InProcessRunner
from splittune.runners.worker.errors import describe_error
from splittune.split import BatchSplit
from splittune.training.load_task import load_task, load_task_from_module

STACKS_SIGNAL = signal.SIGUSR1
"""Has the worker write what each of its threads is doing, on standard error."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PARENT_CHECKED_EVERY_S = 0.5

_is_worker = False


def is_worker() -> bool:
    """Whether this process is a worker itself."""
    return _is_worker


def main(handle: int, parent_pid: int) -> None:
    """Serve the tuner at the other end of a connection.

    It sends an order, the job and its devices, and then requests for trials, each a dict in JSON; the last may be to
    foretell some. It is answered "opened", and for each trial "began" and then "measured", "foretold" or "raised";
    "spoilt" says that this process can use its
    devices no more, and "log" may come at any time. The end of the connection is the end of the process.

    Args:
        handle: the file descriptor of this end.
        parent_pid: the tuner's process; without it this one ends at once, whatever it is doing.
    """
    global _is_worker  # noqa: PLW0603  what this process is, it is for good
    _is_worker = True
    end_with(parent_pid)
    faulthandler.enable()  # a crash in native code shows the line of Python it came from
    faulthandler.register(STACKS_SIGNAL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a line that was printed is not lost with the process
    tuner = _Tuner(Connection(handle))
    order = tuner.receive()
    if order is None:
        return
    logging.basicConfig(level=order["log_level"], handlers=[_Forward(tuner)], force=True)
    trials = _answer(tuner, lambda: _opened(order, tuner))
    if trials is None:
        return
    while (request := tuner.receive()) is not None:
        tuner.send("began")
        _answer(tuner, lambda: _served(trials, request, tuner))


class _Tuner:
    """The other end of the connection; any thread may send."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, kind: str, **content: Any) -> None:
        message = json.dumps({"kind": kind, **content}).encode()
        with self._lock:
            self._connection.send_bytes(message)

    def receive(self) -> dict[str, Any] | None:
        """The next order or request; None when the tuner has hung up."""
        try:
            message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None
        return message


class _Forward(logging.Handler):
    """Hands log records to the tuner, whose program knows where they go."""

    def __init__(self, tuner: _Tuner) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self._tuner, self._pid = tuner, os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if os.getpid() == self._pid:
            self._tuner.send("log", name=record.name, level=record.levelno, text=text)
        else:  # a data loader's worker, forked from here, must not write between our messages
            sys.stderr.write(text + "\n")


def _answer(tuner: _Tuner, act: Any) -> Any:
    """What `act` returns; None where it raised, of which the tuner is told. An exit ends the process, unanswered."""
    try:
        return act()
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  the user's own, Ctrl-C too, is raised again by the tuner
        if is_sticky(error):
            tuner.send("spoilt", text=next(iter(str(error).splitlines()), type(error).__name__))
        else:
            tuner.send("raised", error=describe_error(error))
    return None


def _opened(order: Mapping[str, Any], tuner: _Tuner) -> _Trials:
    hardware = resolve_hardware(order["devices"])
    job = order["job"]
    task = load_task(job["target"]) if "target" in job else load_task_from_module(job["module"], job["function"])
    if order["global_batch_size"] is not None:
        task = replace(task, global_batch_size=order["global_batch_size"])
    if order["autocast_dtype"] is not None:
        if task.autocast_dtype is not None:
            raise ConfigError(
                f"{order['autocast_dtype']} was asked for, and the job has autocast to {task.autocast_dtype}: expected "
                "one of them."
            )
        task = replace(task, autocast_dtype=getattr(torch, order["autocast_dtype"].removeprefix("torch.")))
    runner = InProcessRunner(task, hardware)
    tuner.send("opened", job=runner.open(order["placements"]).to_dict())
    return _Trials(runner)


def _served(trials: _Trials, request: Mapping[str, Any], tuner: _Tuner) -> None:
    """Answer a request for a trial, or for what would be foretold."""
    if "asked" in request:
        tuner.send("foretold", foretold=trials.foretell(**request).to_dict())
    else:
        tuner.send("measured", measurement=trials.run(**request).to_dict())


class _Trials:
    """Runs the trials that are asked for, with one profiler for all that have the same demands.

    A profiler compares a trial with those before: what other programs held, whether devices are
    warm, the fastest split. As the tuner's own would, it lasts as long as the worker; what it knew
    is lost where a worker ends and is replaced.
    """

    def __init__(self, runner: InProcessRunner) -> None:
        self._runner = runner
        self._profilers: dict[tuple[tuple[int, ...], LossPlacement], Profiler] = {}

    def run(
        self,
        *,
        split: Mapping[str, Any],
        in_whole_steps: bool,
        min_headroom_bytes: Sequence[int],
        loss_placement: LossPlacement,
    ) -> Measurement:
        """What `split`, a `BatchSplit` as plain data, was measured as."""
        demands = (tuple(min_headroom_bytes), loss_placement)
        if demands not in self._profilers:
            self._profilers[demands] = self._runner.profiler(
                min_headroom_bytes=min_headroom_bytes, loss_placement=loss_placement
            )
        profiler = self._profilers[demands]
        measure = profiler.measure_whole_steps if in_whole_steps else profiler.measure
        return measure(BatchSplit(**split))

    def foretell(
        self,
        *,
        devices: Sequence[Mapping[str, Any]],
        memory: Sequence[Mapping[str, Any]],
        asked: Sequence[tuple[Mapping[str, Any], LossPlacement]],
        budget_s: float,
    ) -> Foretold:
        """What virtual cards say of these splits; everything in plain data."""
        return self._runner.foretell(
            [Device(**each) for each in devices],
            [DeviceMemory(**each) for each in memory],
            [(BatchSplit(**split), placement) for split, placement in asked],
            budget_s=budget_s,
        )


def end_with(parent_pid: int) -> None:
    """Have this process killed when its parent has ended, also in mid-trial and in code that never returns."""
    is_linux = sys.platform == "linux"
    if not is_linux or ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        threading.Thread(target=_watch, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before it could be watched
        os._exit(1)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_CHECKED_EVERY_S)
    os.killpg(0, signal.SIGKILL)  # the worker has a group of its own
