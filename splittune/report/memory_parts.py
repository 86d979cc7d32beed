"""What a device's peak is made of, worked out from the trials."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splittune.profiling.measurement import Outcome
from splittune.search.models.growth import Growth, growth_of

if TYPE_CHECKING:
    from splittune.hardware.base import DeviceMemory
    from splittune.profiling.measurement import Measurement
    from splittune.search import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """What the peak of one device is made of at the best split, in bytes.

    ``peak_bytes == per_share_bytes + whole_batch_bytes + fixed_bytes``, and `outside_bytes` come on
    top. A part is None where the trials do not tell. `memory_parts` says how they are worked out.
    """

    device: int
    """Index within the job: 0 is 'GPU 0'."""
    outside_bytes: int
    """Held by others than this process's allocator."""
    peak_bytes: int
    """Most that live tensors took in forward and backward."""
    per_share_bytes: int | None
    """Grows with the device's own share of the micro-batch: activations."""
    whole_batch_bytes: int | None
    """Grows with the whole micro-batch: outputs gathered on GPU 0, and the loss. Elsewhere 0."""
    fixed_bytes: int | None
    """Neither: parameters, gradients, optimizer state."""
    update_peak_bytes: int | None = None
    """Peak of the optimizer's update where that is the higher one; no split changes it."""
    parameter_bytes: int | None = None
    """Of `fixed_bytes` the parameters and buffers; None where the model's size is not known."""
    optimizer_bytes: int | None = None
    """Of `fixed_bytes` what rests on the card besides: the optimizer's state."""
    gradient_bytes: int | None = None
    """Of what is left then the gradients, in ranks with their buckets: at most their size. The last rest is whatever
    else is there at the peak."""


def memory_parts(trials: Iterable[Trial], best: Measurement, *, grown: Growth | None = None) -> tuple[MemoryParts, ...]:
    """The parts of every device's peak at the split of `best`; empty where memory was not recorded.

    `growth_of` tells what a sample costs: one of a card's own share, and one of the whole
    micro-batch. It is given the trials that ran with the loss where `best` has it. `fixed_bytes` is
    what remains of the peak. Parts are clipped so that none is negative. Worked, in MiB: 2 a sample
    and 0.5 for each of the micro-batch make of a peak of 40 with 3 of 48 samples 6 for the share,
    24 for the whole micro-batch, and 10 that are fixed.

    `grown` spares working out the growth again, where many splits of the same trials are asked for.

    Limits: replicas are taken to cost the same per sample. Peaks are those of forward and backward
    where known (the update's do not grow with the batch); a trial without them counts only when no
    trial has them. With a single device its share is the micro-batch: `per_share_bytes` is both,
    and `whole_batch_bytes` 0.
    """
    runs, split_runs = _comparable(trials, best)
    grown = grown or growth_of(split_runs or runs)
    per_sample, per_whole_sample = grown.per_sample_bytes, grown.per_micro_batch_sample_bytes
    alike = next((run for run in split_runs if run.split == best.split), best)
    return tuple(
        _parts_of(
            memory,
            alike.memory[device],
            None if per_sample is None else per_sample * best.split.shard_sizes[device],
            0.0 if device else None if per_whole_sample is None else per_whole_sample * best.split.micro_batch_size,
        )
        for device, memory in enumerate(best.memory)
    )


def growth_for(trials: Iterable[Trial], best: Measurement) -> Growth:
    """What a sample costs, as `memory_parts` works it out for `best`, and for all that have the loss where it has."""
    runs, split_runs = _comparable(trials, best)
    return growth_of(split_runs or runs)


def _comparable(trials: Iterable[Trial], best: Measurement) -> tuple[list[Measurement], list[Measurement]]:
    """The runs with the loss where `best` has it, and those of them whose peaks are known phase by phase."""
    runs = [trial.measurement for trial in trials if trial.measurement.outcome in (Outcome.OK, Outcome.NO_HEADROOM)]
    runs = [run for run in (*runs, best) if run.memory and run.loss_placement == best.loss_placement]
    return runs, [run for run in runs if all(memory.micro_step_peak_bytes is not None for memory in run.memory)]


def _parts_of(memory: DeviceMemory, searched: DeviceMemory, share: float | None, whole: float | None) -> MemoryParts:
    """The parts of one peak. `searched` is a reading of the same split that may have the phases."""
    update = searched.update_peak_bytes
    is_update_bound = update is not None and update >= searched.batch_peak_bytes
    peak = searched.batch_peak_bytes if is_update_bound else memory.batch_peak_bytes
    share_bytes = None if share is None else min(round(share), peak)
    whole_bytes = None if whole is None or share_bytes is None else min(round(whole), peak - share_bytes)
    known = share_bytes is not None and whole_bytes is not None
    return MemoryParts(
        device=memory.device,
        outside_bytes=memory.outside_bytes,
        peak_bytes=peak,
        per_share_bytes=share_bytes,
        whole_batch_bytes=whole_bytes,
        fixed_bytes=peak - (share_bytes or 0) - (whole_bytes or 0) if known else None,
        update_peak_bytes=update if is_update_bound else None,
    )
