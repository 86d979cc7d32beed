"""A rank of two that asks torch's ZeroRedundancyOptimizer how it deals out parameters, and what it holds.

`python -m tests.ranks.zero_job RANK STORE RESULT`: rank 0 writes what all found, as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from splittune.ranks.zero import state_bytes_of

NUM_CASES = 60
MOST_RANKS = 6


def groups_of(draws: random.Random) -> list[list[torch.nn.Parameter]]:
    """Parameters of any size, many of them alike, in up to three groups."""
    return [
        [torch.nn.Parameter(torch.zeros(draws.choice([1, 2, 2, 3, 7, 7, 40]))) for _ in range(draws.randint(1, 6))]
        for _ in range(draws.randint(1, 3))
    ]


def dealt(optimizer: ZeroRedundancyOptimizer, parameters: list[torch.nn.Parameter]) -> list[list[int]]:
    """Positions of the parameters of each rank, as torch deals them out."""
    positions = {id(parameter): position for position, parameter in enumerate(parameters)}
    return [
        [positions[id(parameter)] for group in groups for parameter in group["params"]]
        for groups in optimizer._partition_parameters()
    ]


def case(draws: random.Random) -> dict[str, Any]:
    groups = groups_of(draws)
    parameters = [parameter for group in groups for parameter in group]
    optimizer = ZeroRedundancyOptimizer([{"params": group} for group in groups], torch.optim.AdamW, lr=0.1)
    frozen = draws.randrange(len(parameters))
    for position, parameter in enumerate(parameters):
        parameter.grad = None if position == frozen else torch.ones_like(parameter)
    before = state_bytes_of(optimizer)
    optimizer.step()
    held: list[Any] = [None, None]
    dist.all_gather_object(held, state_bytes_of(optimizer))
    partitions = {2: dealt(optimizer, parameters)}
    for num_ranks in range(1, MOST_RANKS + 1):  # the rule itself needs no other processes
        optimizer.world_size = num_ranks
        optimizer._clear_cache()
        partitions.setdefault(num_ranks, dealt(optimizer, parameters))
    plain = torch.optim.AdamW(parameters, lr=0.1)
    plain.step()
    return {
        "sizes": [parameter.numel() for parameter in parameters],
        "group_lengths": [len(group) for group in groups],
        "partitions": partitions,
        "before": before,
        "held": held,
        "plain": state_bytes_of(plain),
    }


def main(rank: int, store: str, result: str) -> None:
    timeout = timedelta(seconds=180)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    try:
        draws = random.Random(0)
        cases = [case(draws) for _ in range(NUM_CASES)]
        if rank == 0:
            Path(result).write_text(json.dumps(cases))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
