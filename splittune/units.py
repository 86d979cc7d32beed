"""Units for printing: inside splittune everything is bytes and seconds."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def format_bytes(num_bytes: float) -> str:
    """Bytes as people read them: GiB from 1 GiB up, else MiB (``1610612736`` gives ``'1.50 GiB'``)."""
    if abs(num_bytes) >= GIB - 0.05 * MIB:  # what would round to 1024.0 MiB
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB"


def format_time(seconds: float) -> str:
    """Seconds as people read them: ms below 1 s (``0.01234`` gives ``'12.3 ms'``)."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
