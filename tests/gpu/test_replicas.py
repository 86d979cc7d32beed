"""What replicas cost a card and the host: the benchmark's part for it, over one card that is named three times."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import replicas
from benchmarks.gpu.stage import Findings
from splittune.cards import module_of
from splittune.parallel.link import TorchLink

pytestmark = [pytest.mark.gpu, pytest.mark.standin]


def test_nothing_more_stays_and_no_kernel_is_searched_for_twice(stage):
    """Threads that stay, one copy of the parameters, inputs ahead; what the host takes is for the benchmark to tell."""
    findings = Findings(part="replicas")
    replicas.run(stage, findings)
    failures = [check for check in findings.failures if "takes no longer than" not in check.claim]
    assert not failures, "\n".join(map(str, failures))
    assert {row["engine"] for row in findings.rows} >= {"window", "torch"}
    assert any(check.passed for check in findings.checks)


def test_a_cards_inputs_do_not_queue_behind_its_work(card):
    """A batch from the host has arrived while the card is still busy with what it was asked for before."""
    module, link = module_of(card), TorchLink([card])
    link.copy(torch.ones(1000), card)
    module.synchronize(card)
    with module.device(card):
        module._sleep(5_000_000_000)  # some seconds of the card's cycles
    busy = module.Event()
    busy.record(module.current_stream(card))
    arrived = link.copy(torch.arange(1000.0), card)
    assert not busy.query()
    assert torch.equal(arrived.cpu(), torch.arange(1000.0))
    assert busy.query()  # what reads it comes after the work: in the card's own order
