"""Part 1 of `benchmarks.gpu`: the peaks that the profiler reports, beside what else can be read of the same trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.readings import CardSamples, Trace, Window, blocks_held, sampled, traced, watched_phases
from benchmarks.gpu.stage import Findings, Measured, Stage, mib, percent, relative
from benchmarks.jobs.gpu_models import make
from splittune.profiling.measurement import Measurement, Outcome
from splittune.units import MIB

JOBS = (
    ("GPT", {"optimizer": "AdamW"}, (4, 1)),
    ("CNN", {"optimizer": "SGD", "autocast_dtype": torch.bfloat16}, (2,)),
    ("MLP", {"optimizer": "AdamW"}, (2,)),
)
# A block from a large segment may be up to 1 MiB larger than what was asked for, and the trace tells only that: tensors
# of some MiB make that a few per cent.
BLOCKS_UP_TO, BLOCKS_DOWN_TO = 0.08, -0.005
SEGMENTS_WITHIN = 0.001
# The runtime and NVML disagree by what the driver keeps for itself; a reading every few milliseconds misses little.
CARD_WITHIN, CARD_WITHIN_BYTES = 0.02, 256 * MIB
OUTSIDE_WITHIN_BYTES = 768 * MIB
TRIAL_S = 6.0


def run(stage: Stage, findings: Findings, *, jobs: Sequence[Any] | None = None) -> None:
    """A row for each trial, and what should agree."""
    for name, options, steps in jobs or JOBS:
        if findings.cut_short:
            break
        family = make(name, stage.sizes, stage.seed)
        with Measured(family.task(**options, seed=stage.seed), stage.hardware) as job:
            job.measure(min(4, job.global_batch_size))  # loads kernels and libraries
            for accumulation_steps in steps:
                if not stage.has_time(0 if stage.is_rehearsal else TRIAL_S):
                    findings.cut_short = f"{name} at {accumulation_steps} steps and what follows"
                    break
                findings.rows.append(_row(stage, job, name, options, accumulation_steps))
                _judge(stage, findings, findings.rows[-1])
    stage.table(
        findings.rows,
        [
            "model",
            "accumulation_steps",
            "outcome",
            "peak_allocated_mib",
            "peak_allocated_error",
            "micro_step_error",
            "update_error",
            "peak_reserved_mib",
            "peak_reserved_error",
            "card_used_error",
            "outside_mib",
            "outside_error_mib",
        ],
    )


def _row(stage: Stage, job: Measured, name: str, options: dict[str, Any], accumulation_steps: int) -> dict[str, Any]:
    stage.hardware.recover()
    device = stage.torch_device
    with sampled(device) as samples, traced(device) as trace, watched_phases() as windows:
        measurement = job.measure(accumulation_steps)
    row: dict[str, Any] = {
        "model": name,
        "optimizer": options["optimizer"],
        "autocast": str(options.get("autocast_dtype", "none")).removeprefix("torch."),
        "accumulation_steps": accumulation_steps,
        "micro_batch_size": measurement.split.micro_batch_size,
        "outcome": measurement.outcome.value,
    }
    if measurement.outcome is not Outcome.OK:
        return row | {"message": measurement.message}
    return row | _beside_trace(measurement, trace, windows) | _beside_card(stage, measurement, samples)


def _beside_trace(measurement: Measurement, trace: Trace, windows: Sequence[Window]) -> dict[str, Any]:
    """The profiler's peaks and the trace's, phase by phase."""
    memory = measurement.memory[0]
    # a trial that was disturbed is run again: the second run counts
    begin = max((i for i, window in enumerate(windows) if _begins_a_trial(windows, i)), default=0)
    peaks = list(zip(windows, trace.peaks(windows), strict=True))[begin:] if trace.covers(windows) else []

    def most(figure: str, *phases: str) -> int | None:
        found = [getattr(peak, figure) for window, peak in peaks if not phases or window.phase in phases]
        return max(found, default=None)

    figures = {
        "peak_allocated": (memory.peak_allocated_bytes, most("allocated_bytes")),
        "micro_step": (memory.micro_step_peak_bytes, most("allocated_bytes", "micro_step")),
        "update": (memory.update_peak_bytes, most("allocated_bytes", "update")),
        "peak_reserved": (memory.peak_reserved_bytes, most("reserved_bytes")),
    }
    row: dict[str, Any] = {"num_trace_events": len(trace.events), "trace_problem": trace.problem}
    for figure, (ours, theirs) in figures.items():
        row |= {
            f"{figure}_mib": mib(ours),
            f"{figure}_traced_mib": mib(theirs),
            f"{figure}_error": relative(ours, theirs),
        }
    return row


def _begins_a_trial(windows: Sequence[Window], i: int) -> bool:
    """A trial begins with a warm-up, and no warm-up follows what was timed."""
    return windows[i].phase == "warm_up" and (
        i == 0 or windows[i - 1].phase in ("update", "unbroken_round", "whole_step")
    )


def _beside_card(stage: Stage, measurement: Measurement, samples: CardSamples) -> dict[str, Any]:
    """The profiler's device-wide figures beside the runtime's samples, and the snapshot's sums beside the counters."""
    memory = measurement.memory[0]
    claimed = memory.outside_bytes + memory.peak_reserved_bytes
    outside = samples.typical_outside_bytes
    blocks = blocks_held(stage.torch_device)
    row = {
        "card_used_mib": mib(claimed),
        "card_used_sampled_mib": mib(samples.most_used_bytes),
        "card_used_error": relative(claimed, samples.most_used_bytes),
        "outside_mib": mib(memory.outside_bytes),
        "outside_sampled_mib": mib(outside),
        "outside_error_mib": None if outside is None else mib(memory.outside_bytes - outside),
        "num_card_samples": len(samples.used_bytes),
    }
    if blocks is not None:
        allocated, reserved = (
            torch.cuda.memory_allocated(stage.torch_device),
            torch.cuda.memory_reserved(stage.torch_device),
        )
        row |= {
            "blocks_error_bytes": allocated - blocks[0],
            "segments_error_bytes": reserved - blocks[1],
        }
    return row


def _judge(stage: Stage, findings: Findings, row: dict[str, Any]) -> None:
    where = f"{row['model']} at {row['accumulation_steps']} steps"
    findings.check(f"{where}: the trial ran", row["outcome"] == Outcome.OK.value, row.get("message", "ok"))
    if row["outcome"] != Outcome.OK.value:
        return

    def beside(claim: str, error: float | None, low: float, high: float, unknown: str) -> None:
        passed = None if error is None else low <= error <= high
        findings.check(f"{where}: {claim}", passed, unknown if error is None else percent(error))

    for figure in ("peak_allocated", "micro_step", "update"):
        beside(
            f"{figure} peak beside the trace",
            row[f"{figure}_error"],
            BLOCKS_DOWN_TO,
            BLOCKS_UP_TO,
            row["trace_problem"],
        )
    reserved = row["peak_reserved_error"]
    beside("reserved peak beside the trace", reserved, -SEGMENTS_WITHIN, SEGMENTS_WITHIN, row["trace_problem"])
    if stage.is_rehearsal:
        return
    apart_mib = abs(row["card_used_mib"] - row["card_used_sampled_mib"]) if row["card_used_sampled_mib"] else None
    within_mib = max(mib(CARD_WITHIN_BYTES) or 0.0, CARD_WITHIN * row["card_used_mib"])
    findings.check(
        f"{where}: outside + reserved beside the card's samples",
        None if apart_mib is None else apart_mib <= within_mib + (mib(OUTSIDE_WITHIN_BYTES) or 0.0),
        "no samples" if apart_mib is None else f"{apart_mib:.0f} MiB apart of {row['card_used_mib']:.0f}",
    )
    outside_mib = row["outside_error_mib"]
    findings.check(
        f"{where}: outside beside the runtime's",
        None if outside_mib is None else abs(outside_mib) <= (mib(OUTSIDE_WITHIN_BYTES) or 0.0),
        "no samples" if outside_mib is None else f"{outside_mib:+.0f} MiB",
    )
    findings.check(
        f"{where}: the snapshot's blocks and segments add up to the counters",
        (row["blocks_error_bytes"], row["segments_error_bytes"]) == (0, 0),
        f"{row['blocks_error_bytes']} and {row['segments_error_bytes']} bytes apart",
    )
