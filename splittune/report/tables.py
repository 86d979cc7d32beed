"""The trials as tables, for capacity planning: one row a trial, and one row a trial and device.

What each column means stands in the docstrings of `trials_table` and `devices_table`, and nowhere
else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pandas as pd

from splittune.config.files import write_atomically
from splittune.profiling.foretold import Foretold
from splittune.report.memory_parts import MemoryParts

if TYPE_CHECKING:
    from splittune.hardware.base import Device, DeviceMemory
    from splittune.profiling.measurement import Measurement


class TrialRecord(Protocol):
    """What a table needs of a trial; the search's `Trial` is one."""

    @property
    def number(self) -> int: ...

    @property
    def kind(self) -> str: ...

    @property
    def measurement(self) -> Measurement: ...

    @property
    def reason(self) -> str: ...


# pandas' nullable types: an absent integer stays an empty cell, and the column one of integers.
_TRIALS_TYPES = {
    "trial": "Int64",
    "kind": "string",
    "outcome": "string",
    "global_batch_size": "Int64",
    "accumulation_steps": "Int64",
    "micro_batch_size": "Int64",
    "gpu0_bsz": "Int64",
    "shard_sizes": "string",
    "loss_placement": "string",
    "throughput_samples_per_s": "Float64",
    "step_time_s": "Float64",
    "planned_step_time_s": "Float64",
    "micro_step_time_s": "Float64",
    "update_time_s": "Float64",
    "num_micro_steps_timed": "Int64",
    "num_updates_timed": "Int64",
    "num_whole_steps_timed": "Int64",
    "relative_error": "Float64",
    "is_noisy": "boolean",
    "is_modelled": "boolean",
    "least_headroom_bytes": "Int64",
    "least_headroom_device": "Int64",
    "num_alloc_retries": "Int64",
    "reason": "string",
    "notes": "string",
    "message": "string",
}
_DEVICES_TYPES = {
    "trial": "Int64",
    "device": "Int64",
    "device_name": "string",
    "shard_size": "Int64",
    "total_bytes": "Int64",
    "outside_bytes": "Int64",
    "peak_allocated_bytes": "Int64",
    "peak_reserved_bytes": "Int64",
    "planned_peak_allocated_bytes": "Int64",
    "planned_peak_reserved_bytes": "Int64",
    "headroom_bytes": "Int64",
    "micro_step_peak_bytes": "Int64",
    "update_peak_bytes": "Int64",
    "single_step_peak_bytes": "Int64",
    "resting_bytes": "Int64",
    "before_backward_bytes": "Int64",
    "share_bytes": "Int64",
    "whole_batch_bytes": "Int64",
    "fixed_bytes": "Int64",
    "parameter_bytes": "Int64",
    "optimizer_bytes": "Int64",
    "gradient_bytes": "Int64",
    "reserve_bytes": "Int64",
    "busy_s": "Float64",
    "copied_s": "Float64",
    "outcome": "string",
}


def trials_table(
    trials: Iterable[TrialRecord], *, is_modelled: bool | None = None, foretold: Foretold | None = None
) -> pd.DataFrame:
    """One row a trial, in the order given; what was not measured is an empty cell, never 0.

    `is_modelled` is the hardware's: True for virtual devices, None where it is not known. `foretold` is what a plan for
    real cards said of some of the splits.

    | column | unit | meaning |
    |---|---|---|
    | `trial` | | number of the trial, counted from 0 |
    | `kind` | | `search`, or `confirm`: measured again in whole steps |
    | `outcome` | | `ok`, `out_of_memory`, `no_headroom` (too little was left) or `crashed` |
    | `global_batch_size` | samples | behind one optimizer step, all devices and micro-batches |
    | `accumulation_steps` | | micro-batches in one optimizer step |
    | `micro_batch_size` | samples | of the largest micro-batch, all devices together |
    | `gpu0_bsz` | samples | device 0's part of the largest micro-batch |
    | `shard_sizes` | samples | every device's part of the largest micro-batch: `5+20+20+19` |
    | `loss_placement` | | `output`: from gathered outputs, on GPU 0; `replica`: in each replica |
    | `throughput_samples_per_s` | samples/s | global batch over step time |
    | `step_time_s` | s | median whole step, or else accumulation steps x micro-step + update |
    | `planned_step_time_s` | s | of a step, as virtual cards of the same kind have it: modelled |
    | `micro_step_time_s` | s | median forward and backward of one micro-batch; see below |
    | `update_time_s` | s | median update of the optimizer |
    | `num_micro_steps_timed` | | micro-steps timed alone; 0 where none ran |
    | `num_updates_timed` | | updates behind the median |
    | `num_whole_steps_timed` | | whole optimizer steps behind the median |
    | `relative_error` | | half the 95 % interval over the step time; empty for an exact clock |
    | `is_noisy` | | `True` where times spread by over 5 % of their median; empty without times |
    | `is_modelled` | | `True` where times come from a model of the devices, not from a clock |
    | `least_headroom_bytes` | bytes | left on the fullest device; negative where it would not fit |
    | `least_headroom_device` | | that device, counted from 0 within the job |
    | `num_alloc_retries` | | times an allocator had to free memory and try again: fits barely |
    | `reason` | | why the search tried this split |
    | `notes` | | what else happened: a trial repeated, cut short, throttled |
    | `message` | | what went wrong, if anything did; line breaks become spaces |

    A clock is read while all devices are idle, so micro-steps timed alone are longer than in
    training, which does not stop between them. A round of up to 3 micro-steps and an update is
    therefore timed without a stop as well, once for each update, and `micro_step_time_s` is an
    equal part of the median of those without the update. Worked: 3 micro-steps and an update of 4
    ms in 34 ms make 10 ms. Modelled, it is the median of micro-steps alone.
    """
    foretold = foretold or Foretold()
    return frame_of([_trial_row(trial, is_modelled, foretold) for trial in trials], _TRIALS_TYPES)


def devices_table(
    trials: Iterable[TrialRecord],
    *,
    devices: Sequence[Device] = (),
    foretold: Foretold | None = None,
    nodes: Sequence[str] = (),
    parts: Callable[[Measurement], Sequence[MemoryParts]] | None = None,
) -> pd.DataFrame:
    """One row a trial and device, in the order given; what was not measured is an empty cell.

    `devices` gives the names and is the hardware's; without it the names are empty cells. `foretold` is what a plan for
    real cards said of some of the splits, and `parts` says what the peaks of a measurement are made of. `nodes` are the
    machines of ranks, where the trials ran in those on real cards. Two columns are added then: `rank`, which had the
    device, and `node`, its machine's name.

    | column | unit | meaning |
    |---|---|---|
    | `trial` | | number of the trial, as in `trials.csv` |
    | `device` | | counted from 0 within the job: 0 is 'GPU 0' |
    | `device_name` | | name of the device |
    | `shard_size` | samples | the device's part of the largest micro-batch |
    | `total_bytes` | bytes | memory of the device |
    | `outside_bytes` | bytes | held by others: other programs, the CUDA context, libraries |
    | `peak_allocated_bytes` | bytes | most that live tensors took |
    | `peak_reserved_bytes` | bytes | most that torch's caching allocator held |
    | `planned_peak_allocated_bytes` | bytes | the same, as virtual cards of the same kind account it |
    | `planned_peak_reserved_bytes` | bytes | the same, as virtual cards of the same kind account it |
    | `headroom_bytes` | bytes | total - outside - peak reserved |
    | `micro_step_peak_bytes` | bytes | peak allocated in forward and backward alone |
    | `update_peak_bytes` | bytes | peak allocated in the optimizer's update alone |
    | `single_step_peak_bytes` | bytes | the same of a step of one micro-batch: no gradients wait |
    | `resting_bytes` | bytes | most allocated just before a forward: what no batch size changes, and the last output |
    | `before_backward_bytes` | bytes | most allocated just before a backward: the same and activations |
    | `share_bytes` | bytes | of the peak, derived: grows with the device's own share: activations |
    | `whole_batch_bytes` | bytes | derived: grows with the whole micro-batch: outputs and loss on GPU 0 |
    | `fixed_bytes` | bytes | derived: the rest of the peak in forward and backward, which no batch size changes |
    | `parameter_bytes` | bytes | of `fixed_bytes`: parameters and buffers, a size of the model |
    | `optimizer_bytes` | bytes | of `fixed_bytes`, derived: what rests there besides parameters and gradients |
    | `gradient_bytes` | bytes | of `fixed_bytes`, derived: gradients, in ranks with their buckets: at most their size |
    | `reserve_bytes` | bytes | peak reserved - peak allocated, both as read: what torch's allocator keeps besides |
    | `busy_s` | s | median time of a micro-step in which the device worked; see below |
    | `copied_s` | s | of modelled devices: median time of a micro-step in which it stood still for copies |
    | `outcome` | | the trial's outcome, as in `trials.csv` |

    What is called derived follows from how peaks grow with shares and micro-batches over all trials (`memory_parts`);
    it is empty where these do not tell, and in the tables of a search that was interrupted. The other bytes are read:
    from torch's allocator and NVML on real cards, accounted operation by operation on modelled ones.

    A real card's `busy_s` is the time from its first kernel to its last, in forward and in
    backward. The gaps between them, in which it waits for the host to launch the next, are among
    it: for a small model it may be the host's time, whatever the shard. Modelled devices have
    kernels' own times.
    """
    names, foretold = {device.index: device.name for device in devices}, foretold or Foretold()
    types = _DEVICES_TYPES | {"rank": "Int64", "node": "string"} if nodes else _DEVICES_TYPES
    rows = [
        row
        for trial in trials
        for row in _device_rows(trial, names, foretold, () if parts is None else parts(trial.measurement))
    ]
    if nodes:
        rows = [row | {"rank": row["device"], "node": nodes[row["device"]]} for row in rows]
    return frame_of(rows, types)


def save_csv(frame: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    r"""Write `frame` as CSV, whole or not at all, and return the path; missing folders are made.

    The same frame gives the same bytes anywhere: UTF-8, ``"\n"`` line ends, no index, absent cells
    empty, and floats in the fewest digits that read back equal (``0.1``, not
    ``0.10000000000000001``).

    Raises:
        ConfigError: it cannot be written there.
    """
    return write_atomically(path, csv_text(frame))


def csv_text(frame: pd.DataFrame) -> str:
    """What `save_csv` writes of `frame`."""
    text: str = frame.to_csv(index=False, lineterminator="\n", na_rep="")
    return text


def _trial_row(trial: TrialRecord, is_modelled: bool | None, foretold: Foretold) -> dict[str, Any]:
    measurement, split = trial.measurement, trial.measurement.split
    planned = foretold.of(measurement)
    fullest = min(measurement.memory, key=lambda memory: (memory.headroom_bytes, memory.device), default=None)
    return {
        "trial": trial.number,
        "kind": trial.kind,
        "outcome": measurement.outcome.value,
        "global_batch_size": split.global_batch_size,
        "accumulation_steps": split.accumulation_steps,
        "micro_batch_size": split.micro_batch_size,
        "gpu0_bsz": split.gpu0_bsz,
        "shard_sizes": "+".join(map(str, split.shard_sizes)),
        "loss_placement": measurement.loss_placement,
        "throughput_samples_per_s": measurement.throughput,
        "step_time_s": measurement.step_time_s,
        "planned_step_time_s": None if planned is None else planned.step_time_s,
        "micro_step_time_s": measurement.micro_step_time_s,
        "update_time_s": measurement.update_time_s,
        "num_micro_steps_timed": len(measurement.micro_step_times_s),
        "num_updates_timed": len(measurement.update_times_s),
        "num_whole_steps_timed": len(measurement.whole_step_times_s),
        "relative_error": measurement.relative_error,
        "is_noisy": None if measurement.step_time_s is None else measurement.is_noisy,
        "is_modelled": is_modelled,
        "least_headroom_bytes": None if fullest is None else fullest.headroom_bytes,
        "least_headroom_device": None if fullest is None else fullest.device,
        "num_alloc_retries": measurement.num_alloc_retries,
        "reason": in_one_line(trial.reason),
        "notes": in_one_line(" ".join(measurement.notes)),
        "message": in_one_line(measurement.message),
    }


def _device_rows(
    trial: TrialRecord, names: Mapping[int, str], foretold: Foretold, parts: Sequence[MemoryParts]
) -> list[dict[str, Any]]:
    measurement, planned = trial.measurement, foretold.of(trial.measurement)
    planned_of = {} if planned is None else {memory.device: memory for memory in planned.memory}
    memory_of = {memory.device: memory for memory in measurement.memory}
    parts_of = {part.device: part for part in parts}
    busy_s, copied_s = measurement.device_busy_s, measurement.device_copied_s
    return [
        {
            "trial": trial.number,
            "device": device,
            "device_name": names.get(device),
            "shard_size": shard_size,
            **_memory_cells(memory_of.get(device)),
            **_planned_cells(planned_of.get(device)),
            **_parts_cells(parts_of.get(device)),
            "busy_s": None if busy_s is None else busy_s[device],
            "copied_s": None if copied_s is None else copied_s[device],
            "outcome": measurement.outcome.value,
        }
        for device, shard_size in enumerate(measurement.split.shard_sizes)
    ]


def _memory_cells(memory: DeviceMemory | None) -> dict[str, int | None]:
    cells = (
        "total_bytes",
        "outside_bytes",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "headroom_bytes",
        "micro_step_peak_bytes",
        "update_peak_bytes",
        "single_step_peak_bytes",
        "resting_bytes",
        "before_backward_bytes",
    )
    reserve = None if memory is None else memory.peak_reserved_bytes - memory.peak_allocated_bytes
    return {cell: None if memory is None else getattr(memory, cell) for cell in cells} | {"reserve_bytes": reserve}


def _parts_cells(parts: MemoryParts | None) -> dict[str, int | None]:
    return {
        "share_bytes": None if parts is None else parts.per_share_bytes,
        "whole_batch_bytes": None if parts is None else parts.whole_batch_bytes,
        "fixed_bytes": None if parts is None else parts.fixed_bytes,
        "parameter_bytes": None if parts is None else parts.parameter_bytes,
        "optimizer_bytes": None if parts is None else parts.optimizer_bytes,
        "gradient_bytes": None if parts is None else parts.gradient_bytes,
    }


def _planned_cells(planned: DeviceMemory | None) -> dict[str, int | None]:
    return {
        "planned_peak_allocated_bytes": None if planned is None else planned.peak_allocated_bytes,
        "planned_peak_reserved_bytes": None if planned is None else planned.peak_reserved_bytes,
    }


def in_one_line(text: str) -> str:
    """Its words with single spaces between."""
    return " ".join(text.split())


def frame_of(rows: list[dict[str, Any]], types: Mapping[str, str]) -> pd.DataFrame:
    """The rows under the columns of `types`, in their order; what a row lacks is an empty cell."""
    # Objects first: read as numbers, an integer column with an absent cell would become floats.
    return pd.DataFrame(rows, columns=list(types), dtype=object).astype(dict(types))
