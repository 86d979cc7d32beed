"""A training run on ranks with unlike shares ends where one device's ends."""

from __future__ import annotations

import pytest

from tests.ranks.jobs import DIGITS, GPT, NUM_EPOCHS, Job, train_on_one_device, train_on_ranks
from tests.ranks.pool import Pool

TOLERANCE = 1e-4  # what the product promises after three epochs in float32


@pytest.mark.parametrize("job", [GPT, DIGITS], ids=["a small GPT", "a CNN with BatchNorm"])
def test_three_epochs_end_at_one_devices_parameters(pool: Pool, job: Job) -> None:
    """With shares of 1, 4, 3 and no samples and a short last batch: the same losses and model, buffers included."""
    truth, true_losses = train_on_one_device(job)
    per_epoch = len(true_losses) // NUM_EPOCHS
    # it learns: else equal parameters would say little
    assert sum(true_losses[-per_epoch:]) < 0.9 * sum(true_losses[:per_epoch])
    for state, losses in pool.run(train_on_ranks, job):
        assert losses == pytest.approx(true_losses, abs=TOLERANCE)
        assert state.keys() == truth.keys()
        for name, value in truth.items():
            assert (state[name].double() - value.double()).abs().max() <= TOLERANCE, name
