"""Part 6 of `benchmarks.gpu`: the tuned split beside other tools' answers and every split there is, under one limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch

from benchmarks.gpu.stage import Findings, Measured, Stage, demand_of, in_brief, mib, tuned, useful_splits
from benchmarks.jobs.gpu_models import tuned_job
from benchmarks.peers.finders import PEERS, PeerResult
from splittune.hardware import Hardware
from splittune.profiling.measurement import Measurement, Outcome
from splittune.split import BatchSplit
from splittune.training import TrainingTask
from splittune.units import format_bytes

# Of the whole batch's peak: the whole batch does not fit, and half of it only just.
ROOM_PART = 0.55
# What two measurements of one split may differ by.
NOISE = 0.02
PEER_S = 12.0
DISTRIBUTIONS = {"Accelerate": "accelerate", "Lightning": "pytorch-lightning"}


def run(stage: Stage, findings: Findings, *, peers: Sequence[Callable[..., PeerResult]] = PEERS) -> None:
    """A row for each way to choose a split."""
    if not stage.can_tell_limits():
        findings.check(
            "limits can be placed", None, f"torch {torch.__version__} does not tell the cap that it was given"
        )
        return
    make_task = tuned_job(stage.sizes, stage.seed)
    with Measured(make_task(), stage.hardware) as job:
        whole = job.measure(1)
    if whole.outcome is not Outcome.OK:
        findings.check("the whole batch runs without a limit", False, whole.message)
        return
    with stage.limited_to(int(ROOM_PART * whole.memory[0].peak_reserved_bytes)) as hardware:
        demand = demand_of(hardware)
        findings.rows.append(_every_split(make_task(), hardware, demand))
        findings.rows.append(_ours(stage, make_task(), hardware, demand))
        for peer in peers:
            if not stage.has_time(0 if stage.is_rehearsal else PEER_S):
                findings.cut_short = f"{peer.__name__} and what follows"
                break
            row = _theirs(findings, peer, make_task(), hardware)
            findings.rows += [] if row is None else [row]
        _measure_alike(make_task(), hardware, demand, findings.rows)
    stage.table(
        findings.rows,
        [
            "strategy",
            "version",
            "accumulation_steps",
            "micro_batch_size",
            "outcome",
            "samples_per_s",
            "of_best",
            "headroom_mib",
            "num_trials",
            "num_ooms",
            "search_s",
        ],
    )
    _judge(findings, demand)


def _row(
    strategy: str, split: BatchSplit | None, trials: int, ooms: int, search_s: float, **more: Any
) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "accumulation_steps": None if split is None else split.accumulation_steps,
        "micro_batch_size": None if split is None else split.micro_batch_size,
        "num_trials": trials,
        "num_ooms": ooms,
        "search_s": search_s,
        "split": split,
        **more,
    }


def _every_split(task: TrainingTask, hardware: Hardware, demand: int) -> dict[str, Any]:
    """Every micro-batch size at its fewest steps; the fastest that keeps the headroom, in whole steps too."""
    began_s = time.monotonic()
    with Measured(task, hardware, min_headroom_bytes=demand) as job:
        every = [job.profiler.measure(split) for split in reversed(useful_splits(job.global_batch_size))]
        fitting = [measurement for measurement in every if measurement.outcome is Outcome.OK]
        fitting.sort(key=lambda measurement: measurement.throughput or 0.0, reverse=True)
        best = None
        for measurement in fitting:
            every.append(job.profiler.measure_whole_steps(measurement.split))
            if every[-1].outcome is Outcome.OK:
                best = measurement.split
                break
    return _row("every split", best, len(every), _num_ooms(every), time.monotonic() - began_s)


def _ours(stage: Stage, task: TrainingTask, hardware: Hardware, demand: int) -> dict[str, Any]:
    began_s = time.monotonic()
    result = tuned(task, hardware, min_headroom_bytes=demand, seed=stage.seed)
    measurements = [trial.measurement for trial in result.trials]
    return _row(
        "splittune",
        result.config.split,
        len(measurements),
        _num_ooms(measurements),
        time.monotonic() - began_s,
        in_brief=in_brief(result.trials),
    )


def _theirs(
    findings: Findings, peer: Callable[..., PeerResult], task: TrainingTask, hardware: Hardware
) -> dict[str, Any] | None:
    try:
        found = peer(task, hardware)
    except ModuleNotFoundError as error:
        findings.check(f"{peer.__name__} could be run", None, str(error))
        return None
    split = None if found.measurement is None else found.measurement.split
    return _row(
        found.peer,
        split,
        found.num_trials,
        found.num_ooms,
        found.elapsed_s,
        version=_version_of(found.peer),
        num_micro_steps=found.num_micro_steps,
    )


def _measure_alike(task: TrainingTask, hardware: Hardware, demand: int, rows: Sequence[dict[str, Any]]) -> None:
    """Every answer in whole optimizer steps, by one profiler, in a row; fills `rows`."""
    measured: dict[BatchSplit, Measurement] = {}
    with Measured(task, hardware, min_headroom_bytes=demand) as job:
        for row in rows:
            split = row.pop("split")
            if split is not None and split not in measured:
                measured[split] = job.profiler.measure_whole_steps(split)
            found = measured.get(split)
            row["outcome"] = "nothing found" if found is None else found.outcome.value
            row["samples_per_s"] = None if found is None else found.throughput
            row["headroom_mib"] = (
                mib(found.memory[0].headroom_bytes) if found is not None and found.throughput else None
            )
            row["demand_mib"] = mib(demand)
    best = rows[0]["samples_per_s"]
    for row in rows:
        row["of_best"] = row["samples_per_s"] / best if row["samples_per_s"] and best else None


def _judge(findings: Findings, demand: int) -> None:
    every, ours, *theirs = findings.rows
    findings.check(
        "splittune's split is within 2 % of the best of all splits",
        None if every["samples_per_s"] is None else (ours["of_best"] or 0.0) >= 1 - NOISE,
        f"{ours['of_best'] or 0.0:.1%} of it",
    )
    findings.check(
        "splittune's split keeps its headroom",
        ours["outcome"] == Outcome.OK.value,
        f"{ours['outcome']}, {ours['headroom_mib']} MiB left, {format_bytes(demand)} demanded",
    )
    findings.check("splittune ran out of memory in no trial", ours["num_ooms"] == 0, f"{ours['num_ooms']} OOMs")
    rivals = [row for row in theirs if row["outcome"] == Outcome.OK.value and row["of_best"] is not None]
    fastest = max(rivals, key=lambda row: row["of_best"], default=None)
    findings.check(
        "no other tool's answer that keeps the headroom is more than 2 % faster",
        None if fastest is None or ours["of_best"] is None else fastest["of_best"] <= ours["of_best"] * (1 + NOISE),
        "none keeps it" if fastest is None else f"{fastest['strategy']}: {fastest['of_best']:.1%} of the best",
    )


def _num_ooms(measurements: Sequence[Measurement]) -> int:
    return sum(measurement.outcome is Outcome.OUT_OF_MEMORY for measurement in measurements)


def _version_of(peer: str) -> str:
    distribution = DISTRIBUTIONS.get(peer.partition(",")[0])
    if distribution is None:
        return ""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
