"""Part 2 of `benchmarks.gpu`: within any limit of memory the emitted split fits, and a faster one does not."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.readings import sampled
from benchmarks.gpu.stage import Findings, Measured, Stage, demand_of, in_brief, mib, tuned, useful_splits
from benchmarks.jobs.gpu_models import tuned_job
from splittune.errors import NoFeasibleSplitError
from splittune.hardware import Hardware
from splittune.profiling.measurement import Measurement, Outcome
from splittune.split import BatchSplit
from splittune.training import TrainingTask
from splittune.units import format_bytes

NUM_LIMITS, NUM_REHEARSED = 4, 2
# Limits are drawn, one from each of so many equal parts of the range from the smallest
# micro-batch's peak (0) to the whole batch's (1), in logarithms: it is the tight ones that decide.
# Where peaks are some tens of MiB, as in a rehearsal, the allocator's segments of 20 MiB make steps
# of them that no model of sizes foresees: there only the upper part tells.
LOWEST, LOWEST_REHEARSED, HIGHEST = 0.08, 0.75, 1.05
# Two measurements of the same split differ by this much: what is no more than so much faster is not called faster.
NOISE = 0.02
SEARCH_S = 25.0


def run(stage: Stage, findings: Findings, *, num_limits: int | None = None) -> None:
    """A row for each limit."""
    if not stage.can_tell_limits():
        findings.check(
            "limits can be placed", None, f"torch {torch.__version__} does not tell the cap that it was given"
        )
        return
    make_task = tuned_job(stage.sizes, stage.seed)
    every = measure_every(stage.hardware, make_task())
    if not every:
        findings.check("every split was measured without a limit", False, "the job did not run")
        return
    stage.say("every micro-batch size at its fewest steps, without a limit:")
    stage.table(
        [
            {
                "accumulation_steps": split.accumulation_steps,
                "micro_batch_size": split.micro_batch_size,
                "outcome": m.outcome.value,
                "samples_per_s": m.throughput,
                "peak_reserved_mib": mib(m.memory[0].peak_reserved_bytes) if m.memory else None,
            }
            for split, m in every.items()
        ]
    )
    rooms = _rooms(stage, every, num_limits or (NUM_REHEARSED if stage.is_rehearsal else NUM_LIMITS))
    for number, room_bytes in enumerate(rooms, start=1):
        if not stage.has_time(SEARCH_S if not stage.is_rehearsal else 0):
            findings.cut_short = f"the limits from number {number} of {len(rooms)} on"
            break
        findings.rows.append(_under(stage, make_task(), every, room_bytes))
        _judge(findings, findings.rows[-1])
    stage.table(
        findings.rows,
        [
            "room_mib",
            "emitted_steps",
            "emitted_micro_batch_size",
            "fits",
            "headroom_mib",
            "least_free_mib",
            "next_steps",
            "next_outcome",
            "num_trials",
            "num_ooms",
            "num_ooms_by_torch",
            "search_s",
            "regret",
        ],
    )


def measure_every(hardware: Hardware, task: TrainingTask) -> dict[BatchSplit, Measurement]:
    """Each useful split, smallest first; the ones that lack memory are left out."""
    with Measured(task, hardware) as job:
        found = {split: job.profiler.measure(split) for split in reversed(useful_splits(job.global_batch_size))}
    return {split: m for split, m in found.items() if m.outcome is Outcome.OK}


def _rooms(stage: Stage, every: Mapping[BatchSplit, Measurement], num_limits: int) -> list[int]:
    """Limits drawn at random, tightest first."""
    peaks = [measurement.memory[0].peak_reserved_bytes for measurement in every.values()]
    draw, lowest = random.Random(stage.seed), LOWEST_REHEARSED if stage.is_rehearsal else LOWEST
    parts = [lowest + (HIGHEST - lowest) * (i + draw.random()) / num_limits for i in range(num_limits)]
    return [int(min(peaks) * (max(peaks) / min(peaks)) ** part) for part in parts]


def _under(
    stage: Stage, task: TrainingTask, every: Mapping[BatchSplit, Measurement], room_bytes: int
) -> dict[str, Any]:
    """The search under one limit, what it emits trained anew, and the next faster split tried."""
    row: dict[str, Any] = {"room_mib": mib(room_bytes), "emitted_steps": None}
    with stage.limited_to(room_bytes) as hardware:
        demand = demand_of(hardware)
        ooms_before, began_s = stage.num_ooms(), time.monotonic()
        try:
            result = tuned(task, hardware, min_headroom_bytes=demand, seed=stage.seed)
        except NoFeasibleSplitError as error:
            smallest = min(m.memory[0].peak_reserved_bytes for m in every.values())
            return row | {
                "message": str(error),
                "demand_mib": mib(demand),
                "could_fit": smallest <= room_bytes - demand,
            }
        ooms_after = stage.num_ooms()
        emitted = result.config.split
        row |= {
            "demand_mib": mib(demand),
            "search_s": time.monotonic() - began_s,
            "num_trials": sum(trial.kind == "search" for trial in result.trials),
            "num_ooms": sum(trial.measurement.outcome is Outcome.OUT_OF_MEMORY for trial in result.trials),
            "num_no_headroom": sum(trial.measurement.outcome is Outcome.NO_HEADROOM for trial in result.trials),
            "num_ooms_by_torch": None if ooms_before is None or ooms_after is None else ooms_after - ooms_before,
            "stopped": result.stopped,
            "emitted_steps": emitted.accumulation_steps,
            "emitted_micro_batch_size": emitted.micro_batch_size,
            "emitted_samples_per_s": result.best.throughput,
        }
        with Measured(task, hardware, min_headroom_bytes=demand) as job:
            with sampled(stage.torch_device) as samples:
                again = job.profiler.measure_whole_steps(emitted)
            row |= {
                "fits": again.outcome is Outcome.OK,
                "fits_message": again.message,
                "headroom_mib": mib(again.memory[0].headroom_bytes) if again.memory else None,
                "least_free_mib": mib(samples.least_free_bytes),
            }
            row |= _next_of(every, again, job)
    return row | {"in_brief": in_brief(result.trials)}


def _next_of(every: Mapping[BatchSplit, Measurement], again: Measurement, job: Measured) -> dict[str, Any]:
    """The splits that were faster without a limit, least memory first, until one does not train under it.

    In whole steps, as what was emitted was measured `again`: these can reserve more than short trials.
    `every` has each size of a micro-batch once.
    """
    emitted = next((m for split, m in every.items() if split.micro_batch_size == again.split.micro_batch_size), None)
    if again.throughput is None or emitted is None or emitted.throughput is None:
        return {"next_steps": None, "next_outcome": "unknown", "regret": None}
    known_to_be = emitted.throughput
    faster = sorted(
        (split for split, m in every.items() if (m.throughput or 0) > (1 + NOISE) * known_to_be),
        key=lambda split: split.micro_batch_size,
    )
    tried: dict[str, Any] = {
        "next_steps": None,
        "next_outcome": "none is faster",
        "num_faster": len(faster),
        "regret": 0.0,
    }
    for number, split in enumerate(faster):
        measurement = job.profiler.measure_whole_steps(split)
        is_better = measurement.outcome is Outcome.OK and (measurement.throughput or 0) > (1 + NOISE) * again.throughput
        if number == 0 or is_better:
            tried |= {"next_steps": split.accumulation_steps, "next_outcome": measurement.outcome.value}
        if is_better:
            tried["regret"] = max(tried["regret"], 1 - again.throughput / (measurement.throughput or again.throughput))
        if measurement.outcome is not Outcome.OK:
            break  # what needs more memory fits no better
    return tried


def _judge(findings: Findings, row: dict[str, Any]) -> None:
    where = f"room for {format_bytes(row['room_mib'] * 2**20)}"
    if row["emitted_steps"] is None:
        findings.check(f"{where}: a split is emitted if one fits", not row["could_fit"], row["message"][:160])
        return
    findings.check(
        f"{where}: what is emitted fits when it is trained anew",
        row["fits"],
        row["fits_message"][:120]
        or f"{row['emitted_steps']} steps, {row['headroom_mib']:.1f} MiB left of {row['demand_mib']:.1f} demanded",
    )
    findings.check(
        f"{where}: nothing faster would have fitted",
        row["regret"] == 0.0 if row["regret"] is not None else None,
        f"the next faster, at {row['next_steps']} steps: {row['next_outcome']}"
        + (f"; {row['regret']:.1%} were lost" if row["regret"] else ""),
    )
    by_torch = row["num_ooms_by_torch"]
    findings.check(
        f"{where}: no trial of the search ran out of memory",
        row["num_ooms"] == 0 and not by_torch,
        f"{row['num_ooms']} of {row['num_trials']} trials"
        + ("" if by_torch is None else f", {by_torch} by torch's own count"),
    )
