"""Limits of a card's memory, placed anywhere or moved by another process: what is emitted fits beside them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import limits as gpu_limits
from benchmarks.gpu import neighbour as gpu_neighbour
from benchmarks.gpu.stage import Findings
from splittune.cards import module_of
from splittune.units import GIB

pytestmark = [
    pytest.mark.gpu,
    # torch's, where autograd's thread multiplies first; it then does what is to be done
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"),
]


def test_what_is_emitted_fits_and_what_would_be_faster_does_not(stage):
    """Two limits anywhere: no OOM on the way, the emitted split trains within them, and the next
    faster one does not."""
    findings = Findings(part="limits")
    gpu_limits.run(stage, findings, num_limits=2)
    assert not findings.failures


def test_a_process_that_takes_memory_in_mid_search_is_noticed(stage):
    """The trial is measured again and tells why, and what is emitted keeps its headroom beside the other process."""
    findings = Findings(part="neighbour")
    gpu_neighbour.run(stage, findings)
    assert not findings.failures


@pytest.mark.standin
def test_a_limit_is_lifted_after_an_error(stage):
    """Whatever happens under a limit, afterwards the process may take what it could before."""
    with pytest.raises(KeyError), stage.limited_to(GIB):
        raise KeyError
    if stage.can_tell_limits():
        assert module_of(stage.torch_device).get_per_process_memory_fraction(0) == 1.0
    block = torch.empty(2 * GIB, dtype=torch.uint8, device=stage.torch_device)
    assert block.nbytes == 2 * GIB
