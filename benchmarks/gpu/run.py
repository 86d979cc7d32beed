"""Everything that a single CUDA card can show, in one command of about twelve minutes.

    python -m benchmarks.gpu [--out benchmarks/results] [--only memory,limits,...] [--budget-s 720] [--seed 0]

Each part prints what it finds as it goes, and writes ``gpu_<part>.csv`` with the card, its driver
and the versions. At the end every check is listed; the exit code is 1 if one failed or a part broke
off with an error. A part that runs out of its time says what it left out. ``--devices 1xT400-4GB``
rehearses all of it on a virtual GPU, with tiny models: that shows that the code runs, its figures
are modelled, and nothing is written.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from benchmarks.gpu import limits, memory, model_errors, neighbour, ooms, peers, replicas, timing, truth, worker
from benchmarks.gpu.stage import Findings, Stage
from splittune.errors import SplittuneError
from splittune.hardware.oom import is_sticky
from splittune.report.tables import save_csv

BUDGET_S = 720.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part, and its portion of the time."""

    name: str
    title: str
    run: Callable[[Stage, Findings], None]
    share_s: float


PARTS = (
    Part(name="memory", title="the profiler's peaks beside other readings", run=memory.run, share_s=30),
    Part(name="ooms", title="out of memory in each phase, and recovery", run=ooms.run, share_s=25),
    Part(name="timing", title="busy time, and cuDNN's search for kernels", run=timing.run, share_s=20),
    Part(name="replicas", title="the wrapper over the card named three times", run=replicas.run, share_s=25),
    Part(name="limits", title="limits of memory placed anywhere", run=limits.run, share_s=100),
    Part(name="neighbour", title="another process takes memory in mid-search", run=neighbour.run, share_s=35),
    Part(name="models", title="peaks and step times foretold", run=model_errors.run, share_s=140),
    Part(name="peers", title="beside other tools and every split", run=peers.run, share_s=60),
    Part(name="worker", title="a worker that is spoilt, and one that is killed", run=worker.run, share_s=45),
    Part(name="truth", title="twenty models beside what a plan foretells of them", run=truth.run, share_s=240),
)


def run_parts(stage: Stage, parts: Sequence[Part], budget_s: float, out: Path | None) -> list[Findings]:
    """Run the parts in order, each with the time the last one left over, and write tables where `out` is given."""
    started_s, total_s, share_s = time.monotonic(), sum(part.share_s for part in parts), 0.0
    found = []
    for part in parts:
        share_s += part.share_s
        stage.ends_at_s = started_s + budget_s * share_s / total_s
        found.append(_run_part(stage, part))
        if out is not None and found[-1].rows:
            save_csv(pd.DataFrame(found[-1].rows).assign(**stage.columns()), out / f"gpu_{part.name}.csv")
    return found


def _run_part(stage: Stage, part: Part) -> Findings:
    findings, began_s = Findings(part=part.name), time.monotonic()
    stage.say(f"\n== {part.name}: {part.title}")
    if stage.is_spoilt or not stage.has_time():
        why = "an error has spoilt the card for this process" if stage.is_spoilt else "the time was over"
        findings.cut_short = f"all of it: {why} before it began"
        stage.say(f"left out: {findings.cut_short}")
        return findings
    try:
        part.run(stage, findings)
    except Exception as error:  # noqa: BLE001  what broke off is reported, and the other parts go on
        stage.say(traceback.format_exc())
        findings.check("the part ran to its end", False, f"{type(error).__name__}: {str(error).splitlines()[:1]}")
        stage.is_spoilt = is_sticky(error)
    for check in findings.checks:
        if check.passed is False:
            stage.say(str(check))
    if findings.cut_short:
        stage.say(f"cut short, left out: {findings.cut_short}")
    stage.say(f"({part.name} took {time.monotonic() - began_s:.1f} s)")
    return findings


def summarise(stage: Stage, found: Sequence[Findings]) -> int:
    """Print every check; how many failed."""
    checks = [check for findings in found for check in findings.checks]
    stage.say("\n== checks")
    stage.say("\n".join(map(str, checks)) or "none")
    for findings in found:
        if findings.cut_short:
            stage.say(f"cut short: {findings.part}: {findings.cut_short}")
    num_failed = sum(check.passed is False for check in checks)
    num_unknown = sum(check.passed is None for check in checks)
    stage.say(f"{len(checks) - num_failed - num_unknown} passed, {num_failed} failed, {num_unknown} could not be told")
    return num_failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 if a check failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="cuda:0", help="one CUDA card, or one virtual GPU to rehearse on")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", default="", help=f"parts, by comma: {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all of it")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    wanted = {name.strip() for name in given.only.split(",") if name.strip()}
    unknown = wanted - {part.name for part in PARTS}
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: expected {', '.join(p.name for p in PARTS)}.")
    if given.devices.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            "torch sees no CUDA device here, so nothing can be measured. --devices 1xT400-4GB rehearses on a "
            "virtual GPU."
        )
    began_s = time.monotonic()
    try:
        stage = Stage(given.devices, seed=given.seed)
    except (SplittuneError, ValueError) as error:
        parser.error(str(error))
    said = "[modelled] %(message)s" if stage.is_rehearsal else "%(message)s"
    logging.basicConfig(level=logging.WARNING, format=said, stream=sys.stdout)
    if stage.is_rehearsal:
        torch.set_num_threads(1)
        stage.say("a rehearsal on a virtual GPU: tiny models, modelled figures, nothing is written")
    stage.say(", ".join(f"{name} {value}" for name, value in stage.columns().items()))
    parts = [part for part in PARTS if not wanted or part.name in wanted]
    found = run_parts(stage, parts, given.budget_s, None if stage.is_rehearsal else given.out)
    num_failed = summarise(stage, found)
    stage.say(f"{time.monotonic() - began_s:.0f} s in all")
    return 1 if num_failed else 0
