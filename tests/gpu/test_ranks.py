"""A rank's DistributedDataParallel on a card, over NCCL."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.ranks.cases import Case, errors_of, train_on_one_device, train_on_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("counts_tokens", [False, True])
def test_a_rank_on_a_card_has_one_devices_gradient(card, counts_tokens):
    """One rank of one, its batches in three micro-batches: moved to the card, agreed on, reduced, as on the CPU."""
    case = Case(sizes=(((5, 4, 1),), ((2, 3, 1),)), counts_tokens=counts_tokens, device=card.type)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.warns(UserWarning, match="planned on virtual devices"):
            trained = train_on_ranks(None, case)
    finally:
        dist.destroy_process_group()
    assert max(errors_of(trained, train_on_one_device(case))) <= 1e-10
