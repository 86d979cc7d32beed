"""Whatever happens to the storage: no wrong result, no lost trial, and an error in our words."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy

from splittune.errors import ConfigError
from splittune.search import SearchResult, Trial, find_best_split
from splittune.search.storage import open_study as storage_module
from tests.search.problem import Job, failing_after, linear_job

Tried = Callable[[str, str, str, str], None]

KINDS = {"study.db": "SQLite file", "study.journal": "journal file"}
NUM_TRIALS = 5
NOT_ROOT = 65534
RESUMES = "a search started again goes on from every finished trial"
THE_SAME = "the result is that of a search nobody disturbed"


def search(storage: Path, problem: Job | None = None, measure: Any = None, **options: Any) -> SearchResult:
    """A short search, the same every time."""
    problem = problem or linear_job()
    options = {"max_trials": NUM_TRIALS, "sampler": "random", "seed": 3} | options
    return find_best_split(problem.space(), measure or problem.measure, storage=storage, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return search(tmp_path_factory.mktemp("whole") / "study.journal")


def assert_goes_on(storage: Path, seen: list[Trial], undisturbed: SearchResult) -> int:
    """Started again, the search measures nothing that had been stored, and ends as if nothing had happened."""
    problem = linear_job()
    result = search(storage, problem)
    assert [(t.kind, t.measurement) for t in result.trials] == [(t.kind, t.measurement) for t in undisturbed.trials]
    assert result.best == undisturbed.best
    num_resumed = sum(trial.is_resumed for trial in result.trials)
    assert len(problem.measured) == len(result.trials) - num_resumed
    assert [t.measurement for t in result.trials[: len(seen)]] == [t.measurement for t in seen]
    return num_resumed


@contextlib.contextmanager
def nobody_in_particular() -> Iterator[None]:
    """Permissions hold for root too: it becomes nobody meanwhile."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOT_ROOT)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def is_open(path: Path) -> bool:
    """Whether this process has a connection to the file."""
    return any(link.resolve() == path.resolve() for link in Path("/proc/self/fd").iterdir())


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def in_a_child(act: Callable[[], object]) -> int:
    """The process id of a copy of this process that does `act` and ends, with 0 unless it raised."""
    pid = os.fork()
    if pid:
        return pid
    try:
        act()
        os._exit(0)
    finally:
        os._exit(1)


def locked_by_another(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    return connection


# locked


def test_a_locked_database_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: SearchResult, tried: Tried
) -> None:
    """A file that another program keeps locked is a ConfigError that says so, in a line, without Optuna's traceback."""
    path = tmp_path / "study.db"
    search(path, max_trials=2)
    monkeypatch.setattr(storage_module, "SQLITE_PATIENCE_S", 0.05)
    other, problem = locked_by_another(path), linear_job()
    with pytest.raises(ConfigError, match=r"cannot be used: OperationalError: database is locked\. Expected") as caught:
        search(path, problem)
    assert caught.value.__cause__ is None
    assert problem.measured == []
    other.close()
    assert not is_open(path)
    assert_goes_on(path, [], undisturbed)
    tried("storage locked", "SQLite file, at the start", "ConfigError", RESUMES)


def test_a_database_locked_in_mid_search_loses_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: SearchResult, tried: Tried
) -> None:
    """The trial that could not be stored is with the caller, those before are in the file."""
    path, problem, seen, others = tmp_path / "study.db", linear_job(), [], []
    monkeypatch.setattr(storage_module, "SQLITE_PATIENCE_S", 0.05)

    def measure(split: Any) -> Any:
        if len(problem.measured) == 2:
            others.append(locked_by_another(path))
        return problem.measure(split)

    with pytest.raises(ConfigError, match=r"failed in mid-search: OperationalError: database is locked"):
        search(path, problem, measure, on_trial=seen.append)
    assert len(seen) == 3
    others[0].close()
    assert assert_goes_on(path, seen, undisturbed) == 2
    tried("storage locked", "SQLite file, in mid-search", "ConfigError", f"the caller has the trial; {RESUMES}")


def test_a_short_lock_is_waited_for(tmp_path: Path, undisturbed: SearchResult, tried: Tried) -> None:
    """A backup, or somebody who looks at the trials, does not end the search."""
    path, problem = tmp_path / "study.db", linear_job()

    def measure(split: Any) -> Any:
        other = locked_by_another(path)
        threading.Timer(0.2, other.close).start()
        return problem.measure(split)

    result = search(path, problem, measure, max_trials=2)
    assert [t.measurement for t in result.trials[:2]] == [t.measurement for t in undisturbed.trials[:2]]
    tried("storage locked", "SQLite file, for a moment", "waits", THE_SAME)


# not writable, not ours


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("protected", ["file", "folder"])
def test_a_storage_that_is_read_only_is_refused(name: str, protected: str, tried: Tried) -> None:
    """Nothing is measured for a file that cannot keep it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        path, problem = folder / name, linear_job()
        search(path, max_trials=2)
        before = path.read_bytes()
        path.chmod(0o444 if protected == "file" else 0o666)
        folder.chmod(0o777 if protected == "file" else 0o555)
        with nobody_in_particular(), pytest.raises(ConfigError, match=r"cannot be used: .*(readonly|[Pp]ermission)"):
            search(path, problem)
        folder.chmod(0o777)
        assert problem.measured == []
        assert path.read_bytes() == before
        assert {file.name for file in folder.iterdir()} == {name}
    tried("storage read-only", f"{KINDS[name]}, its {protected}", "ConfigError", "the file is unchanged")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "content", [b"my notes", b"my notes\nof today\n", b"\x80\x05\x95" * 1000, b"{}\n", b"[" * 9000]
)
def test_a_file_of_another_kind_is_refused_and_not_touched(tmp_path: Path, name: str, content: bytes) -> None:
    """A wrong path costs nobody a file."""
    path, problem = tmp_path / name, linear_job()
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be used: ") as caught:
        search(path, problem)
    assert caught.value.__cause__ is None
    assert not is_open(path)
    assert path.read_bytes() == content
    assert problem.measured == []


@pytest.mark.parametrize("line", ["", "{", '{"op_code":99,"worker_id":"x"}', '{"op_code":4}', "[]", '{"op_code":[]}'])
def test_a_journal_damaged_in_its_middle_is_refused(tmp_path: Path, line: str, tried: Tried) -> None:
    """What a crash of ours cannot leave is somebody's hand: it is not guessed what stood there."""
    path = tmp_path / "study.journal"
    search(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:10], line, *lines[11:]]) + "\n")
    with pytest.raises(ConfigError, match="cannot be used: "):
        search(path)
    tried("file damaged", "journal file, a line in its middle", "ConfigError", "nothing is measured")


# full


def disk_fills_up_at(path: Path, num_bytes: int) -> list[Trial]:
    """The trials that the caller got from a search that could not write on."""
    seen: list[Trial] = []
    with largest_file(num_bytes), pytest.raises(ConfigError, match=r"cannot be used|failed in mid-search"):
        search(path, on_trial=seen.append)
    return seen


@pytest.mark.parametrize("name", KINDS)
def test_a_full_disk_loses_no_trial(tmp_path: Path, name: str, undisturbed: SearchResult, tried: Tried) -> None:
    """Wherever it fills up, the trials are with the caller, and all but the last one in the file,
    which stays readable."""
    whole = tmp_path / "whole" / name
    search(whole, max_trials=1)
    beginning = whole.stat().st_size
    search(whole)
    size = whole.stat().st_size
    counts = set()
    for step in range(6):
        path = tmp_path / f"{step}" / name
        search(path, max_trials=1)
        limit = beginning + step * (size - beginning) // 6
        if name == "study.db":
            limit -= limit % 512  # SQLite writes pages
        seen = disk_fills_up_at(path, limit)
        assert assert_goes_on(path, seen, undisturbed) >= len(seen) - 1
        counts.add(len(seen))
    assert len(counts) > 1, "it filled up at different trials"
    tried("disk full", f"{KINDS[name]}, at 6 sizes", "ConfigError", f"the caller has the trial; {RESUMES}")


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("fault", ["disk full", "Ctrl-C"])
def test_a_journal_is_whole_after_any_write_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, fault: str, undisturbed: SearchResult, tried: Tried
) -> None:
    """A line that was half written, or not brought to the disk, is taken back; the next one is readable."""
    original = {"write": os.write, "fsync": os.fsync}[call]
    raised: Any = OSError(errno.ENOSPC, "No space left on device") if fault == "disk full" else KeyboardInterrupt()
    for at in range(0, 60, 5):
        path, count, seen = tmp_path / f"{at}.journal", [0], []

        def fail(handle: int, *data: bytes, at: int = at, count: list[int] = count) -> Any:
            count[0] += 1
            if count[0] == at:
                if data:
                    original(handle, data[0][: len(data[0]) // 2])
                raise raised
            return original(handle, *data)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with contextlib.suppress(ConfigError, KeyboardInterrupt):
                search(path, on_trial=seen.append)
        if path.exists():
            assert all(json.loads(line) for line in path.read_text().splitlines())
        assert assert_goes_on(path, seen, undisturbed) >= len(seen) - 1
    tried(fault, f"journal file, any {call}", "ConfigError" if fault == "disk full" else fault, RESUMES)


# killed


@pytest.mark.parametrize("name", KINDS)
def test_a_tuner_killed_while_it_writes_is_resumed(
    tmp_path: Path, name: str, undisturbed: SearchResult, tried: Tried
) -> None:
    """SIGKILL in the middle of a line or a transaction costs at most the trial being written, and no waiting."""
    counts = set()
    stride = 14 if name == "study.db" else 5  # transactions, lines
    for at in range(3, 3 + 10 * stride, stride):
        path = tmp_path / f"{at}-{name}"

        def search_and_die(path: Path = path, at: int = at) -> None:
            write, count = os.write, [0]

            def die_at(*_: Any) -> None:
                count[0] += 1
                if count[0] == at:
                    os.kill(os.getpid(), signal.SIGKILL)

            def write_half(handle: int, data: bytes) -> int:
                if data.startswith(b"{"):
                    write(handle, data[: len(data) // 2])
                    die_at()
                    return len(data) // 2 + write(handle, data[len(data) // 2 :])
                return write(handle, data)

            os.write = write_half
            sqlalchemy.event.listen(sqlalchemy.Engine, "commit", die_at)
            search(path)

        _, status = os.waitpid(in_a_child(search_and_die), 0)
        assert os.WIFSIGNALED(status)
        counts.add(assert_goes_on(path, [], undisturbed))
    assert len(counts) > 2, "it was killed in different trials"
    tried("SIGKILL of the tuner", f"{KINDS[name]}, in mid-write, at 10 writes", "resumed", THE_SAME)


def test_a_journal_cut_anywhere_in_its_last_line_is_resumed(
    tmp_path: Path, undisturbed: SearchResult, tried: Tried
) -> None:
    """What a crash of the machine leaves of the last line is taken off, and nothing else is."""
    whole = tmp_path / "whole.journal"
    with pytest.raises(KeyboardInterrupt):
        search(whole, measure=failing_after(3, linear_job().measure, KeyboardInterrupt()))
    lines = whole.read_bytes().splitlines(keepends=True)
    for at in (0, 1, 7, len(lines) // 2, len(lines) - 1):
        for length in (1, len(lines[at]) // 2, len(lines[at]) - 1):
            path = tmp_path / f"{at}-{length}.journal"
            path.write_bytes(b"".join(lines[:at]) + lines[at][:length])
            assert_goes_on(path, [], undisturbed)
            assert path.read_bytes().startswith(b"".join(lines[:at]))
            optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    tried("file cut", "journal file, in its last line", "resumed", THE_SAME)


# interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_trial_is_stored_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, undisturbed: SearchResult, tried: Tried
) -> None:
    """The trial is written whole and reported, then the signal takes effect."""
    path, tell, seen = tmp_path / "study.journal", storage_module.optuna.Study.tell, []

    def interrupted_tell(*args: Any, **options: Any) -> Any:
        for _ in range(2):  # people press it twice
            signal.raise_signal(number)
        return tell(*args, **options)

    monkeypatch.setattr(optuna.Study, "tell", interrupted_tell)
    previous = signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(SystemExit(143)))
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            search(path, on_trial=seen.append)
    finally:
        signal.signal(signal.SIGTERM, previous)
    monkeypatch.undo()
    assert len(seen) == 1
    assert assert_goes_on(path, seen, undisturbed) == 1
    name = "Ctrl-C" if number is signal.SIGINT else "SIGTERM with a handler"
    tried(name, "while a trial is stored", "takes effect afterwards", RESUMES)


# two at once


@pytest.mark.parametrize("name", KINDS)
def test_a_second_search_of_the_same_study_is_refused(
    tmp_path: Path, name: str, undisturbed: SearchResult, tried: Tried
) -> None:
    """In this process, by a URL and from another process too; the first one does not notice."""
    path, problem, statuses = tmp_path / name, linear_job(), []
    places = [path, tmp_path / "x" / ".." / name, *([f"sqlite:///{path}"] if name == "study.db" else [])]
    message = (
        rf"another splittune is using study 'splittune' in storage .*{name}' \(process {os.getpid()}\): expected one"
    )

    def refused(place: Any) -> None:
        second = linear_job()
        with pytest.raises(ConfigError, match=message):
            search(place, second)
        assert second.measured == []

    def measure(split: Any) -> Any:
        if len(problem.measured) == 1:
            for place in places:
                refused(place)
            statuses.append(os.waitpid(in_a_child(lambda: refused(path)), 0)[1])
        return problem.measure(split)

    assert search(path, problem, measure) == undisturbed
    assert statuses == [0]
    assert {file.name for file in tmp_path.iterdir()} - {"x"} == {name}
    tried("two tuners", f"{KINDS[name]}, one job", "the second: ConfigError", THE_SAME)


def test_the_lock_of_a_killed_search_does_not_keep_the_next_one_out(
    tmp_path: Path, undisturbed: SearchResult, tried: Tried
) -> None:
    """Nor does a child that outlives it, a worker of a data loader say: the next search begins at once."""
    path = tmp_path / "study.journal"
    reading, writing = os.pipe()

    def search_fork_and_die() -> None:
        def measure(split: Any) -> Any:
            child = os.fork()
            if child == 0:
                signal.pause()
            os.write(writing, str(child).encode())
            os.kill(os.getpid(), signal.SIGKILL)

        search(path, measure=measure)

    os.waitpid(in_a_child(search_fork_and_die), 0)
    orphan = int(os.read(reading, 20))
    try:
        assert_goes_on(path, [], undisturbed)
    finally:
        os.kill(orphan, signal.SIGKILL)
        os.close(reading)
        os.close(writing)
    tried("SIGKILL of the tuner", "in a trial, a child of it lives on", "resumed at once", THE_SAME)


@pytest.mark.parametrize("name", KINDS)
def test_two_jobs_share_a_file_at_once(tmp_path: Path, name: str, undisturbed: SearchResult, tried: Tried) -> None:
    """Searches of different studies write into one file in turn, and neither loses a trial."""
    path = tmp_path / name
    search(path, study_name="first", max_trials=1)
    children = [
        in_a_child(lambda study=study: search(path, study_name=study))  # type: ignore[misc]
        for study in ("first", "second", "third")
    ]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    for study in ("first", "second", "third"):
        result = search(path, study_name=study)
        assert all(trial.is_resumed for trial in result.trials)
        assert result.best == undisturbed.best
    tried("two tuners", f"{KINDS[name]}, different jobs", "both go on", THE_SAME)
