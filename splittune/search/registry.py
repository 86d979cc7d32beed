"""The samplers by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from optuna.samplers import BaseSampler, TPESampler

from splittune.errors import ConfigError
from splittune.search.coarse_to_fine import CoarseToFineSampler
from splittune.search.sampler import CandidateSampler, OrderSampler, RandomSampler

if TYPE_CHECKING:
    from splittune.search.candidates import Candidates

DEFAULT_SAMPLER = "coarse-to-fine"

_SAMPLERS: dict[str, Callable[[Candidates, int, int], BaseSampler]] = {
    DEFAULT_SAMPLER: lambda candidates, _seed, _num_finished: CoarseToFineSampler(candidates),
    "grid": lambda candidates, _seed, _num_finished: OrderSampler(candidates),
    "random": lambda candidates, seed, _num_finished: RandomSampler(candidates, seed=seed),
    # Seeded anew for each trial, so that a resumed search draws what an uninterrupted one would. constant_liar would
    # let the unfinished trials of a killed run sway it.
    "tpe": lambda _candidates, seed, num_finished: TPESampler(
        seed=random.Random(f"{seed} {num_finished}").getrandbits(32), constant_liar=False
    ),
}

SAMPLER_NAMES = tuple(_SAMPLERS)


def make_inner(sampler: str | BaseSampler | None, candidates: Candidates, seed: int) -> Callable[[int], BaseSampler]:
    """From the number of finished trials to the sampler that proposes the next; an instance stays the same.

    Raises:
        ConfigError: no sampler has this name, or it is neither a name nor a sampler, or chooses among other candidates.
    """
    if isinstance(sampler, CandidateSampler) and sampler.candidates.space != candidates.space:
        raise ConfigError(
            f"the sampler chooses among the candidates of {sampler.candidates.space}, but the search is over "
            f"{candidates.space}: make it with Candidates(space) of the same space."
        )
    if isinstance(sampler, BaseSampler):
        return lambda _num_finished: sampler
    name = DEFAULT_SAMPLER if sampler is None else sampler
    if name not in SAMPLER_NAMES:
        known = ", ".join(map(repr, SAMPLER_NAMES))
        raise ConfigError(f"sampler is {sampler!r}: expected one of {known}, or an instance of an Optuna sampler.")
    make = _SAMPLERS[name]
    return lambda num_finished: make(candidates, seed, num_finished)
