"""The samplers by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

from splittune.errors import ConfigError
from splittune.search.samplers.filtered import FilteredSampler
from splittune.search.samplers.grid import GridSampler
from splittune.search.samplers.guided import GuidedSampler
from splittune.split import SplitSpace

DEFAULT_SAMPLER = "guided"

# Seeded anew for each trial, so that a resumed search draws what an uninterrupted one would.
# constant_liar would let the unfinished trials of a killed run sway it.
_PLAIN: dict[str, Callable[[SplitSpace, int], BaseSampler]] = {
    "grid": lambda space, _seed: GridSampler(space),
    "random": lambda _space, seed: RandomSampler(seed=seed),
    "tpe": lambda _space, seed: TPESampler(seed=seed, constant_liar=False),
    "gp": lambda _space, seed: GPSampler(seed=seed),
}

SAMPLER_NAMES = (DEFAULT_SAMPLER, *_PLAIN)


def make_sampler(
    sampler: str | BaseSampler | None, space: SplitSpace, seed: int, min_headroom_bytes: Sequence[int]
) -> GuidedSampler | FilteredSampler:
    """The sampler of a search: guided, or any other behind a filter; an instance stays the same.

    Raises:
        ConfigError: no sampler has this name, or it is neither a name nor a sampler, or is for
            another space.
    """
    if isinstance(sampler, GuidedSampler):
        if sampler.space != space:
            raise ConfigError(
                f"the sampler chooses from {sampler.space}, but the search is over {space}: make it for the same space."
            )
        return sampler
    if isinstance(sampler, BaseSampler):
        return FilteredSampler(space, lambda _num_finished: sampler)
    name = DEFAULT_SAMPLER if sampler is None else sampler
    if name not in SAMPLER_NAMES:
        known = ", ".join(map(repr, SAMPLER_NAMES))
        raise ConfigError(f"sampler is {sampler!r}: expected one of {known}, or an instance of an Optuna sampler.")
    if name == DEFAULT_SAMPLER:
        return GuidedSampler(space, min_headroom_bytes=min_headroom_bytes)
    make = _PLAIN[name]

    def seeded(num_finished: int) -> BaseSampler:
        return make(space, random.Random(f"{seed} {num_finished}").getrandbits(32))

    return FilteredSampler(space, seeded)
