"""A module of these tests under torchrun, two gloo processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.processes import DEADLINE_S

ROOT = Path(__file__).parents[2]


def on_two_ranks(module: str, folder: Path) -> list[Any]:
    """Run ``module folder``; what each rank left in ``rank0.pt`` and ``rank1.pt``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(
        [*command, str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def worst_error(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> float:
    """The largest difference of any step's gradients, over the largest entry of that gradient."""
    assert len(found) == len(expected) > 0
    return max(
        float((one - other).abs().max() / other.abs().max().clamp(min=1e-6))
        for ours, theirs in zip(found, expected, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )
