"""What a plan would have said of a search's splits, foretold once they are measured, to stand beside that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from splittune.hardware.base import Device, DeviceMemory
from splittune.hardware.virtual.twins import twins_of
from splittune.profiling.foretold import Foretold
from splittune.profiling.measurement import LossPlacement
from splittune.runners.base import JobFacts, Runner
from splittune.search import SearchResult
from splittune.split import BatchSplit

# For both splits together. A choice: a step of GPT-2 on shapes takes two or three seconds on two cores, a search on
# real cards minutes. Twice as much lets models of four times the layers be foretold.
BUDGET_S = 30.0


@runtime_checkable
class Foreteller(Protocol):
    """A runner that can foretell the splits of its job, which is open."""

    def foretell(
        self,
        devices: Sequence[Device],
        memory: Sequence[DeviceMemory],
        asked: Sequence[tuple[BatchSplit, LossPlacement]],
        *,
        budget_s: float,
    ) -> Foretold:
        """What virtual cards of the kinds of `devices`, with their memory, say of each split."""
        ...


def foretell_beside(
    runner: Runner, job: JobFacts, found: SearchResult, on_activity: Callable[[str], None]
) -> Foretold | None:
    """The best split and the baseline as a plan for these cards has them; None where the cards are virtual anyway.

    Nothing that goes wrong here loses what was measured: it is the answer's `why`.
    """
    if job.cards.is_modelled or not isinstance(runner, Foreteller):
        return None
    splits = [each for each in (found.best, found.baseline) if each is not None]
    asked = list(dict.fromkeys((each.split, each.loss_placement) for each in splits))
    devices, memory = job.cards.devices, found.best.memory or job.cards.memory()
    try:
        twins_of(devices, memory)  # says so now where a card is unknown
        on_activity(f"foretelling the same on virtual cards, to compare: at most {BUDGET_S:g} s")
        return runner.foretell(devices, memory, asked, budget_s=BUDGET_S)
    except Exception as error:  # noqa: BLE001  the measured result is what counts
        return Foretold(why=str(error) or type(error).__name__)
