"""`python -m benchmarks.distributed`: ranks against one device; the price of a slow rank, of agreeing; 1,024 cards."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.distributed import agreement, batches, gradients, scale, slow_rank
from benchmarks.distributed.launch import run_ranks
from splittune import __version__

RESULTS = Path(__file__).parents[1] / "results" / "distributed.csv"
SEED = 0
NUM_CASES = 100  # for each world size
TOLERANCES = {"float32": 1e-5, "float64": 1e-12}
FACTORS = (1.5, 2.0, 3.0, 5.0)
NUM_RANKS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write all figures; 0 where every check held."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed", description=__doc__)
    parser.add_argument("--cases", type=int, default=NUM_CASES, help="cases of gradients for each world size")
    parser.add_argument("--batches", type=int, default=batches.NUM_CASES, help="cases of sharded loaders")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the CSV")
    parser.add_argument("--only", choices=["agreement"], help="this part alone; the CSV keeps the other rows")
    given = parser.parse_args(arguments)
    if given.only:
        gradient_rows, slow_rows, scale_rows, failed = [], [], [], 0
    else:
        gradient_rows = gradient_errors(given.cases, given.seed)
        slow_rows = slow_ranks(given.seed)
        scale_rows = scale.scales()
        failed = batches.main([str(given.batches), str(given.seed)])
    agreement_rows = agreements()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    table = pd.DataFrame([*gradient_rows, *slow_rows, *scale_rows, *agreement_rows]).assign(
        machine=machine,
        splittune=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        seed=given.seed,
    )
    if given.only and given.out.exists():
        kept = pd.read_csv(given.out)
        table = pd.concat([kept[~kept["measure"].isin(table["measure"])], table], ignore_index=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(given.out, index=False, float_format="%.6g")
    print(f"\nwritten to {given.out}; {machine}, torch {torch.__version__}, seed {given.seed}")
    return failed or int(not all(scale.holds(row) for row in [*gradient_rows, *scale_rows]))


def gradient_errors(num_cases: int, seed: int) -> list[dict[str, Any]]:
    """The largest relative error over all cases, ranks and steps, for each world size and dtype."""
    print("gradients of drawn cases in real processes (gloo) beside one device's")
    print("ranks    dtype  cases  largest relative error  wanted at most")
    rows = []
    for num_ranks in range(1, NUM_RANKS + 1):
        cases = gradients.draw_cases(num_ranks, num_cases, seed)
        of_ranks = run_ranks(num_ranks, gradients.judge_on_rank, cases)
        worst = [max(errors) for errors in zip(*of_ranks, strict=True)]
        for dtype, bound in TOLERANCES.items():
            errors = [error for case, error in zip(cases, worst, strict=True) if str(case.dtype) == f"torch.{dtype}"]
            if not errors:
                continue
            print(f"{num_ranks:5}  {dtype}  {len(errors):5}  {max(errors):22.1e}  {bound:14.0e}")
            rows.append(
                {
                    "measure": "gradient error, relative",
                    "ranks": num_ranks,
                    "case": f"{dtype}, {len(errors)} cases",
                    "figure": max(errors),
                    "bound": bound,
                }
            )
    return rows


def slow_ranks(seed: int) -> list[dict[str, Any]]:
    """Samples/s of both splits, measured and in theory, for each factor."""
    size = slow_rank.GLOBAL_BATCH_SIZE
    print(
        f"\none of {NUM_RANKS} ranks slower, a batch of {size}: samples/s measured (in theory, without any other work)"
    )
    print("factor  even shares                  shares by speed              gain measured  in theory")
    rows: list[dict[str, Any]] = []
    contests = [slow_rank.Contest(factor=factor, num_ranks=NUM_RANKS) for factor in FACTORS]
    of_ranks = run_ranks(NUM_RANKS, slow_rank.measure_on_rank, contests, seed)
    for contest, *found in zip(contests, *of_ranks, strict=True):
        factor, splits, times_s = contest.factor, contest.splits, contest.sample_times_s
        measured = {name: size / max(each[name] for each in found) for name in splits}
        theory = {name: size / slow_rank.slowest_s(shares, times_s) for name, shares in splits.items()}
        words = [
            f"{measured[name]:4.0f} ({theory[name]:4.0f}) {'+'.join(map(str, shares))}"
            for name, shares in splits.items()
        ]
        gains = measured["by speed"] / measured["even"], theory["by speed"] / theory["even"]
        print(f"{factor:6}  {words[0]:27}  {words[1]:27}  {gains[0]:12.2f}x  {gains[1]:8.2f}x")
        rows += [
            {
                "measure": "samples/s",
                "ranks": NUM_RANKS,
                "case": f"rank 0 {factor} times slower, {name}: {'+'.join(map(str, shares))}",
                "figure": measured[name],
                "theory": theory[name],
            }
            for name, shares in splits.items()
        ]
    return rows


def agreements() -> list[dict[str, Any]]:
    """Seconds of an agreement, the median and the 95th percentile."""
    times_s = run_ranks(NUM_RANKS, agreement.time_on_rank)[0]
    print(f"\nan agreement of {NUM_RANKS} ranks on one trial, {len(times_s)} of them (gloo)")
    print("                  ms  hoped for at most")
    figures = {"median": statistics.median(times_s), "95 of 100": statistics.quantiles(times_s, n=20)[-1]}
    for name, figure_s in figures.items():
        print(f"{name:>9}  {1e3 * figure_s:9.2f}  {1e3 * agreement.BOUND_S:17.0f}")
    return [
        {
            "measure": "agreement, s a trial",
            "ranks": NUM_RANKS,
            "case": f"{name} of {len(times_s)}",
            "figure": figure_s,
            "bound": agreement.BOUND_S,
        }
        for name, figure_s in figures.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
