"""`python -m benchmarks.truth`: how well virtual cards foretell training steps that were measured on a real one."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.truth.judge import MemoryVerdicts, TimeErrors, memory_verdicts, time_errors
from benchmarks.truth.measured import read_measured
from benchmarks.truth.models import architecture_of, load_timm
from benchmarks.truth.run import Judge, Judged, Traces
from splittune.units import GIB

RESULTS = Path(__file__).parents[1] / "results"
TRACES = Path("runs/truth/traces")


def main() -> None:
    """Trace what is missing, fit, judge across families, print, and keep the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=main.__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES, help="where traces are kept (default: %(default)s)")
    parser.add_argument("--as-traced", action="store_true", help="judge what is there, trace nothing")
    parser.add_argument("--fit", action="store_true", help="print the factors fitted to all families")
    options = parser.parse_args()
    version = load_timm().__version__
    steps = read_measured()
    gone = [step.model for step in steps if architecture_of(step.model) is None]
    print(f"{len(steps)} measured steps; timm {version} has {len(gone)} of the models no more: {', '.join(gone)}")
    traces = Traces(options.traces)
    if not options.as_traced:
        traces.make(steps)
    rows = [row for step in steps if (row := traces.read(step)) is not None]
    traces.keep()
    judge = Judge(rows)
    if options.fit:
        kernel_s, table = judge.model.factors(judge.fit_all())
        print(f"KERNEL_S = {kernel_s}")
        for kind, factors in table.items():
            print(f'    "{kind}": {factors},')
    judged = judge.across_families()
    _print(judged)
    write_rows(judged, RESULTS / "truth.csv", timm_version=version)


def errors_of(judged: Sequence[Judged]) -> TimeErrors:
    """Errors of the step time over these rows."""
    return time_errors(
        np.array([each.foretold_s for each in judged]),
        np.array([each.measured.step_s for each in judged]),
        np.array([each.measured.batch_size for each in judged]),
    )


def verdicts_of(judged: Sequence[Judged]) -> MemoryVerdicts:
    """What was said to fit over these rows."""
    return memory_verdicts(
        [each.needed_bytes for each in judged],
        [each.next_needed_bytes for each in judged],
        [each.usable_bytes for each in judged],
    )


def _print(judged: Sequence[Judged]) -> None:
    errors, verdicts = errors_of(judged), verdicts_of(judged)
    families = sorted({each.measured.family for each in judged})
    print(f"{len(judged)} steps of {len(families)} families, each foretold (modelled) by factors fitted to the others:")
    print(f"  step time: median error {errors.median:.1%}, 90th percentile {errors.p90:.1%}, tau {errors.tau:.3f}")
    said, measured = verdicts.num_said_to_fit, verdicts.num_measured
    print(f"  measured sizes said to fit: {said} of {measured} ({said / measured:.1%})")
    if verdicts.num_next:
        said, following = verdicts.num_next_said_not_to, verdicts.num_next
        print(f"  next sizes said not to fit: {said} of {following} traced ({said / following:.1%})")
    usable = [each.usable_bytes / GIB for each in judged]
    print(f"  usable of 24 GiB, as found on the other families: {min(usable):.2f} to {max(usable):.2f} GiB")
    print("family          steps  median of foretold / measured - 1  largest")
    by_family = {family: [each for each in judged if each.measured.family == family] for family in families}
    errors_by = {
        family: np.array([each.foretold_s / each.measured.step_s - 1 for each in own])
        for family, own in by_family.items()
    }
    for family in sorted(families, key=lambda family: -abs(np.median(errors_by[family]))):
        own = errors_by[family]
        worst = int(np.argmax(np.abs(own)))
        name = by_family[family][worst].measured.model
        print(f"{family:15} {len(own):5}  {np.median(own):+33.1%}  {own[worst]:+.1%} {name}")


def write_rows(judged: Sequence[Judged], path: Path, *, timm_version: str) -> None:
    """A line for each step, with the versions."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            (
                *("model", "architecture", "family", "batch_size", "image_size", "measured_s", "foretold_s"),
                *("needed_bytes", "usable_bytes", "next_batch_size", "next_needed_bytes", "torch", "timm"),
            )
        )
        for each in judged:
            step = each.measured
            after = each.next_needed_bytes
            writer.writerow(
                (
                    step.model,
                    each.architecture,
                    step.family,
                    step.batch_size,
                    step.image_size,
                    f"{step.step_s:.6g}",
                    f"{each.foretold_s:.6g}",
                    each.needed_bytes,
                    each.usable_bytes,
                    step.next_batch_size or "",
                    "" if after is None else after,
                    torch.__version__,
                    timm_version,
                )
            )


if __name__ == "__main__":
    main()
