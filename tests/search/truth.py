"""Jobs of `benchmarks.problems.problem` made by hand: memory and time of a known form, and what trials of them say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.problems.problem import CardMemory, CardTime, Problem
from splittune.search.attempts import Attempt, lacking_devices
from splittune.split import BatchSplit

MIB = 1024**2
VAST = 10**6


def card_memory(
    *,
    parameters: float = 100.0,
    state: float = 0.0,
    stays: float = 0.0,
    workspace: float = 0.0,
    sample: float = 10.0,
    output: float = 0.0,
    is_first: bool = False,
    total: float = VAST,
    outside: float = 0.0,
) -> CardMemory:
    """Bytes from MiB; ``stays`` is the part of the gradients that a single step does not hold at its peak."""
    fixed = 2 * parameters - stays * parameters + state + workspace
    return CardMemory(
        total=total * MIB,
        outside=outside * MIB,
        fixed=fixed * MIB,
        sample=sample * MIB,
        output=output * MIB,
        accumulating=stays * parameters * MIB,
        reduce=(fixed + parameters * is_first) * MIB,
        update=(3 * parameters + state) * MIB * is_first,
        parameters=parameters * MIB,
        state=state * MIB,
    )


def job(
    memories: Sequence[CardMemory] | int,
    *,
    B: int = 64,
    times: Sequence[CardTime] | None = None,
    shares: str = "gpu0",
    noise: float = 0.0,
    tells_busy: bool = True,
    micro_step_s: float = 0.010,
    replica_s: float = 0.0,
    output_s: float = 0.0,
    update_s: float = 0.005,
    reduce_s: float = 0.0,
) -> Problem:
    """A job on these cards; a number of them stands for as many with room for anything."""
    if isinstance(memories, int):
        memories = [card_memory(is_first=i == 0) for i in range(memories)]
    return Problem(
        seed=0,
        kind="affine",
        B=B,
        shares=shares,  # type: ignore[arg-type]
        times=tuple(times or [CardTime(launch_s=0.010, sample_s=0.002)] * len(memories)),
        memories=tuple(memories),
        micro_step_s=micro_step_s,
        replica_s=replica_s,
        output_s=output_s,
        update_s=update_s,
        reduce_s=reduce_s,
        noise=noise,
        tells_busy=tells_busy,
    )


def split(B: int, steps: int, *shards: int) -> BatchSplit:
    return BatchSplit(global_batch_size=B, accumulation_steps=steps, shard_sizes=shards)


def even(B: int, steps: int, num_devices: int) -> BatchSplit:
    return BatchSplit.even(global_batch_size=B, accumulation_steps=steps, num_devices=num_devices)


def trial(problem: Problem, tried: BatchSplit, demands: Sequence[int] = ()) -> Attempt:
    """What the search makes of a trial; without any demand for headroom unless given."""
    demands = demands or (0,) * problem.num_devices
    measurement = problem.measure(tried).judged(demands)
    return Attempt(measurement=measurement, lacking=lacking_devices(measurement, demands))


def trials(problem: Problem, tried: Sequence[BatchSplit]) -> list[Attempt]:
    return [trial(problem, one) for one in tried]


def rows(tried: Sequence[BatchSplit]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Accumulation steps (N,) and shards (N, n)."""
    steps = np.array([one.accumulation_steps for one in tried], dtype=float)
    return steps, np.array([one.shard_sizes for one in tried], dtype=float)
