"""What a plan foretells of models stands beside what the card gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.gpu import truth as gpu_truth
from benchmarks.gpu.stage import Findings, Stage
from benchmarks.jobs.gpu_models import REHEARSAL
from benchmarks.jobs.zoo import ZooModel
from splittune.hardware.virtual import driver_names
from splittune.profiling import pacing
from splittune.units import GIB
from tests.standin import devices

pytestmark = [
    pytest.mark.gpu,
    # torch's, where autograd's thread multiplies first; it then does what is to be done
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"),
]


# Convolutions and attention take more memory on a stand-in than on a card, for whose kernels others stand in.
WORDS = ZooModel(
    name="words",
    library="",
    make=lambda: nn.Sequential(nn.Embedding(256, 64), nn.Flatten(), nn.Linear(1024, 512), nn.Tanh(), nn.Linear(512, 8)),
    batch_size=512,
    draw=lambda size, generator: (
        torch.randint(256, (size, 16), generator=generator),
        torch.randint(8, (size,), generator=generator),
    ),
    loss_fn=nn.functional.cross_entropy,
    in_half=False,
)


def test_every_model_has_its_rows(stage: Stage) -> None:
    """Of a card in the catalog both splits are foretold; a check may fail there, which is a finding and no fault."""
    findings = Findings(part="truth")
    gpu_truth.run(stage, findings, models=gpu_truth.tiny(Stage("1xT400-4GB", quiet=True, sizes=REHEARSAL)))
    assert [row["outcome"] for row in findings.rows] == ["ok"] * 4


@pytest.mark.standin
def test_two_models_on_a_device_that_stands_in_for_a_card(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live tensors' peaks are foretold to 2 %; times are not a card's, and nothing is judged."""
    if stage.torch_device.type != devices.NAME:
        pytest.skip("there is a card")
    monkeypatch.setattr(pacing, "FIRST_WARM_UP_S", 0.05)
    monkeypatch.setattr(pacing, "WARM_UP_LIMIT_S", 0.05)
    monkeypatch.setitem(driver_names._BY_DRIVER, "Stand-in", "T400-4GB")
    devices.set_capacity(0, 4 * GIB, GIB)
    try:
        on_card = Stage(str(stage.torch_device), quiet=True, sizes=REHEARSAL)
        findings = Findings(part="truth")
        gpu_truth.run(on_card, findings, models=[gpu_truth.tiny(on_card)[0], WORDS])
    finally:
        devices.set_capacity(0, devices.CAPACITY_BYTES, devices.OUTSIDE_BYTES)
    assert [row["why"] for row in findings.rows] == [""] * 4
    assert all(row["planned_step_time_s"] > 0 for row in findings.rows)
    assert [row["peak_allocated_error"] for row in findings.rows] == pytest.approx([0.0] * 4, abs=0.02)
    assert [check.passed for check in findings.checks] == [None] * 5
