"""What the caller says of a search, and what that comes to for a job: the legal splits, the headroom demanded."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Literal, get_args

from splittune.checks import check_limits, checked_int
from splittune.config.data import Strategy
from splittune.errors import ConfigError
from splittune.profiling.measurement import LossPlacement
from splittune.runners.base import DeviceView, JobFacts
from splittune.search import DEFAULT_SAMPLER, SAMPLER_NAMES
from splittune.search.headroom import headroom_demands
from splittune.split import SplitSpace
from splittune.split.space import Shares

logger = logging.getLogger(__name__)

# The guided search ends by itself after 7 trials in the median, and in 19 of 20 searches after 15 at most
# (benchmarks/README.md): a higher limit costs the others nothing.
DEFAULT_MAX_TRIALS = 32
# A choice. Allocation patterns shift a little over days of training; what this keeps free is cheap
# beside a run that dies.
HEADROOM_FRACTION = 0.05
# A choice. Statistics over fewer samples than this are mostly noise, and over a single one
# BatchNorm refuses to train.
MIN_BATCH_NORM_SHARD = 4

# A choice. Cards are alike where neither their memory nor what other programs hold of it differs by
# more than this part.
ALIKE_FRACTION = 0.05

LossPlacements = Literal["output", "replica", "either"]
SharesChoice = Literal["auto", "gpu0", "each"]
StrategyChoice = Literal["dp", "ddp", "either"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What the caller says of the search, checked, in one piece; `autotune` documents each.

    Raises:
        ConfigError: a value of the wrong type or range.
    """

    min_headroom_bytes: int | Sequence[int] | None = None
    max_trials: int = DEFAULT_MAX_TRIALS
    timeout_s: float | None = None
    storage: str | os.PathLike[str] | None = None
    loss_placement: LossPlacements = "output"
    shares: SharesChoice = "auto"
    sampler: str = DEFAULT_SAMPLER
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checked_int("seed", self.seed, at_least=0))
        check_limits(self.max_trials, self.timeout_s)
        if self.shares not in get_args(SharesChoice):
            raise ConfigError(f"shares is {self.shares!r}: expected one of {get_args(SharesChoice)}.")
        if self.sampler not in SAMPLER_NAMES:
            raise ConfigError(f"sampler is {self.sampler!r}: expected one of {SAMPLER_NAMES}.")
        if self.loss_placement not in get_args(LossPlacements):
            raise ConfigError(f"loss_placement is {self.loss_placement!r}: expected one of {get_args(LossPlacements)}.")

    @property
    def placements(self) -> tuple[LossPlacement, ...]:
        """The placements to search, each with its part of the trials and of the time."""
        return ("output", "replica") if self.loss_placement == "either" else (self.loss_placement,)

    @property
    def max_trials_each(self) -> int:
        """Trials for each placement: all of them for one, half for each of two, at least one."""
        return self.max_trials if len(self.placements) == 1 else max(1, self.max_trials // 2)

    @property
    def timeout_each_s(self) -> float | None:
        """Seconds for each placement, None for no limit."""
        return self.timeout_s if len(self.placements) == 1 or self.timeout_s is None else self.timeout_s / 2


def strategies_of(choice: object) -> tuple[Strategy, ...]:
    """The strategies to plan: "either" is both.

    Raises:
        ConfigError: it is none; the message names the nearest.
    """
    known = get_args(StrategyChoice)
    if choice not in known:
        near = difflib.get_close_matches(str(choice).lower(), known, n=2, cutoff=0.4)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ConfigError(f"strategy is {short_repr(choice)}: expected one of {known}.{hint}")
    return ("dp", "ddp") if choice == "either" else ("dp",) if choice == "dp" else ("ddp",)


def space_for(job: JobFacts, shares: SharesChoice) -> SplitSpace:
    """The legal splits of a job: its global batch over its cards, with BatchNorm's least share on each.

    Worked: 64 samples on four like cards give GPU 0 any share and the others the rest evenly; with
    BatchNorm every card gets at least min(4, 64 // 4) = 4 samples.
    """
    loader_batch_size, num_devices = job.loader_batch_size, len(job.cards.devices)
    global_batch_size = loader_batch_size if job.global_batch_size is None else job.global_batch_size
    if global_batch_size != loader_batch_size:
        logger.warning(
            "global_batch_size is %d and the loader gives batches of %d: trials are made of its samples all the same, "
            "but training needs a loader of batch size %d.",
            global_batch_size,
            loader_batch_size,
            global_batch_size,
        )
    min_shard_size = 0
    if job.has_batch_norm:
        min_shard_size = min(MIN_BATCH_NORM_SHARD, global_batch_size // num_devices)
        logger.info("the model has BatchNorm: every device gets at least %d samples.", min_shard_size)
    return SplitSpace(
        global_batch_size=global_batch_size,
        num_devices=num_devices,
        shares=_shares_for(job.cards) if shares == "auto" else shares,
        min_shard_size=min_shard_size,
    )


def _shares_for(cards: DeviceView) -> Shares:
    """A share for each card where the cards after GPU 0 differ, or are of another kind than it."""
    with cards.metered():
        memories = cards.memory()
    names = {device.name for device in cards.devices}
    others = memories[1:]
    tolerance = ALIKE_FRACTION * min(memory.total_bytes for memory in memories)
    are_alike = all(
        max(amounts) - min(amounts) <= tolerance
        for amounts in ([m.total_bytes for m in memories], [m.outside_bytes for m in others] or [0])
    )
    return "gpu0" if len(names) == 1 and are_alike else "each"


def headroom_for(cards: DeviceView, min_headroom_bytes: int | Sequence[int] | None) -> tuple[int, ...]:
    """The bytes that each card must keep free at its peak: those asked for, else 5 % of what others leave.

    Worked: a card of 24 GiB of which other programs hold 4 GiB must keep 0.05 x 20 = 1 GiB.

    Raises:
        ConfigError: as many numbers as there are devices were expected, or a number is none.
    """
    if min_headroom_bytes is None:
        with cards.metered():
            return tuple(int(HEADROOM_FRACTION * (m.total_bytes - m.outside_bytes)) for m in cards.memory())
    return headroom_demands(min_headroom_bytes, len(cards.devices))
