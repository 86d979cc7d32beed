"""What the profiler says of a card's memory and time agrees with what else can be read there."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import memory as gpu_memory
from benchmarks.gpu import timing as gpu_timing
from benchmarks.gpu.readings import blocks_held, sampled, traced
from benchmarks.gpu.stage import Findings
from splittune.units import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
    # torch's, where autograd's thread multiplies first; it then does what is to be done
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"),
]

CARD = torch.device("cuda", 0)


def test_peaks_agree_with_the_allocators_trace_and_the_cards_samples(stage):
    """Allocated, reserved, each phase's peak and what is outside: within what the readings themselves differ by."""
    findings = Findings(part="memory")
    gpu_memory.run(stage, findings, jobs=gpu_memory.JOBS[:2])
    assert len(findings.rows) == 3
    assert not findings.failures


def test_the_readings_see_a_block_of_known_size(stage):
    """64 MiB taken and given back: in the trace, in the snapshot while it is there, and in the card's samples."""
    stage.hardware.recover(thoroughly=True)
    with sampled(CARD, every_s=0.001) as samples, traced(CARD) as trace:
        before = blocks_held(CARD)
        block = torch.zeros(64 * MIB, dtype=torch.uint8, device=CARD)
        torch.cuda.synchronize(CARD)
        during = blocks_held(CARD)
        del block
    assert before is not None
    assert during is not None
    assert (during[0] - before[0], during[1] - before[1]) == (64 * MIB, 64 * MIB)
    assert not samples.problem
    if trace.problem:
        pytest.skip(trace.problem)
    sizes = [event["size"] for event in trace.events if event["action"] == "alloc"]
    assert 64 * MIB in sizes


def test_busy_time_agrees_with_the_kernels_and_cudnn_has_searched(stage):
    """The gauge counts the kernels and little besides, and no timed micro-step holds cuDNN's search."""
    findings = Findings(part="timing")
    gpu_timing.run(stage, findings)
    assert not findings.failures
