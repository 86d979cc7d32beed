"""The wrapper over cards that are really several: parameters and gradients pass between them, by NCCL where it is."""

from __future__ import annotations

import warnings

import pytest
import torch

from splittune.cards import all_cards, count_cards, kind_of_cards, module_of
from splittune.parallel import BalancedDataParallel, TorchLink, nccl
from splittune.parallel.collectives import copy_to_each
from splittune.units import MIB
from tests.parallel.models import MODELS, assert_same, train, whole_batch

pytestmark = [pytest.mark.gpu, pytest.mark.standin]

MAX_CARDS = 4


@pytest.fixture
def cards(card):
    """Up to four cards of this machine."""
    if count_cards() < 2:
        pytest.skip(f"one card alone is here: {card}")
    return all_cards()[:MAX_CARDS]


@pytest.fixture(params=["as found", "by copies"])
def way(request, monkeypatch):
    """With NCCL where torch finds it, and without."""
    nccl.is_nccl_usable.cache_clear()
    if request.param == "by copies":
        monkeypatch.setattr(nccl, "KIND", "none")
    yield request.param
    nccl.is_nccl_usable.cache_clear()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("engine", ["window", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_whole_batchs(cards, name, engine):
    """Several windows with steps of unequal micro-batches between them."""
    torch.manual_seed(0)
    build, draw_inputs = MODELS[name]
    model, batch = build().to(cards[0]), draw_inputs(16).to(cards[0])
    expected = whole_batch(model, batch)
    shards = (2, 3, 2, 1)[: len(cards)]
    wrapper = BalancedDataParallel(module=model, shard_sizes=shards, device_ids=list(cards), engine=engine)
    sizes = [sum(shards)] * (16 // sum(shards))
    sizes += [16 - sum(sizes)] if sum(sizes) < 16 else []
    for _ in range(2):
        assert_same(train(wrapper, batch, sizes), expected, tolerance=5e-5)


def test_nccl_serves_cudas_cards(cards):
    """On CUDA's cards NCCL is found usable without a word, as nn.DataParallel finds it."""
    if kind_of_cards() != nccl.KIND:
        pytest.skip(f"NCCL is for {nccl.KIND}'s cards, and these are {kind_of_cards()}'s")
    nccl.is_nccl_usable.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nccl.is_nccl_usable(cards)


@pytest.mark.usefixtures("way")
def test_what_arrives_is_what_was_sent(cards):
    """400 MiB in tensors of all sizes, sent again and again while their source is written to in between."""
    link, module = TorchLink(cards), module_of(cards[0])
    sizes = [1, 1000, 3 * MIB, 25 * MIB, 70 * MIB]
    originals = [torch.zeros(size, device=cards[0]) for size in sizes]
    for number in range(1, 4):
        for original in originals:
            original.fill_(float(number))
        copies = copy_to_each(originals, link, range(1, len(cards)))
        for original in originals:
            original.fill_(-1.0)
        for own in copies:
            for copied in own:
                assert copied.eq(number).all()
        del own, copied
    for each in cards:
        module.synchronize(each)
