"""Processes that a test started, directly or not, and how it waits for them."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 300.0
"""For what would never come where the product is broken. No test is decided by how long something took."""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie has ended, and waits for whoever adopted it


def assert_ends(pid: int) -> None:
    """The process ends by itself, whoever is its parent."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([process], [], [], DEADLINE_S)[0], f"process {pid} lives on"
    finally:
        os.close(process)


def wait_until(has_happened: Callable[[], bool]) -> None:
    """Look again and again until it has, or cannot be hoped for any more."""
    end = time.monotonic() + DEADLINE_S
    while not has_happened() and time.monotonic() < end:
        time.sleep(0.02)
