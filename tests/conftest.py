"""What every test shares: one thread for torch, so that workers do not fight over the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
