"""What rank 0 has the ranks do, and what each answers: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from splittune.profiling.measurement import Measurement
from splittune.split import BatchSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Every rank runs its share by itself.

    Worked: shares (8, None, 8) have ranks 0 and 2 measure 8 samples, and rank 1 wait for them.
    """

    shares: tuple[int | None, ...]
    """Samples of each rank's micro-batch; None for a rank that has nothing to do."""
    accumulation_steps: int
    in_full: tuple[bool, ...]
    """For each rank, whether what could be played from a script is run whole."""
    scripts_hold: bool = True
    """False where some rank has found that nothing may be played."""

    @property
    def identity(self) -> dict[str, Any]:
        """What tells it from other orders, in JSON types."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSteps:
    """All ranks run synchronised steps of DistributedDataParallel, each with its share."""

    split: BatchSplit

    @property
    def identity(self) -> dict[str, Any]:
        """What tells it from other orders, in JSON types."""
        return {"whole_steps": asdict(self.split)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """All ranks make the group of synchronised steps, and time its all-reduce."""

    @property
    def identity(self) -> dict[str, Any]:
        """What tells it from other orders, in JSON types."""
        return {"connect": True}


Order = Connect | Probe | WholeSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """It is over: with rank 0's result, or its error (`worker.errors.describe_error`)."""

    result: Any = None
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of an order on one rank."""

    measurement: Measurement | None = None
    """None of a rank that had nothing to do, and of one with an error."""
    needs_values: str | None = None
    """Why its trials run on real tensors."""
    scripts_hold: bool = True
    all_reduce_s: float | None = None
    """Seconds of an all-reduce of all gradients, where that was asked for."""
    lost: str = ""
    """Why its synchronised steps cannot be gone on with; empty mostly."""
    error: Mapping[str, Any] | None = None
    """What was raised: an exception of the user's, say; None where a trial failed in a way that the search knows."""
