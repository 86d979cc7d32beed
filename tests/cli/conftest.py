"""The command line in this process, in a folder with a job of the user's own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from splittune.cli import main
from tests.cli.command_line import JOB, Ended, Run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Run]:
    """Runs the command line; torch, path and logging are put back."""
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
