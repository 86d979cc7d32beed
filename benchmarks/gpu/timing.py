"""Part 7 of `benchmarks.gpu`: what the busy gauge counts beside the kernels' own times, and when cuDNN has searched."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.readings import Window, watched_phases
from benchmarks.gpu.stage import Findings, Measured, Stage, relative, split_of
from benchmarks.jobs.gpu_models import make
from splittune.profiling.measurement import Outcome

NUM_STEPS = 5
# Kernels do not follow one another without a gap, and the events stand around the gaps.
BUSY_LOW, BUSY_HIGH = -0.05, 0.25
# On an H100 (torch 2.11) a search took 39 and 68 times a step, and once the host was late for one: 3 times the median.
SLOWEST_OVER_MEDIAN = 10.0


def run(stage: Stage, findings: Findings) -> None:
    """Rows of both kinds, told apart by `figure`."""
    for name in ("GPT", "CNN"):
        row = _busy(stage, name)
        findings.rows.append(row)
        error = row["busy_error"]
        passed = None if error is None or stage.is_rehearsal else BUSY_LOW <= error <= BUSY_HIGH
        findings.check(
            f"{name}: the gauge's busy time beside the kernels'",
            passed,
            row["problem"] or f"{1e3 * row['busy_s']:.2f} ms by events, {1e3 * row['kernels_s']:.2f} ms of kernels",
        )
    for row in _first_steps(stage):
        findings.rows.append(row)
        settled = row["slowest_over_median"]
        findings.check(
            f"CNN at {row['accumulation_steps']} steps: cuDNN's search was over before anything was timed",
            None if settled is None or stage.is_rehearsal else settled <= SLOWEST_OVER_MEDIAN,
            "the trial did not run"
            if settled is None
            else f"first step {row['first_step_ms']:.1f} ms, timed micro-steps {row['median_micro_step_ms']:.1f} ms, "
            f"the slowest {settled:.2f} times that",
        )
    stage.table(
        [row for row in findings.rows if row["figure"] == "busy"],
        ["model", "step_s", "busy_s", "kernels_s", "busy_error"],
    )
    stage.table(
        [row for row in findings.rows if row["figure"] == "first steps"],
        ["accumulation_steps", "first_step_ms", "second_step_ms", "median_micro_step_ms", "slowest_over_median"],
    )


def _busy(stage: Stage, name: str) -> dict[str, Any]:
    """Busy time of a micro-step by the gauge, and the sum of its kernels by torch's profiler."""
    hardware, family = stage.hardware, make(name, stage.sizes, stage.seed)
    task = family.task(seed=stage.seed)
    with Measured(task, hardware) as job, hardware.metered():
        model = hardware.wrap(task.model, split_of(job.global_batch_size, 1))
        inputs, _ = job.samples.micro_batch(job.global_batch_size)
        inputs = inputs.to(stage.torch_device)  # no copy from the host is among the kernels

        def micro_step() -> None:
            model(inputs).float().mean().backward()
            model.zero_grad(set_to_none=True)

        busy, steps = [], []
        for _ in range(NUM_STEPS):
            before, began_s = hardware.busy_s(), hardware.clock()
            micro_step()
            steps.append(hardware.clock() - began_s)
            after = hardware.busy_s()
            if before is not None and after is not None:
                busy.append(after[0] - before[0])
        kernels_s, problem = _kernels_s(stage, micro_step)
    busy_s = median(busy[1:]) if len(busy) > 1 else None
    return {
        "figure": "busy",
        "model": name,
        "step_s": median(steps),
        "busy_s": busy_s,
        "kernels_s": kernels_s,
        "busy_error": relative(busy_s, kernels_s),
        "problem": problem if busy_s is not None else "the gauge could not follow the steps",
    }


def _kernels_s(stage: Stage, micro_step: Any) -> tuple[float | None, str]:
    """Seconds of all kernels of a micro-step, added up; None, and why, where they cannot be had."""
    if stage.is_rehearsal:
        micro_step()
        return None, "virtual hardware runs no kernels"
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on how it might be used otherwise
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                for _ in range(NUM_STEPS):
                    micro_step()
                stage.hardware.clock()
            averages = profiled.key_averages()
        micros = sum(event.self_device_time_total for event in averages if event.device_type == DeviceType.CUDA)
    except (RuntimeError, AttributeError) as error:
        return None, f"torch's profiler cannot be used here: {error}"
    if not micros:
        return None, "torch's profiler saw no kernel: it may not be allowed to here"
    return micros / 1e6 / NUM_STEPS, ""


def _first_steps(stage: Stage) -> Iterator[dict[str, Any]]:
    """Times of the first steps and of those that counted, with cuDNN told to search for its kernels."""
    family = make("CNN", stage.sizes, stage.seed)
    with cudnn_searching(), Measured(family.task(optimizer="SGD", seed=stage.seed), stage.hardware) as job:
        for accumulation_steps in (
            4,
            2,
        ):  # two sizes: the second search comes when the first trial's warm-up is long over
            with watched_phases() as windows:
                measurement = job.measure(accumulation_steps)
            yield {"figure": "first steps", "model": "CNN", "accumulation_steps": accumulation_steps} | _times(
                windows, measurement.outcome
            )


def _times(windows: Sequence[Window], outcome: Outcome) -> dict[str, Any]:
    warm_up = [window.duration_s for window in windows if window.phase in ("warm_up", "single_step")]
    timed = [window.duration_s for window in windows if window.phase == "micro_step"]
    if outcome is not Outcome.OK or not timed:
        return {"slowest_over_median": None}
    return {
        "first_step_ms": 1e3 * warm_up[0],
        "second_step_ms": 1e3 * warm_up[1] if len(warm_up) > 1 else None,
        "num_warm_up_steps": len(warm_up),
        "median_micro_step_ms": 1e3 * median(timed),
        "slowest_over_median": max(timed) / median(timed),
    }


@contextmanager
def cudnn_searching() -> Iterator[None]:
    """``torch.backends.cudnn.benchmark`` on inside."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
