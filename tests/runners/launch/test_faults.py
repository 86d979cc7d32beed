"""Whatever happens to one rank, and wherever: all end alike in bounded time, and no finished trial is lost."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from splittune import SplitConfig
from tests.cli.command_line import trials_in
from tests.processes import DEADLINE_S, assert_ends, is_alive
from tests.runners.launch.faulty_job import JOB, prepare
from tests.runners.launch.standin import Launched, launch

Tried = Callable[[str, str, str, str], None]

PLACES = ("forward", "backward", "update", "agreement", "synchronised step")
CHECKED = "ranks alike, no finished trial lost, no process left, the config was measured"
TRIAL_LINE = re.compile(r"^ +0  12 x \(1\+1\) .*$", re.MULTILINE)
LIMIT_S = 8.0
"""For a trial where one hangs. A busy machine may end another with it, which then counts as crashed as well."""


def tune(folder: Path, fault: str) -> Launched:
    (folder / "job.py").write_text(JOB)
    arguments = ["tune", "job.py:make_task", "--strategy", "ddp", "--max-trials", "3", "--trial-timeout-s"]
    limit_s = LIMIT_S if fault.startswith("hang") else DEADLINE_S
    launched = launch([*arguments, f"{limit_s:g}"], folder, environment={"FAULT": fault}, prepare=prepare)
    assert (folder / "fault").exists(), f"no fault happened: {launched.log}"
    assert not any(is_alive(pid) for pid in launched.pids)
    return launched


def assert_tuned(folder: Path, launched: Launched, *, crashes: int | None, num_starts: int | None = None) -> None:
    """It went on to its end: with the trial that was finished before, and a split that was measured."""
    assert launched.code == 0, launched.log
    assert launched.codes[-1] == [0, 0]
    first = TRIAL_LINE.findall(launched.log)
    assert len(first) == (num_starts or len(launched.codes)), launched.log
    assert len(set(first)) == 1, "the finished trial was read back"
    trials = trials_in(folder / "runs/split")
    found = [trial for trial in trials if trial["outcome"] == "crashed"]
    assert crashes is None or len(found) == crashes
    config = SplitConfig.load(folder / "runs/split/split.json")
    split = ["+".join(map(str, config.split.shard_sizes)), str(config.split.accumulation_steps)]
    assert ["ok", *split] in [[each["outcome"], each["shard_sizes"], each["accumulation_steps"]] for each in trials]


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_killed_costs_a_trial(tmp_path: Path, tried: Tried, place: str) -> None:
    """All are started again, that trial counts as crashed, and the search goes on."""
    launched = tune(tmp_path, f"SIGKILL, {place}, 1")
    # rank 0 may be asked to end before it has seen that rank 1 is lost: then the trial is run again
    assert_tuned(tmp_path, launched, crashes=None if place == "agreement" else 1)
    assert len(launched.codes) == 2
    assert "The ranks were started again: rank 1 ended with signal 9 (SIGKILL)" in launched.log
    tried("SIGKILL of a rank", f"on ranks, {place}", "CRASHED, and the search goes on", CHECKED)


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_asked_to_end_costs_no_trial(tmp_path: Path, tried: Tried, place: str) -> None:
    """SIGTERM of one rank ends all, in order where they can; the trial on its way is run again, or has crashed."""
    launched = tune(tmp_path, f"SIGTERM, {place}, 1")
    assert_tuned(tmp_path, launched, crashes=None)
    assert len(launched.codes) == 2
    tried("SIGTERM of a rank", f"on ranks, {place}", "the search goes on", CHECKED)


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_hangs_costs_a_trial(tmp_path: Path, tried: Tried, place: str) -> None:
    """It is ended after the limit, also where it holds Python's lock and nothing of Python's runs."""
    launched = tune(tmp_path, f"hang, {place}, 1")
    assert_tuned(tmp_path, launched, crashes=None)
    assert len(launched.codes) > 1
    assert "--trial-timeout-s" in launched.log or "RanksError" in launched.log
    tried("a hang of a rank", f"on ranks, {place}", "CRASHED, and the search goes on", CHECKED)


@pytest.mark.parametrize("place", PLACES[:3])
def test_a_rank_out_of_memory_is_an_outcome(tmp_path: Path, tried: Tried, place: str) -> None:
    """All ranks learn of it in the trial's agreement: no process ends, none waits."""
    launched = tune(tmp_path, f"out of memory, {place}, 1")
    assert_tuned(tmp_path, launched, crashes=0)
    assert launched.codes == [[0, 0]]
    outcomes = [trial["outcome"] for trial in trials_in(tmp_path / "runs/split")]
    assert outcomes.count("out_of_memory") == 1
    tried("out of memory on a rank", f"on ranks, {place}", "OUT_OF_MEMORY", CHECKED)


def test_a_rank_out_of_memory_in_a_synchronised_step_costs_a_trial(tmp_path: Path, tried: Tried) -> None:
    """It fitted by itself, so it is a surprise: the group is given up, and all are started again."""
    launched = tune(tmp_path, "out of memory, synchronised step, 1")
    assert_tuned(tmp_path, launched, crashes=None)
    assert len(launched.codes) == 2
    tried("out of memory on a rank", "on ranks, synchronised step", "the search goes on", CHECKED)


@pytest.mark.parametrize("place", [*PLACES[:3], "synchronised step"])
def test_an_exception_of_the_users_ends_all_ranks_alike(tmp_path: Path, tried: Tried, place: str) -> None:
    """It is no surprise: nothing is started again, and the command exits with the code of a job that raised."""
    launched = tune(tmp_path, f"exception, {place}, 1")
    assert (launched.code, launched.codes) == (3, [[0, 0]])
    assert "MineError: mine" in launched.log
    assert "Finished trials kept in runs/split/trials.csv: " in launched.log
    tried("an exception of the user's on a rank", f"on ranks, {place}", "the exception, on all", CHECKED)


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGTERM", "hang"])
def test_rank_0_lost_while_it_writes_is_started_again(tmp_path: Path, tried: Tried, fault: str) -> None:
    """The search is over, and is read back: what is written is whole."""
    launched = tune(tmp_path, f"{fault}, writing, 0")
    assert_tuned(tmp_path, launched, crashes=None if fault == "hang" else 0)
    assert len(launched.codes) > 1
    tried(f"{fault} of rank 0", "on ranks, writing", "the search goes on", CHECKED)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "named", "words"),
    [
        ("out of host memory", "out of memory", "MemoryError: no room for an answer"),
        ("exception of a handler", "an exception of the user's signal handler", "MineError: mine"),
    ],
)
def test_a_rank_that_raises_in_an_agreement_costs_a_trial_at_most(
    tmp_path: Path, tried: Tried, fault: str, named: str, words: str, rank: int
) -> None:
    """The others are freed at once, and let it end first: it is the one that is blamed, with its reason."""
    launched = tune(tmp_path, f"{fault}, agreement's collective, {rank}")
    assert_tuned(tmp_path, launched, crashes=rank)  # where rank 0 raises it has lost nobody: the trial is run again
    assert len(launched.codes) == 2
    assert f"The ranks were started again: rank {rank} raised {words}." in launched.log
    outcome = "CRASHED, and the search goes on" if rank else "the search goes on"
    tried(f"{named} on rank {rank}", "on ranks, agreement", outcome, CHECKED)


@pytest.mark.parametrize(
    ("fault", "named", "words"),
    [
        ("out of host memory, writing", "out of memory", "MemoryError: no room for an answer"),
        ("disk full, file", "disk full", "ConfigError: cannot write runs/split/split.json: No space left on device"),
        ("exception of a handler, writing", "an exception of the user's signal handler", "MineError: mine"),
    ],
)
def test_rank_0_that_raises_while_it_writes_is_started_again(
    tmp_path: Path, tried: Tried, fault: str, named: str, words: str
) -> None:
    """The other ranks had ended well; all are started, the search is read back, and the files are whole."""
    launched = tune(tmp_path, f"{fault}, 0")
    assert_tuned(tmp_path, launched, crashes=0)
    assert len(launched.codes) == 2
    assert f"The ranks were started again: rank 0 raised {words}" in launched.log
    tried(f"{named} on rank 0", "on ranks, writing", "the search goes on", CHECKED)


@pytest.mark.parametrize("place", [*PLACES, "writing"])
def test_ranks_whose_rendezvous_is_lost_end(tmp_path: Path, tried: Tried, place: str) -> None:
    """With whoever launched them the store is gone where they met: all end, and the same command goes on."""
    (tmp_path / "job.py").write_text(JOB)
    fault = f"loss of the rendezvous, {place}, {0 if place == 'writing' else 1}"
    launcher = multiprocessing.get_context("spawn").Process(target=launched_here, args=(tmp_path, fault))
    launcher.start()
    launcher.join(DEADLINE_S)
    assert launcher.exitcode == -signal.SIGKILL
    for rank in range(2):
        assert_ends(int((tmp_path / f"pid{rank}").read_text()))
    shutil.rmtree(tmp_path / "launch")
    again = launched_here(tmp_path, "none, nowhere, 0")
    assert_tuned(tmp_path, again, crashes=None, num_starts=2)
    tried("loss of the rendezvous", f"on ranks, {place}", "all ranks end", "no process left, no finished trial lost")


def launched_here(folder: Path, fault: str) -> Launched:
    arguments = ["tune", "job.py:make_task", "--strategy", "ddp", "--max-trials", "3", "--storage", "kept.db"]
    limit = ["--trial-timeout-s", f"{LIMIT_S:g}"]
    return launch([*arguments, *limit], folder, environment={"FAULT": fault}, prepare=prepare)
