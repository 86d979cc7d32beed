"""A signal at any moment of what runs: between two lines of Python, wherever they are."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable


def count_calls(act: Callable[[], object], fire_at: int | None = None, number: int = signal.SIGINT) -> int:
    """How many calls and returns `act` makes; at one of them the signal arrives."""
    count = 0

    def profile(*_: object) -> None:
        nonlocal count
        count += 1
        if count == fire_at:
            sys.setprofile(None)
            signal.raise_signal(number)

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count
