"""What one trial measured: plain data, raw samples kept, statistics derived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from statistics import mean, median, quantiles
from typing import Any, Literal

from splittune.hardware.base import DeviceMemory
from splittune.profiling.noise import relative_standard_error
from splittune.split import BatchSplit

# A measurement is noisy if its interquartile range exceeds this part of its median. A choice.
NOISY_RELATIVE_IQR = 0.05
# Quartiles of fewer samples say nothing.
MIN_SAMPLES_FOR_IQR = 3
# Nor does a confidence interval: with two samples Student's t is 12.7.
MIN_SAMPLES_FOR_ERROR = 3
# Student's t for a two-sided 95 %, with 2, 3, ... degrees of freedom. The last stands for any more,
# which errs by 6 % at most.
_STUDENT_T = (
    *(4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201),
    *(2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)

LossPlacement = Literal["output", "replica"]


class Outcome(str, Enum):
    """How a trial ended. Anything else, the user's own bug say, is no outcome: it propagates."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    NO_HEADROOM = "no_headroom"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured split.

    A trial that is `OK`, or lacks headroom, really ran: without times it is refused. One that ran
    out of memory, or crashed, has no times, and its statistics are None.

    Worked: 4 accumulation steps, micro-steps of 0.10 s and updates of 0.02 s give
    ``step_time_s == 0.42``, and with 64 samples a ``throughput`` of 152.4 samples/s.
    """

    split: BatchSplit
    outcome: Outcome
    micro_step_times_s: tuple[float, ...] = ()
    """Forward and backward of one micro-batch of the largest size."""
    update_times_s: tuple[float, ...] = ()
    """What happens once a step: the update, copying parameters and gathering gradients."""
    whole_step_times_s: tuple[float, ...] = ()
    """Complete optimizer steps, where those were run."""
    memory: tuple[DeviceMemory, ...] = ()
    """One reading for each device; empty where nobody read it."""
    loss_placement: LossPlacement = "output"
    """Where the loss was computed: from gathered outputs on GPU 0, or in each replica."""
    device_busy_s: tuple[float, ...] | None = None
    """Median seconds of a micro-step in which device i worked; None where unknown."""
    message: str = ""
    num_alloc_retries: int = 0
    """How often allocators handed their cache back and tried again in timed phases."""
    notes: tuple[str, ...] = ()
    """What a reader should know of how this measurement came about, a plain sentence each."""
    loss_exponent: int | None = None
    """The loss grows as the samples to this power, 0 for a mean, 1 for a sum; None where that is not known."""

    def __post_init__(self) -> None:
        times = (*self.micro_step_times_s, *self.update_times_s, *self.whole_step_times_s)
        if any(not 0 < time < float("inf") for time in times):
            raise ValueError(f"a measured time is not above 0 and finite: {times}. What did not run is not measured.")
        ran = bool(self.micro_step_times_s and self.update_times_s) or bool(self.whole_step_times_s)
        if self.outcome in (Outcome.OK, Outcome.NO_HEADROOM) and not ran:
            raise ValueError(f"outcome {self.outcome.value} without a measured step: a trial counts only if it ran.")
        if self.outcome in (Outcome.OUT_OF_MEMORY, Outcome.CRASHED) and times:
            raise ValueError(f"outcome {self.outcome.value} with times {times}: a failed trial has none.")
        if self.memory and len(self.memory) != self.split.num_devices:
            raise ValueError(f"{len(self.memory)} memory readings for a split over {self.split.num_devices} devices.")
        if self.device_busy_s is not None and len(self.device_busy_s) != self.split.num_devices:
            raise ValueError(f"{len(self.device_busy_s)} busy times for a split over {self.split.num_devices} devices.")
        if self.num_alloc_retries < 0:
            raise ValueError(f"num_alloc_retries is {self.num_alloc_retries}: expected at least 0.")

    @property
    def micro_step_time_s(self) -> float | None:
        """Median of the micro-steps."""
        return median(self.micro_step_times_s) if self.micro_step_times_s else None

    @property
    def update_time_s(self) -> float | None:
        """Median of the updates."""
        return median(self.update_times_s) if self.update_times_s else None

    @property
    def step_time_s(self) -> float | None:
        """Of one step: the median whole step, else k x median micro-step + median update."""
        if self.whole_step_times_s:
            return median(self.whole_step_times_s)
        if self.micro_step_time_s is None or self.update_time_s is None:
            return None
        return self.split.accumulation_steps * self.micro_step_time_s + self.update_time_s

    @property
    def throughput(self) -> float | None:
        """Samples per second: the global batch over `step_time_s`."""
        return None if self.step_time_s is None else self.split.global_batch_size / self.step_time_s

    @property
    def main_times_s(self) -> tuple[float, ...]:
        """Whole steps where those ran, else micro-steps: the larger part of a step."""
        return self.whole_step_times_s or self.micro_step_times_s

    @property
    def is_noisy(self) -> bool:
        """Whether the interquartile range of three times or more exceeds 5 % of their median."""
        times = self.main_times_s
        if len(times) < MIN_SAMPLES_FOR_IQR:
            return False
        lower, _, upper = quantiles(times, n=4, method="inclusive")
        return (upper - lower) > NOISY_RELATIVE_IQR * median(times)

    @property
    def relative_error(self) -> float | None:
        """Half the width of the step time's 95 % confidence interval, over its median.

        None with fewer than 3 samples. It is Student's t times `relative_standard_error` of the
        steps: t, since their deviation is estimated from the same few. Order statistics would need
        six samples for 95 %, and a quiet trial should end after three. An outlier makes it too
        wide, and so asks for more samples.

        Worked: steps of 1.00, 1.01 and 1.02 s have a standard error of 0.72 %, so it is
        4.303 x 0.72 % = 3.1 %.
        """
        samples = self._step_samples_s()
        if len(samples) < MIN_SAMPLES_FOR_ERROR:
            return None
        student_t = _STUDENT_T[min(len(samples) - MIN_SAMPLES_FOR_ERROR, len(_STUDENT_T) - 1)]
        return student_t * relative_standard_error(samples)

    @property
    def is_on_the_edge(self) -> bool:
        """Whether an allocator had to try again: the split fits, barely, and loses time by it."""
        return self.num_alloc_retries > 0

    def _step_samples_s(self) -> tuple[float, ...]:
        """A step time for each whole step, or for each round of micro-steps and an update."""
        if self.whole_step_times_s:
            return self.whole_step_times_s
        micro_steps, updates = self.micro_step_times_s, self.update_times_s
        each = len(micro_steps) // len(updates) if updates else 0
        if not each or len(micro_steps) != each * len(updates):
            return micro_steps  # not of rounds: the larger part of the step stands for it
        rounds = (micro_steps[start : start + each] for start in range(0, len(micro_steps), each))
        return tuple(
            self.split.accumulation_steps * mean(times) + update for times, update in zip(rounds, updates, strict=True)
        )

    def lacks_headroom(self, min_headroom_bytes: int | Sequence[int]) -> tuple[DeviceMemory, int] | None:
        """The device furthest below its demanded headroom, and the demand; None if all keep it."""
        demands = (
            min_headroom_bytes if isinstance(min_headroom_bytes, Sequence) else [min_headroom_bytes] * len(self.memory)
        )
        if self.memory and len(demands) != len(self.memory):
            raise ValueError(f"{len(demands)} headroom demands for {len(self.memory)} devices: give one for each.")
        lacking = [(m, d) for m, d in zip(self.memory, demands, strict=False) if m.headroom_bytes < d]
        return min(lacking, key=lambda pair: pair[0].headroom_bytes - pair[1], default=None)

    def judged(self, min_headroom_bytes: int | Sequence[int]) -> Measurement:
        """This measurement, as `NO_HEADROOM` if it was `OK` and a device kept too little."""
        lacking = self.lacks_headroom(min_headroom_bytes) if self.outcome is Outcome.OK else None
        if lacking is None:
            return self
        memory, demand = lacking
        return replace(self, outcome=Outcome.NO_HEADROOM, message=memory.describe_lack(demand))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads them back equal."""
        return asdict(self) | {"outcome": self.outcome.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        busy = data["device_busy_s"]
        return cls(
            split=BatchSplit(**data["split"]),
            outcome=Outcome(data["outcome"]),
            micro_step_times_s=tuple(data["micro_step_times_s"]),
            update_times_s=tuple(data["update_times_s"]),
            whole_step_times_s=tuple(data["whole_step_times_s"]),
            memory=tuple(DeviceMemory(**memory) for memory in data["memory"]),
            device_busy_s=None if busy is None else tuple(busy),
            message=data["message"],
            loss_placement=data["loss_placement"],
            num_alloc_retries=data.get("num_alloc_retries", 0),  # absent where an earlier version wrote it
            notes=tuple(data.get("notes", ())),
            loss_exponent=data.get("loss_exponent"),
        )
