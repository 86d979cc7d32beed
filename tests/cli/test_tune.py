"""tune: what it writes, what it says, and how it ends early."""

from __future__ import annotations

import csv
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from splittune import SplitConfig
from splittune.cli.tune import names_cuda_devices, tune_and_save
from splittune.report import TuneResult
from splittune.report.progress import HEADER
from splittune.runners.base import DeviceSnapshot
from splittune.split import SplitSpace
from splittune.tuner import TuneCallback
from tests.cli.command_line import CARDS, Run, trials_in
from tests.processes import DEADLINE_S, wait_until
from tests.report.page import folders

TRIAL_LINE = re.compile(r" +\d+  \d+ x \(")


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
    assert "To train on real cards:" in ended.out
    assert 'model = config.wrap(model, devices=["cuda:0", ...])' in ended.out
    assert "modelled" in ended.out
    assert ended.out.splitlines()[-1].startswith("note: the search ended at its limit of trials (--max-trials)")


def test_plain_lines_where_it_is_no_terminal(run: Run) -> None:
    """Without a terminal there is a line for each trial, whatever its length, and no escape code."""
    ended = run("tune", "job.py:make_task", *CARDS, "--max-trials", "3")
    assert "\x1b" not in ended.out + ended.err
    assert "\r" not in ended.out + ended.err
    _, _, after = ended.out.partition(f"{HEADER}\n")
    lines = [line for line in after.splitlines() if TRIAL_LINE.match(line)]
    assert [int(line.split()[0]) for line in lines] == [0, 1, 2]
    assert all(line.split()[-3:] == ["on", "GPU", "0"] for line in lines)


def test_quiet_shows_the_result_only(run: Run) -> None:
    """--quiet shows no trial, and the result all the same."""
    ended = run("tune", "job.py:make_task", *CARDS, "--max-trials", "2", "--quiet")
    assert ended.code == 0
    assert HEADER not in ended.out
    assert "AdamW" not in ended.out
    assert "samples per GPU" in ended.out


def test_verbose_tells_why_each_split_was_tried(run: Run, tmp_path: Path) -> None:
    """-v shows every reason, which is in trials.csv in any case, and the whole explanation."""
    ended = run("tune", "job.py:make_task", *CARDS, "--max-trials", "2", "-v", "--out", "out")
    assert ended.code == 0
    assert all(trial["reason"] in ended.out for trial in trials_in(tmp_path / "out"))
    explanation = (tmp_path / "out/explanation.txt").read_text()
    assert " ".join(explanation.split()) in " ".join(ended.out.split())
    plain = run("tune", "job.py:make_task", *CARDS, "--max-trials", "2", "--out", "plain")
    assert not any(trial["reason"] in plain.out for trial in trials_in(tmp_path / "plain"))


def test_advice_is_tried_and_written_beside_the_result(run: Run, tmp_path: Path) -> None:
    """--advise says each remedy as it is tried, and writes advice.csv; with ranks it is refused."""
    ended = run("tune", "job.py:make_task", *CARDS, "--max-trials", "1", "--advise", "--out", "out")
    assert ended.code == 0
    with (tmp_path / "out/advice.csv").open() as file:
        rows = list(csv.DictReader(file))
    tried = [row for row in rows if row["gain"]]
    assert tried
    assert {row["how"] for row in tried} == {"modelled"}
    assert all(f": {row['remedy']}" in ended.out for row in tried)
    assert "advice.csv" in ended.out
    refused = run("tune", "job.py:make_task", *CARDS, "--strategy", "ddp", "--advise", "--out", "other")
    assert refused.code == 2
    assert "--advise is for a search in one process" in " ".join(refused.err.split())


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
    monkeypatch.setattr("splittune.cli.tune.count_visible_devices", lambda: num_visible)
    assert names_cuda_devices(devices) is expected


# early ends


def test_ctrl_c_keeps_the_finished_trials(run: Run, tmp_path: Path) -> None:
    """Ctrl-C in mid-search exits with 130, and the trials that were finished are written."""
    ended = run("tune", "job.py:interrupted", *CARDS, "--out", "out")
    assert ended.code == 130
    trials = trials_in(tmp_path / "out")
    assert f"Finished trials kept in out/trials.csv: {len(trials)}." in ended.out
    assert trials
    assert (tmp_path / "out/devices.csv").exists()
    assert "What was tried: out/report.html" in ended.out
    page = (tmp_path / "out/report.html").read_bytes()
    assert b"The search is not finished" in page
    assert run("report", "out").code == 0
    assert (tmp_path / "out/report.html").read_bytes() == page
    assert not (tmp_path / "out/split.json").exists()


def test_ctrl_c_leaves_what_an_earlier_search_wrote(run: Run, tmp_path: Path) -> None:
    """Its config, trials and report belong together; the unfinished search gets a folder of its own in there."""
    assert run("tune", "job.py:make_task", *CARDS, "--max-trials", "2", "--out", "out").code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    ended = run("tune", "job.py:interrupted", *CARDS, "--out", "out")
    assert ended.code == 130
    assert {path: path.read_bytes() for path in before} == before
    kept = len(trials_in(tmp_path / "out/unfinished"))
    assert f"Finished trials kept in out/unfinished/trials.csv: {kept}." in ended.out
    assert run("report", "out").code == 0


@pytest.mark.usefixtures("run")
def test_ranks_and_their_machines_are_kept_as_well(tmp_path: Path) -> None:
    """In the tables of a search that was interrupted as in those of one that ended."""
    result = folders.search(folders.RANKS, batch=512)

    def interrupted(callback: TuneCallback) -> TuneResult:
        nodes = tuple(f"host{rank // 8}" for rank in range(64))
        cards = DeviceSnapshot(
            devices=result.config.devices, is_modelled=False, spec=None, memory_before=result.best.memory, nodes=nodes
        )
        callback.on_start(cards, SplitSpace(global_batch_size=512, num_devices=64), 12)
        callback.on_trial(result.trials[0])
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit):
        tune_and_save(interrupted, tmp_path, quiet=True, verbose=False)
    with (tmp_path / "devices.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["node"]) for row in rows] == [(str(rank), f"host{rank // 8}") for rank in range(64)]
    assert "The search is not finished" in (tmp_path / "report.html").read_text(encoding="utf-8")


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
        wait_until(lambda: (tmp_path / "reached").exists() or program.poll() is not None)
        program.send_signal(signal.SIGINT)
        output, _ = program.communicate(timeout=DEADLINE_S)
    assert program.returncode == 130, output
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if TRIAL_LINE.match(line)]
    assert len(trials_in(tmp_path / "out")) == len(lines)


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
