"""A worker whose card is spoilt by a kernel's assert, and one that is killed while it holds memory of the card."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import worker as gpu_worker
from benchmarks.gpu.stage import Findings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def test_a_spoilt_or_killed_worker_is_a_crashed_trial_and_gives_its_memory_back(stage):
    """The search goes on in a fresh worker, this process can use the card, and no memory stays behind."""
    findings = Findings(part="worker")
    gpu_worker.run(stage, findings)
    assert [row["outcomes"] for row in findings.rows] == ["ok, ok, crashed, ok", "ok, crashed"]
    assert not findings.failures
