"""BatchNorm by the whole micro-batch on cards, with torch's own kernels there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from splittune.parallel import BalancedDataParallel, accumulate
from splittune.parallel.batch_norm import batch_norm
from tests.parallel.models import assert_same
from tests.parallel.normed import NORMS, images, make, one_device, state_after

pytestmark = [pytest.mark.gpu, pytest.mark.standin]


@pytest.mark.parametrize("shards", [(5, 3), (0, 7, 1)])
@pytest.mark.parametrize("name", sorted(NORMS))
def test_replicas_on_one_card_are_one_device(card, name, shards):
    """One card, named as often as there are replicas: threads of their own in forward, the card's in backward."""
    model, batch, sizes = make(name).to(card), images(13).to(card), [8, 5]
    expected = one_device(copy.deepcopy(model), batch.detach(), sizes)
    model = BalancedDataParallel(
        module=model, shard_sizes=shards, device_ids=[card] * len(shards), sync_batch_norm=True
    )
    batch = batch.detach().requires_grad_()
    parts = accumulate(model, batch.split(sizes))
    got = state_after(model.module, batch, ((model, part) for part in parts))
    assert_same(got, expected, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_share_that_is_the_whole_is_batch_norm(card, dtype, memory_format):
    """What comes of torch's kernels for statistics, forward and backward is what its BatchNorm gives in training."""
    x = (torch.randn(6, 8, 5, 7) * 2 + 3).to(card, dtype).contiguous(memory_format=memory_format)
    norm = nn.BatchNorm2d(8).to(card)
    other, mine, its = copy.deepcopy(norm), x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = batch_norm(norm, mine, lambda part: part), other(its)
    slope = torch.randn(6, 8, 5, 7).to(card, dtype)
    got.backward(slope)
    expected.backward(slope)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert got.stride() == expected.stride()
    pairs = {"out": (got, expected), "inputs": (mine.grad, its.grad), "weight": (norm.weight.grad, other.weight.grad)}
    assert_same(
        {key: pair[0].float() for key, pair in pairs.items()},
        {key: pair[1].float() for key, pair in pairs.items()},
        tolerance,
    )
    torch.testing.assert_close(norm.running_var, other.running_var)
