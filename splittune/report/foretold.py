"""One sentence that holds what a plan said of the best split against what was measured."""

from __future__ import annotations

from splittune.profiling.foretold import Foretold
from splittune.profiling.measurement import Measurement
from splittune.units import format_bytes, format_time


def describe_foretold(foretold: Foretold, measured: Measurement) -> str:
    """What was foretold of a measured split, or why nothing was.

    ``"The plan for these cards foretold (modelled) 412.0 ms a step (measured 401.0 ms: +3 %) and 21.30 GiB on GPU 0
    (measured 21.90 GiB)."``: of the card that is furthest off, what torch's allocator reserves at its peak.
    """
    planned = foretold.of(measured)
    if planned is None:
        return f"No plan for these cards stands beside what was measured: {foretold.why or 'nothing was foretold'}."
    if planned.step_time_s is None:
        lacking = f": {planned.message}" if planned.message else ""
        return f"The plan for these cards foretold (modelled) that this split would not fit{lacking}."
    parts = [_time(planned.step_time_s, measured.step_time_s)]
    pairs = [(plan, real) for plan, real in zip(planned.memory, measured.memory, strict=False)]
    if pairs:
        plan, real = max(pairs, key=lambda pair: abs(pair[0].peak_reserved_bytes - pair[1].peak_reserved_bytes))
        parts.append(
            f"{format_bytes(plan.peak_reserved_bytes)} on GPU {real.device} (measured "
            f"{format_bytes(real.peak_reserved_bytes)})"
        )
    return f"The plan for these cards foretold (modelled) {' and '.join(parts)}."


def _time(planned_s: float, measured_s: float | None) -> str:
    if measured_s is None:
        return f"{format_time(planned_s)} a step"
    error = f"{100 * (planned_s / measured_s - 1):+.0f} %"
    return f"{format_time(planned_s)} a step (measured {format_time(measured_s)}: {error})"
