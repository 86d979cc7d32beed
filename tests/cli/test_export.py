"""export: what it writes, what it says, and the code it exits with."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cli.command_line import CARDS, Run


def test_a_tuned_job_is_exported(run: Run, tmp_path: Path) -> None:
    """Into its folder, unless told otherwise; a second time it needs --force."""
    assert run("tune", "job.py:make_task", *CARDS, "--out", "split", "-q").code == 0
    ended = run("export", "split", "--to", "transformers")
    assert ended.code == 0
    assert "Written to split/training_args.yaml, tried with transformers" in ended.out
    again = run("export", "split", "--to", "transformers")
    assert again.code == 2
    assert "training_args.yaml is there already" in again.error
    assert run("export", "split", "--to", "transformers", "--force").code == 0
    assert run("export", "split/split.json", "--to", "torchrun", "--out", "mine.py").code == 0
    assert "SplitConfig.load('split/split.json')" in Path("mine.py").read_text()


def test_a_tool_that_is_not_installed_is_said(run: Run) -> None:
    """With the command that installs it; the export is written all the same."""
    run("tune", "job.py:make_task", *CARDS, "--out", "split", "-q")
    ended = run("export", "split", "--to", "torchtitan")
    assert ended.code == 0
    assert "torchtitan is not installed here: pip install torchtitan==" in ended.out


def test_what_cannot_be_exported_is_said(run: Run) -> None:
    """A batch that no even split makes, a table that was cut, a config of a newer schema: exit status 2, no file."""
    run("tune", "job.py:make_task", *CARDS, "--global-batch-size", "9", "--out", "odd", "-q")
    ended = run("export", "odd", "--to", "accelerate")
    assert ended.code == 2
    assert "expected a global batch that 2 devices divide evenly" in ended.error
    assert "is 8 or 10" in ended.error
    assert run("export", "odd", "--to", "torchrun").code == 0, "which takes any shares"
    trials, config = Path("odd/trials.csv"), Path("odd/split.json")
    trials.write_text(trials.read_text()[:-9])
    ended = run("export", "odd", "--to", "deepspeed")
    assert ended.code == 2
    assert "odd/trials.csv is half-written" in ended.error
    config.write_text(re.sub(r'"schema": \d+', '"schema": 99', config.read_text()))
    ended = run("export", "odd", "--to", "deepspeed")
    assert ended.code == 2
    assert "schema is 99, newer than this splittune reads" in ended.error
    assert sorted(path.name for path in Path("odd").glob("*.json")) == ["result.json", "split.json"]


def test_bad_input_is_said(run: Run) -> None:
    """No folder, no config in it, no such tool: exit status 2."""
    Path("empty").mkdir()
    for arguments, message in {
        ("nowhere", "--to", "lightning"): "cannot read nowhere",
        ("empty", "--to", "lightning"): "empty has no split.json",
        ("empty", "--to", "keras"): "no tool is called 'keras'",
    }.items():
        ended = run("export", *arguments)
        assert ended.code == 2
        assert message in ended.error
