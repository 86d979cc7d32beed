"""A made-up job whose peaks are straight lines, and its trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splittune.hardware.base import Device, DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.diagnosis import Diagnosis, diagnose
from splittune.search import Trial
from splittune.split import BatchSplit
from splittune.units import MIB

BATCH = 48
LEVEL = (100.0, 100.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a sample costs, and what does not grow, on cards of these sizes; in MiB."""

    share: float = 2
    whole: float = 0.5
    fixed0: float = 10
    fixed: float = 7
    update: float = 0
    totals: Sequence[float] = (100, 1000, 1000)
    outside: Sequence[float] = (0, 0, 0)

    def run(self, *shards: int, outcome: Outcome = Outcome.OK, is_split: bool = True, time_s: float = 1) -> Measurement:
        steps = BATCH // sum(shards)
        split = BatchSplit(global_batch_size=BATCH, accumulation_steps=steps, shard_sizes=shards)
        ran = outcome in (Outcome.OK, Outcome.NO_HEADROOM)
        return Measurement(
            split=split,
            outcome=outcome,
            whole_step_times_s=(time_s,) if ran else (),
            memory=tuple(self.memory(device, shard, sum(shards), is_split) for device, shard in enumerate(shards)),
        )

    def memory(self, device: int, shard: int, micro_batch: int, is_split: bool) -> DeviceMemory:
        base = self.fixed if device else self.fixed0 + self.whole * micro_batch
        micro_step, update = round((base + self.share * shard) * MIB), round(self.update * MIB)
        peak = max(micro_step, update)
        return DeviceMemory(
            device=device,
            total_bytes=round(self.totals[device] * MIB),
            outside_bytes=round(self.outside[device] * MIB),
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak + MIB,
            micro_step_peak_bytes=micro_step if is_split else None,
            update_peak_bytes=update if is_split else None,
        )

    def trials(self, is_split: bool = True) -> list[Trial]:
        return trials_of(*(self.run(*shards, is_split=is_split) for shards in [(2, 3, 3), (4, 2, 2), (4, 22, 22)]))

    def devices(self) -> tuple[Device, ...]:
        return tuple(
            Device(index=index, name=f"CARD{index}", torch_device=f"cuda:{index}", total_bytes=round(total * MIB))
            for index, total in enumerate(self.totals)
        )

    def diagnosis(self, *shards: int, baseline: Measurement | None = None, is_modelled: bool = False) -> Diagnosis:
        """Of a best split with these shards, measured in whole steps of half a second."""
        best = self.run(*shards, is_split=False, time_s=0.5)
        return diagnose(self.trials(), best, baseline, self.devices(), is_modelled=is_modelled)


def trials_of(*runs: Measurement) -> list[Trial]:
    return [Trial(number=i, kind="search", measurement=run, reason="") for i, run in enumerate(runs)]
