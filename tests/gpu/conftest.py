"""One card, as the benchmark's parts take it; what they find is asserted here."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.stage import Stage


@pytest.fixture
def stage() -> Stage:
    """The first card, without a word."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    return Stage("cuda:0", quiet=True)
