"""Going through a window's micro-batches."""

from __future__ import annotations

import pytest
from torch import nn

from splittune.parallel import accumulate
from tests.parallel.models import mlp
from tests.parallel.wrapped import on_the_cpu


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_all_but_the_last_run_without_sync(count: int) -> None:
    """Every item comes once, in order; only the last one's forward is outside no_sync."""
    wrapped = on_the_cpu(mlp(), (1, 1))
    seen = [(item, wrapped._syncs) for item in accumulate(wrapped, iter(range(count)))]
    assert seen == [(item, item == count - 1) for item in range(count)]
    assert wrapped._syncs


def test_a_model_that_is_not_wrapped_is_simply_iterated() -> None:
    """The same loop trains on one device."""
    assert list(accumulate(nn.Linear(1, 1), [1, 2, 3])) == [1, 2, 3]


def test_leaving_the_loop_early_ends_no_sync() -> None:
    """A break, once the loop's iterator is gone, or an exception leaves the wrapper as it was."""
    wrapped = on_the_cpu(mlp(), (1, 1))
    for _ in accumulate(wrapped, range(3)):
        break
    assert wrapped._syncs

    def failing() -> None:
        for _ in accumulate(wrapped, range(3)):
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        failing()
    assert wrapped._syncs
