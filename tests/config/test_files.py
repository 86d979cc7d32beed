"""Whatever happens while a file is written, its reader finds the old one or the new one."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splittune.config import SplitConfig
from splittune.config.files import check_writable, write_atomically
from splittune.errors import ConfigError
from splittune.report.tables import save_csv, trials_table
from splittune.search import Trial
from splittune.split import BatchSplit
from tests.config.example import CONFIG
from tests.search.problem import linear_job

Tried = Callable[[str, str, str, str], None]

SPLIT = BatchSplit(global_batch_size=64, accumulation_steps=4, shard_sizes=(4, 4, 4, 4))
TRIALS = [
    Trial(number=i, kind="search", measurement=linear_job().measure(SPLIT), reason="", elapsed_s=1.0, is_resumed=False)
    for i in range(3)
]
OLD, NEW = replace(CONFIG, seed=1), replace(CONFIG, seed=2)


def save_config(path: Path, *, new: bool) -> None:
    (NEW if new else OLD).save(path)


def save_trials(path: Path, *, new: bool) -> None:
    save_csv(trials_table(TRIALS[: 3 if new else 1]), path)


SAVERS: dict[str, Callable[..., None]] = {"split.json": save_config, "trials.csv": save_trials}


@pytest.fixture(params=sorted(SAVERS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def written(path: Path, name: str, *, new: bool) -> bytes:
    SAVERS[name](path, new=new)
    return path.read_bytes()


def owner_of(call: str) -> Any:
    """Where a call is found when it is made: a path of Python 3.10 has kept `os.replace` since it was imported."""
    return Path if call == "replace" else os


@pytest.mark.parametrize("call", ["open", "write", "flush", "fsync", "replace"])
@pytest.mark.parametrize("fault", ["disk full", "Ctrl-C"])
def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: str, fault: str, tried: Tried
) -> None:
    """At each call on the way the old file stays, nothing lies beside it, and the error has the system's reason."""
    path = tmp_path / name
    old, raised = written(path, name, new=False), {"disk full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}
    error: Any = raised.get(fault, KeyboardInterrupt())
    original = Path.open

    def fail(*_: Any, **__: Any) -> None:
        raise error

    def open_what_fails(place: Path, *args: Any, **options: Any) -> Any:
        file = original(place, *args, **options)
        return FailsAt(file, call, fail)

    with monkeypatch.context() as patch:
        if call == "open":
            patch.setattr(Path, "open", fail)
        elif call in ("write", "flush"):
            patch.setattr(Path, "open", open_what_fails)
        else:
            patch.setattr(owner_of(call), call, fail)
        expected = ConfigError if fault == "disk full" else KeyboardInterrupt
        with pytest.raises(expected, match="cannot write .*: No space left" if fault == "disk full" else None):
            SAVERS[name](path, new=True)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
    outcome = "ConfigError" if fault == "disk full" else fault
    tried(fault, f"{name}, at {call}", outcome, "the old file is whole, nothing beside it")


class FailsAt:
    """A file of which one method fails, after half of what it was given."""

    def __init__(self, file: Any, call: str, fail: Callable[..., None]) -> None:
        self.file, self.call, self.fail = file, call, fail

    def __enter__(self) -> FailsAt:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def fileno(self) -> int:
        return self.file.fileno()

    def write(self, text: str) -> None:
        self.file.write(text if self.call != "write" else text[: len(text) // 2])
        if self.call == "write":
            self.fail()

    def flush(self) -> None:
        self.file.flush()
        if self.call == "flush":
            self.fail()


def test_a_file_that_does_not_fit_leaves_the_old_one(tmp_path: Path, name: str, tried: Tried) -> None:
    """With room for part of the new file only, wherever it ends, the old one stays."""
    path = tmp_path / name
    old, size = written(path, name, new=False), len(written(tmp_path / "new", name, new=True))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 1, size // 2, size - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            with pytest.raises(ConfigError, match="cannot write"):
                SAVERS[name](path, new=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == old
    assert {file.name for file in tmp_path.iterdir()} == {name, "new"}
    tried("disk full", f"{name}, at 4 sizes", "ConfigError", "the old file is whole, nothing beside it")


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_process_killed_while_it_writes_leaves_a_whole_file(
    tmp_path: Path, name: str, call: str, is_done: bool, tried: Tried
) -> None:
    """SIGKILL before or after the disk has it: the old file or the new one, never a part."""
    path = tmp_path / name
    old, new = written(path, name, new=False), written(tmp_path / "new", name, new=True)
    child = os.fork()
    if child == 0:
        original = getattr(owner_of(call), call)

        def die(*args: Any) -> None:
            if is_done:
                original(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner_of(call), call, die)
        try:
            SAVERS[name](path, new=True)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert path.read_bytes() == (new if call == "replace" and is_done else old)
    tried("SIGKILL of the tuner", f"{name}, at {call}", "the old or the new file", "it is whole")


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    """While a file is replaced over and over, every load gives one of the configs that were saved."""
    path = CONFIG.save(tmp_path / "split.json")
    child = os.fork()
    if child == 0:
        try:
            for number in range(300):
                replace(CONFIG, seed=number).save(path)
        finally:
            os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert replace(SplitConfig.load(path), seed=0) == replace(CONFIG, seed=0)
    write_atomically(path, "done")
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_where_a_folder_is_expected_is_called_one(tmp_path: Path) -> None:
    """The path that was given stands in the message, and not one below it."""
    (tmp_path / "split").touch()
    with pytest.raises(ConfigError, match=r"split is a file: expected a folder to write to\. Name another one"):
        check_writable(tmp_path / "split")
    check_writable(tmp_path / "made" / "for it")
    assert list((tmp_path / "made" / "for it").iterdir()) == []
