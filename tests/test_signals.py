"""Ctrl-C and SIGTERM at moments drawn at random: nothing finished is lost, and nothing of the user's is changed."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from splittune import Measurement, TuneResult
from splittune.cli import main
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual.hardware import VirtualHardware
from splittune.training.load_task import load_task
from splittune.tuner import autotune
from tests.faults.moments import count_calls
from tests.faults.trapped import DEVICES, Job, Trap
from tests.processes import assert_ends

Tried = Callable[[str, str, str, str], None]

NUM_MOMENTS = 6
JOB = """
import os, pathlib, time
import torch
from splittune import TrainingTask

class Model(torch.nn.Linear):
    def forward(self, x):
        pathlib.Path("pid").write_text(str(os.getpid()))
        time.sleep(float(os.environ.get("PAUSE_S", 0)))
        return super().forward(x)

def make():
    torch.manual_seed(0)
    return TrainingTask(Model(4, 1), [(torch.ones(8, 4), torch.ones(8, 1))] * 2)
"""


def tune(job: Job, **options: Any) -> Any:
    return autotune(
        job.model,
        job.loader,
        loss_fn=job.loss_fn,
        optimizer=job.optimizer,
        devices=DEVICES,
        progress=False,
        max_trials=2,
        **options,
    )


@pytest.fixture(scope="module")
def moments() -> list[int]:
    """Calls of a search, drawn at random from all of them, the same every time."""
    tune(Job(Trap()))  # imports what is imported late: later searches make fewer calls than the first
    gc.collect()  # or what earlier tests left is ended in a search, and its calls count
    num_calls = min(count_calls(lambda: tune(Job(Trap()))) for _ in range(2))
    draw = random.Random(11)
    # not the last tenth: a search outside a fixture has been seen to make 2 % fewer calls, and each moment must come
    return [draw.randrange(num_calls * 9 // 10) for _ in range(NUM_MOMENTS)]


# one that arrives in a weakref's callback
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_leaves_the_job_as_it_was_found(moments: list[int], tried: Tried) -> None:
    """Wherever Ctrl-C arrives it is raised, the job is bit-identical and the devices are empty."""
    for moment in moments:
        job = Job(Trap())
        found, hardware = job.fingerprint(), resolve_hardware(DEVICES)
        assert isinstance(hardware, VirtualHardware)
        with pytest.raises(KeyboardInterrupt):
            count_calls(lambda job=job: tune(job), moment)  # type: ignore[misc]
        assert job.fingerprint() == found, moment
        with hardware.metered():
            assert not any(hardware.allocated_bytes()), moment
    tried("Ctrl-C", f"in a search, at {NUM_MOMENTS} moments", "Ctrl-C", "state bit-identical, devices empty")


def forked(act: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        act()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else bool(end.code)
    finally:
        os._exit(status)


def measured(**options: Any) -> list[Measurement]:
    """The trials of a search that is watched call by call, as those that a signal ends are.

    Python 3.10 lets a watched function's variables live on a little, which shows in the peaks.
    """
    results: list[TuneResult] = []
    count_calls(lambda: results.append(tune(Job(Trap()), **options)))
    return [trial.measurement for trial in results[0].trials]


def test_sigterm_with_a_handler_at_any_moment(tmp_path: Path, moments: list[int], tried: Tried) -> None:
    """A training script that ends on SIGTERM ends so, with its job as it was, and another one goes
    on from its trials."""
    expected = measured()
    for moment in moments[::2]:
        storage = tmp_path / f"{moment}.journal"

        def search(storage: Path = storage, moment: int = moment) -> None:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            job = Job(Trap())
            found = job.fingerprint()
            try:
                count_calls(lambda: tune(job, storage=storage), moment, signal.SIGTERM)
            finally:
                if job.fingerprint() != found:
                    os._exit(99)

        assert os.waitstatus_to_exitcode(os.waitpid(forked(search), 0)[1]) == 143
        assert measured(storage=storage) == expected
    where = f"in a search, at {NUM_MOMENTS // 2} moments"
    tried("SIGTERM with a handler", where, "exit 143", "state bit-identical, resumed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def command_line(output: Path, arguments: list[str]) -> None:
    with output.open("w") as stream:
        sys.stdout = sys.stderr = stream
        sys.argv = ["splittune", "tune", *arguments]
        os.environ["PAUSE_S"] = "0.05"  # so that the moment lies within the search
        torch.set_num_threads(1)
        main()


@pytest.mark.parametrize(
    ("number", "isolation", "num_moments"),
    [(signal.SIGINT, "none", 2), (signal.SIGTERM, "none", 2), (signal.SIGTERM, "process", 1)],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM-process"],
)
def test_the_command_line_ends_at_any_moment(
    folder: Path, number: signal.Signals, isolation: str, num_moments: int, tried: Tried
) -> None:
    """The exit status says what ended it, no file is half written, no worker lives on, and a search
    goes on from there."""
    draw = random.Random(f"{number} {isolation}")
    arguments = ["job.py:make", "--devices", "2xT400-4GB", "--isolation", isolation, "--max-trials", "6"]
    for moment in range(num_moments):
        (folder / "pid").unlink(missing_ok=True)
        storage, out, printed = folder / f"{moment}.journal", folder / f"out{moment}", folder / f"printed{moment}"
        options = ["--storage", str(storage), "--out", str(out)]
        tuner = forked(lambda printed=printed, options=options: command_line(printed, [*arguments, *options]))  # type: ignore[misc]
        while not (folder / "pid").exists():
            assert os.waitpid(tuner, os.WNOHANG) == (0, 0), printed.read_text()
            time.sleep(0.01)
        time.sleep(draw.random() * 0.5)
        os.kill(tuner, number)
        status = os.waitstatus_to_exitcode(os.waitpid(tuner, 0)[1])
        output = printed.read_text()
        if status == 0:  # it had finished before the signal came
            assert (out / "split.json").exists()
            continue
        assert status in ({130} if number is signal.SIGINT else {-number, 128 + number}), output
        assert "Traceback" not in output
        if pid := (folder / "pid").read_text():
            assert_ends(int(pid))
        num_printed = len(re.findall(r"^ +\d+  \d+ x \(", output, re.MULTILINE))  # a line for each trial
        if (out / "trials.csv").exists():
            assert len(pd.read_csv(out / "trials.csv")) >= num_printed
        assert (out / "trials.csv").exists() or not num_printed
        assert not (out / "split.json").exists()
        assert_resumes(storage, num_printed)
    name = "SIGTERM" if number is signal.SIGTERM else "Ctrl-C"
    where = f"command line, isolation {isolation}, moments drawn: {num_moments}"
    tried(name, where, "the exit status says so", "no trial lost, no worker left")


def assert_resumes(storage: Path, num_printed: int) -> None:
    task = load_task("job.py:make")
    result = autotune(task.model, task.loader, devices="2xT400-4GB", storage=storage, max_trials=6, progress=False)
    assert sum(trial.is_resumed for trial in result.trials) >= num_printed
