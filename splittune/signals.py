"""Signals held back while something must be done whole: the user's state put back, a finished trial written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_HELD = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C, and a SIGTERM for which the program has a handler of its own, take effect when the block has ended.

    Keep it short: what waits in it cannot be interrupted. Signals without a handler in Python,
    SIGTERM unless the program set one, end the process as ever. Python handles signals in its main
    thread only, so in another one nothing is held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _HELD}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in arrived[:1]:  # pressed twice, it is still one wish
            handlers[number](number, frame)
