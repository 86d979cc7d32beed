"""A plan for 1,024 cards of four kinds: how near it comes to the best there is, and what the search itself takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from benchmarks.distributed.optimum import Machine, machine_of
from splittune import TrainingTask, modelled_ddp, plan
from splittune.demo import gpt2
from splittune.planning import PlannedSearch
from splittune.search.by_kind.study import FoundByKind, find_by_kind

MACHINES = (
    "256xT4,256xA10,256xV100-16GB,256xA100-40GB",
    "256xA100-80GB,256xV100-32GB,256xRTX3090,256xT4",
    "256xH100-80GB,256xRTX4090,256xL4,256xRTX2080Ti",
)
GLOBAL_BATCH_SIZES = (4096, 8192, 16384, 32768, 65536, 2**17, 2**20)
LARGEST_SHARE = 256
# What is wanted.
LEAST_PART = 0.95
MOST_OWN_S = 1.0
MOST_PLAN_S = 60.0


@dataclass
class Stopwatch:
    """CPU seconds of a search, and those of them in what it asks of the ranks: a busy machine does not blur them."""

    search_s: float = 0.0
    asked_s: float = 0.0
    num_trials: int = 0
    _asking: Callable[..., Any] = field(default=find_by_kind, repr=False)

    @property
    def own_s_a_trial(self) -> float:
        return (self.search_s - self.asked_s) / max(1, self.num_trials)

    def find(self, problem: Any, ranks: Any, **options: Any) -> FoundByKind:
        """`find_by_kind`, timed."""
        start = time.process_time()
        found = find_by_kind(problem, _Asked(ranks, self), **options)
        self.search_s += time.process_time() - start
        self.num_trials += len(found.result.trials)
        return found


@dataclass
class _Asked:
    """Ranks whose answers are timed."""

    ranks: Any
    watch: Stopwatch

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self.ranks, name)

        def timed(*args: Any, **named: Any) -> Any:
            start = time.process_time()
            try:
                return asked(*args, **named)
            finally:
                self.watch.asked_s += time.process_time() - start

        return timed


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A plan beside the judge's optimum."""

    planned: PlannedSearch
    real_s: float
    whole_s: float
    plan_s: float
    own_s_a_trial: float

    @property
    def step_s(self) -> float:
        assert self.planned.result is not None
        return self.planned.result.best.step_time_s or float("inf")

    @property
    def even_s(self) -> float:
        """Of the even split at the fewest accumulation steps that fit."""
        assert self.planned.result is not None
        baseline = self.planned.result.baseline
        return float("inf") if baseline is None else baseline.step_time_s or float("inf")


def judged_plan(task: TrainingTask, machine: Machine, devices: str, global_batch_size: int) -> Scaled:
    """A plan of this batch on these cards, timed and judged."""
    watch, start = Stopwatch(), time.process_time()
    with mock.patch.object(modelled_ddp, "find_by_kind", watch.find):
        found = plan(task, [devices], strategy="ddp", global_batch_sizes=[global_batch_size], progress=False)
    plan_s = time.process_time() - start
    return Scaled(
        planned=found.searches[0],
        real_s=machine.best_step_s(global_batch_size),
        whole_s=machine.best_step_s(global_batch_size, whole=True),
        plan_s=plan_s,
        own_s_a_trial=watch.own_s_a_trial,
    )


def scales() -> list[dict[str, Any]]:
    """A row for each machine, batch size and figure; a bound is what is wanted at least, or of seconds at most.

    "plan s" are CPU seconds of the whole plan, "own s" those of the search itself for each trial.
    """
    print("\nGPT-2 on 1,024 cards of four kinds (modelled): the step beside the best that any shares could reach")
    print("   batch  as                       step s  of the optimum  of the best whole  even shares  plan s  own s")
    task, rows = gpt2(), []
    for devices in MACHINES:
        print(devices)
        machine = machine_of(task, devices, largest=LARGEST_SHARE)
        for size in GLOBAL_BATCH_SIZES:
            found = judged_plan(task, machine, devices, size)
            words = words_of(found)
            parts = {"best": found.real_s / found.step_s, "even shares": found.real_s / found.even_s}
            whole = found.whole_s / found.step_s
            print(
                f"{size:8}  {words:23}  {found.step_s:6.2f}  {parts['best']:14.1%}  {whole:17.1%}  "
                f"{parts['even shares']:11.1%}  {found.plan_s:6.1f}  {found.own_s_a_trial:5.3f}"
            )
            case = {"ranks": machine.num_cards, "case": f"GPT-2, {devices}, batch {size}"}
            rows += [
                case
                | {"measure": "part of the harmonic optimum (modelled)", "figure": parts["best"], "bound": LEAST_PART},
                case | {"measure": "part of the best whole shares (modelled)", "figure": whole},
                case | {"measure": "part of it by even shares (modelled)", "figure": parts["even shares"]},
                case | {"measure": "CPU seconds of a plan", "figure": found.plan_s, "bound": MOST_PLAN_S},
                case
                | {
                    "measure": "the search's own CPU seconds a trial",
                    "figure": found.own_s_a_trial,
                    "bound": MOST_OWN_S,
                },
            ]
    return rows


def holds(row: dict[str, Any]) -> bool:
    """Whether a row keeps its bound, where it has one."""
    if "bound" not in row:
        return True
    is_least = row["measure"].startswith("part of")
    return bool(row["figure"] >= row["bound"] if is_least else row["figure"] <= row["bound"])


def words_of(found: Scaled) -> str:
    """The best split, a share for each kind: 3 x (2 7 9 21) where a kind's first card has the smaller share."""
    assert found.planned.result is not None
    split = found.planned.result.best.split
    kinds = found.planned.devices.count(",") + 1
    each = split.shard_sizes[:: split.num_devices // kinds]
    return f"{split.accumulation_steps} x ({' '.join(map(str, each))})"
