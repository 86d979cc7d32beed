"""What each rule and each number of the search is worth: every one left out, or changed, in turn.

    python -m benchmarks.search.ablation [--problems 250] [--only NAME ...] [--change 'left out'] [--out DIR]

A policy is left out, and a part of a model is replaced by what is left without it. A number, of a
policy or of a module of the search, is taken as nothing, halved and doubled; a true or false is turned
round. Every variant sees the same problems as the search itself, so differences are paired: a row has
the mean difference of regret and of trials, each with its standard error, and of OOMs after the first
trial that ran. `search_ablation.csv` has all rows.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager as Context
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from math import sqrt
from multiprocessing import Pool
from numbers import Real
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd

from benchmarks.search.judge import GENERATORS, MAX_TRIALS, RESULTS, at_least, judged, seeds
from benchmarks.search.problem import Problem, without_optional_readings
from splittune import SplittuneError, search
from splittune.search import find_best_split
from splittune.search.arrays import BoolArray, FloatArray
from splittune.search.models import busy_times, hypothesis_fit, kinds, memory, overhead, weighing
from splittune.search.models.busy_times import BusyTimes
from splittune.search.models.calibration import Calibration
from splittune.search.models.envelope import Envelope
from splittune.search.models.hypotheses import Hypothesis
from splittune.search.models.memory import MemoryModel
from splittune.search.models.memory_readings import MemoryReadings
from splittune.search.models.step_time import TimeModel
from splittune.search.models.trend import Trend
from splittune.search.models.whole_steps import WholeSteps
from splittune.search.policies import baseline
from splittune.search.policies.base import Policy
from splittune.search.policies.confidence import UpperConfidenceBound
from splittune.search.policies.proposer import POLICIES
from splittune.search.samplers.guided import GuidedSampler
from splittune.split import BatchSplit

FIRST_SEED = 200_000
FACTORS: dict[str, float] = {"nothing": 0.0, "halved": 0.5, "doubled": 2.0}
# What is no choice: which column is which, how many numbers a line has, a unit, how torch reserves, and what only a
# type checker reads.
NO_CHOICE = ("CONSTANT", "KNEE_TERMS", "SHARE", "ACCUMULATES", "MICRO_BATCH", "MIB", "SEGMENT_BYTES", "TYPE_CHECKING")
# Parts of the models and of the candidates: where each is, and what is left without it.


def _no_larger(_: MemoryReadings, _device: int, sizes: FloatArray, **_kind: bool) -> BoolArray:
    """No trial held more."""
    return np.zeros(len(sizes), dtype=bool)


PARTS: tuple[tuple[str, Any, str, Any], ...] = (
    ("tiles", weighing, "TILES", ()),
    ("first samples that are more work", busy_times, "FADES", ()),
    ("waiting for the host", weighing, "HOST_PARTS", ()),
    ("GPU 0's own work", BusyTimes, "_gpu0_per_sample_s", lambda _: 0.0),
    ("ratios drawn", WholeSteps, "_drawn", lambda self, ratios, work, log: [(log, self._at(ratios, work=work)[1])]),
    ("ratios as each kind alone says", WholeSteps, "_ratios_alone", lambda *_: []),
    ("GPU 0's own work, without busy times", WholeSteps, "_with_work_of_gpu0", lambda *_: []),
    ("a cold first trial", hypothesis_fit, "COLD", (0.0,)),
    ("fewer devices may be faster", Hypothesis, "optimistic_step_s", lambda self, *step: self.step_s(*step)),
    ("doubt of a kind", TimeModel, "_doubt_of_kind", lambda *asked: np.zeros(len(asked[-1]))),
    ("calibration", Calibration, "doubt", 1.0),
    ("kinds that took as long", kinds, "grouped", lambda found, _: [(one,) for one in found]),
    ("no margin below what was held", MemoryReadings, "held_more", _no_larger),
    ("what a forward leaves", MemoryReadings, "saved", lambda *_: []),
    ("how much of a peak that is", MemoryReadings, "saved_part", lambda *_: 0.0),
    ("what replicas tell of GPU 0", memory, "larger_on_gpu0", lambda *_, **_kind: []),
    ("the least by chords", Envelope, "least", Envelope.sure),
    ("peaks that go on as they grew", Trend, "through", lambda *_: None),
    ("outputs on GPU 0 told by one size", Trend, "_of_outputs", lambda *_: None),
    ("gaps of an allocator beside gathered outputs", overhead, "_gathers", lambda *_: False),
    ("jumps that more trials explain", MemoryModel, "_explain_jumps", lambda _: None),
    ("no baseline that is slower", baseline, "_log_s", lambda table, _: table.steps),
    ("small risks first", UpperConfidenceBound, "_next", lambda _self, _state, _, worth: int(worth.argmax())),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The search with one thing changed."""

    name: str
    """What was changed: ``"UpperConfidenceBound.min_gain"``, ``"memory.SLOPE_SLACK"``."""
    change: str
    place: int | None = None
    """Which of `POLICIES` it changes; None where it changes none."""
    replaced: Mapping[str, Any] | None = None
    """The fields of that policy that are other; None where it is left out."""
    patched: Callable[[], Context[Any]] = nullcontext

    def excludes(self, other: Variant) -> bool:
        """Whether both cannot be made at once: they change the same number, or one of a policy that the other lacks."""
        if self.name == other.name:
            return True
        return self.place is not None and self.place == other.place and None in (self.replaced, other.replaced)


def policies_of(made: Iterable[Variant]) -> tuple[Policy, ...]:
    """`POLICIES` with all these changes."""
    policies = dict(enumerate(POLICIES))
    for one in made:
        if one.place is None:
            continue
        if one.replaced is None:
            del policies[one.place]
        else:
            policies[one.place] = replace(policies[one.place], **one.replaced)  # type: ignore[type-var]
    return tuple(policies.values())


def variants() -> Iterator[Variant]:
    """The search itself first, then everything that can be changed, one at a time."""
    yield Variant(name="the search", change="none")
    for place, policy in enumerate(POLICIES):
        name = type(policy).__name__
        yield Variant(name=name, change="left out", place=place)
        for field in fields(policy):  # type: ignore[arg-type]
            for change, value in _changed(getattr(policy, field.name)):
                other = {field.name: value}
                yield Variant(name=f"{name}.{field.name}", change=change, place=place, replaced=other)
    for name, holder, attribute, left in PARTS:
        yield Variant(name=name, change="left out", patched=_replaced([(holder, attribute, left)]))
    seen: set[tuple[str, int]] = set()  # what one module imports from another is changed once
    for module in _modules():
        for constant, told in vars(module).items():
            if not constant.isupper() or constant in NO_CHOICE or not isinstance(told, Real):
                continue
            if (constant, id(told)) not in seen:
                seen.add((constant, id(told)))
                for change, value in _changed(told):
                    name = f"{module.__name__.rpartition('.')[2]}.{constant}"
                    yield Variant(name=name, change=change, patched=_patched(constant, told, value))


def _changed(told: object) -> Iterator[tuple[str, Any]]:
    """How a value may be changed; whole numbers stay whole, and what would change nothing is left out."""
    if isinstance(told, bool):
        yield "turned round", not told
    elif isinstance(told, Real):
        for change, factor in FACTORS.items():
            value = type(told)(factor * float(told))  # type: ignore[call-arg]
            if value != told:
                yield change, value


def _modules() -> list[Any]:
    """The modules of the search that hold its choices, policies, models and candidates, and the last word."""
    rooms = ("choices", "policies", "models", "candidates", "finalists")
    found = pkgutil.walk_packages(search.__path__, f"{search.__name__}.")
    names = [info.name for info in found if info.name.split(".")[2] in rooms and not info.ispkg]
    # what several share has the name of the module that has it
    return [importlib.import_module(name) for name in sorted(names, key=lambda name: "choices" not in name)]


def _patched(constant: str, told: object, value: object) -> Callable[[], Context[Any]]:
    """Sets a constant in its module and in all that imported it."""
    return _replaced([(module, constant, value) for module in _modules() if vars(module).get(constant) is told])


def _replaced(attributes: Sequence[tuple[Any, str, Any]]) -> Callable[[], Context[Any]]:
    """Sets attributes of modules or classes, (holder, name, value) each."""

    @contextmanager
    def everywhere() -> Iterator[None]:
        with ExitStack() as stack:
            for holder, name, value in attributes:
                stack.enter_context(patch.object(holder, name, value))
            yield

    return everywhere


def searched(*made: Variant, tells_all: bool) -> Callable[[Problem], BatchSplit | None]:
    """The search with these changes at once, as one that `judged` can run."""

    def found(problem: Problem) -> BatchSplit | None:
        space, demands = problem.space(), problem.min_headroom_bytes
        try:
            with ExitStack() as stack:
                for one in made:
                    stack.enter_context(one.patched())
                return find_best_split(
                    space,
                    problem.measure if tells_all else lambda split: without_optional_readings(problem.measure(split)),
                    confirm=problem.confirm
                    if tells_all
                    else lambda split: without_optional_readings(problem.confirm(split)),
                    max_trials=MAX_TRIALS,
                    min_headroom_bytes=demands,
                    sampler=GuidedSampler(space, min_headroom_bytes=demands, policies=policies_of(made)),
                    seed=problem.seed,
                ).best.split
        except SplittuneError:
            return None

    return found


@cache
def all_variants() -> tuple[Variant, ...]:
    """`variants`, made once in each process."""
    return tuple(variants())


def _row(task: tuple[int, bool, str, int]) -> dict[str, Any]:
    """One problem searched by the variant at a place among all, for a process of its own."""
    place, tells_all, generator, seed = task
    variant = all_variants()[place]
    return judged(generator, seed, variant.name, searched(variant, tells_all=tells_all))


def compared(rows: pd.DataFrame, search_itself: pd.DataFrame) -> dict[str, float]:
    """Paired differences of a variant to the search itself: rows of the same problems in the same order."""
    regret = rows.regret.to_numpy() - search_itself.regret.to_numpy()
    trials = (rows.num_trials - search_itself.num_trials).to_numpy()
    ooms = (rows.num_later_oom - search_itself.num_later_oom).to_numpy()
    return {
        "problems": len(rows),
        "within 1 %": float((rows.regret <= 0.01).mean()),
        "worst": float(rows.regret.max()),
        "regret more": float(regret.mean()),
        "give or take": float(regret.std(ddof=1) / sqrt(len(rows))),
        "trials more": float(trials.mean()),
        "trials give or take": float(trials.std(ddof=1) / sqrt(len(rows))),
        "later OOMs more": float(ooms.mean()),
    }


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search.ablation", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--problems", type=at_least(1), default=250, help="of each generator")
    parser.add_argument(
        "--blind", type=at_least(0), help="how many are searched with no optional reading, too; all if not given"
    )
    parser.add_argument("--first-seed", type=at_least(0), default=FIRST_SEED)
    parser.add_argument("--generators", nargs="+", choices=list(GENERATORS), default=list(GENERATORS))
    parser.add_argument("--only", nargs="+", default=[""], help="variants whose names begin so")
    parser.add_argument("--change", choices=["left out", "turned round", *FACTORS], help="this change alone")
    parser.add_argument("--processes", type=at_least(1), default=os.cpu_count(), help="searches at a time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    drawn = [
        (tells_all, name, seed)
        for tells_all, count in ((True, chosen.problems), (False, chosen.blind))
        for name in chosen.generators
        for seed in seeds(name, chosen.problems if count is None else count, chosen.first_seed)
    ]
    wanted = [
        place
        for place, one in enumerate(all_variants())
        if not place or (one.name.startswith(tuple(chosen.only)) and chosen.change in (None, one.change))
    ]
    if len(wanted) == 1:
        asked = " or ".join(chosen.only) + (f", {chosen.change}" if chosen.change else "")
        parser.error(f"no variant's name begins with {asked}, expected such as UpperConfidenceBound")
    table: list[dict[str, Any]] = []
    itself = pd.DataFrame()
    with Pool(chosen.processes) as pool:
        for place in wanted:
            variant = all_variants()[place]
            rows = pd.DataFrame(pool.map(_row, [(place, *one) for one in drawn], chunksize=4))
            itself = itself if place else rows
            table.append({"what": variant.name, "change": variant.change, **compared(rows, itself)})
            print(pd.DataFrame(table[-1:]).round(4).to_string(index=False, header=len(table) == 1), flush=True)
            chosen.out.mkdir(parents=True, exist_ok=True)
            pd.DataFrame(table).assign(first_seed=chosen.first_seed).round(6).to_csv(
                chosen.out / "search_ablation.csv", index=False
            )


if __name__ == "__main__":
    main()
