"""The micro-batches of a batch of any size: tuned ones for a full batch, the fewest that hold a short one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.errors import ConfigError
from splittune.split import BatchSplit, micro_batch_sizes_of


def split(global_batch_size: int, accumulation_steps: int) -> BatchSplit:
    return BatchSplit.even(global_batch_size=global_batch_size, accumulation_steps=accumulation_steps, num_devices=2)


def test_docstring_example() -> None:
    """Tuned for 64 in 4 micro-batches of 16, 20 samples take two of 10."""
    assert micro_batch_sizes_of(64, split(64, 4)) == (16, 16, 16, 16)
    assert micro_batch_sizes_of(20, split(64, 4)) == (10, 10)


@given(st.data())
def test_no_micro_batch_exceeds_the_tuned_one_and_one_fewer_would(data: st.DataObject) -> None:
    """For any batch: all samples, sizes that differ by at most one, none too large, and no more than it takes."""
    batch = data.draw(st.integers(1, 300))
    tuned = split(batch, data.draw(st.integers(1, batch)))
    num_samples = data.draw(st.integers(1, batch))
    sizes = micro_batch_sizes_of(num_samples, tuned)
    assert sum(sizes) == num_samples
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes[0] <= tuned.micro_batch_size
    assert num_samples == batch or (len(sizes) - 1) * tuned.micro_batch_size < num_samples


@pytest.mark.parametrize(("num_samples", "complaint"), [(0, "0 samples"), (9, "9 - 8 = 1 more than")])
def test_a_batch_that_is_empty_or_too_large_is_refused(num_samples: int, complaint: str) -> None:
    """With what to do about it."""
    with pytest.raises(ConfigError, match=complaint):
        micro_batch_sizes_of(num_samples, split(8, 2))
