"""How close each way of searching comes to the best split, in how many trials, with how many OOMs.

    python -m benchmarks.regret [--problems 500] [--others 100] [--first-seed 10000] [--no-workloads] [--out DIR]

Two parts. Drawn problems (`benchmarks.problems.draw`): a known truth with noise, so that the
exhaustive optimum is known. All searches see the same problems: Optuna's samplers through
`find_best_split`, and the ways of other tools imitated where there is no model to run. Then real
workloads on virtual GPUs: every split measured, beside the guided search and the tools themselves.
Regret is what the chosen split's true samples/s lack to the optimum's, 1 where nothing was found.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import torch

from benchmarks.jobs.workloads import digits_cnn, mlp
from benchmarks.problems.draw import draw
from benchmarks.problems.problem import Problem
from benchmarks.regret.peers import PEERS
from splittune import SplittuneError
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
FIRST_SEED = 230_000  # from here on no problem took part in the making of the search
SAMPLERS = ("guided", "tpe", "gp", "random", "grid")
# The same problems, but with more noise, and on cards whose busy times are not known.
HARDER: dict[str, dict[str, Any]] = {
    "guided, noise to 5 %": {"max_noise": 0.05},
    "guided, no busy times": {"tells_busy": False},
}


def problems(count: int, first_seed: int) -> Iterator[int]:
    """Seeds of problems in which something fits."""
    seed = first_seed
    while count:
        if draw(seed).best_throughput is not None:
            yield seed
            count -= 1
        seed += 1


def by_sampler(problem: Problem, sampler: str) -> BatchSplit | None:
    """The split that a search with this sampler emits."""
    try:
        result = find_best_split(
            problem.space(),
            problem.measure,
            confirm=problem.confirm,
            sampler=sampler,
            max_trials=MAX_TRIALS,
            min_headroom_bytes=problem.min_headroom_bytes,
            seed=problem.seed,
        )
    except SplittuneError:
        return None
    return result.best.split


def doubling_then_halving(problem: Problem) -> BatchSplit | None:
    """Lightning's power mode at the even split: doubled until one runs out of memory, then half of that."""
    size, fitted = min(2, problem.B), None
    while size <= problem.B:
        if _runs(problem, size) is None:
            break
        fitted = size
        size *= 2
    return None if fitted is None else _even(problem, fitted)


def backing_off(problem: Problem) -> BatchSplit | None:
    """Accelerate's finder at the even split: from the whole batch down, nine tenths after every OOM."""
    size = problem.B
    while size > 0:
        if _runs(problem, size) is not None:
            return _even(problem, size)
        size = int(size * 0.9)
    return None


def untuned(problem: Problem) -> BatchSplit | None:
    """The whole batch at once, evenly; halved on every OOM, as people do by hand."""
    size = problem.B
    while size > 0:
        if _runs(problem, size) is not None:
            return _even(problem, size)
        size //= 2
    return None


STRATEGIES: dict[str, Callable[[Problem], BatchSplit | None]] = {
    **{name: lambda problem, name=name: by_sampler(problem, name) for name in SAMPLERS},  # type: ignore[misc]
    "doubling (as Lightning)": doubling_then_halving,
    "x 0.9 (as Accelerate)": backing_off,
    "even, halved by hand": untuned,
}


def _even(problem: Problem, size: int) -> BatchSplit:
    steps = -(-problem.B // size)
    return BatchSplit.even(global_batch_size=problem.B, accumulation_steps=steps, num_devices=problem.num_devices)


def _runs(problem: Problem, size: int) -> BatchSplit | None:
    """These tools see their own OOMs only, and demand no headroom."""
    split = _even(problem, size)
    return split if problem.measure(split).outcome is Outcome.OK else None


def run_problem(seed: int, strategy: str, **how: Any) -> dict[str, Any]:
    """One strategy on one problem, drawn as `how` has it, as a row of the table."""
    problem = draw(seed, **how)
    best = problem.best_throughput
    assert best is not None
    started = time.perf_counter()
    split = STRATEGIES[strategy](problem)
    elapsed_s = time.perf_counter() - started
    searched = len(problem.measured)
    runs = [problem.runs(measured) for measured in problem.measured]
    num_probe_oom = runs.index(True) if True in runs else len(runs)
    return {
        "strategy": strategy,
        "seed": seed,
        "kind": problem.kind,
        "num_devices": problem.num_devices,
        "global_batch_size": problem.B,
        "shares": problem.shares,
        "noise": problem.noise,
        "num_trials": searched,
        "num_duplicates": searched - len(set(problem.measured)),
        "num_micro_steps": problem.num_micro_steps,
        "num_oom": problem.num_oom,
        "num_probe_oom": num_probe_oom,
        "regret": 1.0 if split is None else max(0.0, 1 - problem.throughput(split) / best),
        "own_ms_per_trial": 1e3 * elapsed_s / max(1, searched),
    }


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a strategy: regret, trials, micro-steps and OOMs; the guided search's promises in its own columns."""
    # where even the smallest splits do not fit, OOMs before anything ran teach where to go; they are counted apart
    later = frame.num_oom - frame.num_probe_oom
    is_affine = ~frame.kind.str.contains("memory")
    rows = []
    for strategy, own in frame.groupby("strategy", sort=False):
        rest, affine = later[own.index], is_affine[own.index]
        rows.append(
            {
                "strategy": strategy,
                "problems": len(own),
                "within 1 %": (own.regret <= 0.01).mean(),
                "within 5 %": (own.regret <= 0.05).mean(),
                "median regret": own.regret.median(),
                "p95 regret": own.regret.quantile(0.95),
                "worst regret": own.regret.max(),
                "trials (median)": own.num_trials.median(),
                "trials (most)": own.num_trials.max(),
                "micro-steps": own.num_micro_steps.median(),
                "duplicates": own.num_duplicates.sum(),
                "OOMs a problem": own.num_oom.mean(),
                "of these before anything ran": own.num_probe_oom.mean(),
                "later, memory affine": rest[affine].mean(),
                "later, memory not affine": rest[~affine].mean(),
                "own ms a trial (median)": own.own_ms_per_trial.median(),
            }
        )
    return pd.DataFrame(rows).set_index("strategy")


# --- real workloads on virtual GPUs ----------------------------------------------------------------------------------


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


def plot(frame: pd.DataFrame, path: Path) -> None:
    """For each strategy the share of problems with at most a given regret."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.2))
    for strategy, own in frame.groupby("strategy", sort=False):
        regrets = np.append(np.sort(np.maximum(own.regret.to_numpy(), 1e-4)), 1.0)
        axes.step(
            regrets,
            np.minimum(np.arange(1, len(regrets) + 1) / len(own), 1),
            where="post",
            label=strategy,
            linewidth=2.5 if strategy == "guided" else 1.2,
        )
    axes.set(xscale="log", xlim=(1e-4, 1), ylim=(0, 1.02), xlabel="regret: samples/s lost to the best split")
    axes.set_ylabel("share of problems")
    axes.axvline(0.01, color="0.7", linewidth=0.8)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axes.set_title(f"Drawn problems, at most {MAX_TRIALS} trials", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Run both parts, print the tables, write CSVs and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=500, help="for the guided search and the ways of other tools")
    parser.add_argument(
        "--others", type=int, default=100, help="for the samplers beside it, which are slow, and for what is harder"
    )
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--no-workloads", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seeds = list(problems(arguments.problems, arguments.first_seed))
    rows = []
    for strategy in STRATEGIES:
        own = seeds[: arguments.others] if strategy in SAMPLERS[1:] else seeds
        rows += [run_problem(seed, strategy) for seed in own]
        print(f"{strategy}: {len(own)} problems done", flush=True)
    for name, how in HARDER.items():
        harder = [run_problem(seed, "guided", **how) for seed in seeds[: arguments.others]]
        rows += [row | {"strategy": name} for row in harder]
    frame = pd.DataFrame(rows)
    versions = {"optuna": optuna.__version__, "torch": str(torch.__version__), "first_seed": arguments.first_seed}
    arguments.out.mkdir(parents=True, exist_ok=True)
    frame.drop(columns="own_ms_per_trial").to_csv(
        arguments.out / "search_regret_problems.csv", index=False, float_format="%.5g"
    )
    summary = summarise(frame)
    summary.drop(columns="own ms a trial (median)").assign(**versions).to_csv(
        arguments.out / "search_regret.csv", float_format="%.4g"
    )
    plot(frame, arguments.out / "search_regret.png")
    with pd.option_context("display.width", 250, "display.max_columns", 20, "display.float_format", "{:.4g}".format):
        print(summary.T.to_string())
    if not arguments.no_workloads:
        table = pd.DataFrame([row for job in workloads() for row in run_workload(*job)])
        table.assign(**versions).to_csv(arguments.out / "search_regret_workloads.csv", index=False, float_format="%.6g")
        print(table.drop(columns=["devices", "is_modelled"]).to_string(index=False))
