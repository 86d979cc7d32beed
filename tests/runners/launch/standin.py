"""A launcher that starts ranks in a tenth of the time of torch's, for tests of what ranks do under it.

Torch's starts a new interpreter for each rank, which reads torch and splittune anew: some seconds on a small machine.
This one forks its ranks from a process that has read both, and does what torch's does with them otherwise: it gives
them the same environment, hosts the store, ends all when one ends with another code than 0, and starts them again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from splittune.runners.launch.attempts import Attempts
from splittune.runners.launch.outcome import read_verdict
from splittune.runners.launch.place import FOLDER_VARIABLE, LAUNCHER_VARIABLE
from tests.processes import DEADLINE_S

_FACTORY = multiprocessing.get_context("forkserver")
_FACTORY.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "splittune.cli", "splittune.collective"]
)
MAX_STARTS = 6


@dataclass
class Launched:
    """How a launch went."""

    code: int | None
    """Its exit code; None where it was started too often."""
    codes: list[list[int]] = field(default_factory=list)
    """The exit codes of the ranks, for each start."""
    pids: list[int] = field(default_factory=list)
    log: str = ""
    """What all ranks printed."""


def _nothing() -> None: ...


def launch(
    arguments: Sequence[str],
    folder: Path,
    *,
    num_ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    prepare: Callable[[], None] = _nothing,
) -> Launched:
    """``splittune`` with these arguments on ranks that run in `folder`, started again where one of them ends.

    Each calls `prepare` first, a function of a module.
    """
    kept = folder / "launch"
    kept.mkdir(exist_ok=True)
    attempts, launched = Attempts(kept), Launched(None)
    for start in range(MAX_STARTS):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S))
        given = {
            "WORLD_SIZE": f"{num_ranks}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{store.port}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": f"{start}",
            "GLOO_SOCKET_IFNAME": "lo",
            FOLDER_VARIABLE: str(kept),
            "STANDIN_PID": f"{os.getpid()}",
            **(environment or {}),
        }
        ranks = [
            _FACTORY.Process(target=_run, args=(list(arguments), str(folder), prepare, given | {"RANK": f"{rank}"}))
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        launched.pids += [rank.pid or 0 for rank in ranks]
        first = _first_failure(ranks)
        time.sleep(0.1)  # as often as torch's launcher looks
        _end(ranks)
        launched.codes.append([rank.exitcode or 0 for rank in ranks])
        if first is None:
            launched.code = read_verdict(kept)
            break
        attempts.note_end(first, ranks[first].exitcode or 0)
    launched.log = (folder / "log.txt").read_text()
    return launched


def _first_failure(ranks: Sequence[Any]) -> int | None:
    """The rank that ended first with another code than 0; None where all have ended well."""
    running = dict(enumerate(ranks))
    while running:
        ready = wait([rank.sentinel for rank in running.values()], DEADLINE_S)
        assert ready, f"ranks {sorted(running)} live on"
        for number, rank in list(running.items()):
            if not rank.is_alive():
                del running[number]
                if rank.exitcode:
                    return number
    return None


def _end(ranks: Sequence[Any]) -> None:
    for rank in ranks:
        if rank.is_alive():
            os.kill(rank.pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        if rank.is_alive():
            rank.kill()
        rank.join()


def _run(arguments: list[str], folder: str, prepare: Callable[[], None], environment: dict[str, str]) -> None:
    """The rank's process."""
    log = os.open(Path(folder) / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(environment | {LAUNCHER_VARIABLE: f"{os.getppid()}"})
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = ["splittune", *arguments]
    torch.set_num_threads(1)
    from splittune.cli import main

    prepare()
    main()
