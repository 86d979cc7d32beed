"""Real workloads on virtual GPUs: every split measured, beside the guided search and other tools, run as they are.

    python -m benchmarks.peers [--out DIR]

Regret is what the chosen split's samples/s lack to the best one's, 1 where nothing was found. Times
are modelled, so the table is the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import torch

from benchmarks.jobs.workloads import digits_cnn, mlp
from benchmarks.peers.finders import PEERS
from splittune.demo import DEMO_DEVICES, byte_gpt
from splittune.hardware import resolve_hardware
from splittune.options import HEADROOM_FRACTION
from splittune.profiling.measurement import Outcome
from splittune.profiling.profiler import Profiler
from splittune.search import find_best_split
from splittune.search.candidates.table import listed_table
from splittune.split import BatchSplit, SplitSpace
from splittune.training import TrainingTask, read_batches

MAX_TRIALS = 12


def workloads() -> Iterator[tuple[str, Callable[[], TrainingTask], str]]:
    """(name, what makes the job, devices)."""
    yield "byte GPT", lambda: byte_gpt(64), DEMO_DEVICES
    yield "digits CNN", lambda: _task(digits_cnn(batch_size=64)), "1xT400-4GB:occupied=3780MiB,2xT400-4GB"
    yield "MLP", lambda: _task(mlp(batch_size=64)), "1xT400-4GB:occupied=3800MiB,3xT400-4GB"


def _task(workload: Any) -> TrainingTask:
    return TrainingTask(workload.model, workload.loader, loss_fn=workload.loss_fn, optimizer=workload.optimizer)


def run_workload(name: str, make: Callable[[], TrainingTask], devices: str) -> list[dict[str, Any]]:
    """Every split of the workload, the guided search, and the tools themselves."""
    task, hardware = make(), resolve_hardware(devices)
    snapshot, samples = task.snapshot(), read_batches(task.loader)
    with hardware.metered():
        demands = [int(HEADROOM_FRACTION * (m.total_bytes - m.outside_bytes)) for m in hardware.memory()]
    profiler = Profiler(task, hardware, samples, snapshot, min_headroom_bytes=demands)
    space = SplitSpace(global_batch_size=samples.loader_batch_size, num_devices=len(hardware.devices))
    table = listed_table(space)
    every = {table.split(row): profiler.measure(table.split(row)) for row in range(len(table))}
    best = max((m.throughput or 0.0) for m in every.values() if m.outcome is Outcome.OK)
    rows = []

    def add(strategy: str, throughput: float | None, trials: int, ooms: int, micro_steps: int | None) -> None:
        regret = 1.0 if throughput is None else 1 - throughput / best
        rows.append(
            {
                "workload": name,
                "devices": devices,
                "strategy": strategy,
                "throughput_samples_per_s": throughput,
                "regret": regret,
                "num_trials": trials,
                "num_oom": ooms,
                "num_micro_steps": micro_steps,
                "is_modelled": True,
            }
        )

    add("every split", best, len(every), sum(m.outcome is Outcome.OUT_OF_MEMORY for m in every.values()), None)
    for sampler in ("guided", "tpe", "random"):
        measured = []

        def measure(split: BatchSplit, measured: list[Any] = measured) -> Any:
            measured.append(every.get(split) or profiler.measure(split))
            return measured[-1]

        result = find_best_split(space, measure, sampler=sampler, max_trials=MAX_TRIALS, min_headroom_bytes=demands)
        searched = [trial for trial in result.trials if trial.kind == "search"]
        ooms = sum(trial.measurement.outcome is Outcome.OUT_OF_MEMORY for trial in searched)
        add(sampler, result.best.throughput, len(searched), ooms, None)
    for peer in PEERS:
        found = peer(make(), hardware)
        add(found.peer, found.throughput, found.num_trials, found.num_ooms, found.num_micro_steps)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """The command: prints the table and writes it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    table = pd.DataFrame([row for job in workloads() for row in run_workload(*job)])
    chosen.out.mkdir(parents=True, exist_ok=True)
    versions = {"optuna": optuna.__version__, "torch": str(torch.__version__)}
    table.assign(**versions).to_csv(chosen.out / "search_workloads.csv", index=False, float_format="%.6g")
    print(table.drop(columns=["devices", "is_modelled"]).to_string(index=False))
