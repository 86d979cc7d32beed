"""Part 8 of `benchmarks.gpu`: a worker whose card is spoilt, and one that is killed while it holds memory."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.readings import sampled
from benchmarks.gpu.stage import Findings, Stage, mib, split_of
from splittune import autotune
from splittune.profiling.measurement import Measurement, Outcome
from splittune.runners.worker.runner import WorkerRunner
from splittune.units import GIB, MIB, format_bytes

GLOBAL_BATCH_SIZE = 5
FAULTY_SIZE = 3
HELD_BYTES = 2 * GIB
# A killed process' memory comes back when the driver has seen to it, and other programs are never quite still.
BACK_WITHIN_S, BACK_WITHIN_BYTES = 20.0, 128 * MIB

_JOB = '''
import os
import signal
import time

import torch
from torch import nn
from torch.nn import functional

from splittune import TrainingTask

NUM_TOKENS, WIDTH, LENGTH = 16, {width}, {length}


class Faulty(nn.Module):
    """An embedding and some layers; with {faulty_size} samples it meets a fault."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, WIDTH)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)], nn.Linear(WIDTH, NUM_TOKENS))

    def forward(self, tokens):
        if len(tokens) == {faulty_size}:
            tokens = fault(tokens)
        return self.layers(self.embed(tokens))


def fault(tokens):
    if {kind!r} == "killed":
        held = torch.zeros({held_bytes}, dtype=torch.uint8, device=tokens.device)
        held.sum().item()
        time.sleep(0.5)  # for whoever looks at the card
        os.kill(os.getpid(), signal.SIGKILL)
    if tokens.device.type == "cpu":  # which raises an IndexError, and goes on: a rehearsal says what a card would
        raise RuntimeError("CUDA error: device-side assert triggered")
    tokens = tokens.clone()
    tokens[0, 0] = NUM_TOKENS
    return tokens


def loss_fn(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def make():
    torch.manual_seed({seed})
    tokens = torch.randint(NUM_TOKENS, ({batch_size}, LENGTH))
    return TrainingTask(Faulty(), [(tokens, tokens)], loss_fn=loss_fn)
'''


def run(stage: Stage, findings: Findings) -> None:
    """A row for each fault."""
    for kind, act in (("device-side assert", _spoilt), ("killed", _killed)):
        if not stage.has_time(0 if stage.is_rehearsal else 15):
            findings.cut_short = f"{kind} and what follows"
            return
        began_s = time.monotonic()
        with _job_file(stage, kind) as job, _quiet() as said:
            row = act(stage, findings, job)
        findings.rows.append(
            {
                "fault": kind,
                **row,
                "took_s": time.monotonic() - began_s,
                "num_lines_on_stderr": said.getvalue().count("\n"),
            }
        )
    stage.table(
        findings.rows,
        ["fault", "outcomes", "used_before_mib", "used_when_killed_mib", "used_after_mib", "back_after_s", "took_s"],
    )


def _spoilt(stage: Stage, findings: Findings, job: str) -> dict[str, Any]:
    """A search in which one size writes past an embedding: that trial crashed, the others are measured."""
    # the grid: it tries every size, and a guided search what is worth it
    result = autotune(job, devices=stage.devices, isolation="process", sampler="grid", seed=stage.seed, progress=False)
    searched = [trial.measurement for trial in result.trials if trial.kind == "search"]
    crashed = [i for i, measurement in enumerate(searched) if measurement.outcome is Outcome.CRASHED]
    message = searched[crashed[0]].message if crashed else "no trial crashed"
    findings.check(
        "an index out of range on the card is a crashed trial, and says so",
        len(crashed) == 1 and "device-side assert" in message,
        message[:160],
    )
    later = [m.outcome for m in searched[crashed[0] + 1 :]] if crashed else []
    findings.check(
        "the search goes on in a fresh worker, and ends with a split that fits",
        Outcome.OK in later and result.best.outcome is Outcome.OK,
        f"{_outcomes(searched)}, then {result.config.split}",
    )
    still_works = float(torch.ones(8, device=stage.torch_device).sum()) == 8.0
    findings.check(
        "this process can still use the card", still_works, "a sum on it is right" if still_works else "it is not"
    )
    return {
        "outcomes": _outcomes(searched),
        "message": message,
        "emitted_steps": result.config.split.accumulation_steps,
    }


def _killed(stage: Stage, findings: Findings, job: str) -> dict[str, Any]:
    """A worker killed while it holds 2 GiB, and how much of the card is in use before, meanwhile and after."""
    stage.hardware.recover(thoroughly=True)
    before = stage.used_bytes()
    runner = WorkerRunner(job, stage.devices)
    try:
        runner.open(("output",))
        profiler = runner.profiler(min_headroom_bytes=(0,), loss_placement="output")
        good = profiler.measure(split_of(GLOBAL_BATCH_SIZE, GLOBAL_BATCH_SIZE))
        waiting = stage.used_bytes()
        with sampled(stage.torch_device) as samples:
            crashed = profiler.measure(split_of(GLOBAL_BATCH_SIZE, 2))
        after, back_after_s = _wait_for_memory(stage, before)
    finally:
        runner.close()
    findings.check(
        "a worker that is killed is a crashed trial, and says so",
        good.outcome is Outcome.OK and crashed.outcome is Outcome.CRASHED and "SIGKILL" in crashed.message,
        f"{_outcomes([good, crashed])}: {crashed.message[:120]}",
    )
    held = (samples.most_used_bytes or before) - before
    findings.check(
        "all that it held of the card is given back",
        None if stage.is_rehearsal else held >= HELD_BYTES and after - before <= BACK_WITHIN_BYTES,
        f"{format_bytes(held)} when it was killed; {back_after_s:.1f} s later "
        f"{format_bytes(after - before)} more than before",
    )
    return {
        "outcomes": _outcomes([good, crashed]),
        "message": crashed.message,
        "used_before_mib": mib(before),
        "used_waiting_mib": mib(waiting),
        "used_when_killed_mib": mib(samples.most_used_bytes),
        "used_after_mib": mib(after),
        "back_after_s": back_after_s,
    }


def _wait_for_memory(stage: Stage, before: int) -> tuple[int, float]:
    """What is in use once it is back to what it was, or the patience is over; and after how long."""
    began_s = time.monotonic()
    while (used := stage.used_bytes()) - before > BACK_WITHIN_BYTES and time.monotonic() - began_s < BACK_WITHIN_S:
        time.sleep(0.05)
    return used, time.monotonic() - began_s


@contextmanager
def _job_file(stage: Stage, kind: str) -> Iterator[str]:
    width, length = (32, 8) if stage.is_rehearsal else (2048, 2048)
    text = _JOB.format(
        width=width,
        length=length,
        kind=kind,
        faulty_size=FAULTY_SIZE,
        held_bytes=MIB if stage.is_rehearsal else HELD_BYTES,
        batch_size=GLOBAL_BATCH_SIZE,
        seed=stage.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "faulty_job.py"
        path.write_text(text, encoding="utf-8")
        yield f"{path}:make"


@contextmanager
def _quiet() -> Iterator[io.StringIO]:
    """A kernel that asserts says so once for each of its threads: that is counted, not shown."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        yield said


def _outcomes(measurements: list[Measurement]) -> str:
    return ", ".join(measurement.outcome.value for measurement in measurements)
