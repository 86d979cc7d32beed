"""advice.csv: what was tried beyond the split, what it brought, and what no split can help.

What each column means stands in the docstring of `advice_table`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from splittune.report.tables import frame_of, in_one_line
from splittune.report.words import LEAST_SPEEDUP, shares_of

if TYPE_CHECKING:
    import pandas as pd

    from splittune.split import BatchSplit

# Rows on a console: what is worth most. A choice; all are in advice.csv.
MAX_SHOWN = 3

_TYPES = {
    "remedy": "string",
    "is_limit": "boolean",
    "how": "string",
    "gain": "Float64",
    "throughput_samples_per_s": "Float64",
    "accumulation_steps": "Int64",
    "shard_sizes": "string",
    "num_trials": "Int64",
    "cost": "string",
    "finding": "string",
}


class How(str, Enum):
    """Where a finding comes from."""

    MEASURED = "measured"
    MODELLED = "modelled"
    RULE = "rule"
    FAILED = "failed"
    """It was tried, and raised or did not fit."""
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRow:
    """A remedy and what became of it, or a limit that no split moves.

    Worked: the loss in the replicas, 331 samples/s where the best split without gives 300, is a gain of 1.10.
    """

    remedy: str
    how: How
    finding: str
    """What was found, a sentence or two; of a rule the rule; of one that failed why."""
    cost: str = ""
    """What it costs the user."""
    gain: float | None = None
    """Samples/s over those of the search's best split; None unless trials of both ran."""
    throughput: float | None = None
    """Samples/s with the remedy."""
    accumulation_steps: int | None = None
    shard_sizes: str = ""
    """``"4+20+20"``, in the order of the cards as the remedy has them."""
    num_trials: int = 0
    """Trials that the row took."""
    is_limit: bool = False
    """Whether it names what no split can help."""

    def __post_init__(self) -> None:
        if self.gain is not None and self.how not in (How.MEASURED, How.MODELLED):
            raise ValueError(f"gain is {self.gain} of a row that is {self.how.value!r}: expected None, no trial ran.")

    @property
    def is_worth_it(self) -> bool:
        """Whether it trains visibly faster."""
        return self.gain is not None and self.gain >= LEAST_SPEEDUP


def split_cells(split: BatchSplit) -> dict[str, Any]:
    """The fields of a row that say a split."""
    return {"accumulation_steps": split.accumulation_steps, "shard_sizes": shares_of(split)}


def sorted_rows(rows: Sequence[AdviceRow]) -> tuple[AdviceRow, ...]:
    """Limits first, then what gains most, then what costs speed, then rules and what was not tried."""
    return tuple(sorted(rows, key=lambda row: (not row.is_limit, row.gain is None, -(row.gain or 0.0))))


def advice_table(rows: Sequence[AdviceRow]) -> pd.DataFrame:
    """One row a remedy, in the order given; what does not apply is an empty cell.

    | column | unit | meaning |
    |---|---|---|
    | `remedy` | | what to change; for a limit, what holds training up |
    | `is_limit` | | `True` where the row names what no split can help |
    | `how` | | `measured`; `modelled`, on virtual cards; `rule`: not tried here; `failed`; `not tried` |
    | `gain` | | samples/s with the remedy over those of the best split without; empty unless trials of both ran |
    | `throughput_samples_per_s` | samples/s | with the remedy, in whole optimizer steps |
    | `accumulation_steps` | | of the fastest split tried with it |
    | `shard_sizes` | samples | of the same, in the order of the cards as the remedy has them |
    | `num_trials` | | trials behind the row: few, so a search may find a faster split with the same remedy |
    | `cost` | | what it costs the user |
    | `finding` | | what was found, or why there is no figure |
    """
    return frame_of([_cells(row) for row in rows], _TYPES)


def advice_of(cells: Mapping[str, str]) -> AdviceRow:
    """A row of ``advice.csv``."""
    return AdviceRow(
        remedy=cells["remedy"],
        is_limit=cells["is_limit"] == "True",
        how=How(cells["how"]),
        gain=float(cells["gain"]) if cells["gain"] else None,
        throughput=float(cells["throughput_samples_per_s"]) if cells["throughput_samples_per_s"] else None,
        accumulation_steps=int(cells["accumulation_steps"]) if cells["accumulation_steps"] else None,
        shard_sizes=cells["shard_sizes"],
        num_trials=int(cells["num_trials"]),
        cost=cells["cost"],
        finding=cells["finding"],
    )


def gain_text(row: AdviceRow) -> str:
    """``"1.10 times (modelled)"``; of a row without a figure, how it was found: ``"rule"``."""
    return row.how.value if row.gain is None else f"{row.gain:.2f} times ({row.how.value})"


def lines_of(rows: Sequence[AdviceRow]) -> tuple[str, ...]:
    """What a console shows: the limits, and the remedies that gain most, three at most."""
    limits = [row.finding for row in rows if row.is_limit]
    worth = [row for row in sorted_rows(rows) if not row.is_limit and row.is_worth_it][:MAX_SHOWN]
    said = [
        f"Tried: {row.remedy}: {gain_text(row)} as fast, {row.accumulation_steps} x ({row.shard_sizes}). {row.cost}"
        for row in worth
    ]
    tried = sum(row.num_trials > 0 for row in rows if not row.is_limit)
    if tried and not worth:
        said.append(f"Of {tried} remedies that were tried none is faster; advice.csv has them.")
    return (*limits, *said)


def _cells(row: AdviceRow) -> dict[str, Any]:
    return {
        "remedy": in_one_line(row.remedy),
        "is_limit": row.is_limit,
        "how": row.how.value,
        "gain": row.gain,
        "throughput_samples_per_s": row.throughput,
        "accumulation_steps": row.accumulation_steps,
        "shard_sizes": row.shard_sizes or None,
        "num_trials": row.num_trials,
        "cost": in_one_line(row.cost),
        "finding": in_one_line(row.finding),
    }
