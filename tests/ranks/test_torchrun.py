"""What starts ranks: the commands of the README's own section as they stand there, accelerate, and what srun sets."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from splittune.split import BatchSplit
from tests.processes import DEADLINE_S
from tests.ranks.cases import config_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.split("## From one process to many machines")[1].split("\n## ")[0]
PARTS = (Path(__file__).parent / "train_parts.py").read_text(encoding="utf-8")
BEFORE, AFTER = PARTS.split("# the README's lines stand here\n")
SPLIT = BatchSplit(global_batch_size=12, accumulation_steps=2, shard_sizes=(1, 3, 2, 0))


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


def loop() -> str:
    """The training loop of the README's first example, with the config by the name that the section gives it."""
    first = blocks_of(README)[0]
    return first[first.index("for batch in loader:") :].replace("result.config", "config")


def commands() -> list[str]:
    return re.findall(r"^ {4}(torchrun .*)$", SECTION, flags=re.MULTILINE)


def end(agent: subprocess.Popen[bytes]) -> None:
    """An agent's ranks are in sessions of their own: it ends them itself when it is asked to."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)
        try:
            agent.wait(60)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def run_all(lines: list[str], folder: Path, *, of_each: Sequence[dict[str, str]] | None = None) -> None:
    """Run the commands side by side, as on a machine each, with what `of_each` has set; none outlives this."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    agents = []
    try:
        for number, line in enumerate(lines):
            log = (folder / f"log{number}.txt").open("w")
            own = environment | (of_each[number] if of_each is not None else {})
            agents.append(subprocess.Popen(line.split(), cwd=folder, env=own, stdout=log, stderr=log))
            log.close()
        codes = [agent.wait(DEADLINE_S) for agent in agents]
    finally:
        for agent in agents:
            end(agent)
    assert codes == [0] * len(lines), "\n".join(log.read_text() for log in sorted(folder.glob("log*.txt")))


@pytest.fixture(scope="module")
def truth() -> dict[str, Any]:
    """What the same script trains on one device, where nothing is split."""
    names: dict[str, Any] = {}
    plain = BEFORE + "for inputs, targets in loader:\n    loss_fn(model(inputs), targets).backward()\n"
    plain += "    optimizer.step()\n    optimizer.zero_grad()\n"
    with torch.random.fork_rng():
        exec(compile(plain, "train.py", "exec"), names)
    state: dict[str, Any] = names["model"].state_dict()
    return state


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def on_this_machine(line: str, port: int) -> str:
    """The command with what no test can have: the other machine's name, and a port that is free for sure."""
    return line.replace("host0", "127.0.0.1").replace("29500", str(port))


@pytest.mark.parametrize("num_machines", [1, 2])
def test_the_commands_train_as_one_device(tmp_path: Path, truth: dict[str, Any], num_machines: int) -> None:
    """The README's script under its commands ends on all four ranks where one device ends, two agents included."""
    write_script(tmp_path)
    chosen = [line for line in commands() if ("--nnodes 2" in line) == (num_machines == 2)]
    assert len(chosen) == num_machines
    port = free_port()
    run_all([on_this_machine(line, port) for line in chosen], tmp_path)
    check_trained(tmp_path, truth)


def test_accelerate_starts_the_same_script(tmp_path: Path, truth: dict[str, Any]) -> None:
    """``accelerate launch`` sets what torchrun does: the script is the README's, and ends where one device ends."""
    write_script(tmp_path)
    options = "--num_machines 1 --mixed_precision no --dynamo_backend no"
    line = f"accelerate launch --multi_gpu --num_processes 4 {options} --main_process_port {free_port()} train.py"
    run_all([line], tmp_path, of_each=[{"HF_HOME": str(tmp_path)}])
    check_trained(tmp_path, truth)


def test_what_srun_sets_is_enough(tmp_path: Path, truth: dict[str, Any]) -> None:
    """Scripts for Slurm give its rank to init_process_group: nothing else says who is who."""
    start = "torch.distributed.init_process_group()"
    given = (
        'torch.distributed.init_process_group("gloo", init_method="env://", rank=int(os.environ["SLURM_PROCID"]),\n'
        '                                     world_size=int(os.environ["SLURM_NTASKS"]))'
    )
    write_script(tmp_path, replaced={start: given, "'RANK'": "'SLURM_PROCID'"})
    port = str(free_port())
    tasks = [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % 2),
            "SLURM_NODEID": str(rank // 2),
            "SLURM_NTASKS": "4",
            "SLURM_JOB_NUM_NODES": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank in range(4)
    ]
    run_all([f"{sys.executable} train.py"] * 4, tmp_path, of_each=tasks)
    check_trained(tmp_path, truth)


def write_script(folder: Path, *, replaced: Mapping[str, str] | None = None) -> None:
    """The README's script and the config it loads, in `folder`."""
    config_of(4, "dp", split=SPLIT).save(folder / "runs" / "split" / "split.json")
    script = BEFORE + blocks_of(SECTION)[0] + loop() + AFTER
    for old, new in (replaced or {}).items():
        assert old in script
        script = script.replace(old, new)
    (folder / "train.py").write_text(script)


def check_trained(folder: Path, truth: dict[str, Any]) -> None:
    """Every rank ended with one device's parameters."""
    for rank in range(4):
        state = torch.load(folder / f"state{rank}.pt")
        assert state.keys() == {f"module.{name}" for name in truth} or state.keys() == truth.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, truth[name.removeprefix("module.")], rtol=0, atol=1e-12)
