"""Printing of bytes and seconds."""

from __future__ import annotations

import pytest

from splittune.units import GIB, KIB, MIB, format_bytes, format_time


def test_units_are_binary() -> None:
    """GiB and MiB are powers of 1024, as NVML and torch count memory."""
    assert (KIB, MIB, GIB) == (2**10, 2**20, 2**30)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1610612736, "1.50 GiB"),
        (GIB, "1.00 GiB"),
        (80 * GIB, "80.00 GiB"),
        (512 * MIB, "512.0 MiB"),
        (512 * KIB, "0.5 MiB"),
        (0, "0.0 MiB"),
        (-3 * GIB / 2, "-1.50 GiB"),
        (-MIB, "-1.0 MiB"),
    ],
)
def test_bytes_are_gib_from_one_gib_up_and_mib_below(num_bytes: float, text: str) -> None:
    """Also for what is lacking, which is negative."""
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.01234, "12.3 ms"), (0.0, "0.0 ms"), (0.5, "500.0 ms"), (1.0, "1.00 s"), (12.345, "12.35 s"), (90, "90.00 s")],
)
def test_seconds_are_ms_below_one_second(seconds: float, text: str) -> None:
    """Steps take milliseconds, searches take seconds."""
    assert format_time(seconds) == text
