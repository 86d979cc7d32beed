"""A module of these tests on two gloo processes of this machine, started as torchrun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.processes import DEADLINE_S

ROOT = Path(__file__).parents[2]
NUM_RANKS = 2


def on_two_ranks(module: str, folder: Path) -> list[Any]:
    """Run ``module folder``; what each rank left in ``rank0.pt`` and ``rank1.pt``."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
    }
    logs = [folder / f"log{rank}.txt" for rank in range(NUM_RANKS)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as file:
                command = [sys.executable, "-m", module, str(folder)]
                ranks.append(
                    subprocess.Popen(command, cwd=folder, env=os.environ | shared | own, stdout=file, stderr=file)
                )
        codes = [rank.wait(DEADLINE_S) for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert codes == [0] * NUM_RANKS, "\n".join(log.read_text() for log in logs)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(NUM_RANKS)]


def worst_error(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> float:
    """The largest difference of any step's gradients, over the largest entry of that gradient."""
    assert len(found) == len(expected) > 0
    return max(
        float((one - other).abs().max() / other.abs().max().clamp(min=1e-6))
        for ours, theirs in zip(found, expected, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )
