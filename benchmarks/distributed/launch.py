"""Real processes of one gloo group for a benchmark, all of which end with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Seconds for a whole part of the benchmark. A choice: ten times what the longest takes on two cores.
TIMEOUT_S = 600.0


def run_ranks(num_ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``work(*args)`` gives on each of `num_ranks` processes, by rank.

    Raises:
        RuntimeError: a process ended without an answer, or gave none in time; its error is on the console.
    """
    context = multiprocessing.get_context("forkserver")  # torch is read once, for all of them
    context.set_forkserver_preload(["torch", "torch.distributed", "splittune"])
    pairs = [context.Pipe() for _ in range(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_run, args=(rank, num_ranks, store, theirs, work, args), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        try:
            for process, (_, theirs) in zip(processes, pairs, strict=True):
                process.start()
                theirs.close()
            return [_answer(rank, ours) for rank, (ours, _) in enumerate(pairs)]
        finally:
            for process in processes:
                process.join(5)
                process.kill()


def _answer(rank: int, connection: Connection) -> Any:
    with contextlib.suppress(EOFError):
        if connection.poll(TIMEOUT_S):
            return connection.recv()
    raise RuntimeError(f"rank {rank} gave no answer within {TIMEOUT_S:g} s: its error, if any, stands above.")


def _run(
    rank: int, num_ranks: int, store: str, connection: Connection, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        connection.send(work(*args))
    finally:
        dist.destroy_process_group()
