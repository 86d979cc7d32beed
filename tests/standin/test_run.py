"""The tests on devices that stand in for cards, in a process of their own: they are registered for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standin.devices import why_not

ROOT = Path(__file__).parents[2]
DEADLINE_S = 1800.0
"""For what would never end: the build alone takes half a minute where nothing else runs."""


def test_what_is_proven_on_devices_that_stand_in_for_cards() -> None:
    """Every test marked `standin` passes, of tests/standin and of tests/gpu."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--standin",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/standin",
        "tests/gpu",
    ]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    try:
        ran = subprocess.run(
            command, cwd=ROOT, env=plain, capture_output=True, text=True, check=False, timeout=DEADLINE_S
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"{' '.join(command[1:])} did not end:\n{late.stdout}\n{late.stderr}", pytrace=False)
    if ran.returncode != 0:
        pytest.fail(f"{' '.join(command[1:])} gave {ran.returncode}:\n{ran.stdout}\n{ran.stderr}", pytrace=False)
