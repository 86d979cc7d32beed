"""Updates that the job's gradient scaler skips: no step was taken, so their times count nowhere."""

from __future__ import annotations

from collections.abc import Callable

from splittune.errors import ConfigError
from splittune.training.task import TrainingTask

# Every skip halves the scale: so many take torch's first one, 2**16, below float16's smallest number, 2**-24.
MAX_SKIPPED_IN_A_ROW = 40


def _as_it_is(took_effect: bool) -> bool:
    return took_effect


class SkippedUpdates:
    """Tells whether the latest update was made, and counts those that were not.

    Args:
        task: the job; without a gradient scaler every update is made.
        agreed: makes of this rank's answer that of all ranks; asked only where the job has a gradient scaler.
    """

    def __init__(self, task: TrainingTask, agreed: Callable[[bool], bool] = _as_it_is) -> None:
        self.count = 0
        """Updates that were skipped, of those that `took_effect` was asked about."""
        self._scaler, self._agreed = task.grad_scaler, agreed
        self._scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        self._num_in_a_row = 0

    def took_effect(self) -> bool:
        """Whether the latest update was made; False where the gradient scaler skipped it, which lowers its scale.

        Ask after every update, and outside what is timed: reading the scale waits for the device.

        Raises:
            ConfigError: more than 40 were skipped in a row, so no scale will do.
        """
        if self._scaler is None:
            return True
        before, self._scale = self._scale, self._scaler.get_scale()
        if self._agreed(self._scale >= before):
            self._num_in_a_row = 0
            return True
        self.count += 1
        self._num_in_a_row += 1
        if self._num_in_a_row > MAX_SKIPPED_IN_A_ROW:
            raise ConfigError(
                f"the gradient scaler skipped {self._num_in_a_row} steps in a row, and its scale is "
                f"{self._scale:g}: expected finite gradients at some scale. Check the model for operations that "
                "overflow in half precision, or train in torch.bfloat16, which needs no scaler."
            )
        return False
