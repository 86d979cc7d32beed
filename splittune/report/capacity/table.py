"""capacity.csv: a plan as a table, a row for each machine and batch size.

What each column means stands in the docstring of `capacity_table`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from splittune.report.tables import frame_of, in_one_line
from splittune.report.words import shares_of

if TYPE_CHECKING:
    from splittune.profiling.measurement import Measurement
    from splittune.report.capacity.row import CapacityRow
    from splittune.training.module_memory import ModuleMemory

# Between the figures of a machine's cards, in the order of the cards.
SEPARATOR = ";"

_TYPES = {
    "devices": "string",
    "strategy": "string",
    "global_batch_size": "Int64",
    "fits": "boolean",
    "is_modelled": "boolean",
    "accumulation_steps": "Int64",
    "micro_batch_size": "Int64",
    "gpu0_bsz": "Int64",
    "shard_sizes": "string",
    "throughput_samples_per_s": "Float64",
    "step_time_s": "Float64",
    "micro_step_time_s": "Float64",
    "update_time_s": "Float64",
    "speedup_over_even": "Float64",
    "even_fits": "boolean",
    "even_accumulation_steps": "Int64",
    "even_shard_sizes": "string",
    "even_throughput_samples_per_s": "Float64",
    "even_step_time_s": "Float64",
    "largest_micro_batch_size": "Int64",
    "largest_micro_batch_shards": "string",
    "largest_micro_batch_is_measured": "boolean",
    "limiting_device": "Int64",
    "limiting_device_name": "string",
    "limited_by": "string",
    "why": "string",
    "device_names": "string",
    "total_bytes": "string",
    "outside_bytes": "string",
    "peak_reserved_bytes": "string",
    "headroom_bytes": "string",
    "min_headroom_bytes": "string",
    "peak_allocated_bytes": "string",
    "share_bytes": "string",
    "whole_batch_bytes": "string",
    "fixed_bytes": "string",
    "parameter_bytes": "string",
    "optimizer_bytes": "string",
    "gradient_bytes": "string",
    "update_peak_bytes": "string",
    "outcome": "string",
    "config": "string",
    "message": "string",
}


def capacity_table(rows: Iterable[CapacityRow], *, config_names: Sequence[str | None] | None = None) -> pd.DataFrame:
    """One row for each machine and batch size, or for each split that was given, in the order given.

    All of it is modelled: memory is accounted operation by operation, times come from a model of the cards. What is not
    known is an empty cell, never 0. `config_names` are the files in which the rows' configs lie.

    Columns of a machine's cards hold a figure for each, in their order, with ``;`` between: ``1073741824;2147483648``.

    | column | unit | meaning |
    |---|---|---|
    | `devices` | | the machine, as it was named: `4xRTX3090` |
    | `strategy` | | `dp`: one process for all cards; `ddp`: a process, a rank, for each |
    | `global_batch_size` | samples | behind one optimizer step, all cards and micro-batches |
    | `fits` | | whether a split was found that fits and keeps the headroom demanded |
    | `is_modelled` | | `True`: no card was there; times are modelled, memory is accounted |
    | `accumulation_steps` | | micro-batches in one optimizer step, of the best split |
    | `micro_batch_size` | samples | of the largest micro-batch, all cards together |
    | `gpu0_bsz` | samples | card 0's part of the largest micro-batch |
    | `shard_sizes` | samples | every card's part of the largest micro-batch: `5+20+20+19`; of many `512x4+512x12` |
    | `throughput_samples_per_s` | samples/s | global batch over step time |
    | `step_time_s` | s | one optimizer step |
    | `micro_step_time_s` | s | forward and backward of one micro-batch; empty where whole steps alone were run |
    | `update_time_s` | s | the optimizer's update; likewise |
    | `speedup_over_even` | | throughput over that of the even split |
    | `even_fits` | | whether any even split fits; it is the one people use, halved until it does |
    | `even_accumulation_steps` | | the fewest accumulation steps at which the even split was found to fit |
    | `even_shard_sizes` | samples | its parts of the largest micro-batch |
    | `even_throughput_samples_per_s` | samples/s | its throughput |
    | `even_step_time_s` | s | its step time |
    | `largest_micro_batch_size` | samples | largest micro-batch that fits on this machine; see below |
    | `largest_micro_batch_shards` | samples | how it is spread over the cards |
    | `largest_micro_batch_is_measured` | | `True`: one at most 1 % larger did not fit; `False`: a lower bound |
    | `limiting_device` | | the card with the least headroom, from 0; where nothing fits the one that lacked memory |
    | `limiting_device_name` | | its name |
    | `limited_by` | | the most of what is held there; see below |
    | `why` | | the same in words |
    | `device_names` | | of each card: its name |
    | `total_bytes` | bytes | of each card: its memory |
    | `outside_bytes` | bytes | of each card: held by others, other programs and the CUDA context |
    | `peak_reserved_bytes` | bytes | of each card: the most that torch's caching allocator holds |
    | `headroom_bytes` | bytes | of each card: total - outside - peak reserved |
    | `min_headroom_bytes` | bytes | of each card: what had to stay free there |
    | `peak_allocated_bytes` | bytes | of each card: most that live tensors take in forward and backward |
    | `share_bytes` | bytes | of each card: grows with its own share of the micro-batch: activations |
    | `whole_batch_bytes` | bytes | of each card: grows with the whole micro-batch: outputs and loss on card 0 |
    | `fixed_bytes` | bytes | of each card: what no batch size changes: parameters, gradients, optimizer state |
    | `parameter_bytes` | bytes | of each card, of `fixed_bytes`: parameters and buffers, a size of the model |
    | `optimizer_bytes` | bytes | of each card, of `fixed_bytes`: what rests there besides parameters and gradients |
    | `gradient_bytes` | bytes | of each card, of `fixed_bytes`: gradients, in ranks with buckets: at most their size |
    | `update_peak_bytes` | bytes | of each card: the optimizer's update, where that is the higher peak; else empty |
    | `outcome` | | `ok`; of what does not fit `out_of_memory`, `no_headroom` or `crashed` |
    | `config` | | the file of the config to train with |
    | `message` | | what was lacking, and where; line breaks become spaces |

    `peak_allocated_bytes` is the sum of `share_bytes`, `whole_batch_bytes` and `fixed_bytes`.

    `limited_by` is `share`, `whole_batch`, `fixed`, `update` or `outside`: the largest of these parts on the limiting
    card, though memory may leave room there.

    The largest micro-batch is that of a step by itself, without accumulation, on this machine; the rows of a machine
    have it in common, whatever their batch size. It is measured on shapes, as the splits are: sizes are tried, first
    where the trials' own growth puts the limit and then between what fitted and what did not, until one fits and one
    at most 1 % larger does not. A job that runs on real tensors is not tried at such sizes: there it is the largest
    micro-batch of the trials, a lower bound. Micro-batches that are accumulated may be a little smaller, as gradients
    wait beside them.

    Rows of given splits have neither an even split nor a largest micro-batch beside them.
    """
    rows = list(rows)
    names = [None] * len(rows) if config_names is None else list(config_names)
    return frame_of([_row(row, name) for row, name in zip(rows, names, strict=True)], _TYPES)


def modules_table(modules: Iterable[ModuleMemory]) -> pd.DataFrame:
    """``modules.csv``: what each module of the planned job holds, most first, modules of a list together.

    | column | unit | meaning |
    |---|---|---|
    | `module` | | its name: `transformer.h.*.mlp` |
    | `count` | | modules of that name |
    | `parameter_bytes` | bytes | parameters and buffers of all of them |
    | `activation_bytes` | bytes | what their forward keeps of one sample for the backward; empty where not known |
    """
    rows = [
        {
            "module": each.name,
            "count": each.count,
            "parameter_bytes": each.parameter_bytes,
            "activation_bytes": each.activation_bytes,
        }
        for each in modules
    ]
    types = {"module": "string", "count": "Int64", "parameter_bytes": "Int64", "activation_bytes": "Int64"}
    return frame_of(rows, types)


def _row(row: CapacityRow, config_name: str | None) -> dict[str, Any]:
    device, largest = row.limiting_device, row.largest
    return {
        "devices": row.devices,
        "strategy": row.strategy,
        "global_batch_size": row.global_batch_size,
        "fits": row.fits,
        "is_modelled": True,
        **_split_cells(row.best),
        "speedup_over_even": row.speedup,
        **_even_cells(row),
        "largest_micro_batch_size": None if largest is None else largest.num_samples,
        "largest_micro_batch_shards": None if largest is None else shares_of(largest.split),
        "largest_micro_batch_is_measured": None if largest is None else largest.is_measured,
        "limiting_device": device,
        "limiting_device_name": None if device is None else row.cards[device].name,
        "limited_by": None if row.limited_by is None else row.limited_by.value,
        "why": in_one_line(row.why),
        **_memory_cells(row),
        "outcome": _outcome_of(row),
        "config": config_name,
        "message": in_one_line(row.message),
    }


def _split_cells(best: Measurement | None) -> dict[str, Any]:
    if best is None:
        return {}
    return {
        "accumulation_steps": best.split.accumulation_steps,
        "micro_batch_size": best.split.micro_batch_size,
        "gpu0_bsz": best.split.gpu0_bsz,
        "shard_sizes": shares_of(best.split),
        "throughput_samples_per_s": best.throughput,
        "step_time_s": best.step_time_s,
        "micro_step_time_s": best.micro_step_time_s,
        "update_time_s": best.update_time_s,
    }


def _even_cells(row: CapacityRow) -> dict[str, Any]:
    even = row.baseline
    if even is None:
        return {"even_fits": False if row.trials and not row.is_given else None}
    return {
        "even_fits": True,
        "even_accumulation_steps": even.split.accumulation_steps,
        "even_shard_sizes": shares_of(even.split),
        "even_throughput_samples_per_s": even.throughput,
        "even_step_time_s": even.step_time_s,
    }


def _memory_cells(row: CapacityRow) -> dict[str, Any]:
    """A figure for each card; what is only known of some has nothing between its separators."""
    cells = {"device_names": _joined([card.name for card in row.cards])}
    memory = row.best.memory if row.best is not None and row.ran else ()
    for name in ("total_bytes", "outside_bytes", "peak_reserved_bytes", "headroom_bytes"):
        cells[name] = _joined([getattr(each, name) for each in memory])
    cells["min_headroom_bytes"] = _joined([] if row.config is None else row.config.min_headroom_bytes)
    parts = {
        "peak_allocated_bytes": "peak_bytes",
        "share_bytes": "per_share_bytes",
        "whole_batch_bytes": "whole_batch_bytes",
        "fixed_bytes": "fixed_bytes",
        "parameter_bytes": "parameter_bytes",
        "optimizer_bytes": "optimizer_bytes",
        "gradient_bytes": "gradient_bytes",
        "update_peak_bytes": "update_peak_bytes",
    }
    for name, part in parts.items():
        cells[name] = _joined([getattr(each, part) for each in row.parts])
    return cells


def _joined(figures: Sequence[object]) -> str | None:
    """``"1;2"``; None where not one of them is known."""
    if all(figure is None for figure in figures):
        return None
    return SEPARATOR.join("" if figure is None else str(figure) for figure in figures)


def _outcome_of(row: CapacityRow) -> str | None:
    if row.best is not None:
        return row.best.outcome.value
    return row.trials[-1].measurement.outcome.value if row.trials else None
