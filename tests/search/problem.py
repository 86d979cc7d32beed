"""Jobs with a known truth, made by hand: how long each split takes, what memory it needs, what trials of it say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.problems.problem import CardMemory, CardTime
from benchmarks.problems.problem import Problem as KnownProblem
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.judged_trials import JudgedTrial
from splittune.split import BatchSplit

MIB = 1024**2
VAST = 10**6


@dataclass(kw_only=True)
class Job(KnownProblem):
    """A problem made by hand, which may hide what real trials may hide."""

    seed: int = 0
    kind: str = "affine"
    headroom_fraction: float = 0.05
    """The part of its memory, as far as others leave it, that every device must keep free."""
    tells_all: bool = True
    """Whether a trial tells the peaks of single phases, what is held at rest, and readings where it
    ran out of memory."""
    oom: Literal["named", "silent", "readings"] = "named"
    """How a lack of memory looks: the message names the device; it does not; or the steps run, and readings show it."""

    @property
    def min_headroom_bytes(self) -> tuple[int, ...]:
        return tuple(int(self.headroom_fraction * (card.total - card.outside)) for card in self.memories)

    def baseline(self) -> BatchSplit | None:
        return next((one for one in self.space().even_splits() if self.fits(one)), None)

    def measure(self, split: BatchSplit) -> Measurement:
        measurement = super().measure(split)
        if measurement.outcome is Outcome.OUT_OF_MEMORY and self.oom == "readings":
            measurement = self._measured_with_room_to_spare(split)
        elif measurement.outcome is Outcome.OUT_OF_MEMORY and not self.tells_all:
            measurement = replace(measurement, memory=())
        if measurement.outcome is Outcome.OUT_OF_MEMORY and self.oom == "silent":
            measurement = replace(measurement, memory=(), message="out of memory")
        if self.tells_all:
            return measurement
        unknown = dict.fromkeys(
            (
                *("micro_step_peak_bytes", "update_peak_bytes", "single_step_peak_bytes", "resting_bytes"),
                "before_backward_bytes",
            )
        )
        return replace(measurement, memory=tuple(replace(memory, **unknown) for memory in measurement.memory))

    def _measured_with_room_to_spare(self, split: BatchSplit) -> Measurement:
        spacious = tuple(replace(card, total=VAST * MIB) for card in self.memories)
        roomy = replace(self, memories=spacious, oom="named", measured=[])
        measurement = roomy.measure(split)
        own = (int(card.total) for card in self.memories)
        memory = tuple(
            replace(reading, total_bytes=total) for reading, total in zip(measurement.memory, own, strict=True)
        )
        return replace(measurement, memory=memory)


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
) -> Job:
    """A job on these cards; a number of them stands for as many with room for anything."""
    if isinstance(memories, int):
        memories = [card_memory(is_first=i == 0) for i in range(memories)]
    return Job(
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


def linear_job(
    *,
    B: int = 64,
    num_devices: int = 4,
    shares: str = "gpu0",
    c: float = 0.010,
    a: float = 0.010,
    b: float = 0.002,
    u: float = 0.005,
    total_mib: tuple[int, ...] | int = 100_000,
    sample_mib: float = 100.0,
    output_mib: float = 0.0,
    gradients_mib: float = 0.0,
    fixed_mib: float = 0.0,
    oom: Literal["named", "silent", "readings"] = "readings",
) -> Job:
    """A step takes ``k (c + a + b max s_i) + u``; a device holds ``fixed_mib + sample_mib s_i``.

    GPU 0 holds besides ``output_mib`` for each sample of the micro-batch, and ``gradients_mib`` where it accumulates.
    Nothing is demanded as headroom, and no more is told than a trial must tell.
    """
    totals = (total_mib,) * num_devices if isinstance(total_mib, int) else total_mib
    memories = [
        CardMemory(
            total=total * MIB,
            outside=0,
            fixed=fixed_mib * MIB,
            sample=sample_mib * MIB,
            output=output_mib * MIB * (i == 0),
            accumulating=gradients_mib * MIB * (i == 0),
            reduce=0,
            update=float(i == 0),  # GPU 0 holds its part without a sample, too
            parameters=0,
            state=0,
        )
        for i, total in enumerate(totals)
    ]
    times = [CardTime(launch_s=a, sample_s=b)] * num_devices
    made = job(memories, B=B, times=times, shares=shares, tells_busy=False, micro_step_s=c, update_s=u)
    return replace(made, headroom_fraction=0.0, tells_all=False, oom=oom)


def split(B: int, steps: int, *shards: int) -> BatchSplit:
    return BatchSplit(global_batch_size=B, accumulation_steps=steps, shard_sizes=shards)


def even(B: int, steps: int, num_devices: int) -> BatchSplit:
    return BatchSplit.even(global_batch_size=B, accumulation_steps=steps, num_devices=num_devices)


def trial(problem: KnownProblem, tried: BatchSplit, demands: Sequence[int] = ()) -> JudgedTrial:
    """What the search makes of a trial; without any demand for headroom unless given."""
    demands = demands or (0,) * problem.num_devices
    return JudgedTrial.of(problem.measure(tried), demands)


def trials(problem: KnownProblem, tried: Sequence[BatchSplit]) -> list[JudgedTrial]:
    return [trial(problem, one) for one in tried]


def rows(tried: Sequence[BatchSplit]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Accumulation steps (N,) and shards (N, n)."""
    steps = np.array([one.accumulation_steps for one in tried], dtype=float)
    return steps, np.array([one.shard_sizes for one in tried], dtype=float)


def failing_after(
    num_trials: int, measure: Callable[[BatchSplit], Measurement], error: BaseException
) -> Callable[[BatchSplit], Measurement]:
    """`measure`, but raising `error` once `num_trials` were measured."""
    count = 0

    def measure_or_fail(split: BatchSplit) -> Measurement:
        nonlocal count
        if count == num_trials:
            raise error
        count += 1
        return measure(split)

    return measure_or_fail
