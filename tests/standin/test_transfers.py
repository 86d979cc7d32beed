"""What passes from card to card: the host does not wait for it, and a wait that is missing is seen."""

from __future__ import annotations

import pytest
import torch

from splittune.cards import module_of
from splittune.parallel import TorchLink, collectives
from splittune.parallel.collectives import Part, add_from_afar, copy_to_each
from splittune.parallel.sums import Sums
from splittune.units import MIB
from tests.standin import devices

pytestmark = pytest.mark.standin

CARDS = [torch.device("standin", index) for index in range(3)]
standin = module_of(CARDS[0]) if devices.is_registered() else None
BUSY_S = 600.0
"""For ever, as far as a test is concerned: whoever waited for it would run into the suite's own limit."""


def there_and_back(link: TorchLink) -> Sums:
    """Tensors of 1 to 12 MiB out to two cards, which double them, and home again, where they are added up."""
    originals = [torch.full((size * MIB // 4,), 1.0, device=CARDS[0]) for size in (1, 12, 3, 9)]
    copies = copy_to_each(originals, link, [1, 2])
    for original in originals:
        original.zero_()
    for own in copies:
        torch._foreach_mul_(own, 2.0)
    totals = Sums(len(originals))
    add_from_afar([Part(CARDS[1], list(copies[0])), Part(CARDS[2], list(copies[1]))], link, CARDS[0], totals, range(4))
    return totals


def test_the_host_goes_on_while_every_card_is_busy():
    """Everything is asked for before any card has begun with it."""
    there_and_back(TorchLink(CARDS))  # memory is there afterwards: asking for more waits
    for card in CARDS:
        standin.synchronize(card)
        with standin.device(card):
            devices.sleep(card.index, BUSY_S)
    try:
        there_and_back(TorchLink(CARDS))
        assert not any(standin.current_stream(card).query() for card in CARDS)
    finally:
        devices.forget_delays()


def test_it_is_in_order(monkeypatch):
    """Every read after its write, memory reused when it is free, in buckets of which several are under way."""
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 2 * MIB)
    with devices.order_checked() as reports:
        for _ in range(3):
            for total in there_and_back(TorchLink(CARDS)).values:
                assert total.eq(4).all()
        del total
    assert reports == []


def test_a_missing_wait_is_seen(monkeypatch):
    """Without the waits for the ends of hops the test before this one would fail."""
    monkeypatch.setattr(TorchLink, "wait", lambda *_: None)
    with devices.order_checked() as reports:
        there_and_back(TorchLink(CARDS))
        for card in CARDS:
            standin.synchronize(card)
    assert reports
