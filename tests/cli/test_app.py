"""The command line: what it writes, what it says, and the code it exits with."""

from __future__ import annotations

import csv
import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from splittune import SplitConfig
from splittune.cli import main
from splittune.cli.app import _names_cuda_devices
from splittune.demo import DEMO_STEPS
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual.catalog import GPUS
from splittune.split import BatchSplit
from splittune.units import GIB, MIB

JOB = '''
"""A small job, in a file of the user's own."""
import os, pathlib, signal, time
import torch
from torch import nn
from splittune import TrainingTask

BATCHES = [(torch.randn(8, 4), torch.randn(8, 1))] * 2

class Model(nn.Linear):
    num_calls = 0
    fails_at, error = None, None

    def forward(self, x):
        Model.num_calls += 1
        if Model.num_calls == self.fails_at:
            raise self.error
        return super().forward(x)

def make_task():
    return TrainingTask(Model(4, 1), BATCHES)

def interrupted():
    task = make_task()
    task.model.fails_at, task.model.error = 12, KeyboardInterrupt()
    return task

def buggy():
    task = make_task()
    task.model.fails_at, task.model.error = 12, ZeroDivisionError("a bug of the user's own")
    return task

def slow():
    class Slow(Model):
        def forward(self, x):
            if Model.num_calls == 12:
                pathlib.Path("reached").touch()
                time.sleep(60)
            return super().forward(x)
    return TrainingTask(Slow(4, 1), BATCHES)

def terminated():
    class Terminated(Model):
        def forward(self, x):
            if Model.num_calls == 12:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().forward(x)
    return TrainingTask(Terminated(4, 1), BATCHES)

def batches_of_6():
    return TrainingTask(Model(4, 1), [(x[:6], y[:6]) for x, y in BATCHES])

def too_large():
    return TrainingTask(nn.Sequential(nn.Linear(4, 4096), nn.Linear(4096, 1024), nn.Linear(1024, 1)), BATCHES)

def nothing_to_train():
    return TrainingTask(nn.ReLU(), BATCHES)

def raises():
    raise ZeroDivisionError("a bug of the user's own")

def exits():
    raise SystemExit(0)

def aborts():
    os.abort()

def needs_an_argument(path):
    return make_task()

def returns_a_model():
    return Model(4, 1)

def returns_nothing():
    pass

NOT_A_FUNCTION = 3
'''
CARDS = ("--devices", "2xRTX3090")
Run = Callable[..., "Ended"]


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The message on standard error, without a traceback before it."""
        return self.err.rpartition("splittune: ")[2]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Run]:
    """Runs the command line in this process, in a folder with a job.py; torch, path and logging are put back."""
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    root = logging.getLogger()
    handlers, level, modules = root.handlers[:], root.level, set(sys.modules)

    def run_main(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["splittune", *arguments])
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        assert isinstance(code, int) or code is None
        captured = capsys.readouterr()
        return Ended(code or 0, captured.out, captured.err)

    yield run_main
    root.handlers[:], root.level = handlers, level
    for name in ("job", "job_job"):
        if name not in modules:
            sys.modules.pop(name, None)


def trials_in(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "trials.csv").read_text().splitlines()))


# tune


def test_tune_writes_what_training_needs(run: Run, tmp_path: Path) -> None:
    """tune exits with 0, writes the three files, and says how to train; the config is ready to train with."""
    ended = run("tune", "job.py:make_task", *CARDS, "--max-trials", "2", "--out", "made/here")
    assert (ended.code, ended.err) == (0, "")
    config = SplitConfig.load(tmp_path / "made/here/split.json")
    assert config.split.global_batch_size == 8
    trials = trials_in(tmp_path / "made/here")
    assert [trial["kind"] for trial in trials[:2]] == ["search", "search"]
    confirmed = ["+".join(map(str, config.split.shard_sizes)), str(config.split.accumulation_steps)]
    assert confirmed in [[t["shard_sizes"], t["accumulation_steps"]] for t in trials if t["kind"] == "confirm"]
    with (tmp_path / "made/here/devices.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * len(trials)
    assert 'SplitConfig.load("made/here/split.json")' in ended.out
    assert "modelled" in ended.out


def test_plain_lines_where_it_is_no_terminal(run: Run) -> None:
    """Without a terminal there is a line for each trial, whatever its length, and no escape code."""
    ended = run("tune", "job.py:make_task", *CARDS, "--max-trials", "3")
    assert "\x1b" not in ended.out + ended.err
    assert "\r" not in ended.out + ended.err
    lines = [line for line in ended.out.splitlines() if re.match(r"trial +\d", line)]
    assert len(lines) == 3
    assert all("samples/s" in line and "left on GPU" in line for line in lines)


def test_quiet_shows_the_result_only(run: Run) -> None:
    """--quiet shows no trial, and the result all the same."""
    ended = run("tune", "job.py:make_task", *CARDS, "--max-trials", "2", "--quiet")
    assert ended.code == 0
    assert not re.search(r"^trial +\d", ended.out, re.MULTILINE)
    assert "AdamW" not in ended.out
    assert "tuned split" in ended.out


def test_the_global_batch_size_is_kept(run: Run, tmp_path: Path) -> None:
    """--global-batch-size is the split's, and that training needs such a loader is said."""
    ended = run("tune", "job.py:make_task", *CARDS, "--max-trials", "1", "--global-batch-size", "20", "--out", "out")
    assert SplitConfig.load(tmp_path / "out/split.json").split.global_batch_size == 20
    assert "batch size 20" in " ".join(ended.out.split())


def test_no_feasible_split_exits_with_1(run: Run, tmp_path: Path) -> None:
    """Where nothing fits it exits with 1, says what was lacking, and keeps the trials it made."""
    ended = run("tune", "job.py:too_large", "--devices", "2xT400-4GB:occupied=3800MiB", "--out", "out")
    assert ended.code == 1
    assert "no split fits" in ended.error
    assert re.search(r"device [01]", ended.error)
    assert {trial["outcome"] for trial in trials_in(tmp_path / "out")} <= {"out_of_memory", "no_headroom"}
    assert not (tmp_path / "out/split.json").exists()


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_trials_run_where_isolation_says(isolation: str, run: Run, tmp_path: Path) -> None:
    """In a process of their own trials give what they give in this one, and what they log is shown all the same."""
    ended = run("tune", "job.py:make_task", *CARDS, "--max-trials", "3", "--isolation", isolation, "--out", "out")
    assert (ended.code, ended.err) == (0, "")
    assert "AdamW is assumed" in ended.out
    assert ("job" in sys.modules) == (isolation == "none")
    assert run("tune", "job.py:make_task", *CARDS, "--max-trials", "3", "--out", "auto").code == 0
    for name in ("trials.csv", "devices.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "auto" / name).read_bytes()


@pytest.mark.parametrize(
    ("devices", "num_visible", "expected"),
    [
        (None, 2, True),
        ("cuda:1, cuda:0", 2, True),
        ("0,1", 2, True),
        ("cuda:0", 0, False),
        (None, 0, False),
        ("2xRTX3090", 2, False),
        ("cuda:0,2xRTX3090", 2, False),
    ],
)
def test_by_itself_only_cuda_devices_get_a_worker(
    devices: str | None, num_visible: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--isolation auto` is a worker for CUDA devices that are there; virtual ones cannot take the process down."""
    monkeypatch.setattr("splittune.cli.app.count_visible_devices", lambda: num_visible)
    assert _names_cuda_devices(devices) is expected


# early ends


def test_ctrl_c_keeps_the_finished_trials(run: Run, tmp_path: Path) -> None:
    """Ctrl-C in mid-search exits with 130, and the trials that were finished are written."""
    ended = run("tune", "job.py:interrupted", *CARDS, "--out", "out")
    assert ended.code == 130
    trials = trials_in(tmp_path / "out")
    assert f"{len(trials)} finished trials are kept in out/trials.csv" in " ".join(ended.out.split())
    assert trials
    assert (tmp_path / "out/devices.csv").exists()
    assert not (tmp_path / "out/split.json").exists()


def test_a_search_goes_on_where_it_was_stopped(run: Run, tmp_path: Path) -> None:
    """With --storage the same command goes on, and writes what an uninterrupted one writes."""
    options = (*CARDS, "--max-trials", "4", "--storage", "kept.journal")
    assert run("tune", "job.py:interrupted", *options, "--out", "first").code == 130
    assert run("tune", "job.py:make_task", *options, "--out", "second").code == 0
    assert run("tune", "job.py:make_task", *CARDS, "--max-trials", "4", "--out", "whole").code == 0
    assert (tmp_path / "second/trials.csv").read_bytes() == (tmp_path / "whole/trials.csv").read_bytes()


def test_the_users_own_exception_is_shown_as_it_is(run: Run, tmp_path: Path) -> None:
    """An exception of the model's own leaves with its traceback, and the finished trials are written."""
    ended = run("tune", "job.py:buggy", *CARDS, "--out", "out")
    assert ended.code == 3
    assert "Traceback" in ended.err
    assert "ZeroDivisionError: a bug of the user's own" in ended.err
    assert trials_in(tmp_path / "out")


def test_an_interrupt_signal_ends_the_program(run: Run, tmp_path: Path) -> None:
    """A real SIGINT, as Ctrl-C sends it to the program in mid-search, exits with 130 and keeps the finished trials."""
    command = "import torch; torch.set_num_threads(1); from splittune.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", command, "tune", "job.py:slow", *CARDS, "--out", "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as program:
        end = time.monotonic() + 60
        while not (tmp_path / "reached").exists() and program.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        output, _ = program.communicate(timeout=60)
    assert program.returncode == 130, output
    assert "Traceback" not in output
    assert len(trials_in(tmp_path / "out")) == output.count("\ntrial ")


def test_a_workers_end_is_the_jobs_failure(run: Run, tmp_path: Path) -> None:
    """In a worker as here: the user's exception exits with 3 and its traceback, the finished trials are written."""
    ended = run("tune", "job.py:buggy", *CARDS, "--isolation", "process", "--out", "out")
    assert ended.code == 3
    assert "raise self.error" in ended.err
    assert "ZeroDivisionError: a bug of the user's own" in ended.err
    assert trials_in(tmp_path / "out")
    ended = run("tune", "job.py:aborts", *CARDS, "--isolation", "process")
    assert ended.code == 3
    assert "the worker could not make the job: the worker ended with signal 6 (SIGABRT)" in ended.error


# bad usage


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["job.py"], r"'job.py' names no job: expected FILE.py:FUNCTION"),
        (["job:make_task"], r"names no job"),
        (["nowhere.py:make_task"], r"there is no file 'nowhere.py'.*Check the path"),
        (["job.py:nothing"], r"job.py has no function 'nothing': it defines .*make_task.*expected FILE.py:FUNCTION"),
        (["job.py:NOT_A_FUNCTION"], r"no function 'NOT_A_FUNCTION'"),
        (["job.py:raises"], r"job.py:raises raised ZeroDivisionError: a bug of the user's own"),
        (["job.py:exits"], r"job.py:exits raised SystemExit: 0"),
        (["job.py:needs_an_argument"], r"raised TypeError.*'path'.*called without arguments"),
        (["job.py:returns_a_model"], r"returned an object of type Model: expected.*TrainingTask"),
        (["job.py:returns_nothing"], r"returned an object of type NoneType: expected.*TrainingTask"),
        (["job.py:nothing_to_train"], r"ReLU has no trainable parameter"),
        (["job.py:make_task", "--global-batch-size", "0"], r"global_batch_size is 0"),
        (["job.py:make_task", "--devices", "2xRTX309"], r"'RTX309' is not in the catalog.*Did you mean RTX3090"),
        (["job.py:make_task", "--devices", "cuda:77"], r"'cuda:77', which is not there"),
        (["job.py:make_task", "--out", "job.py/inside"], r"cannot write job.py/inside.*Choose another path"),
    ],
)
def test_bad_usage_exits_with_2_and_says_what_to_do(arguments: list[str], match: str, run: Run, tmp_path: Path) -> None:
    """What cannot be used is refused in one message on standard error, before anything is measured."""
    ended = run("tune", *CARDS, *arguments)
    assert ended.code == 2
    assert re.search(match, ended.error, re.DOTALL)
    assert ended.error.count("\n") == 1
    assert not re.search(r"^trial", ended.out, re.MULTILINE)
    assert not (tmp_path / "runs/split/split.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune"],
        ["tune", "job.py:make_task", "--max-trials", "0"],
        ["fly"],
        ["demo", "-x"],
        ["tune", "job.py:make_task", "--isolation", "thread"],
    ],
)
def test_a_malformed_command_exits_with_2(arguments: list[str], run: Run) -> None:
    """Missing arguments, numbers out of range, unknown commands and options exit with 2."""
    assert run(*arguments).code == 2


def test_an_exception_of_the_function_is_shown_with_its_traceback(run: Run) -> None:
    """Where the job's function raises, the traceback leads to the line, and the message follows it."""
    ended = run("tune", "job.py:raises", *CARDS)
    assert "Traceback" in ended.err
    assert 'raise ZeroDivisionError("a bug of the user' in ended.err


# verify


def save_split(path: Path, devices: str = CARDS[1], **fields: Any) -> Path:
    """What tune would have written for the job's batches of 8."""
    hardware = resolve_hardware(devices)
    return SplitConfig(
        split=BatchSplit(global_batch_size=8, accumulation_steps=2, shard_sizes=(1, 3)),
        devices=hardware.devices,
        virtual_spec=hardware.spec,
        is_modelled=True,
        **{"min_headroom_bytes": (0, 0), "planned_peak_reserved_bytes": (MIB * 2, MIB * 2), **fields},
    ).save(path)


@pytest.fixture
def split(tmp_path: Path) -> Path:
    return save_split(tmp_path / "split.json")


def test_verify_trains_and_compares(run: Run, split: Path) -> None:
    """verify exits with 0 where all went as planned, says so in its last line, and changes no file."""
    before = split.read_bytes()
    ended = run("verify", "split.json", "job.py:make_task", "--steps", "6")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count("as planned") == 2
    assert re.search(r"^step 6  loss \d", ended.out, re.MULTILINE)
    assert ended.out.splitlines()[-1] == "Verified: 6 steps and 4 evaluations ran, and every device kept its headroom."
    assert split.read_bytes() == before
    quiet = run("verify", "split.json", "job.py:make_task", "--steps", "6", "--quiet")
    assert quiet.code == 0
    assert not re.search(r"^(step|reading|no optimizer)", quiet.out, re.MULTILINE)


def test_verify_takes_what_tune_wrote(run: Run, tmp_path: Path) -> None:
    """A split that was tuned is verified on its devices, and on others with a note."""
    assert run("tune", "job.py:make_task", *CARDS, "--max-trials", "2", "--out", "out").code == 0
    assert run("verify", "out/split.json", "job.py:make_task", "--steps", "5").code == 0
    elsewhere = run("verify", "out/split.json", "job.py:make_task", "--steps", "5", "--devices", "2xV100-16GB")
    assert elsewhere.code == 0
    assert "tuned on other devices than these" in elsewhere.out
    assert "Warning" not in elsewhere.out + elsewhere.err


def test_verify_keeps_the_evaluation_batch_size_on_request(run: Run, split: Path) -> None:
    """--eval-batch-size measures it, prints it, and writes it into the file, which then says a newer schema."""
    ended = run("verify", "split.json", "job.py:make_task", "--steps", "2", "--eval-batch-size")
    assert ended.code == 0
    assert "Written to split.json: eval_batch_size 256." in ended.out
    assert SplitConfig.load(split).eval_batch_size == 256
    assert "Evaluation batches of 256 samples" in run("verify", "split.json", "job.py:make_task", "--steps", "1").out


def test_verify_exits_with_1_where_memory_runs_out(run: Run, tmp_path: Path) -> None:
    """Out of memory: which step, which device, and what to do."""
    save_split(tmp_path / "split.json", "2xT400-4GB:occupied=3800MiB")
    ended = run("verify", "split.json", "job.py:too_large", "--eval-batch-size")
    assert ended.code == 1
    said = " ".join(ended.out.split())
    assert re.search(r"CUDA out of memory\..*Not verified: out of memory at step 1, on GPU 1\. Tune again with", said)
    assert re.search(r"or more kept free \(--min-headroom-bytes \d+\)\.$", said)
    assert SplitConfig.load(tmp_path / "split.json").eval_batch_size is None


def test_verify_exits_with_1_where_headroom_is_not_kept(run: Run, tmp_path: Path) -> None:
    """Too little headroom: what is lacking on which device; tune takes what it advises."""
    save_split(tmp_path / "split.json", min_headroom_bytes=(0, 24 * GIB))
    ended = run("verify", "split.json", "job.py:make_task", "--steps", "2")
    assert ended.code == 1
    assert "Not verified: GPU 1 lacks" in ended.out
    advised = ("--min-headroom-bytes", str(3 * GIB))
    assert run("tune", "job.py:make_task", *CARDS, "--max-trials", "1", *advised, "--out", "out").code == 0
    assert SplitConfig.load(tmp_path / "out/split.json").min_headroom_bytes == (3 * GIB, 3 * GIB)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            ["split.json", "job.py:batches_of_6"],
            r"tuned for batches of 8 samples .* gives batches of 6.*or tune this job",
        ),
        ([".", "job.py:make_task"], r"cannot read \.:.*This is a folder: name the file in it"),
        (["cut.json", "job.py:make_task"], r"cut.json: this is no complete JSON.*tune again"),
        (["none.json", "job.py:make_task"], r"cannot read none.json.*Is the path right"),
        (["split.json", "nowhere.py:make_task"], r"there is no file 'nowhere.py'.*Check the path"),
        (["split.json", "job.py:raises"], r"job.py:raises raised ZeroDivisionError"),
        (["split.json", "job.py:make_task", "--devices", "3xRTX3090"], r"got 3 .*expected 2"),
    ],
)
def test_a_mistake_in_verifying_exits_with_2(arguments: list[str], match: str, run: Run, split: Path) -> None:
    """What cannot be used is refused in one message on standard error, which says what to do."""
    split.with_name("cut.json").write_text(split.read_text()[:200])
    ended = run("verify", *arguments)
    assert ended.code == 2
    assert re.search(match, ended.error, re.DOTALL)
    assert ended.error.count("\n") == 1
    assert run("verify", "split.json", "job.py:make_task", "--steps", "0").code == 2


def test_verify_ends_early_as_tune_does(run: Run, split: Path) -> None:
    """The job's own exception exits with 3 and its traceback, Ctrl-C with 130, SIGTERM with 143."""
    buggy = run("verify", "split.json", "job.py:buggy")
    assert buggy.code == 3
    assert "ZeroDivisionError: a bug of the user's own" in buggy.err
    interrupted = run("verify", "split.json", "job.py:interrupted")
    assert interrupted.code == 130
    assert "Interrupted; the model is as it was." in interrupted.out
    assert run("verify", "split.json", "job.py:terminated").code == 143


# devices, demo


def test_devices_lists_every_virtual_gpu(run: Run) -> None:
    """devices names all GPUs that can be planned with, and exits with 0 where there is no real one."""
    ended = run("devices")
    assert ended.code == 0
    assert all(gpu.name in ended.out for gpu in GPUS)


def test_the_demo_trains_what_it_tuned(run: Run, tmp_path: Path) -> None:
    """The demo's even split fails or is slower, the tuned one trains: the loss falls and no device exceeds its plan."""
    threads = torch.get_num_threads()
    ended = run("demo", "--out", "demo")
    torch.set_num_threads(threads)
    assert ended.code == 0
    assert {"split.json", "trials.csv", "devices.csv", "explanation.txt"} == {
        path.name for path in (tmp_path / "demo").iterdir()
    }
    config = SplitConfig.load(tmp_path / "demo/split.json")
    fallen = re.search(r"loss fell from ([\d.]+) to ([\d.]+) in (\d+) steps of exactly (\d+) samples", ended.out)
    assert fallen is not None
    assert float(fallen[2]) < 0.7 * float(fallen[1])
    assert (int(fallen[3]), int(fallen[4])) == (DEMO_STEPS, config.split.global_batch_size)
    assert ended.out.count("as planned") == config.split.num_devices
    assert "MORE THAN PLANNED" not in ended.out
    speedup = re.search(r"([\d.]+) times the even split's throughput, modelled", ended.out)
    assert speedup is not None
    assert float(speedup[1]) > 1
    assert "out_of_memory" not in {trial["outcome"] for trial in trials_in(tmp_path / "demo")}
