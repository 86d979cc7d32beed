"""How much of a split is run: until it is warm, then until its step time is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from splittune.profiling.measurement import KINDS_OF_MICRO_STEP, Measurement, Outcome
from splittune.profiling.recorder import TIMED, Recorder
from splittune.split import BatchSplit

# Seconds of warm-up of the first trial, at least: its devices are cold. A choice.
FIRST_WARM_UP_S = 3.0
# Seconds of warm-up at most: a device that does not settle is noisy anyway. A choice.
WARM_UP_LIMIT_S = 5.0
# A trial is warm when so many steps in a row
NUM_SETTLED = 3
# differ by no more than this part. Both are choices: stricter costs warm-up, laxer costs noise.
SETTLED_RELATIVE_SPREAD = 0.02
# Rounds that are measured at least: fewer have no confidence interval.
MIN_ROUNDS = 3
# And at most, whatever the noise. A choice.
MAX_ROUNDS = 20
# Whole steps that are measured at least, for the finalists. A choice.
MIN_WHOLE_STEPS = 5
# Measuring ends once the half-width of the 95 % confidence interval is this part of the step. A
# choice: below it differences are not worth the time it takes to see them.
TARGET_RELATIVE_ERROR = 0.02
# Seconds of measured steps after which a trial takes no more rounds than it must. A choice.
TRIAL_BUDGET_S = 60.0
# A trial this many times slower than the fastest ends after one round. A choice, further than noise
# reaches.
CLEARLY_SLOWER = 1.3


class Step(Protocol):
    """What a trial runs: `TrainingStep`, or one that only acts it out."""

    split: BatchSplit
    before_backward: Callable[[], object]
    """To be called in every micro-step between its forward and its backward."""

    @property
    def num_skipped(self) -> int: ...

    def micro_step(self, num_samples: int | None = None, *, last: bool = True) -> None: ...

    def update(self) -> None: ...

    def whole(self) -> None: ...

    def took_effect(self) -> bool: ...

    def loss_exponent(self) -> int | None: ...


class Pacer:
    """Runs the phases of one trial after another, and remembers the fastest.

    On a real clock a trial first warms up all devices together, in the very steps that are timed
    afterwards, so that libraries have chosen their kernels for every size. It is warm when three
    steps in a row differ by 2 % at most, or after 5 s; the first trial takes 3 s at least.

    Then it is measured until the median's 95 % confidence is within 2 %: three rounds or five whole
    steps at least, 20 at most, and no more than three once the budget is spent.

    A trial whose first round is more than 1.3 times slower than the fastest trial so far ends
    there: it cannot win, and nobody needs its exact figure.

    On a real clock each round runs twice: once with a stop around each part, so that micro-steps
    and the update are told apart, and once unbroken, as training runs (see
    `Measurement.micro_step_time_s`).

    A step that the job's gradient scaler skips is run again, with its round, and its times count
    nowhere.

    Args:
        is_modelled: the clock repeats exactly: one warm-up, one round in parts alone, nothing cut
            short.
        budget_s: seconds of measured steps after which a trial goes on no longer than it must.
    """

    def __init__(self, *, is_modelled: bool, budget_s: float = TRIAL_BUDGET_S) -> None:
        self._is_modelled, self._budget_s = is_modelled, budget_s
        self._is_warm = False
        self._fastest_s: float | None = None
        self._fastest_split: BatchSplit | None = None

    def remember(self, measurement: Measurement) -> None:
        """A trial made of rounds has ended: keep it if it is the fastest, or that split anew."""
        step_s, split = measurement.step_time_s, measurement.split
        if measurement.outcome is not Outcome.OK or step_s is None:
            return
        if self._fastest_s is None or split == self._fastest_split or step_s < self._fastest_s:
            self._fastest_s, self._fastest_split = step_s, split

    def run_rounds(self, step: Step, recorder: Recorder) -> None:
        """Micro-steps and updates, timed apart, and on a real clock both unbroken."""
        num_micro_steps = min(step.split.accumulation_steps, KINDS_OF_MICRO_STEP)
        _run_first_step(step, recorder)
        if num_micro_steps > 1:
            # its peak tells what accumulating costs, before any split with a single step was tried
            with recorder.phase("single_step"):
                step.micro_step()
            with recorder.phase("warm_up"):
                step.update()
            step.took_effect()
        if not self._is_modelled:
            self._warm_up(step, recorder, [step.split.micro_batch_size] * num_micro_steps)
        has_ended = False
        while not has_ended:
            if not self._run_round(step, recorder, num_micro_steps):
                continue
            num_rounds = len(recorder.times_s["update"])
            has_ended = self._is_cut_short(step, recorder, num_rounds) or self._is_enough(step, recorder, num_rounds)
        note_skipped(step.num_skipped, recorder)

    def run_whole_steps(self, step: Step, recorder: Recorder) -> None:
        """Complete optimizer steps, every micro-batch included."""
        if self._is_modelled:
            _run_first_step(step, recorder)
        else:
            # each size that is timed, once; of several micro-steps at least one before the last
            *others, final = step.split.micro_batch_sizes
            self._warm_up(step, recorder, [*sorted(set(others)), final])
        num_steps = 0
        while num_steps == 0 or not self._is_enough(step, recorder, num_steps, usual=MIN_WHOLE_STEPS):
            with recorder.phase("whole_step"):
                step.whole()
            if step.took_effect():
                num_steps += 1
            else:
                recorder.drop_latest(whole_step=1)
        note_skipped(step.num_skipped, recorder)

    def _run_round(self, step: Step, recorder: Recorder, num_micro_steps: int) -> bool:
        """One round in parts and, on a real clock, once more unbroken; False if a step of them was skipped."""
        are_last = [number == num_micro_steps for number in range(1, num_micro_steps + 1)]
        for is_last in are_last:
            with recorder.phase("micro_step"):
                step.micro_step(last=is_last)
        with recorder.phase("update"):
            step.update()
        if not step.took_effect():
            recorder.drop_latest(micro_step=num_micro_steps, update=1)
            return False
        if self._is_modelled:
            return True
        with recorder.phase("unbroken_round"):
            for is_last in are_last:
                step.micro_step(last=is_last)
            step.update()
        if not step.took_effect():
            recorder.drop_latest(micro_step=num_micro_steps, update=1, unbroken_round=1)
            return False
        return True

    def _warm_up(self, step: Step, recorder: Recorder, sizes: Sequence[int]) -> None:
        """Optimizer steps of micro-batches of these `sizes`, until they settle."""
        least_s = 0.0 if self._is_warm else FIRST_WARM_UP_S
        times_s: list[float] = []
        while not _is_warm(times_s, least_s):
            with recorder.phase("warm_up"):
                for size in sizes[:-1]:
                    step.micro_step(size, last=False)
                step.micro_step(sizes[-1])
                step.update()
            if step.took_effect():
                times_s.append(recorder.times_s["warm_up"][-1])
        self._is_warm = True

    def _is_enough(self, step: Step, recorder: Recorder, num_done: int, usual: int = MIN_ROUNDS) -> bool:
        if self._is_modelled:
            return True
        if num_done < MIN_ROUNDS:
            return False
        if sum(sum(recorder.times_s[phase]) for phase in TIMED) >= self._budget_s:
            return True
        error = recorder.measurement(step.split).relative_error
        return num_done >= MAX_ROUNDS or (num_done >= usual and error is not None and error <= TARGET_RELATIVE_ERROR)

    def _is_cut_short(self, step: Step, recorder: Recorder, num_rounds: int) -> bool:
        if self._is_modelled or num_rounds > 1 or self._fastest_s is None:
            return False
        step_s = recorder.measurement(step.split).step_time_s
        if step_s is None or step_s <= CLEARLY_SLOWER * self._fastest_s:
            return False
        recorder.notes.append(
            f"Cut short after one round: its step takes {step_s / self._fastest_s:.2f} times that of the fastest trial."
        )
        return True


def _run_first_step(step: Step, recorder: Recorder) -> None:
    """One step, with the update that makes the optimizer's state: again where the gradient scaler skipped it."""
    has_updated = False
    while not has_updated:
        with recorder.phase("warm_up"):
            step.micro_step()
            step.update()
        has_updated = step.took_effect()


def note_skipped(num_skipped: int, recorder: Recorder) -> None:
    """Say how many steps were skipped, where any were."""
    if num_skipped:
        steps = "1 step was" if num_skipped == 1 else f"{num_skipped} steps were"
        recorder.notes.append(f"{steps} skipped by the gradient scaler, whose scale was too large, and not timed.")


def _is_warm(times_s: Sequence[float], least_s: float) -> bool:
    if not times_s:
        return False
    spent_s, recent = sum(times_s), times_s[-NUM_SETTLED:]
    if spent_s >= WARM_UP_LIMIT_S:
        return True
    has_settled = len(recent) == NUM_SETTLED and max(recent) - min(recent) <= SETTLED_RELATIVE_SPREAD * median(recent)
    return spent_s >= least_s and has_settled
