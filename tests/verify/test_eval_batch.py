"""The largest evaluation batch: it keeps the headroom, and the wrapped model takes it at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splittune import InvalidSplitError, verify
from splittune.units import MIB
from tests.verify.jobs import SMALL, Evaluated, config_for, left_free, task_of


class Wide(nn.Module):
    """An output of 0.5 MiB a sample, which evaluation gathers on GPU 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 128 * 1024)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def wide_loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output.mean(1) - targets).square().mean()


@pytest.mark.parametrize("placement", ["output", "replica"])
def test_the_evaluation_batch_is_the_largest_that_keeps_the_headroom(placement: str) -> None:
    """What is measured keeps the headroom in a run of its own, and a tenth more does not."""
    batches = [(torch.randn(8, 4), torch.randn(8))] * 2
    config = config_for(
        (2, 6),
        devices=left_free(120, "1xT400-4GB:occupied=3740MiB"),
        min_headroom_bytes=(10 * MIB, 10 * MIB),
        loss_placement=placement,
    )
    task = task_of(Wide(), batches, loss_fn=wide_loss)
    result = verify(config, task, num_steps=2, measure_eval_batch_size=True)
    found = result.config.eval_batch_size
    assert result.is_verified
    assert found is not None
    assert 16 < found < 64 * 8
    assert all(verify(result.config, task, num_steps=num_steps).is_verified for num_steps in (2, 9))
    more = replace(result.config, eval_batch_size=found + found // 10 + 1)
    assert not verify(more, task, num_steps=2).is_verified


def test_the_wrapped_model_takes_an_evaluation_batch_at_once() -> None:
    """Under no_grad up to eval_batch_size samples are shared as the tuned shards are; with
    gradients, or more, refused."""
    model, sizes = nn.Linear(4, 2), []
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    wrapped = config_for((2, 6), eval_batch_size=40).wrap(model)
    x = torch.randn(41, 4)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x[:40]), functional.linear(x[:40], model.weight, model.bias))
        wrapped(x[:4])
        with pytest.raises(
            InvalidSplitError, match=r"41 samples: expected .* at most eval_batch_size=40.*smaller batch"
        ):
            wrapped(x)
    assert sizes == [10, 30, 1, 3]
    with pytest.raises(InvalidSplitError, match=r"at most 8 in training .*Use SplitConfig.micro_batches, or no_grad"):
        wrapped(x[:9])
    with torch.no_grad(), pytest.raises(InvalidSplitError, match="9 samples does not fit the tuned shards"):
        config_for((2, 6)).wrap(nn.Linear(4, 2))(x[:9])


def test_the_search_ends_at_64_micro_batches() -> None:
    """Evaluation gains nothing beyond that, and it is said that larger ones were not tried."""
    result = verify(
        config_for((1, 1)),
        task_of(nn.Linear(4, 1), [(torch.randn(2, 4), torch.randn(2, 1))]),
        num_steps=1,
        measure_eval_batch_size=True,
    )
    assert result.config.eval_batch_size == 128
    assert result.notes[-1] == "Evaluation batches of more than 128 samples were not tried."


def test_nothing_is_measured_where_the_run_is_not_verified() -> None:
    """A config that does not hold gets no evaluation batch size."""
    config = config_for((2, 2), devices=left_free(64), eval_batch_size=99)
    result = verify(config, task_of(Evaluated(80), SMALL), num_steps=1, measure_eval_batch_size=True)
    assert result.config.eval_batch_size is None
    assert result.notes[-1] == "No evaluation batch size was measured: the run is not verified."
