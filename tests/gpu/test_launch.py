"""A launch on cards: torch's launcher, NCCL for the steps, and what is found of every card."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from splittune import SplitConfig
from splittune.cards import count_cards
from tests.processes import DEADLINE_S

pytestmark = pytest.mark.gpu
JOB = """
import torch
from torch import nn
from splittune import TrainingTask

def make_task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1))
    return TrainingTask(model, [(torch.randn(64, 256), torch.randn(64, 1))] * 2)
"""


def test_the_command_tunes_and_verifies_a_rank_for_each_card(tmp_path: Path) -> None:
    """Each rank has its own card, the finalists are timed in synchronised steps, and verify keeps to the plan."""
    if count_cards() < 2:
        pytest.skip("NCCL has a rank for each card: this needs two")
    (tmp_path / "job.py").write_text(JOB)
    for line in (["tune", "job.py:make_task", "--strategy", "ddp"], ["verify", "runs/split/split.json"]):
        given = [*line, "job.py:make_task"] if line[0] == "verify" else line
        ended = subprocess.run(
            [sys.executable, "-m", "splittune", *given],
            cwd=tmp_path,
            timeout=DEADLINE_S,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    config = SplitConfig.load(tmp_path / "runs/split/split.json")
    assert config.strategy == "ddp"
    assert not config.is_modelled
    assert len({device.uuid for device in config.devices}) == count_cards()
