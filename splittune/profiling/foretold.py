"""What a plan for the cards of a search said of the splits that were measured on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splittune.profiling.measurement import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """Splits as virtual cards of the same kind have them: memory accounted, time modelled.

    Worked: the best split was measured at 0.401 s a step; ``foretold.of(best).step_time_s`` is 0.412, 3 % more.
    """

    planned: tuple[Measurement, ...] = ()
    """One for each split that was foretold; one that would not fit has no times, and says what is lacking."""
    why: str = ""
    """Why a split, or all of them, was not foretold, as a clause; empty where none is missing."""

    def of(self, measured: Measurement) -> Measurement | None:
        """What was foretold of a measured split, loss placement included; None where nothing was."""
        key = (measured.split, measured.loss_placement)
        return next((each for each in self.planned if (each.split, each.loss_placement) == key), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads them back equal."""
        return {"planned": [each.to_dict() for each in self.planned], "why": self.why}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Foretold:
        return cls(planned=tuple(Measurement.from_dict(each) for each in data["planned"]), why=data["why"])
