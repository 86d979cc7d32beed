"""Which micro-batches a batch of any size is run in: pure integers."""

from __future__ import annotations

import math

from splittune.errors import ConfigError
from splittune.split.batch_split import BatchSplit
from splittune.split.shards import spread_evenly


def micro_batch_sizes_of(num_samples: int, split: BatchSplit) -> tuple[int, ...]:
    """The micro-batches of a batch of `num_samples`, larger ones first.

    None is above ``split.micro_batch_size``. A full batch takes the tuned ones; a short one the
    fewest that hold it, of sizes that differ by at most one. Worked: tuned for 64 in 4
    micro-batches of 16, 20 samples take ceil(20 / 16) = 2 of 10.

    Raises:
        ConfigError: no sample, or more than the split was tuned for.
    """
    tuned_for = split.global_batch_size
    if num_samples == 0:
        raise ConfigError("a batch of 0 samples: expected at least 1. Skip empty batches in the loader.")
    if num_samples > tuned_for:
        raise ConfigError(
            f"a batch of {num_samples} samples, {num_samples} - {tuned_for} = {num_samples - tuned_for} more than "
            f"this config was tuned for ({split}): expected at most {tuned_for}. Set the loader's batch size to "
            f"{tuned_for}, or tune for {num_samples}."
        )
    if num_samples == tuned_for:
        return split.micro_batch_sizes
    return spread_evenly(num_samples, math.ceil(num_samples / split.micro_batch_size))
