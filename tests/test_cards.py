from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from splittune.cards import all_cards, card, count_cards, is_card, kind_of_cards, module_of, with_index


@pytest.fixture
def xpus(monkeypatch):
    """Two cards of another kind than CUDA's, the second being the current one."""
    fake = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, current_device=lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: fake)
    return fake


def test_cards_are_those_of_torchs_accelerator(xpus):
    """Their kind, their number and the module that is asked for them come from torch."""
    assert kind_of_cards() == "xpu"
    assert count_cards() == 2
    assert module_of("xpu") is xpus
    assert all_cards() == (card(0), card(1)) == (torch.device("xpu", 0), torch.device("xpu", 1))
    assert with_index(torch.device("xpu")) == torch.device("xpu", 1)
    assert is_card(torch.device("xpu"))
    assert not is_card(torch.device("cpu"))


@pytest.mark.parametrize("accelerator", [None, torch.device("mps"), torch.device("xpu")])
def test_where_there_is_no_card_cudas_are_meant(monkeypatch, accelerator):
    """Nothing there, a device that is no card, or one whose driver is missing: numbers and messages mean CUDA's."""
    absent = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: absent)
    assert kind_of_cards() == "cuda"
    assert count_cards() == 0
    assert all_cards() == ()
    assert is_card(torch.device("cuda", 3))


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_torch_offers_what_is_asked_of_every_kind_of_card(kind):
    """What the wrapper, the snapshot and the hardware call is there by the same names in each of torch's modules."""
    asked = (
        "Event", "current_device", "current_stream", "device", "device_count", "empty_cache", "get_device_properties",
        "get_rng_state_all", "is_available", "max_memory_allocated", "max_memory_reserved", "mem_get_info",
        "memory_allocated", "memory_reserved", "memory_stats", "reset_peak_memory_stats", "set_rng_state_all", "stream",
        "synchronize",
    )  # fmt: skip
    module = torch.get_device_module(kind)
    assert [name for name in asked if not hasattr(module, name)] == []
