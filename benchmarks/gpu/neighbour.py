"""Part 3 of `benchmarks.gpu`: another real process takes memory in mid-search."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.gpu.readings import sampled
from benchmarks.gpu.stage import Findings, Measured, QuietCallback, Stage, demand_of, mib, room_of, tuned
from benchmarks.jobs.gpu_models import tuned_job
from splittune.hardware import DeviceMemory, Hardware
from splittune.hardware.virtual import VirtualHardware
from splittune.profiling.measurement import Outcome
from splittune.split import BatchSplit
from splittune.training import TrainingTask
from splittune.units import GIB, MIB, format_bytes

# What the job is left with at first, in whole batches of it, and how much of that is taken in mid-search.
ROOM_BATCHES, ROOM_BATCHES_REHEARSED, TAKEN_PART = 1.2, 2.0, 0.4
# The rehearsal's card is so much slower than the one it is named for.
SLOWER = 1000
# From the third trial on our own context has settled, and the model has something to lose.
TAKEN_IN_TRIAL = 3
# The driver rounds up what it gives, and keeps some for itself.
DRIVER_BYTES = 256 * MIB
ANSWERED_WITHIN_S = 60.0

_PROGRAM = """
import sys
import torch
device = torch.device(sys.argv[1])
kept = [torch.zeros(1, device=device)]
print("ready", flush=True)
for line in sys.stdin:
    try:
        kept.append(torch.zeros(int(line), dtype=torch.uint8, device=device))
        kept[-1][-1:].tolist()  # waits until it is there
        print("taken", flush=True)
    except RuntimeError as error:
        print("refused", str(error).splitlines()[0], flush=True)
"""


class Neighbour(Protocol):
    """Another program on the same card."""

    def take(self, num_bytes: int) -> None:
        """Hold so much more; it is held once this returns."""
        ...


class NeighbourProcess:
    """A process of its own that takes memory of the card when it is told to, and ends with its input."""

    def __init__(self, device: torch.device) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(device)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self._expect("ready")
        except RuntimeError:
            self.leave()
            raise

    def take(self, num_bytes: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_bytes}\n")
        self._process.stdin.flush()
        self._expect("taken")

    def leave(self) -> None:
        """End it, and so give back what it holds."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(ANSWERED_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer.startswith(word):
            raise RuntimeError(f"the neighbour was expected to say {word!r} and said {answer!r}")


class SlowVirtualHardware(VirtualHardware):
    """A virtual GPU that a search takes for a real one, to rehearse what is left out on modelled devices.

    It is as slow as real ones are, so that seconds of warm-up pass in a few steps, and its
    neighbour can be told to grow.
    """

    is_modelled = False

    def memory(self) -> tuple[DeviceMemory, ...]:
        with self.metered():
            return super().memory()

    def allocated_bytes(self) -> tuple[int, ...]:
        with self.metered():
            return super().allocated_bytes()

    def recover(self, *, thoroughly: bool = False) -> None:
        with self.metered():
            super().recover(thoroughly=thoroughly)

    def take(self, num_bytes: int) -> None:
        self.outside_bytes = (self.outside_bytes[0] + num_bytes,)


class _Watcher(QuietCallback):
    """Counts the trials, so that the neighbour takes its memory within one of them."""

    def __init__(self) -> None:
        self.num_measured = 0
        self.has_taken = False
        self.taken_in: BatchSplit | None = None
        self.split: BatchSplit | None = None

    def on_measure(self, split: BatchSplit, *, in_whole_steps: bool) -> None:
        self.num_measured += 1
        self.split = split


def run(stage: Stage, findings: Findings) -> None:
    """One search, in whose third trial another process takes memory."""
    task = tuned_job(stage.sizes, stage.seed)()
    with Measured(task, stage.hardware) as job:
        whole = job.measure(1)
    if whole.outcome is not Outcome.OK:
        findings.check("the whole batch runs on the card when it is alone", False, whole.message)
        return
    room = int((ROOM_BATCHES_REHEARSED if stage.is_rehearsal else ROOM_BATCHES) * whole.memory[0].peak_reserved_bytes)
    taken = int(TAKEN_PART * room)
    with _neighbour(stage, room) as (neighbour, hardware):
        findings.rows.append(_search(stage, task, hardware, neighbour, taken))
    _judge(findings, findings.rows[-1])
    stage.table(
        findings.rows,
        [
            "room_before_mib",
            "taken_mib",
            "room_after_mib",
            "trial",
            "is_repeated",
            "emitted_steps",
            "fits",
            "headroom_mib",
            "demand_mib",
            "least_free_mib",
            "num_ooms",
            "num_trials",
        ],
    )
    for note in findings.rows[-1]["notes"].splitlines():
        stage.say(f"told: {note}")


@contextmanager
def _neighbour(stage: Stage, room_bytes: int) -> Iterator[tuple[Neighbour, Hardware]]:
    """A neighbour that leaves so much room, and the hardware beside it."""
    if isinstance(stage.hardware, VirtualHardware):
        gpu = stage.hardware.gpus[0]
        slow = replace(
            gpu,
            fp32_flops_per_s=gpu.fp32_flops_per_s / SLOWER,
            half_flops_per_s=gpu.half_flops_per_s / SLOWER,
            memory_bandwidth_bytes_per_s=gpu.memory_bandwidth_bytes_per_s / SLOWER,
        )
        occupied = gpu.total_bytes - stage.hardware.outside_bytes[0] - room_bytes
        virtual = SlowVirtualHardware([slow], occupied_bytes=[occupied])
        yield virtual, virtual
        return
    process = NeighbourProcess(stage.torch_device)
    try:
        stage.hardware.recover(thoroughly=True)
        free_bytes, _ = torch.cuda.mem_get_info(stage.torch_device)
        if free_bytes > room_bytes:
            process.take(free_bytes - room_bytes)
        yield process, stage.hardware
    finally:
        process.leave()


def _search(
    stage: Stage, task: TrainingTask, hardware: Hardware, neighbour: Neighbour, taken_bytes: int
) -> dict[str, Any]:
    watcher = _Watcher()
    loss_fn = task.loss_fn
    assert loss_fn is not None

    def loss_that_takes(output: Tensor, target: Tensor) -> Tensor:
        if watcher.num_measured == TAKEN_IN_TRIAL and not watcher.has_taken:
            watcher.has_taken, watcher.taken_in = True, watcher.split
            # our own cache may hold what it asks for: another program gets only what the card has free
            neighbour.take(max(0, min(taken_bytes, _free(stage, hardware) - DRIVER_BYTES)))
        return loss_fn(output, target)

    room_before, demand = room_of(hardware), demand_of(hardware)
    watched = replace(task, loss_fn=loss_that_takes)
    result = tuned(watched, hardware, callback=watcher, min_headroom_bytes=demand, seed=stage.seed)
    room_after = room_of(hardware)
    disturbed = next((t for t in result.trials if t.measurement.split == watcher.taken_in), None)
    notes = disturbed.measurement.notes if disturbed is not None else ()
    emitted = result.config.split
    with Measured(task, hardware, min_headroom_bytes=demand) as job, sampled(stage.torch_device) as samples:
        again = job.profiler.measure_whole_steps(emitted)
    return {
        "room_before_mib": mib(room_before),
        "taken_mib": mib(room_before - room_after),
        "room_after_mib": mib(room_after),
        "demand_mib": mib(demand),
        "trial": None if disturbed is None else disturbed.number,
        "trial_outcome": None if disturbed is None else disturbed.measurement.outcome.value,
        "is_repeated": any(note.startswith("Measured again") for note in notes),
        "notes": "\n".join(notes),
        "num_trials": len(result.trials),
        "num_ooms": sum(trial.measurement.outcome is Outcome.OUT_OF_MEMORY for trial in result.trials),
        "emitted_steps": emitted.accumulation_steps,
        "emitted_micro_batch_size": emitted.micro_batch_size,
        "fits": again.outcome is Outcome.OK,
        "headroom_mib": mib(again.memory[0].headroom_bytes) if again.memory else None,
        "least_free_mib": mib(samples.least_free_bytes),
        "message": again.message,
    }


def _free(stage: Stage, hardware: Hardware) -> int:
    if isinstance(hardware, VirtualHardware):
        return GIB
    return int(torch.cuda.mem_get_info(stage.torch_device)[0])


def _judge(findings: Findings, row: dict[str, Any]) -> None:
    taken = (row["taken_mib"] or 0.0) * MIB
    findings.check("the neighbour took memory in mid-search", taken >= DRIVER_BYTES / 2, format_bytes(taken))
    told = "took" in row["notes"] and row["is_repeated"]
    findings.check("the search noticed, measured that trial again, and tells it", told, row["notes"] or "no note")
    findings.check(
        "what is emitted fits beside the neighbour, with its headroom",
        row["fits"],
        row["message"] or f"{row['headroom_mib']:.1f} MiB left of {row['demand_mib']:.1f} demanded",
    )
    least = row["least_free_mib"]
    findings.check(
        "the card itself had that much free at all times",
        None if least is None else least >= row["demand_mib"] - DRIVER_BYTES / MIB,
        "not sampled" if least is None else f"{least:.1f} MiB at the least",
    )
