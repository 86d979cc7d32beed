"""One card, as the benchmark's parts take it; what they find is asserted here."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.stage import Stage
from benchmarks.jobs.gpu_models import REHEARSAL
from splittune import cards


@pytest.fixture
def card() -> torch.device:
    """The first card: a real one, or with ``--standin`` a device that stands in for one."""
    if not cards.count_cards():
        pytest.skip("torch sees no card here")
    return cards.card(0)


@pytest.fixture
def stage(card: torch.device) -> Stage:
    """The first card, without a word; with jobs as small as a rehearsal's where the card only stands in for one."""
    return Stage(str(card), quiet=True, sizes=None if card.type == "cuda" else REHEARSAL)
