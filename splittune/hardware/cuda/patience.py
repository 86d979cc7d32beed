"""Calls into a library that may never return: neither caller nor interpreter waits for them."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")


class OutOfPatienceError(Exception):
    """A call did not return within its time, or one before it did not."""


class PatientThread:
    """A thread that makes calls in turn, for a caller who waits `time_limit_s` seconds at most.

    A call that hangs cannot be ended, only left behind: its thread stays in it, and being a daemon
    it does not keep the program from ending. From then on every call is refused at once, since a
    driver that hangs once would hang again.

    The thread starts with the first call, so that importing and making the object start nothing.
    """

    def __init__(self, time_limit_s: float) -> None:
        self.time_limit_s = time_limit_s
        self.has_given_up = False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """False before the first call and after `stop`.

        Also in a forked child, which has no threads but its first.
        """
        return self._thread is not None and self._thread.is_alive()

    def call(self, function: Callable[[], _Answer]) -> _Answer:
        """What `function` returns or raises.

        Raises:
            OutOfPatienceError: it takes longer than the limit, or an earlier call did.
        """
        if self.has_given_up:
            raise OutOfPatienceError
        if self._thread is threading.current_thread():
            return function()  # a finalizer, run by the garbage collector in the middle of a call: no one to wait for
        if not self.is_running:
            self._start()
        answer: concurrent.futures.Future[_Answer] = concurrent.futures.Future()
        self._calls.put((function, answer))
        try:
            return answer.result(self.time_limit_s)
        except concurrent.futures.TimeoutError as error:  # the built-in one only from Python 3.11 on
            if answer.done():
                raise  # the function's own
            self.has_given_up = True
            raise OutOfPatienceError from error

    def stop(self) -> None:
        """Let the thread end when its calls are done. Another call starts a new one."""
        self._calls.put(None)
        self._thread = None

    def _start(self) -> None:
        self._calls = queue.SimpleQueue()
        # it holds the queue alone: an object nobody needs any more must not live on in its thread
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name="splittune-nvml", daemon=True)
        self._thread.start()


_Call = tuple[Callable[[], Any], "concurrent.futures.Future[Any]"]


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        function, answer = call
        try:
            answer.set_result(function())
        except BaseException as error:  # noqa: BLE001  it belongs to the caller, who raises it
            answer.set_exception(error)
        del call, function, answer  # what they hold would stay until the next call
