"""Whether the job's loss is a mean over samples: accumulation and the wrapper take it for one."""

from __future__ import annotations

from math import isfinite, log
from statistics import median

import torch

from splittune.hardware.oom import is_sticky
from splittune.parallel.base import SplitModule
from splittune.training.batches import SampleBatch
from splittune.training.task import TrainingTask

# Between the sizes whose losses are compared: enough to see a sum through dropout. A choice.
TIMES_AS_MANY = 4
# Dropout draws anew each time: the median of so many counts. A choice.
NUM_DRAWS = 3
_SEED = 0


def loss_exponent(task: TrainingTask, model: SplitModule, samples: SampleBatch, num_samples: int) -> int | None:
    """How the loss grows with the samples: as their number to this power, 0 for a mean and 1 for a sum.

    Of one sample over and over, `num_samples` times and a quarter as often, no gradients recorded. Worked: where that
    sample's loss is 0.5, 16 copies and 4 give 0.5, so it is 0; with ``reduction="sum"`` they give 8.0 and 2.0, so it is
    log(4) / log(4) = 1. It is rounded, for dropout is noise. A sum in each replica is seen as one where every device
    has a sample of the quarter.

    None where it cannot be told: of fewer than 4 samples, of a loss of 0, or where none can be computed without
    gradients, since `step_fn` runs backward itself, say.
    """
    quarter = num_samples // TIMES_AS_MANY
    if not quarter:
        return None
    try:
        with torch.no_grad():
            torch.manual_seed(_SEED)  # a trial says the same whenever it is run; what it leaves is put back
            few, many = (_loss_of(task, model, samples.copies(size)) for size in (quarter, num_samples))
        exponent = log(many / few) / log(num_samples / quarter)
    except Exception as error:  # the trials have shown that the job trains: what else it cannot do is no fault of its
        if is_sticky(error):
            raise
        return None
    return round(exponent) if isfinite(exponent) else None


def describe_sum(exponent: int | None) -> str | None:
    """What to do about a loss with a sum's `loss_exponent`; None for a mean's, and where it is not known."""
    if not exponent or exponent < 0:
        return None
    return (
        "The loss grows with the number of samples, so it is a sum over them and no mean: split or accumulated, it "
        "trains on another gradient than one device's. Divide it by the number of its samples, as reduction='mean' "
        "does; a mean over tokens is weighed by weight_fn."
    )


def _loss_of(task: TrainingTask, model: SplitModule, batch: object) -> float:
    return median(float(task.loss_of(model, batch)[0]) for _ in range(NUM_DRAWS))
