"""How close the search comes on problems written apart from it, with what other tools do beside it.

    python -m benchmarks.search [--problems 500] [--peers 100] [--first-seed 1110000] [--only physics] [--out DIR]

Every generator gives problems whose best split is known exactly (`problem`). The search sees each
twice: with all readings, and with none of the optional ones, of these the first `--blind`; Optuna's
samplers and imitations of other tools see the first `--peers`. Regret is what the chosen split's true
samples/s lack to the best one's, 1 where nothing was found. OOMs count from the first trial that ran:
before one did, they are how a search learns where to go. Tables are printed, and written to
`search_judged.csv` with a picture, the problems to `search_judged_problems.csv.gz`.

"lines" are the problems that the search grew up with, in the forms of its own models; the others
were written apart from it.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd

from benchmarks.problems.draw import draw as lines
from benchmarks.search import layered, physics, recorded
from benchmarks.search.problem import Problem, without_optional_readings
from splittune import SplittuneError
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search import find_best_split
from splittune.split import BatchSplit

MAX_TRIALS = 32
# Those of the table, the last but four. From 1,230,000 on no problem was seen while the search was made.
FIRST_SEED = 1_110_000
GENERATORS: dict[str, Callable[[int], Problem]] = {
    "physics": physics.draw,
    "layered": layered.draw,
    "recorded": recorded.draw,
    "lines": lines,
}
RESULTS = Path(__file__).parents[1] / "results"


def with_all_readings(problem: Problem) -> BatchSplit | None:
    """The split that the search emits."""
    return _searched(problem, lambda measurement: measurement)


def without_readings(problem: Problem) -> BatchSplit | None:
    """The same where `measure` fills no optional field."""
    return _searched(problem, without_optional_readings)


def by_sampler(sampler: str) -> Callable[[Problem], BatchSplit | None]:
    """As many trials, chosen by one of Optuna's samplers."""
    return lambda problem: _searched(problem, lambda measurement: measurement, sampler=sampler)


def doubled_then_halved(problem: Problem) -> BatchSplit | None:
    """Lightning's power mode at the even split: doubled until one runs out of memory, then half of that."""
    space = problem.space()
    size, fitted = max(2, space.num_devices * space.min_shard_size), None
    while size <= space.global_batch_size and (ran := _even_that_runs(problem, size)) is not None:
        fitted, size = ran, 2 * size
    return fitted


def backing_off(problem: Problem) -> BatchSplit | None:
    """Accelerate's finder at the even split: from the whole batch down, nine tenths after every OOM."""
    return _first_that_runs(problem, lambda size: int(size * 0.9))


def halved_by_hand(problem: Problem) -> BatchSplit | None:
    """The whole batch evenly, halved on every OOM."""
    return _first_that_runs(problem, lambda size: size // 2)


BLIND = "guided, no optional reading"
SEARCHES: dict[str, Callable[[Problem], BatchSplit | None]] = {"guided": with_all_readings, BLIND: without_readings}
PEERS: dict[str, Callable[[Problem], BatchSplit | None]] = {
    **{sampler: by_sampler(sampler) for sampler in ("tpe", "gp", "random")},
    "doubling (as Lightning)": doubled_then_halved,
    "x 0.9 (as Accelerate)": backing_off,
    "even, halved by hand": halved_by_hand,
}


def _searched(
    problem: Problem, told: Callable[[Measurement], Measurement], sampler: str | None = None
) -> BatchSplit | None:
    try:
        found = find_best_split(
            problem.space(),
            lambda split: told(problem.measure(split)),
            confirm=lambda split: told(problem.confirm(split)),
            max_trials=MAX_TRIALS,
            min_headroom_bytes=problem.min_headroom_bytes,
            sampler=sampler,
            seed=problem.seed,
        )
    except SplittuneError:
        return None
    return found.best.split


def _even_that_runs(problem: Problem, size: int) -> BatchSplit | None:
    """The even split at micro-batches of `size`, if it runs: other tools demand no headroom."""
    space = problem.space()
    steps = -(-space.global_batch_size // size)
    split = BatchSplit.even(
        global_batch_size=space.global_batch_size, accumulation_steps=steps, num_devices=space.num_devices
    )
    if min(split.shard_sizes) < space.min_shard_size:  # not legal here
        return None
    return split if problem.measure(split).outcome in (Outcome.OK, Outcome.NO_HEADROOM) else None


def _first_that_runs(problem: Problem, smaller: Callable[[int], int]) -> BatchSplit | None:
    size = problem.space().global_batch_size
    while size > 0:
        split = _even_that_runs(problem, size)
        if split is not None:
            return split
        size = smaller(size)
    return None


def judged(generator: str, seed: int, name: str, search: Callable[[Problem], BatchSplit | None]) -> dict[str, Any]:
    """One search on one problem, in which something fits, as a row of the table."""
    problem = GENERATORS[generator](seed)
    best = problem.best_throughput
    assert best is not None
    began = time.perf_counter()
    try:
        split = search(problem)
    except Exception:  # noqa: BLE001  told, and judged as one that found nothing: thousands of others are not lost
        traceback.print_exc()
        split = None
    elapsed_s = time.perf_counter() - began
    runs = [problem.runs(tried) for tried in problem.measured]
    first_that_ran = runs.index(True) if True in runs else len(runs)
    space = problem.space()
    even_splits = set(space.even_splits())
    evens = {tried: problem.throughput(tried) for tried in problem.measured if tried in even_splits}
    found = 0.0 if split is None else problem.throughput(split)
    best_even = max((speed for tried, speed in evens.items() if problem.fits(tried)), default=0.0)
    return {
        "generator": generator,
        "search": name,
        "seed": seed,
        "kind": problem.kind,
        "num_devices": space.num_devices,
        "global_batch_size": space.global_batch_size,
        "shares": space.shares,
        "regret": max(0.0, 1 - found / best),
        "behind_best_even": max(0.0, 1 - found / best_even) if best_even else 0.0,
        "num_trials": len(problem.measured),
        "num_duplicates": len(problem.measured) - len(set(problem.measured)),
        "num_oom": runs.count(False),
        "num_later_oom": runs[first_that_ran:].count(False),
        "own_ms_per_trial": 1e3 * elapsed_s / max(1, len(problem.measured)),
    }


def _judged(task: tuple[str, int, str]) -> dict[str, Any]:
    generator, seed, name = task
    return judged(generator, seed, name, (SEARCHES | PEERS)[name])


def seeds(generator: str, count: int, first_seed: int) -> Iterator[int]:
    """Seeds of problems in which something fits."""
    seed = first_seed
    while count:
        if GENERATORS[generator](seed).best_throughput is not None:
            yield seed
            count -= 1
        seed += 1


def summarised(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each generator and search."""
    told = []
    for (generator, search), own in rows.groupby(["generator", "search"], sort=False):
        told.append(
            {
                "generator": generator,
                "search": search,
                "problems": len(own),
                "within 1 %": (own.regret <= 0.01).mean(),
                "within 5 %": (own.regret <= 0.05).mean(),
                "95th percentile": own.regret.quantile(0.95),
                "worst": own.regret.max(),
                "trials (median)": own.num_trials.median(),
                "OOMs once one ran": own.num_later_oom.mean(),
                "OOMs a problem": own.num_oom.mean(),
                "behind the best even split measured (most)": own.behind_best_even.max(),
                "duplicates": own.num_duplicates.sum(),
                "own ms a trial (median)": own.own_ms_per_trial.median(),
            }
        )
    return pd.DataFrame(told).set_index(["generator", "search"])


def plot(problems: pd.DataFrame, path: Path) -> None:
    """For each generator and search the share of problems with at most a given regret."""
    import matplotlib.pyplot as plt

    generators = list(problems.generator.unique())
    figure, panels = plt.subplots(1, len(generators), figsize=(3.6 * len(generators), 3.6), sharey=True, squeeze=False)
    for axes, generator in zip(panels[0], generators, strict=True):
        for search, own in problems[problems.generator == generator].groupby("search", sort=False):
            regrets = np.append(np.sort(np.maximum(own.regret.to_numpy(), 1e-4)), 1.0)
            shares = np.minimum(np.arange(1, len(regrets) + 1) / len(own), 1)
            width = 2.5 if str(search).startswith("guided") else 1.0
            axes.step(regrets, shares, where="post", label=search, linewidth=width)
        axes.axvline(0.01, color="0.7", linewidth=0.8)
        axes.set(
            xscale="log", xlim=(1e-4, 1), ylim=(0, 1.02), xlabel="samples/s lost to the best split", title=generator
        )
    panels[0][0].set_ylabel("share of problems")
    panels[0][-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def at_least(least: int) -> Callable[[str], int]:
    """How `argparse` reads a number that is no smaller."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text}, expected a whole number, {least} or more")
        return int(text)

    return number


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__.partition("\n")[0])
    parser.add_argument("--problems", type=at_least(1), default=500, help="problems of each generator")
    parser.add_argument("--peers", type=at_least(0), default=100, help="how many of these other tools get")
    parser.add_argument(
        "--blind", type=at_least(0), help="how many are searched with no optional reading, too; all if not given"
    )
    parser.add_argument("--processes", type=at_least(1), default=os.cpu_count(), help="searches at a time")
    parser.add_argument("--first-seed", type=at_least(0), default=FIRST_SEED)
    parser.add_argument("--only", choices=list(GENERATORS), help="one generator")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    tasks = [
        (generator, seed, name)
        for generator in ([chosen.only] if chosen.only else list(GENERATORS))
        for place, seed in enumerate(seeds(generator, chosen.problems, chosen.first_seed), start=1)
        for name in (SEARCHES | (PEERS if place <= chosen.peers else {}))
        if name != BLIND or place <= (chosen.problems if chosen.blind is None else chosen.blind)
    ]
    rows = []
    with Pool(chosen.processes) as pool:
        for row in pool.imap(_judged, tasks, chunksize=4):
            rows.append(row)
            print(f"\r{len(rows)} of {len(tasks)} searches", end="", flush=True)
    print()
    problems = pd.DataFrame(rows)
    table = summarised(problems)
    with pd.option_context("display.width", 200, "display.max_columns", None):
        print(table.round(4).to_string())
    chosen.out.mkdir(parents=True, exist_ok=True)
    table.assign(first_seed=chosen.first_seed, optuna=optuna.__version__).round(6).to_csv(
        chosen.out / "search_judged.csv"
    )
    without_clock = problems.drop(columns="own_ms_per_trial").round(6)
    without_clock.to_csv(chosen.out / "search_judged_problems.csv.gz", index=False)
    plot(problems, chosen.out / "search_judged.png")
