"""What code sends to a card stays on the host, however it names the card."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from splittune.cards import card, kind_of_cards
from splittune.runners.cards_as_host import CardsAsHost

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "by its name": lambda tensor: tensor.to(f"{kind_of_cards()}:0"),
    "by its kind": lambda tensor: tensor.to(device=kind_of_cards(), non_blocking=True),
    "as a device": lambda tensor: tensor.to(card(0), torch.float64).to(torch.float32),
    "by its number": lambda tensor: tensor.to(0),
    "by a method": lambda tensor: tensor.cuda(),
    "from the start": lambda tensor: torch.ones(2, 3, device=card(1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_card_is_taken_for_the_host(way: str) -> None:
    """No card need be there, and the values are the same."""
    with CardsAsHost():
        there = WAYS[way](torch.ones(2, 3))
    assert there.device.type == "cpu"
    assert torch.equal(there, torch.ones(2, 3))


def test_other_devices_and_other_words_stay_what_they_are() -> None:
    """A tensor without memory stays one, and so does a way of padding."""
    with CardsAsHost():
        assert torch.ones(2, device="meta").is_meta
        assert torch.nn.functional.pad(torch.ones(1, 1, 2), (1, 1), mode="reflect").shape == (1, 1, 4)
        assert torch.ones(4).to(torch.float16).dtype is torch.float16
