"""Trials played from a script give what trials in full give, to the byte; where they could not, they are not played."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import VirtualHardware
from splittune.profiling.measurement import Measurement, Outcome
from splittune.runners.replay import Scripts
from splittune.runners.shapes import ShapeProfiler, ShapeRunner
from splittune.split import BatchSplit
from splittune.training import TrainingTask
from tests.parallel.models import MODELS, loss_of
from tests.runners.jobs import JOBS

# Each takes another way through wrapper and ledger; tests/parallel/models.py has more.
MODEL_NAMES = ("mlp", "conv and group norm", "checkpointed", "frozen parameters", "unused parameters", "fast weights")
JOB_NAMES = ("an optimizer's instance", "a step function", "bfloat16", "a small loader")


def cards(spec: str = "3xT400-4GB") -> VirtualHardware:
    hardware = resolve_hardware(spec)
    assert isinstance(hardware, VirtualHardware)
    return hardware


def profiler_of(task: TrainingTask, scripts: Scripts | None, spec: str = "3xT400-4GB") -> ShapeProfiler:
    runner = ShapeRunner(task, cards(spec), scripts)
    runner.open(["output"])
    return runner.profiler(min_headroom_bytes=(0, 0, 0), loss_placement="output")


def split_of(accumulation_steps: int, *shard_sizes: int) -> BatchSplit:
    return BatchSplit(
        global_batch_size=accumulation_steps * sum(shard_sizes),
        accumulation_steps=accumulation_steps,
        shard_sizes=shard_sizes,
    )


def model_job(name: str) -> TrainingTask:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    return TrainingTask(make(), [batch(18)], step_fn=lambda model, inputs: loss_of(model(inputs)))


EVERY_JOB: dict[str, Callable[[], TrainingTask]] = {
    **{name: JOBS[name] for name in JOB_NAMES},
    **{name: functools.partial(model_job, name) for name in MODEL_NAMES},
}
SPLITS = [split_of(1, 2, 3, 4), *[split_of(2, *shards) for shards in ((9, 2, 5), (3, 3, 3), (5, 4, 4))]]
SPLITS += [split_of(7, 6, 2, 8), split_of(3, 0, 4, 5)]


@pytest.mark.parametrize("name", EVERY_JOB)
def test_a_script_gives_what_a_trial_in_full_gives(name: str) -> None:
    """Memory to the byte; times but for an operation that counts as another kind when it is small."""
    scripts = Scripts()
    played, full = profiler_of(EVERY_JOB[name](), scripts), profiler_of(EVERY_JOB[name](), None)
    for split in SPLITS:
        found, expected = played.measure(split), full.measure(split)
        assert found.memory == expected.memory
        assert found.step_time_s == pytest.approx(expected.step_time_s, rel=1e-3)
    assert all(script is not None for script in scripts._made.values())
    assert len(scripts._made) == 3  # one for two accumulation steps, one without the first card, one for all others
    assert all(lines is not None for lines in scripts._lines.values())


@functools.cache
def pair_of_profilers() -> tuple[ShapeProfiler, ShapeProfiler]:
    return profiler_of(model_job("mlp"), Scripts()), profiler_of(model_job("mlp"), None)


@settings(max_examples=12, deadline=None)
@given(steps=st.integers(1, 5), shards=st.tuples(*[st.integers(0, 60)] * 3).filter(any))
def test_any_split_is_played_as_it_would_run(steps: int, shards: tuple[int, int, int]) -> None:
    """Cards without a shard, shards of one sample, and those that do not fit among them."""
    played, full = pair_of_profilers()
    split = split_of(steps, *shards)
    found, expected = played.measure(split), full.measure(split)
    assert (found.outcome, found.memory) == (expected.outcome, expected.memory)
    # of a single sample, some operations count as another kind
    assert found.step_time_s == pytest.approx(expected.step_time_s, rel=0.02)


def test_what_does_not_fit_is_told_as_in_full() -> None:
    """The same card, and the same words of what it lacks; but which replica asked for it is not on a tape."""
    job = TrainingTask(nn.Linear(2**10, 2**13), [(torch.ones(2, 2**10), torch.ones(2, 2**13))])
    played, full = profiler_of(job, Scripts()), profiler_of(job, None)
    split = split_of(3, 120_000, 2, 2)
    found = played.measure(split)
    assert found.outcome is Outcome.OUT_OF_MEMORY
    assert found.message.startswith("device 0: CUDA out of memory. Tried to allocate")
    whole = full.measure(split)
    assert whole.message.startswith(found.message)
    assert replace(whole, message=found.message) == found


class Contrastive(nn.Module):
    """Its loss compares every sample of the micro-batch with every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def contrastive_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    features = model(batch[0])
    return functional.cross_entropy(features @ features.T, torch.arange(len(features)))


def changing_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """From 1,000 samples on it does more than with fewer, which no tape shows."""
    outputs = model(batch[0])
    return (outputs.exp() if len(outputs) >= 1000 else outputs).square().mean()


def job_with(step: Callable[..., Tensor]) -> TrainingTask:
    return TrainingTask(Contrastive(), [(torch.randn(16, 6), torch.randint(3, (16,)))], step_fn=step)


def measured_twice(task: TrainingTask, split: BatchSplit) -> list[Measurement]:
    profiler = profiler_of(task, Scripts())
    return [profiler.measure(split), profiler.measure_whole_steps(split)]


def test_a_step_whose_tapes_are_no_lines_is_run_in_full(caplog: pytest.LogCaptureFixture) -> None:
    """All pairs of the micro-batch are a square of its size: that is said, and nothing is played."""
    split = split_of(1, 4, 4, 4)
    with caplog.at_level(logging.WARNING):
        first, _ = measured_twice(job_with(contrastive_step), split)
    assert "does not do the same at every batch size" in caplog.text
    assert first == profiler_of(job_with(contrastive_step), None).measure(split)


def picky_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    if len(batch[0]) > 100:
        raise ValueError("at most 100 samples")
    return model(batch[0]).square().mean()


def test_a_job_that_refuses_the_sizes_of_a_tape_is_run_in_full(caplog: pytest.LogCaptureFixture) -> None:
    """What it raises at a size of ours is no fault of the split; at one of the user's own it is raised."""
    with caplog.at_level(logging.WARNING):
        found, _ = measured_twice(job_with(picky_step), split_of(1, 4, 4, 4))
    assert found.outcome is Outcome.OK
    assert "raised ValueError: at most 100 samples" in caplog.text
    with pytest.raises(ValueError, match="at most 100 samples"):
        measured_twice(job_with(picky_step), split_of(1, 40, 40, 40))


def test_a_script_that_does_not_hold_is_noticed_by_the_trial_in_full(caplog: pytest.LogCaptureFixture) -> None:
    """What is confirmed at the end of a search is run in full, and drops a script that said something else."""
    split = split_of(1, 900, 900, 900)
    with caplog.at_level(logging.WARNING):
        played, confirmed = measured_twice(job_with(changing_step), split)
    full = profiler_of(job_with(changing_step), None).measure(split)
    assert played != full
    assert confirmed == full
    assert "each split is run in full" in caplog.text


def test_a_script_is_held_against_a_trial_in_full_at_every_larger_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a single micro-batch; splits whose micro-batches are no larger are taken from it without another look."""
    profiler = profiler_of(JOBS["AdamW assumed"](), Scripts())
    runs: list[BatchSplit] = []
    on_shapes = ShapeRunner._on_shapes

    def noted(self: ShapeRunner, split: BatchSplit, *others: object) -> Measurement:
        runs.append(split)
        return on_shapes(self, split, *others)  # type: ignore[arg-type]  # they are handed on as they came

    monkeypatch.setattr(ShapeRunner, "_on_shapes", noted)
    for split in (split_of(5, 4, 4, 4), split_of(1, 2, 4, 6), split_of(3, 0, 4, 4), split_of(3, 9, 4, 4)):
        assert profiler.measure(split) == profiler.measure_whole_steps(split)
    assert runs == [split_of(1, 4, 4, 4), split_of(1, 9, 4, 4)]
    profiler.measure(split_of(2, 9, 9, 9))
    profiler.measure_whole_steps(split_of(2, 9, 9, 9))
    assert runs[2:] == [split_of(2, 9, 9, 9)]  # of two steps there may be no script of one


def test_scripts_are_for_any_cards() -> None:
    """One made with some cards tells what others do: as many of them, and the same job."""
    scripts = Scripts()
    profiler_of(model_job("mlp"), scripts).measure(split_of(1, 4, 4, 4))
    (script,) = scripts._made.values()
    found = profiler_of(model_job("mlp"), scripts, "1xRTX3090,2xA100-80GB").measure(split_of(1, 3, 5, 5))
    assert list(scripts._made.values()) == [script]
    full = profiler_of(model_job("mlp"), None, "1xRTX3090,2xA100-80GB")
    assert found == full.measure(split_of(1, 3, 5, 5))


def test_the_garbage_collector_goes_on_afterwards() -> None:
    """It stands still while a trial is taped."""
    profiler_of(JOBS["AdamW assumed"](), Scripts()).measure(split_of(1, 4, 4, 4))
    assert gc.isenabled()
