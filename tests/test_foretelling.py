"""After a search on real cards its splits are foretold; nothing that goes wrong there loses what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from splittune.foretelling import BUDGET_S, foretell_beside
from splittune.hardware.base import Device, DeviceMemory
from splittune.profiling.foretold import Foretold
from splittune.profiling.measurement import Measurement, Outcome
from splittune.runners.base import DeviceSnapshot, JobFacts
from splittune.search import SearchResult
from splittune.split import BatchSplit
from splittune.units import GIB

EVEN = BatchSplit(global_batch_size=8, accumulation_steps=2, shard_sizes=(2, 2))
TUNED = BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(3, 5))
ANSWER = Foretold(why="a test")


class Runner:
    """Foretells what it was told to, and notes what it is asked."""

    def __init__(self, answer: Foretold | Exception | None) -> None:
        self._answer = answer
        self.asked: list[Any] = []

    def foretell(self, devices: Any, memory: Any, asked: Sequence[Any], *, budget_s: float) -> Foretold:
        self.asked = [[device.name for device in devices], [each.outside_bytes for each in memory], *asked, budget_s]
        if isinstance(self._answer, Exception):
            raise self._answer
        assert self._answer is not None
        return self._answer


class Silent:
    """Runs trials, and foretells nothing."""


def ran(split: BatchSplit) -> Measurement:
    memory = tuple(
        DeviceMemory(device=i, total_bytes=4 * GIB, outside_bytes=GIB, peak_allocated_bytes=0, peak_reserved_bytes=0)
        for i in range(2)
    )
    return Measurement(split=split, outcome=Outcome.OK, whole_step_times_s=(0.5,), memory=memory)


def found(best: BatchSplit = TUNED, baseline: BatchSplit | None = EVEN) -> SearchResult:
    even = None if baseline is None else ran(baseline)
    return SearchResult(best=ran(best), baseline=even, trials=(), stopped="converged")


def job(*, name: str = "NVIDIA T400 4GB", is_modelled: bool = False) -> JobFacts:
    devices = tuple(Device(index=i, name=name, torch_device=f"cuda:{i}", total_bytes=4 * GIB) for i in range(2))
    cards = DeviceSnapshot(devices=devices, is_modelled=is_modelled, spec=None, memory_before=())
    return JobFacts(title="", loader_batch_size=8, global_batch_size=None, has_batch_norm=False, cards=cards)


def beside(runner: Any, facts: JobFacts | None = None, result: SearchResult | None = None) -> tuple[Any, list[str]]:
    said: list[str] = []
    return foretell_beside(runner, facts or job(), result or found(), said.append), said


def test_best_and_baseline_are_foretold_with_what_others_held() -> None:
    """In so many seconds at most, which is said."""
    runner = Runner(ANSWER)
    answer, said = beside(runner)
    assert answer is ANSWER
    assert runner.asked == [["NVIDIA T400 4GB"] * 2, [GIB, GIB], (TUNED, "output"), (EVEN, "output"), BUDGET_S]
    assert said == ["foretelling the same on virtual cards, to compare: at most 30 s"]


@pytest.mark.parametrize("result", [found(EVEN, EVEN), found(EVEN, None)])
def test_a_split_is_foretold_once(result: SearchResult) -> None:
    """The even split that won, and a search without a baseline."""
    runner = Runner(ANSWER)
    beside(runner, result=result)
    assert runner.asked[2:] == [(EVEN, "output"), BUDGET_S]


@pytest.mark.parametrize("runner", [Runner(ANSWER), Silent()])
def test_virtual_cards_are_not_foretold(runner: Any) -> None:
    """They were modelled to begin with; and some runners foretell nothing."""
    facts = job(is_modelled=isinstance(runner, Runner))
    assert beside(runner, facts) == (None, [])


def test_an_unknown_card_is_the_reason() -> None:
    """Nobody is asked, and nothing is announced."""
    runner = Runner(ANSWER)
    answer, said = beside(runner, job(name="Quadro 9"))
    assert answer == Foretold(why="GPU 0 is a Quadro 9 of 4.00 GiB, which is not in the catalog of GPUs")
    assert (runner.asked, said) == ([], [])


@pytest.mark.parametrize("error", [RuntimeError("torn"), OSError(), MemoryError("none left")])
def test_no_error_loses_what_was_measured(error: Exception) -> None:
    """It is the reason."""
    answer, _ = beside(Runner(error))
    assert answer == Foretold(why=str(error) or "OSError")


def test_ctrl_c_is_the_users() -> None:
    """It ends the search, as it does anywhere."""

    class Interrupted(Runner):
        def foretell(self, *args: Any, **options: Any) -> Foretold:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        beside(Interrupted(None))
