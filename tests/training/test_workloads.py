"""Jobs of several models and of mixed precision: tuned, trained under their config, and as found whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from splittune import TuneResult, autotune
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual.allocator import CachingAllocator
from splittune.profiling.measurement import Outcome
from splittune.profiling.profiler import Profiler
from splittune.split import BatchSplit
from splittune.training import TrainingTask, read_batches
from tests.training.workloads import BATCH_SIZE, WORKLOADS, Classifier, Trap, Workload, make

CARDS = "2xT4"
SPLIT = BatchSplit(global_batch_size=BATCH_SIZE, accumulation_steps=2, shard_sizes=(1, 3))
OF_SEVERAL_MODELS = ("gan", "segmenter", "teacher")


def tune(workload: Workload, **options: Any) -> TuneResult:
    return autotune(
        workload.model, workload.loader, devices=CARDS, max_trials=2, progress=False, **workload.options, **options
    )


def profile(workload: Workload) -> Any:
    """One trial in two micro-batches, and the job put back."""
    task = TrainingTask(workload.model, workload.loader, **workload.options)
    snapshot, hardware = task.snapshot(), resolve_hardware(CARDS)
    try:
        return Profiler(task, hardware, read_batches(workload.loader), snapshot).measure(SPLIT)
    finally:
        snapshot.restore()
        snapshot.restore_gradients()


@pytest.mark.parametrize("name", WORKLOADS)
def test_it_is_tuned_and_as_it_was_found(name: str) -> None:
    """Every model, optimizer, schedule, scaler and average is bit for bit what it was, the same objects."""
    workload = make(name)
    before = workload.fingerprint()
    assert tune(workload).best.outcome is Outcome.OK
    assert workload.fingerprint() == before


@pytest.mark.parametrize("error", [ValueError("the user's own"), KeyboardInterrupt()], ids=["ValueError", "Ctrl-C"])
@pytest.mark.parametrize("call", [1, 4])
@pytest.mark.parametrize("name", WORKLOADS)
def test_it_is_as_it_was_found_after_a_fault(name: str, call: int, error: BaseException) -> None:
    """A step that fails once it has changed everything: the very exception comes out, and everything is put back."""
    workload = make(name)
    before = workload.fingerprint()
    workload.trap.set(call, error)
    with pytest.raises(type(error)) as caught:
        profile(workload)
    assert caught.value is error
    assert workload.fingerprint() == before


@pytest.mark.parametrize("name", WORKLOADS)
def test_it_is_as_it_was_found_wherever_memory_runs_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation that fails anywhere in the trial, in the other models too, is an outcome that
    leaves nothing behind."""
    workload = make(name)
    before = workload.fingerprint()
    allocate, number, failing = CachingAllocator.allocate, 0, 0

    def allocate_or_fail(self: CachingAllocator, num_bytes: int) -> Any:
        nonlocal number
        number += 1
        return None if number == failing else allocate(self, num_bytes)

    monkeypatch.setattr(CachingAllocator, "allocate", allocate_or_fail)
    assert profile(workload).outcome is Outcome.OK
    total = number
    assert total > 60
    for failing in range(1, total, total // 6):  # noqa: B007  read above
        number = 0
        assert profile(workload).outcome is Outcome.OUT_OF_MEMORY
        assert workload.fingerprint() == before


@pytest.mark.parametrize("name", OF_SEVERAL_MODELS)
def test_it_trains_under_its_config_as_on_one_device(name: str) -> None:
    """Three steps with the wrapped model give every model the parameters that one device gives it."""
    trained = []
    for is_wrapped in (False, True):
        workload = make(name)
        config = tune(workload).config
        assert config.split.accumulation_steps == 1  # so the other models step as often as without
        torch.manual_seed(1)
        model = config.wrap(workload.model) if is_wrapped else workload.model
        optimizer = optim.SGD(workload.model.parameters(), lr=0.1)
        for _ in range(3):
            for micro in config.micro_batches(workload.loader[0]):
                (workload.loss_of(model, micro.batch) * micro.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([value for net in (workload.model, *workload.modules) for value in net.state_dict().values()])
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-5, atol=1e-5)


# what each costs


def test_other_models_count_on_gpu_0(caplog: pytest.LogCaptureFixture) -> None:
    """A discriminator's parameters and its optimizer's state are held on GPU 0 at rest, and it is
    said that they are."""
    peaks = []
    for width in (8, 1024):
        model, critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
        optimizer = optim.Adam(critic.parameters())

        def step(wrapped: nn.Module, batch: Any, critic: Any = critic, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            critic(batch).mean().backward()  # all of it from the host: it runs on the card even so
            optimizer.step()
            return critic(wrapped(batch)).mean()

        with caplog.at_level("INFO", logger="splittune"):
            measured = profile(
                Workload(model=model, loader=[torch.randn(BATCH_SIZE, 4)], options={"step_fn": step}, trap=Trap())
            )
        peaks.append([memory.resting_bytes for memory in measured.memory])
    num_bytes = 4 * sum(parameter.numel() for parameter in critic.parameters())
    # parameters, gradients and two moments, less the 16 blocks of 512 bytes that the small one's take
    assert peaks[1][0] - peaks[0][0] >= 4 * num_bytes - 16 * 512
    assert peaks[1][1] == peaks[0][1]
    assert "what the step uses beside the model (Sequential) is taken to live on virtual GPU 0" in caplog.text


def measured(**options: Any) -> Any:
    checkpointed = options.pop("checkpointed", False)
    torch.manual_seed(0)
    workload = Workload(
        model=Classifier(checkpointed=checkpointed, width=64),
        loader=[(torch.randn(512, 64), torch.randint(64, (512,)))],
        options={"optimizer": lambda parameters: optim.SGD(parameters, lr=0.1), **options},
        trap=Trap(),
    )
    task = TrainingTask(workload.model, workload.loader, **workload.options)
    profiler = Profiler(task, resolve_hardware(CARDS), read_batches(workload.loader), task.snapshot())
    return profiler.measure(BatchSplit.even(global_batch_size=512, accumulation_steps=1, num_devices=2))


def test_each_precision_is_costed_by_its_trial() -> None:
    """Half precision and checkpointing take less memory for activations, checkpointing more time, a
    scaler a longer update."""
    plain, half = measured(), measured(autocast_dtype=torch.bfloat16)
    again = measured(checkpointed=True)
    scaled = measured(autocast_dtype=torch.float16, grad_scaler=torch.amp.GradScaler("cpu"))
    unscaled = measured(autocast_dtype=torch.float16)
    peak = {
        name: m.memory[1].peak_allocated_bytes for name, m in {"plain": plain, "half": half, "again": again}.items()
    }
    assert peak["half"] < 0.8 * peak["plain"]
    assert peak["again"] < 0.8 * peak["plain"]
    assert again.micro_step_time_s > plain.micro_step_time_s
    assert scaled.update_time_s > unscaled.update_time_s
    assert scaled.memory[1].peak_allocated_bytes == half.memory[1].peak_allocated_bytes


def test_a_skipped_step_is_told_and_not_timed() -> None:
    """The trial goes on until a step was made; its notes say how many were skipped, and the times
    are of steps alone."""
    skipping, quiet = make("float16"), make("float16 in mid-training")
    with_skips, without = profile(skipping), profile(quiet)
    assert with_skips.outcome is Outcome.OK
    assert any("skipped by the gradient scaler" in note for note in with_skips.notes)
    assert without.notes == ()
    assert with_skips.update_times_s == pytest.approx(without.update_times_s)
    assert len(with_skips.micro_step_times_s) == len(without.micro_step_times_s) == 2
