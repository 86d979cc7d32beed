"""The launcher's side: one process a card by torch's own launcher, all of them again where one ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from splittune.errors import WorkerError
from splittune.runners.launch.attempts import Attempts
from splittune.runners.launch.outcome import read_verdict
from splittune.runners.launch.place import FOLDER_VARIABLE, LAUNCHER_VARIABLE

# Run with `-c`, so that the ranks find what this process finds, however it was started.
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from splittune.cli import main; main()"
_LOOPBACK = "127.0.0.1"
# The logger on which torch says which process of a launch ended first, and how.
_ENDS_LOGGER = "torch.distributed.elastic.multiprocessing.api"
# What ranks may take to end when they are asked to, once one of them has: rank 0 writes its finished trials. A choice;
# doubled, a rank that does not listen is killed as much later.
SHUTDOWN_S = 10
# How often the launcher looks after its processes, in seconds; torch's own default.
_LOOKED_AFTER_EVERY_S = 0.1


def launch(arguments: Sequence[str], num_ranks: int, *, max_restarts: int, limit_name: str) -> int:
    """Run ``splittune`` with these arguments on `num_ranks` processes of this machine; how they all ended.

    A surprise (a rank that is killed, that raises by itself, that hangs for longer than `limit_name`) ends all of them,
    and they are started again, `max_restarts` times at most. What they are to find again they keep in files. They end
    with this process, however that ends.

    Returns:
        An exit code: what the ranks agreed on, or 128 and a signal's number where that ended this process.

    Raises:
        WorkerError: they ended three times in a row without a finished trial, more often than `max_restarts`, or
            without saying how.
    """
    with tempfile.TemporaryDirectory(prefix="splittune-") as folder, _environment(folder):
        attempts = Attempts(Path(folder))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            role="splittune",
            rdzv_backend="c10d",
            rdzv_endpoint=f"{_LOOPBACK}:0",  # a port that is free
            local_addr=_LOOPBACK,
            max_restarts=max_restarts,
            monitor_interval=_LOOKED_AFTER_EVERY_S,
        )
        program = ["-c", _PROGRAM, json.dumps([str(place) for place in sys.path]), *arguments]
        try:
            with _ends_noted(attempts, limit_name):
                elastic_launch(config, sys.executable)(*program)
        except ChildFailedError:
            raise WorkerError(
                f"the ranks were started {max_restarts + 1} times, and ended each time, at last so: "
                f"{attempts.last_end(limit_name) or 'see standard error'}. The trials before that are kept where "
                "--storage names a file."
            ) from None
        except SignalException as ended:
            return 128 + ended.sigval
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        code = read_verdict(Path(folder))
        if code is None:
            raise WorkerError(
                "the ranks ended without a result and without an error: the job called sys.exit, or alike. Expected "
                "it to leave that to the command."
            )
        return code


@contextmanager
def _environment(folder: str) -> Iterator[None]:
    """The environment that the ranks get; afterwards this process has its own again."""
    kept = dict(os.environ)
    os.environ[FOLDER_VARIABLE] = folder
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no other interface has to be there
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


@contextmanager
def _ends_noted(attempts: Attempts, limit_name: str) -> Iterator[None]:
    """Meanwhile the launcher's words on the process that ended first become a line of `attempts`."""
    noting = _Noting(attempts, limit_name)
    logger = logging.getLogger(_ENDS_LOGGER)
    logger.addHandler(noting)
    try:
        yield
    finally:
        logger.removeHandler(noting)


class _Noting(logging.Handler):
    """Notes the end of a rank from the arguments of torch's message: exit code and local rank, which is the rank here.

    There is no public way to learn it before the restart. A message of another form is an end of nobody's. What it
    raises goes through torch's launcher, which then ends the ranks.
    """

    def __init__(self, attempts: Attempts, limit_name: str) -> None:
        super().__init__(logging.ERROR)
        self._attempts, self._limit_name = attempts, limit_name

    def emit(self, record: logging.LogRecord) -> None:
        if "exitcode" not in str(record.msg) or not isinstance(record.args, tuple) or len(record.args) < 2:
            return
        code, rank = record.args[:2]
        if isinstance(code, int) and isinstance(rank, int):
            self._attempts.note_end(rank, code)
            self._attempts.check_progress(self._limit_name)
