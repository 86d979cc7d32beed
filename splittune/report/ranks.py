"""What fills the cards of ranks, which hold the same beside their shares: parts of memory, and in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from splittune.report.memory_parts import MemoryParts
from splittune.report.words import count_of, gpus
from splittune.units import format_bytes

if TYPE_CHECKING:
    from splittune.hardware.base import Device, DeviceMemory
    from splittune.profiling.measurement import Measurement
    from splittune.search import Trial


def parts_of_ranks(
    trials: Iterable[Trial], best: Measurement, *, each_bytes: float | None = None
) -> tuple[MemoryParts, ...]:
    """The parts of every card's peak: what grows with its share, and what does not, nothing with the whole micro-batch.

    A sample costs as much on every card, for each runs the whole job: as much as the peaks of the smallest and of the
    largest share differ by, over all trials that accumulate as the best does. Where all shares are one, parts are None.

    Worked: peaks of 3 GiB with 8 samples and 5 GiB with 16 make 0.25 GiB a sample, and 1 GiB that is fixed.
    """
    each = each_sample_bytes(trials, best) if each_bytes is None else each_bytes
    return tuple(
        _parts_of(memory, None if each is None else min(round(each * share), memory.batch_peak_bytes))
        for share, memory in zip(best.split.shard_sizes, best.memory, strict=True)
    )


def each_sample_bytes(trials: Iterable[Trial], best: Measurement) -> float | None:
    """What a sample costs on every card where steps accumulate as in `best`; None where all shares are one."""
    accumulates = best.split.accumulation_steps > 1
    runs = [trial.measurement for trial in trials]
    runs = [run for run in (*runs, best) if run.memory and (run.split.accumulation_steps > 1) == accumulates]
    peaks = {
        share: memory.batch_peak_bytes
        for run in runs
        for share, memory in zip(run.split.shard_sizes, run.memory, strict=True)
    }
    small, large = min(peaks), max(peaks)
    return (peaks[large] - peaks[small]) / (large - small) if large > small else None


def why_ranks(
    best: Measurement, parts: Sequence[MemoryParts], limiting_device: int | None, cards: Sequence[Device]
) -> str:
    """The fullest card and what every card holds; then what is to be known of the all-reduce."""
    if limiting_device is None:
        return " ".join(best.notes)
    memory, fixed = best.memory[limiting_device], parts[limiting_device].fixed_bytes
    held = "" if fixed is None else f" {format_bytes(fixed)} of each card's memory do not depend on its share."
    share = count_of(best.split.shard_sizes[limiting_device], "sample")
    fullest = (
        f"The fullest card is {gpus([limiting_device])} ({cards[limiting_device].name}), with "
        f"{format_bytes(memory.headroom_bytes)} of {format_bytes(memory.total_bytes)} left at {share}.{held}"
    )
    return " ".join((fullest, *best.notes))


def _parts_of(memory: DeviceMemory, share_bytes: int | None) -> MemoryParts:
    peak, update = memory.batch_peak_bytes, memory.update_peak_bytes
    return MemoryParts(
        device=memory.device,
        outside_bytes=memory.outside_bytes,
        peak_bytes=peak,
        per_share_bytes=share_bytes,
        whole_batch_bytes=0,
        fixed_bytes=None if share_bytes is None else peak - share_bytes,
        update_peak_bytes=update if update is not None and update >= peak else None,
    )
