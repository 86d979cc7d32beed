"""Trials in a worker: the same result, and whatever kills the worker ends a trial, never the search."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from splittune import BatchSplit, ConfigError, JobError, Measurement, Outcome, WorkerError, autotune
from splittune.hardware import resolve_hardware
from splittune.options import SearchOptions
from splittune.report.progress import SilentCallback
from splittune.runners.base import JobFacts
from splittune.runners.in_process import InProcessRunner
from splittune.runners.worker import link as worker_link
from splittune.runners.worker.errors import RaisedInWorkerError, describe_error, rebuild_error
from splittune.runners.worker.runner import MAX_ENDS_IN_A_ROW, WorkerRunner
from splittune.search import Trial
from splittune.training.load_task import load_task
from splittune.tuner import tune
from splittune.units import GIB
from tests.processes import DEADLINE_S, assert_ends, is_alive, wait_until

Tried = Callable[[str, str, str, str], None]

DEVICES = "2xT400-4GB"

JOB = '''
"""A job of the user's own, which fails in every way that a shard's size can choose."""
import ctypes, logging, os, pathlib, signal, sys, time
import torch
from torch import nn
from splittune import TrainingTask

BATCHES = [(torch.ones(8, 4), torch.ones(8, 1))] * 2

class LabelError(ValueError):
    def __init__(self, label, *, where):
        super().__init__(f"label {label} in {where}")

class Model(nn.Linear):
    deaths = {}
    num_calls = 0

    def forward(self, x):
        Model.num_calls += 1
        pathlib.Path("pid").write_text(str(os.getpid()))
        self.deaths.get(len(x), lambda: None)()
        return super().forward(x)

def hang():
    pathlib.Path("hanging").touch()
    while True:
        pass

def raise_label_error():
    raise LabelError(7, where="batch 3")

def raise_cuda_error():
    try:
        raise RuntimeError("CUDA error: device-side assert triggered")
    finally:
        ctypes.c_int(0)

def make_task(deaths={}):
    print("the job is made by", __name__)
    logging.getLogger("job").info("the job logs")
    torch.manual_seed(0)
    model = Model(4, 1)
    model.deaths = deaths
    return TrainingTask(model, BATCHES)

def deadly():
    return make_task({
        2: hang,
        3: os.abort,
        4: raise_label_error,
        5: lambda: os.kill(os.getpid(), signal.SIGKILL),
        6: lambda: ctypes.string_at(0),
        7: sys.exit,
        8: raise_cuda_error,
    })

def killed_by_shards_of_four():
    return make_task({4: lambda: os.kill(os.getpid(), signal.SIGKILL)})

def always_killed():
    return make_task(dict.fromkeys(range(1, 9), os.abort))

def killed_when_made():
    os._exit(3)

def reach_and_sleep():
    if Model.num_calls > 20:
        pathlib.Path("reached").touch()
        ctypes.PyDLL(None).sleep(600)  # holds Python's lock: no thread and no signal handler of the worker's own runs

def slow():
    return make_task(dict.fromkeys(range(1, 9), reach_and_sleep))
'''
SCRIPT = """
from splittune import autotune
from job import make_task as make_the_job

def make_task():
    return make_the_job()

{guard}
    result = autotune(make_task, devices="2xT400-4GB", isolation="process", max_trials=1)
    print("tuned", result.config.split)
"""
# The command line, which would wait for ever for a worker that it gives time to end by itself.
WITH_ENDLESS_GRACE = """
from splittune.cli import main
from splittune.runners.worker import link
link._GRACE_S = None
main()
"""
# A worker whose devices are scripted. The second trial is disturbed, and so there are three until every step is slow.
CHANGING_DEVICES = """
import itertools
from splittune.runners.worker import main as worker_process
from splittune.units import GIB
from tests.profiling.fake_hardware import FakeHardware

class Changing(FakeHardware):
    num_trials = 0

    def wrap(self, model, split, **options):
        self.num_trials += 1
        if self.num_trials == 2:
            self.others_hold[1] += 2 * GIB
        return super().wrap(model, split, **options)

hardware = Changing(durations_s=(1.0 if hardware.num_trials <= 3 else 10.0 for _ in itertools.count()))
worker_process.resolve_hardware = lambda devices: hardware
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of this module's tests, with the job in it; a worker's torch has one thread as well."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(sys, "path", list(sys.path))
        yield folder
    sys.modules.pop("job", None)


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def deadly(folder: Path) -> Iterator[WorkerRunner]:
    runner = WorkerRunner("job.py:deadly", DEVICES, trial_timeout_s=DEADLINE_S)
    try:
        runner.open(["output"])
        yield runner
    finally:
        runner.close()


def latest_pid(folder: Path) -> int:
    """The process that ran the latest trial."""
    return int((folder / "pid").read_text())


def split_of(first: int, second: int = 1) -> BatchSplit:
    size = first + second
    return BatchSplit(global_batch_size=size, accumulation_steps=1, shard_sizes=(first, second))


def measure(runner: WorkerRunner | InProcessRunner, *shards: int) -> Measurement:
    return runner.profiler(min_headroom_bytes=(0, 0), loss_placement="output").measure(split_of(*shards))


# the same result


def test_a_worker_finds_what_this_process_finds(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The trials, the split and the tables are the same byte for byte, and what the job prints comes out here."""
    sys.path.insert(0, str(folder))
    make_task = importlib.import_module("job").make_task
    in_worker = autotune(make_task, isolation="process", devices=DEVICES, max_trials=6, progress=False)
    assert "the job is made by job\n" in capfd.readouterr().out
    assert_ends(latest_pid(folder))
    task = load_task("job.py:make_task")
    here = autotune(task.model, task.loader, devices=DEVICES, max_trials=6, progress=False)
    assert in_worker.trials == here.trials
    assert in_worker.config.split == here.config.split
    in_worker.save("in_worker")
    here.save("here")
    for name in ("trials.csv", "devices.csv"):
        assert Path("in_worker", name).read_bytes() == Path("here", name).read_bytes()


def test_a_worker_remembers_the_trials_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others take in mid-trial is noticed there, and a split much slower than an earlier one is cut short."""
    code = worker_link._PROGRAM.replace("from splittune", f"exec({CHANGING_DEVICES!r}, {{}}); from splittune")
    monkeypatch.setattr(worker_link, "_PROGRAM", code)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    runner = WorkerRunner("job.py:make_task")
    profiler = runner.profiler(min_headroom_bytes=(0, 0), loss_placement="output")
    try:
        runner.open(["output"])
        first, disturbed, slow = (profiler.measure(split_of(4, 4)) for _ in range(3))
    finally:
        runner.close()
    assert (first.outcome, first.notes) == (Outcome.OK, ())
    assert disturbed.notes == ("Measured again: other programs took 2.00 GiB on device 1 during the trial.",)
    assert slow.notes == ("Cut short after one round: its step takes 10.00 times that of the fastest trial.",)


def test_each_trial_in_a_worker_is_judged_by_its_own_demands(deadly: WorkerRunner) -> None:
    """The headroom asked for and where the loss is computed are those of the request, whatever came before."""
    outcomes, placements = [], []
    for headroom_bytes, placement in [(0, "output"), (4 * GIB, "output"), (0, "replica"), (0, "output")]:
        profiler = deadly.profiler(min_headroom_bytes=(headroom_bytes, 0), loss_placement=placement)  # type: ignore[arg-type]
        measured = profiler.measure(split_of(1, 1))
        outcomes.append(measured.outcome)
        placements.append(measured.loss_placement)
    assert outcomes == [Outcome.OK, Outcome.NO_HEADROOM, Outcome.OK, Outcome.OK]
    assert placements == ["output", "output", "replica", "output"]


def test_a_function_of_the_script_that_is_run_is_found(folder: Path) -> None:
    """A script's own function makes the job in the worker, which does not run what the script guards."""
    Path("script.py").write_text(SCRIPT.format(guard='if __name__ == "__main__":'))
    ended = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("tuned 8 = ") == 1


def test_what_is_known_of_a_job_crosses_as_plain_data() -> None:
    """The description that a worker sends is read back equal."""
    runner = InProcessRunner(load_task("job.py:make_task"), resolve_hardware("1xT400-4GB:occupied=1GiB,1xRTX3090"))
    try:
        job = runner.open(["output"])
    finally:
        runner.close()
    assert JobFacts.from_dict(json.loads(json.dumps(job.to_dict()))) == job
    assert job.cards.memory()[0].outside_bytes > 1024**3
    assert (job.loader_batch_size, job.has_batch_norm) == (8, False)


# deaths


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        (5, r"the worker ended with signal 9 \(SIGKILL\): likely the host's out-of-memory killer"),
        (3, r"the worker ended with signal 6 \(SIGABRT\): native code gave up"),
        (6, r"the worker ended with signal 11 \(SIGSEGV\): a segmentation fault"),
        (7, r"the worker ended with exit code 0 before it had answered: the job called sys\.exit"),
        (8, r"spoils its devices: CUDA error: device-side assert triggered"),
    ],
)
def test_a_death_is_a_crashed_trial(
    shard: int, words: str, folder: Path, deadly: WorkerRunner, caplog: pytest.LogCaptureFixture, tried: Tried
) -> None:
    """Killed, aborted, a fault, an exit, a CUDA error that sticks: the trial crashed and says why,
    a fresh worker goes on."""
    before = measure(deadly, 1, 1)
    worker = latest_pid(folder)
    with caplog.at_level(logging.INFO):
        crashed = measure(deadly, shard)
        assert_ends(worker)
        assert measure(deadly, 1, 1) == before
    assert before.outcome is Outcome.OK
    assert (crashed.outcome, crashed.split) == (Outcome.CRASHED, split_of(shard))
    assert re.search(words, crashed.message)
    assert crashed.message in caplog.text
    assert latest_pid(folder) != worker
    death = {5: "SIGKILL", 3: "SIGABRT", 6: "SIGSEGV", 7: "exit", 8: "CUDA error that sticks"}[shard]
    tried(f"{death} of the worker", "in a trial", "CRASHED", "a fresh worker measures the same")


class ClockOfHangs:
    """In the place of `time`: it stands still until the job hangs, and then all limits are over."""

    def monotonic(self) -> float:
        return 1e9 if Path("hanging").exists() else 0.0


def test_a_hang_ends_at_the_time_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tried: Tried
) -> None:
    """A trial that never ends crashed at its limit, and the line it hung at is shown."""
    Path("hanging").unlink(missing_ok=True)
    monkeypatch.setattr(worker_link, "time", ClockOfHangs())
    runner = WorkerRunner("job.py:deadly", DEVICES, trial_timeout_s=1.5)
    try:
        runner.open(["output"])
        crashed = measure(runner, 2)
    finally:
        runner.close()
    assert_ends(latest_pid(folder))
    assert crashed.outcome is Outcome.CRASHED
    assert "after 1.5 s without an answer (trial_timeout_s)" in crashed.message
    assert "in hang" in capfd.readouterr().err
    tried("hang of the worker", "in a trial", "CRASHED", "it is killed, its stack is shown")


def test_whole_steps_may_take_as_long_as_they_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a trial holds for a few micro-steps, and is stretched where a trial runs all of them."""
    limits = []

    def receive(runner: WorkerRunner, link: None, limit_s: float, limit_name: str) -> dict[str, Any]:
        limits.append(limit_s)
        return {"kind": "measured", "measurement": Measurement(split=split, outcome=Outcome.CRASHED).to_dict()}

    split = BatchSplit(global_batch_size=8, accumulation_steps=4, shard_sizes=(1, 1))
    monkeypatch.setattr(WorkerRunner, "_begin", lambda runner, request: None)
    monkeypatch.setattr(WorkerRunner, "_receive", receive)
    runner = WorkerRunner("job.py:make_task", DEVICES, trial_timeout_s=10)
    profiler = runner.profiler(min_headroom_bytes=(0, 0), loss_placement="output")
    profiler.measure(split)
    profiler.measure_whole_steps(split)
    assert limits == [10, 40]


def test_a_worker_killed_between_trials_costs_no_trial(folder: Path, deadly: WorkerRunner, tried: Tried) -> None:
    """The split that is asked for next is not blamed: a fresh worker measures it."""
    before = measure(deadly, 1, 1)
    worker = latest_pid(folder)
    os.kill(worker, signal.SIGKILL)
    assert_ends(worker)
    assert measure(deadly, 1, 1) == before
    tried("SIGKILL of the worker", "between two trials", "a fresh worker", "no split is blamed")


def test_the_users_own_exception_is_raised_here(deadly: WorkerRunner) -> None:
    """An exception in a trial arrives with its kind, text and the worker's traceback, and the worker stays."""
    with pytest.raises(ValueError, match=r"^label 7 in batch 3") as caught:
        measure(deadly, 4)
    assert type(caught.value).__name__ == "LabelError"
    assert isinstance(caught.value.__cause__, RaisedInWorkerError)
    assert 'raise LabelError(7, where="batch 3")' in str(caught.value.__cause__)
    assert measure(deadly, 1, 1).outcome is Outcome.OK


class Recorder(SilentCallback):
    """Keeps the trials."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def on_trial(self, trial: Trial) -> None:
        self.trials.append(trial)


def outcomes(trials: list[Trial]) -> list[Outcome]:
    return [trial.measurement.outcome for trial in trials]


def test_the_search_goes_on_and_finds_the_best_of_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    """Splits that kill the worker are crashed trials, the best is the fastest of the others; the
    job logs once in all."""
    runner = WorkerRunner("job.py:killed_by_shards_of_four", DEVICES)
    with caplog.at_level(logging.INFO):
        result = tune(runner, SearchOptions(max_trials=4), SilentCallback())
    assert caplog.text.count("the job logs") == 1
    crashed = [trial for trial in result.trials if trial.measurement.outcome is Outcome.CRASHED]
    fitting = [trial.measurement for trial in result.trials if trial.measurement.outcome is Outcome.OK]
    assert crashed
    assert all(4 in trial.measurement.split.shard_sizes for trial in crashed)
    assert not any(4 in measurement.split.shard_sizes for measurement in fitting)
    assert any(trial.number > crashed[0].number for trial in result.trials if trial.measurement in fitting)
    assert result.best.throughput == max(m.throughput or 0 for m in fitting if m.whole_step_times_s)
    result.save("rest")
    assert "SIGKILL" in Path("rest/trials.csv").read_text()


def test_three_deaths_in_a_row_stop_the_search(folder: Path, tried: Tried) -> None:
    """A job that always dies stops with what it died of, and its trials are kept: another run starts behind them."""
    recorder, options = Recorder(), SearchOptions(storage=folder / "dying.journal")
    with pytest.raises(WorkerError, match=r"ended 3 times in a row.*SIGABRT.*tune with isolation none"):
        tune(WorkerRunner("job.py:always_killed", DEVICES), options, recorder)
    assert outcomes(recorder.trials) == [Outcome.CRASHED] * MAX_ENDS_IN_A_ROW
    assert_ends(latest_pid(folder))
    resumed = tune(InProcessRunner(load_task("job.py:make_task"), resolve_hardware(DEVICES)), options, SilentCallback())
    assert [trial.is_resumed for trial in resumed.trials[:4]] == [True] * MAX_ENDS_IN_A_ROW + [False]
    tried("SIGABRT of the worker", "in every trial", "WorkerError", "a search started again goes on from every trial")


# jobs that cannot be made


@pytest.mark.parametrize(
    ("target", "error", "match"),
    [
        ("job.py:killed_when_made", WorkerError, "could not make the job: the worker ended with exit code 3"),
        ("unguarded.py:make_task", JobError, "importing unguarded.py raised.*tunes it when it is imported"),
    ],
)
def test_a_job_that_cannot_be_made_is_refused_at_once(target: str, error: type[Exception], match: str) -> None:
    """What is wrong with the file is said as it is without a worker, and nothing is started again."""
    Path("unguarded.py").write_text(SCRIPT.format(guard="if True:"))
    runner = WorkerRunner(target, DEVICES)
    try:
        with pytest.raises(error, match=match) as caught:
            runner.open(["output"])
    finally:
        runner.close()
    assert type(caught.value).__name__ == error.__name__
    assert caught.value.__cause__ is None


def inner_function() -> Any:
    def make_task() -> None: ...

    return make_task


@pytest.mark.parametrize(
    ("job", "options", "match"),
    [
        (nn.Linear(2, 1), {}, "cannot be given a Linear.*without arguments that returns splittune.TrainingTask"),
        (None, {}, "cannot be given None"),
        (lambda: None, {}, "cannot find <function.*lambda.*expected a function at the top level"),
        (inner_function(), {}, "a function within another cannot be used"),
        ("job.py:make_task", {"loader": [torch.zeros(2)], "loss_fn": max}, "got loader, loss_fn with isolation="),
        ("job.py:make_task", {"trial_timeout_s": 0}, "trial_timeout_s is 0: expected seconds above 0"),
        ("job.py:make_task", {"isolation": "thread"}, "isolation is 'thread': expected None.*or \"process\""),
    ],
)
def test_what_no_worker_can_make_is_refused(job: Any, options: dict[str, Any], match: str) -> None:
    """A model as an object, a function without a name, parts of the job: refused with what to pass, before a start."""
    with pytest.raises(ConfigError, match=match):
        autotune(job, **{"isolation": "process", "devices": DEVICES, **options})


# errors on their way


def error_of(kind: type[BaseException], *args: Any, cause: BaseException | None = None) -> BaseException:
    with pytest.raises(kind) as caught:
        raise kind(*args) from cause
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        error_of(KeyError, "labels"),
        error_of(OSError, 2, "No such file"),
        error_of(UnicodeDecodeError, "utf-8", b"\xff", 0, 1, "invalid start byte"),
        error_of(KeyboardInterrupt),
        error_of(torch.OutOfMemoryError, "CUDA out of memory."),
        error_of(ConfigError, "what, got, expected"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_as_it_was(error: BaseException) -> None:
    """Name, text and kind are what they were, for exceptions that insist on their arguments too."""
    arrived = rebuild_error(json.loads(json.dumps(describe_error(error))))
    assert isinstance(arrived, type(error))
    assert (type(arrived).__qualname__, type(arrived).__module__) == (type(error).__qualname__, type(error).__module__)
    assert (str(arrived), arrived.args) == (str(error), (str(error),))
    assert (arrived.__cause__ is None) == isinstance(error, ConfigError)


def test_behind_an_error_of_ours_stands_the_users() -> None:
    """A JobError brings the traceback of what a job raised, but not its own: its message says all."""
    for kind in (ZeroDivisionError, FileNotFoundError):
        error = error_of(JobError, "job.py:make raised", cause=error_of(kind, "the user's"))
        arrived = rebuild_error(describe_error(error))
        assert f"{kind.__name__}: the user's" in str(arrived.__cause__)
        assert "JobError" not in str(arrived.__cause__)
    ours = error_of(ConfigError, "cannot write", cause=error_of(FileNotFoundError, "no such folder"))
    assert rebuild_error(describe_error(ours)).__cause__ is None


# the tuner's own end


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_the_tuner(ending: signal.Signals, folder: Path, tried: Tried) -> None:
    """However the program ends in mid-trial, its worker ends, and another run goes on from every finished trial."""
    Path("reached").unlink(missing_ok=True)
    storage = folder / f"{ending.name}.journal"
    program = [sys.executable, "-c", WITH_ENDLESS_GRACE, "tune", "job.py:slow"]
    options = ["--devices", DEVICES, "--isolation", "process", "--storage", str(storage), "--max-trials", "6"]
    with subprocess.Popen([*program, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as tuner:
        wait_until(lambda: Path("reached").exists() or tuner.poll() is not None)
        assert tuner.poll() is None, tuner.communicate()[0]
        worker = latest_pid(folder)
        assert is_alive(worker)
        tuner.send_signal(ending)
        try:
            output, _ = tuner.communicate(timeout=DEADLINE_S)  # it does not wait for a worker in mid-trial
        finally:
            tuner.kill()
        assert_ends(worker)
    assert tuner.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(ending, -ending), output
    assert "Traceback" not in output
    num_finished = len(re.findall(r"^ +\d+  \d+ x \(", output, re.MULTILINE))  # a line for each trial
    assert num_finished > 1
    task = load_task("job.py:make_task")
    resumed = autotune(task.model, task.loader, devices=DEVICES, storage=storage, max_trials=6, progress=False)
    assert sum(trial.is_resumed for trial in resumed.trials) == num_finished
    name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGKILL: "SIGKILL of the tuner"}[ending]
    tried(name, "command line, in a worker's trial", "the exit status says so", "no trial lost, no worker left")
