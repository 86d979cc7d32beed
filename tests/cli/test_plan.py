"""plan: what it writes, what it says, what it refuses before any work, and how it ends early."""

from __future__ import annotations

import csv
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from splittune import ConfigError, SplitConfig
from splittune.cli.plan import parse_sizes
from tests.cli.command_line import Run
from tests.processes import DEADLINE_S, wait_until

MACHINES = ("--devices", "2xT400-4GB", "--devices", "1xRTX3090")
FEW = ("--max-trials", "2")
JOB = '''
"""A small job, and others that go wrong."""
import os, pathlib, time
import torch
from torch import nn
from splittune import TrainingTask

BATCHES = [(torch.randn(8, 4), torch.randn(8, 1))]

class Loader(list):
    def __iter__(self):
        raise ZeroDivisionError("a bug of the user's own")

class Unread(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        raise FileNotFoundError("no shard of the data set")

class Stops(nn.Linear):
    """Waits to be interrupted as soon as a row is kept."""
    def forward(self, x):
        if os.environ.get("STOPS") and pathlib.Path("out/plan.json").exists():
            pathlib.Path("reached").touch()
            time.sleep(60)
        return super().forward(x)

def make_task():
    torch.manual_seed(0)
    return TrainingTask(nn.Linear(4, 1), BATCHES)

def stops():
    torch.manual_seed(0)
    return TrainingTask(Stops(4, 1), BATCHES)

def bad_loader():
    return TrainingTask(nn.Linear(4, 1), Loader(BATCHES))

def bad_data():
    return TrainingTask(nn.Linear(4, 1), torch.utils.data.DataLoader(Unread(), batch_size=4, num_workers=1))

def bad_optimizer():
    return TrainingTask(nn.Linear(4, 1), BATCHES, optimizer=lambda parameters: torch.optim.SGD(parameters, speed=1))

def bad_constructor():
    raise ZeroDivisionError("a bug of the user's own")

def no_weights():
    return torch.load("no_weights.pt")

def too_large():
    return TrainingTask(nn.Sequential(nn.Linear(4, 4096), nn.Linear(4096, 1024), nn.Linear(1024, 1)), BATCHES)
'''


@pytest.fixture(autouse=True)
def planned_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's file, under a name that no other test's has."""
    (tmp_path / "planned.py").write_text(JOB)
    monkeypatch.delitem(sys.modules, "planned", raising=False)


def rows_in(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "capacity.csv").read_text().splitlines()))


def test_plan_answers_first_and_writes_everything(run: Run, tmp_path: Path) -> None:
    """It exits with 0: the answer, a row for each machine and batch size, and where the files are."""
    ended = run("plan", "planned.py:make_task", *MACHINES, *FEW, "--global-batch-size", "8,16", "--out", "made/here")
    assert (ended.code, ended.err) == (0, "")
    folder = tmp_path / "made/here"
    rows = rows_in(folder)
    pairs = [(row["devices"], row["global_batch_size"]) for row in rows]
    assert pairs == [("2xT400-4GB", "8"), ("2xT400-4GB", "16"), ("1xRTX3090", "8"), ("1xRTX3090", "16")]
    assert all(SplitConfig.load(folder / row["config"]).is_modelled for row in rows)
    assert (folder / "capacity.png").exists()
    answer = ended.out.index("\nBest: ")
    assert ended.out.index("4 of 4: 1xRTX3090, batch 16") < answer < ended.out.index("\nModelled, a row for each")
    assert (
        "Saved in made/here: capacity.csv, modules.csv, capacity.png, report.html, 4 configs "
        "(split-2xT400-4GB-8.json, ...)" in ended.out
    )
    assert 'config.wrap(model, devices=["cuda:0", ...])' in ended.out
    best = max(rows, key=lambda row: float(row["throughput_samples_per_s"]))
    assert f'SplitConfig.load("made/here/{best["config"]}")' in ended.out


def test_the_loaders_own_batch_size_is_planned_where_none_is_given(run: Run, tmp_path: Path) -> None:
    """8 samples, as its batches have."""
    assert run("plan", "planned.py:make_task", "--devices", "1xRTX3090", *FEW, "--out", "out").code == 0
    assert [row["global_batch_size"] for row in rows_in(tmp_path / "out")] == ["8"]


def test_quiet_shows_the_result_only_and_verbose_every_trial(run: Run) -> None:
    """-q shows no progress, -v why each split was tried."""
    command = ("plan", "planned.py:make_task", "--devices", "2xT400-4GB", *FEW)
    quiet = run(*command, "-q", "--out", "quiet").out
    assert "1 of 1" not in quiet
    assert quiet.lstrip().startswith("Best: ")
    verbose = run(*command, "-v", "--out", "verbose").out
    assert "1 of 1: 2xT400-4GB, batch 8" in verbose
    assert "1 x (4+4)" in verbose.partition("1 of 1")[0]


def test_the_same_command_goes_on(run: Run, tmp_path: Path) -> None:
    """What is finished is not searched again, further batch sizes are; the table is that of a plan in one go."""
    command = ("plan", "planned.py:make_task", *MACHINES, *FEW)
    assert run(*command, "--global-batch-size", "8", "--out", "out").code == 0
    assert run(*command, "--global-batch-size", "8,16", "--out", "out").code == 0
    assert run(*command, "--global-batch-size", "8,16", "--out", "whole").code == 0
    assert (tmp_path / "out/capacity.csv").read_bytes() == (tmp_path / "whole/capacity.csv").read_bytes()


def test_nothing_that_fits_exits_with_1(run: Run, tmp_path: Path) -> None:
    """The table is written all the same, and says what was lacking."""
    ended = run("plan", "planned.py:too_large", "--devices", "2xT400-4GB:occupied=3800MiB", "--out", "out")
    assert ended.code == 1
    assert "No split fits on 2xT400-4GB:occupied=3800MiB (modelled)." in ended.out
    assert "no split fits on any machine" in ended.error
    (row,) = rows_in(tmp_path / "out")
    assert (row["fits"], row["config"]) == ("False", "")
    assert "device 0" in row["message"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", "4xRTX3091"), "RTX3090"),
        (("--devices", "1xRTX3090", "--devices", "nonsense"), "nonsense"),
        (("--devices", "1xRTX3090", "--global-batch-size", "64,abc"), "got 'abc', expected whole numbers"),
        (("--devices", "1xRTX3090", "--global-batch-size", "0"), "got '0', expected whole numbers of at least 1"),
        (("--devices", "1xRTX3090", "--global-batch-size", "8,-4,,x"), "got '-4', '', 'x', expected"),
        (("--devices", "1xRTX3090", "--global-batch-size", "8,8"), "names 8 twice"),
        (("--devices", "1xRTX3090", "--out", "planned.py"), "planned.py is a file: expected a folder"),
        (("--devices", "1xRTX3090", "--storage", "planned.py"), "storage 'planned.py' cannot be used"),
        (("--devices", "1xRTX3090", "--strategy", "DDP"), "Did you mean 'ddp'"),
        (("--devices", "65xRTX3090", "--strategy", "either"), "expected 1 to 64"),
        ((), "Missing option '--devices'"),
    ],
)
def test_bad_usage_is_found_out_before_the_job_is_made(arguments: tuple[str, ...], words: str, run: Run) -> None:
    """It exits with 2, and the job's own function, which would raise, is not called."""
    ended = run("plan", "planned.py:bad_constructor", *arguments)
    assert ended.code == 2
    assert words in ended.err
    assert "ZeroDivisionError" not in ended.err


def test_both_strategies_are_planned_side_by_side(run: Run, tmp_path: Path) -> None:
    """A row and a config for each, and a sentence that compares them; --strategy ddp plans hundreds of cards."""
    ended = run("plan", "planned.py:make_task", "--devices", "2xT400-4GB", *FEW, "--strategy", "either", "--out", "out")
    assert (ended.code, ended.err) == (0, "")
    assert [row["strategy"] for row in rows_in(tmp_path / "out")] == ["dp", "ddp"]
    assert SplitConfig.load(tmp_path / "out/split-2xT400-4GB-ddp-8.json").strategy == "ddp"
    assert '2xT400-4GB, batch 8: "' in ended.out
    many = ("plan", "planned.py:make_task", "--devices", "100xT400-4GB,100xT4", *FEW, "--global-batch-size", "8000")
    ended = run(*many, "--strategy", "ddp", "--out", "many")
    assert ended.code == 0
    assert re.search(r"samples/s \(modelled\) as \d+ x \(\d+x\d+\+", ended.out)
    assert 'config.wrap(model, devices="cuda")' in ended.out


def test_sizes_are_numbers_with_commas_between() -> None:
    """Spaces do not count, and digits of other scripts are none."""
    assert parse_sizes(" 64, 128 ") == [64, 128]
    with pytest.raises(ConfigError, match="got '٣', expected"):
        parse_sizes("٣")


# job, exit code, its exception, its line, and the word that says which part of the job it was
OWN = [
    (
        "bad_loader",
        "ZeroDivisionError: a bug of the",
        'raise ZeroDivisionError("a bug',
        "loader raised this when it",
    ),
    ("bad_data", "FileNotFoundError: ", 'raise FileNotFoundError("no shard', "loader raised this when it"),
    ("bad_optimizer", "TypeError: ", "SGD(parameters, speed=1)", "optimizer callable raised this"),
    (
        "bad_constructor",
        "ZeroDivisionError: a bug of the",
        'raise ZeroDivisionError("a bug',
        "bad_constructor raised",
    ),
    ("no_weights", "FileNotFoundError: ", 'torch.load("no_weights.pt")', "planned.py:no_weights raised"),
]


@pytest.mark.parametrize(("name", "error", "line", "part"), OWN, ids=[own[0] for own in OWN])
def test_the_users_own_exception_is_shown_with_its_line(
    name: str, error: str, line: str, part: str, run: Run, tmp_path: Path
) -> None:
    """Of loader, data set, optimizer or constructor; what an earlier command finished lies there untouched."""
    command = ("--devices", "1xRTX3090", *FEW, "--out", "out")
    assert run("plan", "planned.py:make_task", *command).code == 0
    kept = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    ended = run("plan", f"planned.py:{name}", *command)
    assert ended.code == 3
    assert "Traceback" in ended.err
    assert error in ended.err
    assert line in ended.err
    assert part in ended.err or sys.version_info < (3, 11)  # which has no notes
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == kept
    assert run("plan", f"planned.py:{name}", *command[:-1], "fresh").code == 3
    assert not list((tmp_path / "fresh").glob("**/*"))


def test_an_interrupt_signal_writes_what_is_finished(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real SIGINT in the second search exits with 130; the next command writes what one in one go does."""
    arguments = ["plan", "planned.py:stops", *MACHINES, *FEW, "--out", "out"]
    monkeypatch.setenv("STOPS", "1")
    command = "import torch; torch.set_num_threads(1); from splittune.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as program:
        wait_until(lambda: (tmp_path / "reached").exists() or program.poll() is not None)
        program.send_signal(signal.SIGINT)
        output, _ = program.communicate(timeout=DEADLINE_S)
    assert program.returncode == 130, output
    assert "Traceback" not in output
    assert "Finished before it ended: 1 of 2. The same command goes on there." in output
    assert "Best: " in output
    assert [row["devices"] for row in rows_in(tmp_path / "out")] == ["2xT400-4GB"]
    monkeypatch.delenv("STOPS")
    assert run(*arguments).code == 0
    assert run(*arguments[:-1], "whole").code == 0
    assert [row["devices"] for row in rows_in(tmp_path / "out")] == ["2xT400-4GB", "1xRTX3090"]
    assert (tmp_path / "out/capacity.csv").read_bytes() == (tmp_path / "whole/capacity.csv").read_bytes()
