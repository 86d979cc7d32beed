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

# The first micro-step of a step copies the parameters out, the last one brings the gradients home,
# and those between are alike: a round of three kinds tells the time of any number of them.
KINDS_OF_MICRO_STEP = 3
# Without stops a micro-step takes at least this part of what it takes alone: copies of inputs, the
# host and the devices are the three that can work at once. What is below is noise. A choice; twice
# that would come near to what a job with slow copies may save.
LEAST_UNBROKEN_PART = 1 / 3

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
    ``step_time_s == 0.42``, and with 64 samples a ``throughput`` of 152.4 samples/s. If three such
    micro-steps and an update took 0.29 s unbroken instead of 0.32 s, a micro-step is 0.09 s, and
    ``step_time_s == 0.38``.
    """

    split: BatchSplit
    outcome: Outcome
    micro_step_times_s: tuple[float, ...] = ()
    """Forward and backward of one micro-batch of the largest size, all devices stopped before and after it."""
    update_times_s: tuple[float, ...] = ()
    """What happens once a step: the update, copying parameters and gathering gradients; one for each round."""
    unbroken_round_times_s: tuple[float, ...] = ()
    """For each of the updates one more round, its micro-steps (at most 3) and its update without a stop in between.

    Empty where nobody timed that: on modelled clocks rounds run in parts alone.
    """
    whole_step_times_s: tuple[float, ...] = ()
    """Complete optimizer steps, where those were run."""
    memory: tuple[DeviceMemory, ...] = ()
    """One reading for each device; empty where nobody read it."""
    loss_placement: LossPlacement = "output"
    """Where the loss was computed: from gathered outputs on GPU 0, or in each replica."""
    device_busy_s: tuple[float, ...] | None = None
    """Seconds of a micro-step in which device i worked, the median; None where unknown.

    Of unbroken rounds, where those were timed: each one's seconds over its micro-steps. On a card
    the gaps between kernels, in which it waits for the host to launch the next, are among them.
    """
    device_copied_s: tuple[float, ...] | None = None
    """Seconds of a micro-step in which device i stood still for copies, the median; None where unknown, as on cards."""
    message: str = ""
    num_alloc_retries: int = 0
    """How often allocators handed their cache back and tried again in timed phases."""
    notes: tuple[str, ...] = ()
    """What a reader should know of how this measurement came about, a plain sentence each."""
    loss_exponent: int | None = None
    """The loss grows as the samples to this power, 0 for a mean, 1 for a sum; None where that is not known."""

    def __post_init__(self) -> None:
        unbroken = self.unbroken_round_times_s
        times = (*self.micro_step_times_s, *self.update_times_s, *unbroken, *self.whole_step_times_s)
        if any(not 0 < time < float("inf") for time in times):
            raise ValueError(f"a measured time is not above 0 and finite: {times}. What did not run is not measured.")
        ran = bool(self.micro_step_times_s and self.update_times_s) or bool(self.whole_step_times_s)
        if self.outcome in (Outcome.OK, Outcome.NO_HEADROOM) and not ran:
            raise ValueError(f"outcome {self.outcome.value} without a measured step: a trial counts only if it ran.")
        if self.outcome in (Outcome.OUT_OF_MEMORY, Outcome.CRASHED) and times:
            raise ValueError(f"outcome {self.outcome.value} with times {times}: a failed trial has none.")
        if unbroken and len(unbroken) != len(self.update_times_s):
            raise ValueError(
                f"{len(unbroken)} unbroken rounds beside {len(self.update_times_s)} updates: one for each."
            )
        if self.memory and len(self.memory) != self.split.num_devices:
            raise ValueError(f"{len(self.memory)} memory readings for a split over {self.split.num_devices} devices.")
        if self.device_busy_s is not None and len(self.device_busy_s) != self.split.num_devices:
            raise ValueError(f"{len(self.device_busy_s)} busy times for a split over {self.split.num_devices} devices.")
        if self.device_copied_s is not None and len(self.device_copied_s) != self.split.num_devices:
            raise ValueError(
                f"{len(self.device_copied_s)} copy times for a split over {self.split.num_devices} devices."
            )
        if self.num_alloc_retries < 0:
            raise ValueError(f"num_alloc_retries is {self.num_alloc_retries}: expected at least 0.")

    @property
    def micro_step_time_s(self) -> float | None:
        """What a micro-step adds to a step: of parts alone the median, of unbroken rounds their share.

        A micro-step that is timed alone begins and ends with idle devices. The host's work before
        the first kernel then counts in full; in training it is done while the devices still work
        on the micro-step before. Rounds without stops tell how much that saves. It is shared out
        equally among the n micro-steps of a round, since each is followed by one stop:
        ``(median unbroken round - median update) / n``, where n is `accumulation_steps`, at most 3.
        So a step of n micro-steps takes what an unbroken round takes, and each further one saves
        as much again. Rounds that happen to be slower unbroken count as they are: were they cut
        off, noise would make steps look slower than they are.

        Worked: 3 micro-steps of 12 ms and an update of 4 ms make 40 ms, and 34 ms unbroken: 2 ms
        less for each, so 10 ms. With 8 accumulation steps a step then takes 84 ms, not 100 ms.
        """
        if not self.micro_step_times_s:
            return None
        alone_s = median(self.micro_step_times_s)
        if not self.unbroken_round_times_s:
            return alone_s
        return self._unbroken_micro_step_s(alone_s, median(self.update_times_s), median(self.unbroken_round_times_s))

    @property
    def update_time_s(self) -> float | None:
        """Median of the updates."""
        return median(self.update_times_s) if self.update_times_s else None

    @property
    def step_time_s(self) -> float | None:
        """Of one step: the median whole step, else k x `micro_step_time_s` + median update."""
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
        """Whole steps where those ran, else the steps that unbroken rounds make, else micro-steps.

        Micro-steps are the larger part of a step.
        """
        if self.unbroken_round_times_s:
            return self._step_samples_s()
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
        each_s = [mean(micro_steps[start : start + each]) for start in range(0, len(micro_steps), each)]
        if self.unbroken_round_times_s:
            rounds = zip(each_s, updates, self.unbroken_round_times_s, strict=True)
            each_s = [self._unbroken_micro_step_s(*times) for times in rounds]
        steps = self.split.accumulation_steps
        return tuple(steps * micro_step + update for micro_step, update in zip(each_s, updates, strict=True))

    def _unbroken_micro_step_s(self, alone_s: float, update_s: float, unbroken_round_s: float) -> float:
        num_micro_steps = min(self.split.accumulation_steps, KINDS_OF_MICRO_STEP)
        return max(LEAST_UNBROKEN_PART * alone_s, (unbroken_round_s - update_s) / num_micro_steps)

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
        busy, copied = data["device_busy_s"], data.get("device_copied_s")  # absent where an earlier version wrote it
        return cls(
            split=BatchSplit(**data["split"]),
            outcome=Outcome(data["outcome"]),
            micro_step_times_s=tuple(data["micro_step_times_s"]),
            update_times_s=tuple(data["update_times_s"]),
            unbroken_round_times_s=tuple(data.get("unbroken_round_times_s", ())),
            whole_step_times_s=tuple(data["whole_step_times_s"]),
            memory=tuple(DeviceMemory(**memory) for memory in data["memory"]),
            device_busy_s=None if busy is None else tuple(busy),
            device_copied_s=None if copied is None else tuple(copied),
            message=data["message"],
            loss_placement=data["loss_placement"],
            num_alloc_retries=data.get("num_alloc_retries", 0),  # absent where an earlier version wrote it
            notes=tuple(data.get("notes", ())),
            loss_exponent=data.get("loss_exponent"),
        )
