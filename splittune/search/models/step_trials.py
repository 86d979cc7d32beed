"""What the trials that ran say of step times, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from splittune.profiling.measurement import KINDS_OF_MICRO_STEP, Measurement
from splittune.profiling.noise import relative_standard_error
from splittune.search.arrays import FloatArray
from splittune.search.choices import LEAST_NOISE, SIGNIFICANT, TOLERANCE
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.hypotheses import StepCounts

# Of a micro-step, all else is taken to cost at most this part: something is left for the work itself.
MOST_OVERHEAD = 0.9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTrials:
    """R trials over n devices."""

    runs: tuple[Measurement, ...]
    noise: float
    """Relative standard error of a step time: the median over trials, at least `LEAST_NOISE`."""
    steps: FloatArray
    """(R,) accumulation steps."""
    shards: FloatArray
    """(R, n)"""
    log_step_s: FloatArray
    """(R,) logarithms of seconds a step."""
    micro_step_s: FloatArray
    """(R,) seconds of a micro-step, without what is copied once a step; of whole steps alone, an equal part of one."""
    tells_micro_steps: FloatArray
    """(R,) 1 where a micro-step was timed by itself, 0 where whole steps alone were."""
    update_s: FloatArray
    """(R,) seconds of what happens once a step; of whole steps alone, all of one."""
    tells_updates: FloatArray
    """(R,) 1 where these hold what is copied once a step, too, or it is told by other trials."""
    counts: StepCounts
    tells_busy: bool
    """Whether every trial has busy times."""
    kinds: tuple[int, ...]
    """A number for each device, the same for those that are taken to be alike."""
    cold: float = 0.0
    """So much longer, relative, the first took than it would now: its times are given without."""

    @classmethod
    def of(cls, trials: Sequence[JudgedTrial], kinds: Sequence[int] | None = None) -> StepTrials:
        """Of the trials that ran: at least one must have. Without `kinds` devices of as much memory are alike."""
        runs = tuple(a.measurement for a in trials if a.measurement.throughput is not None)
        steps = np.array([run.split.accumulation_steps for run in runs], dtype=float)
        shards = np.array([run.split.shard_sizes for run in runs], dtype=float)
        noise = max(LEAST_NOISE, float(np.median([relative_standard_error(run.main_times_s) for run in runs])))
        micro_step_s = np.array([_micro_step_s(run) for run in runs])
        tells_micro_steps = np.array([float(run.micro_step_time_s is not None) for run in runs])
        update_s = np.array([run.update_time_s or run.step_time_s for run in runs], dtype=float)
        tells_updates = (steps >= KINDS_OF_MICRO_STEP) * np.array([float(bool(run.update_times_s)) for run in runs])
        hidden_s = tells_micro_steps * _longer_updates_s(update_s, tells_updates > 0, shards, noise)
        hidden_s = np.minimum(hidden_s, MOST_OVERHEAD * micro_step_s * steps)
        return cls(
            runs=runs,
            noise=noise,
            steps=steps,
            shards=shards,
            log_step_s=np.log(np.array([run.step_time_s for run in runs], dtype=float)),
            micro_step_s=micro_step_s - hidden_s / steps,
            tells_micro_steps=tells_micro_steps,
            update_s=update_s + hidden_s,
            tells_updates=np.maximum(tells_updates, hidden_s > 0),
            counts=StepCounts.of(steps, shards),
            tells_busy=all(run.device_busy_s is not None for run in runs),
            kinds=totals_of(runs[0]) if kinds is None else tuple(kinds),
        )

    def without_cold(self, cold: float) -> StepTrials:
        """The same if the first took so much longer, relative: worked, 0.1 makes 1 s of the 1.1 s that it took."""
        took = np.where(np.arange(len(self.steps)) == 0, 1.0 + cold, 1.0)
        return replace(
            self,
            log_step_s=self.log_step_s - np.log(took),
            micro_step_s=self.micro_step_s / took,
            update_s=self.update_s / took,
            cold=cold,
        )

    @property
    def num_devices(self) -> int:
        return int(self.shards.shape[1])

    @property
    def busy_s(self) -> FloatArray:
        """(R, n) seconds of a micro-step in which each device worked, where `tells_busy`."""
        busy_s = np.array([run.device_busy_s for run in self.runs], dtype=float)
        busy_s[0] /= 1.0 + self.cold
        return busy_s

    @property
    def totals(self) -> list[int]:
        """Each device's total memory in bytes; 0 where unknown."""
        return list(totals_of(self.runs[0]))


def totals_of(run: Measurement) -> tuple[int, ...]:
    """Each device's total memory in bytes; 0 where unknown."""
    return tuple(memory.total_bytes for memory in run.memory) or (0,) * run.split.num_devices


def _micro_step_s(run: Measurement) -> float:
    step_s = run.step_time_s
    assert step_s is not None
    return step_s / run.split.accumulation_steps if run.micro_step_time_s is None else run.micro_step_time_s


def _longer_updates_s(update_s: FloatArray, tells: NDArray[np.bool_], shards: FloatArray, noise: float) -> FloatArray:
    """(R,) by how many seconds updates take longer where they do tell what is copied once a step; 0 if that is noise.

    It is those of as many devices beside GPU 0 that tell it, or else of any. Where they do not tell it, it was timed
    with the micro-steps. Worked: with another device an update takes 79 ms at 4 accumulation steps and 26 ms at 1. So
    53 of the 280 ms of the single micro-step were no work of its device.
    """
    others = (shards[:, 1:] > 0).sum(axis=1)
    longer_s = np.zeros_like(update_s)
    for count in set(others[~tells].tolist()) - {0}:
        of_as_many = tells & (others == count)
        told = update_s[of_as_many if of_as_many.any() else tells & (others > 0)]
        if len(told):
            own = ~tells & (others == count)
            longer_s[own] = np.median(told) - update_s[own]
    return np.where(longer_s > (TOLERANCE + SIGNIFICANT * noise) * update_s, longer_s, 0.0)
