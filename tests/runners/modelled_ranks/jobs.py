"""Jobs whose memory and time are easy to tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from splittune import TrainingTask

WIDTH = 1024
PARAMETER_BYTES = 4 * WIDTH * WIDTH
"""Of `square`: 4 MiB."""


def square(**options: Any) -> TrainingTask:
    """One square matrix, AdamW."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    return TrainingTask(model, [(torch.randn(8, WIDTH), torch.randn(8, WIDTH))], **options)


def products(width: int = 2048) -> TrainingTask:
    """A model that is made of products: with a few hundred samples a card's speed is its FLOP/s, not its launches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    return TrainingTask(model, [(torch.randn(8, width), torch.randn(8, width))])
