"""The command line as a whole: bad usage, exit codes, and `python -m splittune`."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from splittune.report.progress import HEADER
from tests.cli.command_line import CARDS, Ended, Run


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["job.py"], r"'job.py' names no job: expected FILE.py:FUNCTION"),
        (["job:make_task"], r"names no job"),
        (["nowhere.py:make_task"], r"there is no file 'nowhere.py'.*Check the path"),
        (["nowhere.py:make_task", "--devices", "cuda:77"], r"there is no file 'nowhere.py'"),
        (["job.py:nothing"], r"job.py has no function 'nothing': it defines .*make_task.*expected FILE.py:FUNCTION"),
        (["job.py:NOT_A_FUNCTION"], r"no function 'NOT_A_FUNCTION'"),
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
    refused(run("tune", *CARDS, *arguments), 2, match, tmp_path)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("raises", r"job.py:raises raised ZeroDivisionError: a bug of the user's own"),
        ("exits", r"job.py:exits raised SystemExit: 0"),
        ("needs_an_argument", r"raised TypeError.*'path'.*called without arguments"),
    ],
)
def test_a_job_whose_function_raises_exits_with_3(name: str, match: str, run: Run, tmp_path: Path) -> None:
    """The same message, and the code of a job that raised."""
    refused(run("tune", *CARDS, f"job.py:{name}"), 3, match, tmp_path)


def refused(ended: Ended, code: int, match: str, folder: Path) -> None:
    assert ended.code == code
    assert re.search(match, ended.error, re.DOTALL)
    assert ended.error.count("\n") == 1
    assert HEADER not in ended.out
    assert not (folder / "runs/split/split.json").exists()


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


def test_python_minus_m_is_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m splittune` takes the same commands, also where the script is not on the path."""
    monkeypatch.setattr(sys, "argv", ["splittune", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("splittune", run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("tune", "verify", "demo", "devices"))
