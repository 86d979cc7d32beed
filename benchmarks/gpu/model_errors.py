"""Part 5 of `benchmarks.gpu`: how well peaks and step times are foretold, model by model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.stage import Findings, Measured, Stage, mib, percent, relative
from benchmarks.jobs.gpu_models import FAMILIES, OPTIMIZERS, Family, make
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search import JudgedTrial, MemoryModel, TimeModel
from splittune.split import BatchSplit

# The smallest first, as a search goes; the last one, the whole batch at once, is what counts.
STEPS = (8, 4, 2, 1)
MIN_TIMED = 2
TRIALS_S = 12.0
# Aims, not what was seen: half of the predictions within this, and hardly any peak above the most
# that was held possible.
MEDIAN_ERROR = 0.05
HELD_PART, EXCEEDED_BY = 0.9, 0.05

Job = tuple[str, torch.dtype | None, str, bool]


def jobs(names: Sequence[str]) -> Iterator[Job]:
    """(model, autocast, optimizer, checkpointed), so ordered that the first few differ most."""
    for is_checkpointed in (False, True):
        for autocast_dtype in (None, torch.bfloat16):
            for optimizer in OPTIMIZERS:
                for name in names:
                    if not is_checkpointed or name in ("ViT", "GPT"):
                        yield name, autocast_dtype, optimizer, is_checkpointed


def run(stage: Stage, findings: Findings, *, names: Sequence[str] = tuple(FAMILIES)) -> None:
    """A row for each trial; the first of a job is foretold by none."""
    families: dict[str, Family] = {}
    every = list(jobs(names))
    for number, job in enumerate(every):
        if not stage.has_time(TRIALS_S if not stage.is_rehearsal else 0):
            findings.cut_short = f"{len(every) - number} of {len(every)} jobs, from {_title(job)} on"
            break
        if job[0] not in families:
            families[job[0]] = make(job[0], stage.sizes, stage.seed)
        rows = _job_rows(stage, findings, families[job[0]], job)
        findings.rows += rows
        if rows:
            last = rows[-1]
            stage.say(
                f"{_title(job):<34} whole batch from smaller ones: peak {percent(last['peak_error'])} (at most "
                f"{percent(last['most_error'])}), step {percent(last['time_error'])}"
            )
    _summarise(stage, findings)


def _title(job: Job) -> str:
    name, autocast_dtype, optimizer, is_checkpointed = job
    autocast = "fp32" if autocast_dtype is None else "bf16"
    return f"{name} {autocast} {optimizer}{' checkpointed' if is_checkpointed else ''}"


def _job_rows(stage: Stage, findings: Findings, family: Family, job: Job) -> list[dict[str, Any]]:
    """Trials from small to large, each but the first foretold from those before it."""
    name, autocast_dtype, optimizer, is_checkpointed = job
    task = family.task(
        optimizer=optimizer, autocast_dtype=autocast_dtype, is_checkpointed=is_checkpointed, seed=stage.seed
    )
    rows: list[dict[str, Any]] = []
    trials: list[JudgedTrial] = []
    with Measured(task, stage.hardware) as measured:
        for accumulation_steps in STEPS:
            split = measured.split(accumulation_steps)
            foretold = _foretold(trials, split)
            measurement = measured.profiler.measure(split)
            if measurement.outcome is not Outcome.OK:
                findings.check(f"{_title(job)} runs at {accumulation_steps} steps", False, measurement.message[:120])
                break
            rows.append(
                {
                    "model": name,
                    "autocast": "none" if autocast_dtype is None else "bfloat16",
                    "optimizer": optimizer,
                    "is_checkpointed": is_checkpointed,
                    "accumulation_steps": accumulation_steps,
                    "micro_batch_size": split.micro_batch_size,
                    "num_known": len(trials),
                    "is_whole_batch": accumulation_steps == STEPS[-1],
                    **_beside(measurement, foretold),
                }
            )
            trials.append(JudgedTrial(measurement=measurement))
    return rows


def _foretold(trials: Sequence[JudgedTrial], split: BatchSplit) -> dict[str, float]:
    """What the search's models say of the split, by the trials so far."""
    if not trials:
        return {}
    steps, shards = np.array([float(split.accumulation_steps)]), np.array([split.shard_sizes], dtype=float)
    needed = MemoryModel(trials, split.num_devices).needed(steps, shards)
    foretold = {
        "least_bytes": float(needed.least[0, 0]),
        "foretold_bytes": float(needed.foretold[0, 0]),
        "most_bytes": float(needed.most[0, 0]),
    }
    if len(trials) >= MIN_TIMED:
        times = TimeModel(trials).predict(steps, shards)
        foretold |= {"step_s": float(np.exp(times.log_s[0])), "deviation": float(times.deviation[0])}
    return foretold


def _beside(measurement: Measurement, foretold: dict[str, float]) -> dict[str, Any]:
    """What was foretold beside what was measured; errors are foretold over measured, less 1."""
    peak = measurement.memory[0].peak_reserved_bytes
    step_s = measurement.step_time_s
    least, likely, most = (foretold.get(f"{name}_bytes") for name in ("least", "foretold", "most"))
    return {
        "peak_reserved_mib": mib(peak),
        "peak_allocated_mib": mib(measurement.memory[0].peak_allocated_bytes),
        "resting_mib": mib(measurement.memory[0].resting_bytes),
        "least_mib": mib(least),
        "foretold_mib": mib(likely),
        "most_mib": mib(most),
        "least_error": relative(least, peak),
        "peak_error": relative(likely, peak),
        "most_error": relative(most, peak),
        "is_within": None if least is None or most is None else least <= peak <= most,
        "step_ms": None if step_s is None else 1e3 * step_s,
        "foretold_step_ms": 1e3 * foretold["step_s"] if "step_s" in foretold else None,
        "time_error": relative(foretold.get("step_s"), step_s),
        "time_deviation": foretold.get("deviation"),
        "samples_per_s": measurement.throughput,
        "is_noisy": measurement.is_noisy,
    }


def _summarise(stage: Stage, findings: Findings) -> None:
    whole = [row for row in findings.rows if row["is_whole_batch"]]
    if not whole:
        findings.check("whole batches were foretold", None, "no job came so far")
        return
    stage.table(
        [
            _summary(name, [row for row in whole if row["model"] == name])
            for name in dict.fromkeys(r["model"] for r in whole)
        ]
        + [_summary("all", whole)]
    )
    summary = _summary("all", whole)
    exceeded = [-row["most_error"] for row in whole if row["most_error"] < 0]
    held = len(exceeded) <= (1 - HELD_PART) * len(whole) and max(exceeded, default=0.0) <= EXCEEDED_BY
    for claim, passed, detail in (
        (
            "whole batches' peaks: the likely one, half of them within 5 %",
            summary["median |peak error|"] <= MEDIAN_ERROR,
            f"median {summary['median |peak error|']:.2%}, worst {summary['worst |peak error|']:.2%} of {len(whole)}",
        ),
        (
            "whole batches' peaks: at most one in ten above the most held possible, and none by over 5 %",
            held,
            f"{len(exceeded)} of {len(whole)}, by up to {max(exceeded, default=0.0):.2%}",
        ),
        (
            "whole batches' step times: half of them within 5 %",
            summary["median |time error|"] <= MEDIAN_ERROR,
            f"median {summary['median |time error|']:.2%}, worst {summary['worst |time error|']:.2%} of {len(whole)}",
        ),
    ):
        # a rehearsal's tensors are smaller than the allocator's segments, and its kernels than their launches
        findings.check(claim, None if stage.is_rehearsal else passed, detail)


def _summary(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    peaks, times = [abs(row["peak_error"]) for row in rows], [abs(row["time_error"]) for row in rows]
    return {
        "model": name,
        "jobs": len(rows),
        "median |peak error|": median(peaks),
        "worst |peak error|": max(peaks),
        "within the interval": sum(row["is_within"] for row in rows),
        "above the most": sum(row["most_error"] < 0 for row in rows),
        "median most / peak": median(1 + row["most_error"] for row in rows),
        "median |time error|": median(times),
        "worst |time error|": max(times),
    }
