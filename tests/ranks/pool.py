"""Real processes of one gloo group, started once and given many cases."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import DEADLINE_S

# For a collective in which somebody is missing: a test of a fault ends then.
GROUP_TIMEOUT_S = 60.0
_FACTORY = multiprocessing.get_context("forkserver")  # torch is read once, for all of them
_FACTORY.set_forkserver_preload(["torch", "torch.distributed", "splittune"])


class RankError(Exception):
    """What a case raised on a rank: its type's name, its message and its traceback."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(kind, message, trace)
        self.kind, self.message, self.trace = kind, message, trace

    def __str__(self) -> str:
        return self.trace


class Pool:
    """`size` processes, which are ranks 0 to `size` - 1 of the default group."""

    def __init__(self, processes: Sequence[Any], connections: Sequence[Connection]) -> None:
        self._processes, self._connections = processes, connections

    def run(self, case: Callable[..., Any], *args: Any, num_ranks: int | None = None) -> list[Any]:
        """What ``case(group, *args)`` gives on each of the first ranks; what one raised is raised here."""
        answers = self.run_each(case, [args] * (num_ranks or len(self._connections)))
        for answer in answers:
            if isinstance(answer, RankError):
                raise answer
        return answers

    def run_each(self, case: Callable[..., Any], args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """``case(group, *args[rank])`` on each of the first ranks; a `RankError` in place of what one raised.

        `group` is None where all ranks take part, for that is the default group.
        """
        taking_part = self._connections[: len(args)]
        self.start(case, args)
        answers = {}
        waiting = {connection: rank for rank, connection in enumerate(taking_part)}
        while waiting:
            ready = wait(list(waiting), DEADLINE_S)
            if not ready:
                self.kill()
                raise TimeoutError(f"no answer of ranks {sorted(waiting.values())} within {DEADLINE_S} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                answers[waiting.pop(connection)] = connection.recv()
        return [answers[rank] for rank in range(len(args))]

    def start(self, case: Callable[..., Any], args: Sequence[tuple[Any, ...]]) -> None:
        """Begin with ``case(group, *args[rank])`` on each of the first ranks; `answer_of` has what comes of it."""
        for connection, each in zip(self._connections, args, strict=False):
            connection.send((case, len(args), each))

    def answer_of(self, rank: int) -> Any:
        """What one rank gives: for where others may not live to give anything."""
        if not self._connections[rank].poll(DEADLINE_S):
            self.kill()
            raise TimeoutError(f"no answer of rank {rank} within {DEADLINE_S} s")
        return self._connections[rank].recv()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(DEADLINE_S)


@contextlib.contextmanager
def pool_of(size: int, folder: Path) -> Iterator[Pool]:
    """Processes that found each other through a file in `folder`; all have ended afterwards."""
    pairs = [_FACTORY.Pipe() for _ in range(size)]
    processes = [
        _FACTORY.Process(target=_serve, args=(rank, size, str(folder / "store"), theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    pool = Pool(processes, [ours for ours, _ in pairs])
    try:
        for process, (_, theirs) in zip(processes, pairs, strict=True):
            process.start()
            theirs.close()
        yield pool
        for ours, _ in pairs:
            with contextlib.suppress(OSError):
                ours.send(None)
        for process in processes:
            process.join(DEADLINE_S)
    finally:
        pool.kill()


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    groups = {each: dist.new_group(list(range(each)), timeout=timeout) for each in range(1, size)}
    while (request := connection.recv()) is not None:
        case, num_ranks, args = request
        try:
            answer = case(groups.get(num_ranks), *args)
        except Exception as error:  # noqa: BLE001  whatever it is, the test that asked is told
            answer = RankError(type(error).__name__, str(error), traceback.format_exc())
        connection.send(answer)
    dist.destroy_process_group()
