"""export: what it writes, what it says, and the code it exits with."""

from __future__ import annotations

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
