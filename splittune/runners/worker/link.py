"""The tuner's hold on one worker process: starting it, talking to it, seeing how it ended, ending it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from typing import IO, Any

from splittune.runners.worker.main import STACKS_SIGNAL

# Run by a fresh interpreter, as nothing of CUDA survives a fork, and with `-c`, so that no script of the user's is run
# anew: neither the command line nor a training script without a guard.
_PROGRAM = (
    "import json, sys; handle, parent_pid, path, argv = map(json.loads, sys.argv[1:]); sys.path[:] = path; "
    "sys.argv[:] = argv; from splittune.runners.worker.main import main; main(handle, parent_pid)"
)
_LOOKED_AFTER_EVERY_S = 0.1
# What Python writes on a crash below the stack that matters: hundreds of names in one line.
_CRASH_NOISE = b"Extension modules: "
# What a worker that waits may take to end by itself, its exit handlers included, and what showing its stacks may take.
_GRACE_S, _STACKS_S = 10.0, 1.0

_MEANINGS = {
    signal.SIGKILL: "likely the host's out-of-memory killer. See the kernel's log, and free memory of the host: fewer "
    "workers of the data loader, or smaller micro-batches",
    signal.SIGSEGV: "a segmentation fault, which is a bug in native code: an extension, a library or a driver",
    signal.SIGABRT: "native code gave up, and says why on standard error",
    signal.SIGBUS: "memory that is mapped but not there: often a full /dev/shm, through which a data loader's workers "
    "pass batches",
    signal.SIGFPE: "an arithmetic error in native code, such as a division of integers by 0",
    signal.SIGILL: "an instruction that this processor does not have: a library built for another one",
    signal.SIGTERM: "somebody asked it to end",
}


def words_of_ending(who: str, code: int) -> str:
    """How a process ended, by its exit code, a signal's number negative.

    Worked: -9 of the worker gives ``"the worker ended with signal 9 (SIGKILL): likely ..."``.
    """
    if code >= 0:
        return f"{who} ended with exit code {code}"
    try:
        ending = signal.Signals(-code)
    except ValueError:  # a real-time signal
        return f"{who} ended with signal {-code}"
    meaning = _MEANINGS.get(ending)
    return f"{who} ended with signal {-code} ({ending.name})" + (f": {meaning}" if meaning else "")


class WorkerEndedError(Exception):
    """A worker has ended, or is to be ended, and owes an answer; the message says how, in words that follow a colon."""


class WorkerLink:
    """One worker process: `send` it requests, `receive` what it answers; it ends with `hang_up` or `kill`.

    The process is in a session of its own, so that Ctrl-C in a terminal reaches the tuner alone,
    and the worker with all it started can be killed together. What it prints comes out where this
    process prints, by lines: above a progress bar, and in a notebook's cell.

    Args:
        folder: its working directory.
        path: its `sys.path`.
    """

    def __init__(self, folder: str, path: Sequence[str]) -> None:
        self._connection, its_end = Pipe()
        given = (its_end.fileno(), os.getpid(), list(path), sys.argv)
        try:
            self._process = subprocess.Popen(  # noqa: S603  our own program, run by the interpreter that runs us
                [sys.executable, "-c", _PROGRAM, *map(json.dumps, given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[its_end.fileno()],
                cwd=folder,
                start_new_session=True,
            )
        finally:
            its_end.close()
        self._owes_an_answer = False
        self._forwarders = [
            threading.Thread(target=_forward, args=(pipe, name), daemon=True)
            for pipe, name in ((self._process.stdout, "stdout"), (self._process.stderr, "stderr"))
        ]
        for forwarder in self._forwarders:
            forwarder.start()

    def send(self, request: dict[str, Any]) -> None:
        """Ask for something.

        Raises:
            WorkerEndedError: nobody is there.
        """
        try:
            self._connection.send_bytes(json.dumps(request).encode())
        except OSError:
            raise WorkerEndedError(self._describe_end()) from None
        self._owes_an_answer = True

    def receive(self, limit_s: float, limit_name: str, on_log: Callable[[str, int, str], None]) -> dict[str, Any]:
        """What the worker answers next; `on_log` gets logger, level and text of what it logs meanwhile.

        Raises:
            WorkerEndedError: it has ended, or not answered for `limit_s` seconds.
        """
        deadline = time.monotonic() + limit_s
        while (message := self._next_message(deadline))["kind"] == "log" and time.monotonic() < deadline:
            on_log(message["name"], message["level"], message["text"])
        if message["kind"] in ("silence", "log"):  # the latter where it logs without end
            self._show_stacks()
            raise WorkerEndedError(
                f"the worker was ended after {limit_s:g} s without an answer ({limit_name}): what it was doing stands "
                "on standard error. It hung, or needs a longer limit"
            )
        if message["kind"] != "began":
            self._owes_an_answer = False
        return message

    def _next_message(self, deadline: float) -> dict[str, Any]:
        """A message of any kind, of kind "silence" where none came in time."""
        # The end of the process is looked for besides the connection's: a child of the worker may hold that open.
        while not self._connection.poll(_LOOKED_AFTER_EVERY_S):
            if self._process.poll() is not None and not self._connection.poll():
                raise WorkerEndedError(self._describe_end())
            if time.monotonic() >= deadline:
                return {"kind": "silence"}
        try:
            message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise WorkerEndedError(self._describe_end()) from None
        return message

    def hang_up(self) -> None:
        """End the worker: one that waits for a request may do what it does at exit, one that works is killed."""
        self._connection.close()
        try:
            if not self._owes_an_answer:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE_S)
        finally:
            if self._process.poll() is None:
                self.kill()
            self._finish_output()

    def kill(self) -> None:
        """End the worker now, with all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds ends when that lets it go
            self._process.wait(_GRACE_S)
        self._connection.close()
        self._finish_output()

    def _describe_end(self) -> str:
        """How the process ended, once it has; its connection ends a moment before."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "the worker hung up without an answer and went on"
        if code >= 0:
            return f"the worker ended with exit code {code} before it had answered: the job called sys.exit, or alike"
        return words_of_ending("the worker", code)

    def _show_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            self._process.send_signal(STACKS_SIGNAL)
            self._process.wait(_STACKS_S)

    def _finish_output(self) -> None:
        """Let out what the worker had printed; not for long, as a process it started may hold its output open."""
        for forwarder in self._forwarders:
            forwarder.join(_STACKS_S)


def _forward(pipe: IO[bytes] | None, name: str) -> None:
    """Print each line at once where this process prints now; of a progress bar, what is left at its end."""
    assert pipe is not None
    with pipe:
        for line in pipe:
            if line.startswith(_CRASH_NOISE):
                continue
            text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
            stream = getattr(sys, name)
            with contextlib.suppress(OSError, ValueError):  # a closed stream: the worker is not to wait for it
                stream.write(text + "\n")
                stream.flush()
