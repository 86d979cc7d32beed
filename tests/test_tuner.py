"""autotune from end to end, on real jobs over virtual GPUs: the job as it was found, the split that was measured."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.jobs.workloads import digits_cnn, mlp
from splittune import (
    ConfigError,
    DeviceError,
    InvalidSplitError,
    NoFeasibleSplitError,
    Outcome,
    SplitConfig,
    TuneResult,
    autotune,
)
from splittune.demo import byte_gpt
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual.allocator import CachingAllocator
from splittune.profiling.profiler import Profiler
from splittune.split import BatchSplit
from splittune.training import TrainingTask, read_batches
from tests.training.state import state_of

TWO_CARDS = "2xRTX3090"
# Another program leaves 22 MiB of GPU 0: for the small GPT below too little at the fewest steps, enough at more.
TIGHT = "1xT400-4GB:occupied=3800MiB,1xT400-4GB"
Job = dict[str, Any]


@pytest.fixture(scope="module")
def tuned() -> TuneResult:
    return tune(JOBS["mlp"](), max_trials=1)


def small_gpt(batch_size: int = 64, context: int = 32) -> Job:
    task = byte_gpt(batch_size, context=context, width=32, num_layers=1)
    return {"model": task.model, "loader": task.loader}


JOBS: dict[str, Callable[[], Job]] = {
    "digits_cnn": lambda: dict(digits_cnn(32)._asdict()),
    "mlp": lambda: dict(mlp()._asdict()),
    "byte_gpt": lambda: small_gpt(16, 16),
}


def tune(job: Job, **options: Any) -> TuneResult:
    return autotune(**job, **{"devices": TWO_CARDS, "max_trials": 3, "progress": False, **options})


def in_mid_training(name: str) -> Job:
    """The job with an optimizer of its own that has state, gradients on the parameters, and a generator advanced."""
    job = JOBS[name]()
    make_optimizer = job.get("optimizer", torch.optim.AdamW)
    loss_fn = job.setdefault(
        "loss_fn", lambda output, y: nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())
    )
    model, optimizer = job["model"], make_optimizer(job["model"].parameters())
    for x, y in [next(iter(job["loader"])) for _ in range(3)]:
        optimizer.step()
        loss_fn(model(x), y).backward()
    return job | {"optimizer": optimizer}


def fail_at(model: nn.Module, call: int, error: BaseException) -> None:
    """Every replica's call counts."""
    num_calls = 0

    def count(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            raise error

    model.register_forward_pre_hook(count)


# as found


@pytest.mark.parametrize("name", JOBS)
def test_the_job_is_as_it_was_found(name: str) -> None:
    """Afterwards weights, buffers, gradients, optimizer, random numbers and the loader's order are what they were."""
    job = in_mid_training(name)
    job["model"].eval()
    before = state_of(job["model"], job["optimizer"], job["loader"])
    assert tune(job).trials
    assert state_of(job["model"], job["optimizer"], job["loader"]) == before


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2, 9, 30])
def test_the_job_is_as_it_was_found_after_an_exception(call: int, kind: type[BaseException]) -> None:
    """An exception in forward leaves as it is, in whichever call it is raised, and the job is as it was."""
    job, error = in_mid_training("digits_cnn"), kind("the user's own")
    fail_at(job["model"], call, error)
    before = state_of(job["model"], job["optimizer"], job["loader"])
    with pytest.raises(kind) as caught:
        tune(job, max_trials=30)
    assert caught.value is error
    assert state_of(job["model"], job["optimizer"], job["loader"]) == before


def test_the_job_is_as_it_was_found_when_nothing_fits() -> None:
    """When no split fits, the job is as it was as well."""
    job = in_mid_training("byte_gpt")
    before = state_of(job["model"], job["optimizer"], job["loader"])
    with pytest.raises(NoFeasibleSplitError):
        tune(job, min_headroom_bytes=24 * 1024**3)
    assert state_of(job["model"], job["optimizer"], job["loader"]) == before


def test_memory_that_runs_out_at_any_operation_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in a trial an allocation fails: an outcome, the job as it was, and every device's memory given back."""
    job, hardware = in_mid_training("mlp"), resolve_hardware(TWO_CARDS)
    task = TrainingTask(**job)
    before = state_of(job["model"], job["optimizer"], job["loader"])
    snapshot = task.snapshot()
    profiler = Profiler(task, hardware, read_batches(task.loader), snapshot)
    split = BatchSplit(global_batch_size=16, accumulation_steps=2, shard_sizes=(3, 5))
    allocate, num_blocks, failing = CachingAllocator.allocate, 0, 0

    def allocate_or_fail(self: CachingAllocator, num_bytes: int) -> Any:
        nonlocal num_blocks
        num_blocks += 1
        return None if num_blocks == failing else allocate(self, num_bytes)

    monkeypatch.setattr(CachingAllocator, "allocate", allocate_or_fail)
    with hardware.metered():
        for _ in range(2):  # from the second on, the optimizer's state is there already
            num_blocks = 0
            assert profiler.measure(split).outcome is Outcome.OK
        num_in_a_trial, baseline = num_blocks, hardware.allocated_bytes()
        for number in range(1, num_in_a_trial + 1, num_in_a_trial // 40):
            num_blocks, failing = 0, number
            assert profiler.measure(split).outcome is Outcome.OUT_OF_MEMORY
            assert hardware.allocated_bytes() == baseline
    snapshot.restore_gradients()
    assert num_in_a_trial > 100
    assert state_of(job["model"], job["optimizer"], job["loader"]) == before


# the split that is emitted


def test_the_emitted_split_was_measured_in_whole_steps_and_fits() -> None:
    """Where memory is scarce splits fail, and the one emitted ran whole steps, kept its headroom and is the plan."""
    result = tune(small_gpt(), devices=TIGHT, max_trials=6)
    outcomes = {trial.measurement.outcome for trial in result.trials}
    assert outcomes > {Outcome.OK}
    confirmed = [trial.measurement for trial in result.trials if trial.kind == "confirm"]
    assert result.best in confirmed
    assert result.best.outcome is Outcome.OK
    assert result.best.whole_step_times_s
    assert result.config.split == result.best.split
    for memory, demand, planned in zip(
        result.best.memory, result.config.min_headroom_bytes, result.config.planned_peak_reserved_bytes, strict=True
    ):
        assert memory.headroom_bytes >= demand > 0
        assert memory.peak_reserved_bytes == planned


@pytest.mark.parametrize("name", JOBS)
def test_the_best_is_never_slower_than_the_baseline(name: str) -> None:
    """Baseline and best were measured alike, and the best is at least as fast."""
    result = tune(JOBS[name](), max_trials=4)
    assert result.baseline is not None
    assert len(set(result.baseline.split.shard_sizes)) == 1
    assert result.speedup is not None
    assert result.speedup >= 1
    assert result.best.throughput == max(
        trial.measurement.throughput or 0 for trial in result.trials if trial.kind == "confirm"
    )


def test_batch_norm_keeps_a_few_samples_on_every_device() -> None:
    """A model with BatchNorm gets no split in which a device has fewer samples than statistics can be made of."""
    result = tune(JOBS["digits_cnn"](), max_trials=6)
    assert all(min(trial.measurement.split.shard_sizes) >= 4 for trial in result.trials)


def test_two_runs_with_one_seed_write_the_same_files(tmp_path: Path) -> None:
    """The same job and seed on virtual GPUs give the same tables, byte for byte, and the same split."""
    written = []
    for run in ("first", "second"):
        torch.rand(1)  # where the random numbers stand does not matter
        result = tune(small_gpt(), devices=TIGHT, max_trials=5, seed=3)
        result.save(tmp_path / run)
        written.append(((tmp_path / run / "trials.csv").read_bytes(), (tmp_path / run / "devices.csv").read_bytes()))
        assert SplitConfig.load(tmp_path / run / "split.json") == result.config
    assert written[0] == written[1]
    assert len(list(csv.DictReader(written[0][0].decode().splitlines()))) == len(result.trials)


def test_a_search_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """After Ctrl-C the same call with the same storage measures only what is missing, and finds what it would have."""
    storage = tmp_path / "trials.journal"
    job = small_gpt(16, 16)
    fail_at(job["model"], 20, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tune(job, storage=storage, max_trials=6)
    resumed = tune(small_gpt(16, 16), storage=storage, max_trials=6)
    assert {trial.is_resumed for trial in resumed.trials} == {True, False}
    whole = tune(small_gpt(16, 16), max_trials=6)
    assert resumed.trials == whole.trials
    assert resumed.best == whole.best


def test_other_devices_are_another_search(tmp_path: Path) -> None:
    """Trials kept from other devices of the same size do not answer for these."""
    storage = tmp_path / "trials.journal"
    tune(JOBS["mlp"](), storage=storage)
    result = tune(JOBS["mlp"](), storage=storage, devices="2xRTX4090")
    assert not any(trial.is_resumed for trial in result.trials)


@pytest.mark.parametrize("global_batch_size", [12, 100])
def test_a_global_batch_other_than_the_loaders_is_legal(
    global_batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A larger global batch is put together from the loader's samples; that training needs such a loader is said."""
    with caplog.at_level(logging.WARNING, logger="splittune"):
        result = tune(JOBS["mlp"](), global_batch_size=global_batch_size)
    assert result.config.split.global_batch_size == global_batch_size
    assert f"training needs a loader of batch size {global_batch_size}" in caplog.text


def test_a_training_task_is_tuned_as_its_parts_are() -> None:
    """What `plan` and the command line take is taken here as well, with another batch where one is given."""
    job = JOBS["mlp"]()
    task = TrainingTask(**job)
    of_parts, of_task = tune(job, max_trials=2), tune({"model": task}, max_trials=2)
    assert of_task.trials == of_parts.trials
    assert replace(of_task.config, created=of_parts.config.created) == of_parts.config
    assert tune({"model": task}, max_trials=1, global_batch_size=8).config.split.global_batch_size == 8
    with pytest.raises(ConfigError, match=r"got loader with a TrainingTask.*autotune\(task, \.\.\.\)"):
        tune({"model": task, "loader": job["loader"]})
    with pytest.raises(ConfigError, match="a worker process cannot be given a TrainingTask"):
        tune({"model": task}, isolation="process")


def test_numpys_integers_are_integers(tmp_path: Path) -> None:
    """Options out of an array give what plain integers give, down to the file."""
    options = {"global_batch_size": 12, "max_trials": 1, "seed": 2, "min_headroom_bytes": 4096}
    given, plain = (
        tune(JOBS["mlp"](), **{name: kind(value) for name, value in options.items()}) for kind in (np.int64, int)
    )
    assert given.trials == plain.trials
    given.save(tmp_path)
    assert SplitConfig.load(tmp_path / "split.json") == replace(plain.config, created=given.config.created)


# bad input


def job_with(**changed: Any) -> Job:
    return JOBS["mlp"]() | changed


def loss_of_nan(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, targets) * float("nan")


def past_the_wrapper(model: Any, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model.module(batch[0]), batch[1])


class Silent(nn.Linear):
    def forward(self, x: Tensor) -> None:  # type: ignore[override]
        super().forward(x)


EMPTY = DataLoader(TensorDataset(torch.zeros(3, 12), torch.zeros(3, 1)), batch_size=4, drop_last=True)


@pytest.mark.parametrize(
    ("job", "options", "error", "match"),
    [
        (
            job_with(),
            {"global_batch_size": 0},
            ConfigError,
            "global_batch_size is 0: expected an integer of at least 1",
        ),
        (
            job_with(),
            {"global_batch_size": -8},
            ConfigError,
            "global_batch_size is -8: expected an integer of at least",
        ),
        (job_with(), {"devices": "2xRTX309"}, DeviceError, "'RTX309' is not in the catalog.*Did you mean RTX3090"),
        (
            job_with(),
            {"devices": ["cuda:0", "cuda:0"]},
            DeviceError,
            r"devices\[0\] is 'cuda:0'.*not there|names already",
        ),
        (job_with(), {"devices": ["cuda:77"]}, DeviceError, r"devices\[0\] is 'cuda:77', which is not there"),
        (job_with(), {"devices": []}, DeviceError, "no device is named: expected at least one"),
        (job_with(model=nn.ReLU()), {}, ConfigError, "ReLU has no trainable parameter"),
        (job_with(loss_fn=torch.sub), {}, ConfigError, r"loss of shape \(\d+, 1\): expected a scalar.*mean"),
        (job_with(loss_fn=loss_of_nan), {}, ConfigError, "loss of nan: expected a finite number"),
        (
            job_with(loss_fn=None),
            {"step_fn": past_the_wrapper},
            ConfigError,
            r"never called it.*expected model\(\.\.\.\)",
        ),
        (
            job_with(loss_fn=None),
            {"step_fn": lambda model, batch: None},
            ConfigError,
            "step_fn gave a NoneType: expected",
        ),
        (
            job_with(loss_fn=None),
            {"step_fn": lambda model, batch: model(batch[0]).mean().item()},
            ConfigError,
            "step_fn gave a float: expected a tensor",
        ),
        (
            job_with(model=Silent(12, 1), loss_fn=None),
            {},
            ConfigError,
            "no loss can be inferred from no output.*step_fn=",
        ),
        (
            job_with(),
            {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=0.0)},
            ConfigError,
            "a scale of 0.0: expected a finite number above 0.*Make a new",
        ),
        (job_with(loader=EMPTY), {}, ConfigError, "the loader is empty.*drop_last"),
        (job_with(loader=[{"name": ["a"]}]), {}, ConfigError, "batch 0 of the loader: a batch with no tensor"),
        (job_with(loader=[(torch.zeros(4, 12), torch.zeros(3, 1))]), {}, ConfigError, r"\[0\] has 4, \[1\] has 3"),
        (job_with(loader=iter([torch.zeros(2)])), {}, ConfigError, "an iterator.*Pass that instead"),
        (job_with(), {"max_trials": 0}, ConfigError, "max_trials is 0: expected an integer of at least 1"),
        (job_with(), {"timeout_s": -1}, ConfigError, "timeout_s is -1: expected seconds above 0"),
        (job_with(), {"min_headroom_bytes": [1]}, ConfigError, "has 1 numbers for 2 devices"),
    ],
)
def test_bad_input_gets_a_clear_error(job: Job, options: Job, error: type[Exception], match: str) -> None:
    """What cannot be used is refused with what it is, what was expected and what to do, and nothing is lost."""
    before = state_of(job["model"])
    with pytest.raises(error, match=match):
        tune(job, **options)
    assert state_of(job["model"]) == before


def test_nothing_fits_says_which_device_lacked_how_much() -> None:
    """When not even one sample a device fits, the error has the smallest split, the device and its arithmetic."""
    with pytest.raises(NoFeasibleSplitError) as caught:
        tune(JOBS["mlp"](), min_headroom_bytes=(0, 24 * 1024**3), max_trials=30)
    for words in (
        r"lacked 27\d\.\d MiB on device 1",
        r"24\.00 GiB in all - 273\.8 MiB held outside - .* at the peak = 23\.73 GiB left, 24\.00 GiB demanded",
        "Use a smaller model or shorter samples",
    ):
        assert caught.match(words)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda text: text[: len(text) // 2], "cut short or edited"),
        (lambda text: text.replace('"schema": 1', '"schema": 99'), "schema is 99, newer than this splittune reads"),
        (
            lambda text: re.sub('"accumulation_steps": [0-9]+', '"accumulation_steps": 3', text),
            r"sum to \d+ \+ \d+ = \d+, but",
        ),
    ],
    ids=["truncated", "newer", "shards that do not sum"],
)
def test_a_config_file_that_was_spoilt_is_refused(
    spoil: Callable[[str], str], match: str, tmp_path: Path, tuned: TuneResult
) -> None:
    """A split.json cut short, of a newer schema or with shards that do not sum is refused by file and reason."""
    path = tmp_path / "split.json"
    tuned.config.save(path)
    path.write_text(spoil(path.read_text()))
    with pytest.raises((ConfigError, InvalidSplitError), match=match) as caught:
        SplitConfig.load(path)
    assert caught.match("split.json")
