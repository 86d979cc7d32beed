"""Real launches: torch's launcher, started by the command itself or by the user, on one machine and as on two."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from splittune import SplitConfig
from tests.processes import DEADLINE_S, assert_ends, wait_until
from tests.runners.launch.launched_job import Model, command, loader

ROOT = Path(__file__).parents[3]
JOB = (Path(__file__).parent / "launched_job.py").read_text(encoding="utf-8")
TWO, FOUR = "1xT400-4GB,1xRTX3090", "2xT400-4GB,2xRTX3090"
ALIKE = "4xT400-4GB"
"""Of cards of one kind all are at work in each trial."""
Tried = Callable[[str, str, str, str], None]
Process = subprocess.Popen[bytes]


@contextmanager
def started(
    lines: Sequence[Sequence[str]], folder: Path, **environment: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Python with these arguments, side by side in `folder`; what they print goes to log0.txt, log1.txt ..."""
    (folder / "launched_job.py").write_text(JOB)
    given = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environment
    processes = []
    try:
        for number, line in enumerate(lines):
            with (folder / f"log{number}.txt").open("w") as log:
                processes.append(
                    subprocess.Popen([sys.executable, *line], cwd=folder, env=given, stdout=log, stderr=log)
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def logs(folder: Path) -> str:
    return "\n".join(log.read_text() for log in sorted(folder.glob("log*.txt")))


def tune_alone(folder: Path, devices: str = FOUR) -> str:
    """The trials of a search in one process, on modelled ranks."""
    with started([["-m", *command(devices, "alone")]], folder) as (process,):
        assert process.wait(DEADLINE_S) == 0, logs(folder)
    return (folder / "alone" / "trials.csv").read_text()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def agents(num_ranks: int, *arguments: str) -> list[list[str]]:
    """Two of torchrun, as on two machines, for `num_ranks` each."""
    shared = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", f"{num_ranks}"]
    shared += ["--master-addr", "127.0.0.1", "--master-port", f"{free_port()}"]
    return [[*shared, "--node-rank", f"{node}", *arguments] for node in range(2)]


def trained_on_one_device() -> dict[str, torch.Tensor]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in loader():
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_two_launches_tune_write_train_and_resume(tmp_path: Path) -> None:
    """Four ranks of two agents: the trials of one process, a config that trains as one device, and none run twice.

    Torch compares every collective of the search between the ranks; while they train it cannot, for under
    TORCH_DISTRIBUTED_DEBUG=DETAIL the constructor of torch 2.13's own DistributedDataParallel crashes on gloo.
    """
    alone = tune_alone(tmp_path)
    search, training = ["-m", *command(FOUR, "first", "kept/trials")], ["launched_job.py", FOUR]
    for line, level in ((search, "DETAIL"), (training, "OFF")):
        with started(agents(2, *line), tmp_path, TORCH_DISTRIBUTED_DEBUG=level) as both:
            assert [process.wait(DEADLINE_S) for process in both] == [0, 0], logs(tmp_path)
    assert (tmp_path / "first" / "trials.csv").read_text() == alone
    assert (tmp_path / "again" / "trials.csv").read_text() == alone
    kept = (tmp_path / "kept" / "trials").read_text().splitlines()
    assert len(kept) == len(set(kept)), "no trial was run twice"
    assert SplitConfig.load(tmp_path / "first" / "split.json").strategy == "ddp"
    truth = trained_on_one_device()
    for rank in range(4):
        state = torch.load(tmp_path / f"state{rank}.pt")
        for name, value in truth.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


def test_the_command_starts_its_ranks_again(tmp_path: Path, tried: Tried) -> None:
    """A rank that is killed costs a start: the launcher says how it ended, and the command ends well."""
    line = ["-m", "splittune", "tune", "launched_job.py:killed", "--devices", TWO, "--strategy", "ddp"]
    with started([[*line, "--isolation", "process", "--max-trials", "2"]], tmp_path) as (process,):
        assert process.wait(DEADLINE_S) == 0, logs(tmp_path)
    assert "The ranks were started again: rank 1 ended with signal 9 (SIGKILL)" in logs(tmp_path)
    assert SplitConfig.load(tmp_path / "runs/split/split.json").split.num_devices == 2
    tried(
        "SIGKILL of a rank", "on ranks that the command started", "the search goes on", "its launcher says how it ended"
    )


def test_torchruns_of_two_machines_start_their_ranks_again(tmp_path: Path, tried: Tried) -> None:
    """A rank of one is killed while those of the other are at work: all are started again, with the same trials.

    The other machine's torchrun has not seen a failure, and counts no restart.
    """
    alone = tune_alone(tmp_path, ALIKE)
    met = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "1"]
    met += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    line = ["-m", *command(ALIKE, "out", "kept"), "--trial-timeout-s", "60"]
    line[line.index("launched_job.py:make_task")] = "launched_job.py:killed_beside_others"
    lines = [["-m", "torch.distributed.run", *met, "--rdzv-conf", f"is_host={host}", *line] for host in (1, 0)]
    with started(lines, tmp_path) as both:
        assert [process.wait(DEADLINE_S) for process in both] == [0, 0], logs(tmp_path)
    assert "exitcode: -9" in logs(tmp_path)
    assert "cannot join the process group" not in logs(tmp_path)
    assert (tmp_path / "out" / "trials.csv").read_text() == alone
    tried("SIGKILL of a rank", "on ranks of two torchruns", "the search goes on", "the trials of one process")


@pytest.mark.parametrize("by", ["the command", "torchrun, of two machines one"])
def test_no_rank_outlives_its_launcher(tmp_path: Path, tried: Tried, by: str) -> None:
    """SIGKILL of whoever started them ends the ranks, and of two launches the other one within a trial's time."""
    line = ["tune", "launched_job.py:waits", "--devices", TWO, "--strategy", "ddp", "--trial-timeout-s", "10"]
    if by == "the command":
        lines = [["-m", "splittune", *line, "--isolation", "process"]]
    else:
        lines = agents(1, "-m", "splittune", *line)
    with started(lines, tmp_path) as launchers:
        wait_until((tmp_path / "waiting").exists)
        pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
        launchers[0].kill()
        for pid in pids:
            assert_ends(pid)
        codes = [launcher.wait(DEADLINE_S) for launcher in launchers]
    assert codes[0] == -signal.SIGKILL
    assert all(codes)
    fault = "SIGKILL of the tuner" if by == "the command" else "loss of the rendezvous"
    tried(fault, "on ranks, in a trial", "all ranks end", "no process left")
