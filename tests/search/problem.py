"""A job with a known truth: how long each split takes, and what memory it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.split import BatchSplit, SplitSpace

MIB = 1024**2


@dataclass(kw_only=True)
class Problem:
    """Step time k * (c + max_i(a_i + b_i * s_i)) + u; memory linear in the shard, and on GPU 0 in the micro-batch too.

    Device i holds ``fixed_mib[i] + sample_mib * s_i``; GPU 0 holds besides ``output_mib`` for each sample of the
    micro-batch, and ``gradients_mib`` more when it accumulates.
    """

    B: int = 64
    num_devices: int = 4
    shares: str = "gpu0"
    c: float = 0.010
    a: float = 0.010
    b: tuple[float, ...] | float = 0.002
    u: float = 0.005
    total_mib: tuple[int, ...] | int = 100_000
    sample_mib: float = 100.0
    output_mib: float = 0.0
    gradients_mib: float = 0.0
    fixed_mib: float = 0.0
    oom: str = "readings"
    """How a failure looks: 'readings' (NO_HEADROOM), 'named' (OOM, the message names the device) or 'silent'."""
    busy: bool = False
    """Whether the devices' busy times are reported."""
    measured: list[BatchSplit] = field(default_factory=list)

    def space(self) -> SplitSpace:
        return SplitSpace(global_batch_size=self.B, num_devices=self.num_devices, shares=self.shares)  # type: ignore[arg-type]

    def needed_mib(self, split: BatchSplit) -> list[float]:
        needed = [self.fixed_mib + self.sample_mib * shard for shard in split.shard_sizes]
        needed[0] += self.output_mib * split.micro_batch_size + self.gradients_mib * (split.accumulation_steps > 1)
        return needed

    def fits(self, split: BatchSplit) -> bool:
        return all(needed <= total for needed, total in zip(self.needed_mib(split), self._totals(), strict=True))

    def busy_s(self, split: BatchSplit) -> tuple[float, ...]:
        slopes = (self.b,) * self.num_devices if isinstance(self.b, float) else self.b
        return tuple(self.a + b * shard for b, shard in zip(slopes, split.shard_sizes, strict=True))

    def step_time_s(self, split: BatchSplit) -> float:
        return split.accumulation_steps * (self.c + max(self.busy_s(split))) + self.u

    def throughput(self, split: BatchSplit) -> float:
        return self.B / self.step_time_s(split)

    def best_throughput(self) -> float:
        """That of the best split, by looking at all of them."""
        return max(self.throughput(split) for split in self.space() if self.fits(split))

    def baseline(self) -> BatchSplit | None:
        return next((split for split in self.space().even_splits() if self.fits(split)), None)

    def measure(self, split: BatchSplit) -> Measurement:
        self.measured.append(split)
        lacking = [i for i, (n, t) in enumerate(zip(self.needed_mib(split), self._totals(), strict=True)) if n > t]
        if lacking and self.oom != "readings":
            message = f"device {lacking[0]}: out of memory" if self.oom == "named" else "out of memory"
            return Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY, message=message)
        return Measurement(
            split=split,
            outcome=Outcome.OK,  # a reading above the total makes it NO_HEADROOM
            micro_step_times_s=(self.c + max(self.busy_s(split)),),
            update_times_s=(self.u,),
            memory=self._readings(split),
            device_busy_s=self.busy_s(split) if self.busy else None,
        )

    def _totals(self) -> tuple[int, ...]:
        return (self.total_mib,) * self.num_devices if isinstance(self.total_mib, int) else self.total_mib

    def _readings(self, split: BatchSplit) -> tuple[DeviceMemory, ...]:
        return tuple(
            DeviceMemory(
                device=device,
                total_bytes=total * MIB,
                outside_bytes=0,
                peak_allocated_bytes=int(needed * MIB),
                peak_reserved_bytes=int(needed * MIB),
            )
            for device, (needed, total) in enumerate(zip(self.needed_mib(split), self._totals(), strict=True))
        )


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
