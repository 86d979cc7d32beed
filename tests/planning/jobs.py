"""Small jobs to plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from splittune import TrainingTask

SMALL = {"progress": False, "max_trials": 3}
"""Options of a plan that takes a second or two."""


def job(num_samples: int = 16, width: int = 256, **options: Any) -> TrainingTask:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8))
    return TrainingTask(model, [(torch.randn(num_samples, 64), torch.randint(8, (num_samples,)))], **options)


def too_large() -> TrainingTask:
    return TrainingTask(nn.Linear(4096, 4096), [(torch.ones(4, 4096),) * 2])


FULL = "1xT400-4GB:occupied=3800MiB"
"""A machine on which `too_large` is that."""
