"""Out of memory in each phase of a step on a card, and everything as before afterwards."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import ooms as gpu_ooms
from benchmarks.gpu.stage import Findings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
    # torch's, where autograd's thread multiplies first; it then does what is to be done
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"),
]


def test_each_phase_runs_out_of_memory_and_nothing_is_left_of_it(stage):
    """Forward, loss, backward, first state, a later update: memory at its baseline, weights
    bit-identical, and on it goes."""
    findings = Findings(part="ooms")
    gpu_ooms.run(stage, findings)
    assert [row["failed_in"] for row in findings.rows] == list(gpu_ooms.PHASES)
    assert not findings.failures
