"""What the wrapper costs the host: the models are as deep as they say, and every engine does its work."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.wrapper import host


def test_thin_models_are_as_deep_as_those_they_stand_for() -> None:
    """ResNet-50 has 161 parameters and 159 buffers; a GPT of 24 layers has 12 parameters a layer."""
    resnet, gpt = (model for _, model, _ in host.jobs())
    assert (len(list(resnet.parameters())), len(list(resnet.buffers()))) == (161, 159)
    assert len(list(gpt.parameters())) == 24 * 12 + 3


def test_a_row_for_each_engine_says_what_it_was_measured_beside() -> None:
    """Both engines on one model, of the same rounds as the bare module and torch's replicate."""
    torch.manual_seed(0)
    rows = host.measure("tiny", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(8, 4), num_rounds=1)
    assert [row["engine"] for row in rows] == ["window", "torch"]
    assert len({(row["bare_ms"], row["torch_replicate_ms"]) for row in rows}) == 1
    assert all(row["torch_replicate_ms"] > 0 for row in rows)
