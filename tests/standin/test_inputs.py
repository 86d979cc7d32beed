"""Inputs travel from the host on streams of their own: a card that is busy keeps neither them nor the host waiting."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from splittune.cards import module_of
from splittune.parallel import BalancedDataParallel
from splittune.parallel import link as links
from splittune.parallel.link import TorchLink
from tests.standin import devices

pytestmark = pytest.mark.standin

CARDS = [torch.device("standin", index) for index in range(3)]
standin = module_of(CARDS[0]) if devices.is_registered() else None
BUSY_S = 600.0
"""For ever, as far as a test is concerned: whoever waited for it would run into the suite's own limit."""


@pytest.fixture
def model():
    return nn.Linear(4, 4).to(CARDS[0])


@pytest.fixture
def busy_cards(model):
    """Cards with ten minutes of work in their queues, which nobody waits for in the end."""
    for card in CARDS:
        standin.synchronize(card)
        with standin.device(card):
            devices.sleep(card.index, BUSY_S)
    yield
    devices.forget_delays()


def test_a_copy_does_not_queue_behind_what_the_card_has_to_do(busy_cards):
    """It is there while the card is still at work, and the card's own stream takes it up when it gets to it."""
    link = TorchLink(CARDS)
    copied = link.copy(torch.arange(1000.0), CARDS[1])
    assert copied.device == CARDS[1]
    assert links._stream_for_inputs(CARDS[1]).query()
    assert not standin.current_stream(CARDS[1]).query()


def test_a_wrappers_inputs_go_ahead_of_every_busy_card(model, busy_cards):
    """All shards are on their cards before any card has begun with the forward."""
    wrapper = BalancedDataParallel(module=model, shard_sizes=(2, 3, 3), device_ids=CARDS)
    wrapper(torch.randn(8, 4))
    for card in CARDS:
        assert links._stream_for_inputs(card).query()
        assert not standin.current_stream(card).query()


def test_memory_is_not_reused_while_a_card_still_reads_its_input():
    """Inputs that are dropped at once leave their memory to the next ones only when the card is done with them."""
    link = TorchLink(CARDS)
    weight = torch.randn(1000, device=CARDS[1])
    standin.synchronize(CARDS[1])
    with devices.order_checked() as reports:
        for number in range(8):
            product = link.copy(torch.full((1000,), float(number)), CARDS[1]) * weight
            link.copy(torch.full((1000,), -1.0), CARDS[1])
            torch.testing.assert_close(product.cpu(), number * weight.cpu())
        del product
    assert reports == []


def test_the_check_of_order_sees_a_missing_wait():
    """Without the stream's wait the test before this one would fail."""
    weight = torch.randn(1000, device=CARDS[1])
    standin.synchronize(CARDS[1])
    side = links._stream_for_inputs(CARDS[1])
    with devices.order_checked() as reports:
        with standin.stream(side):
            copied = torch.arange(1000.0).to(CARDS[1], non_blocking=True)
        product = copied * weight
        standin.synchronize(CARDS[1])
        del product, copied
    assert any("written on standin:1" in report for report in reports)


def test_what_torch_cannot_keep_for_a_stream_goes_as_before():
    """A sparse batch: on the card's own stream, and right."""
    link = TorchLink(CARDS)
    plain = torch.eye(4)
    assert links._is_plain(plain)
    assert not links._is_plain(plain.to_sparse())
    assert torch.equal(link.copy(plain, CARDS[2]).cpu(), plain)
