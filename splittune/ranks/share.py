"""One rank's part of one global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from splittune.checks import checked_int
from splittune.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankShare:
    """What a sharded loader gives a rank for one optimizer step, and what weights need beside it.

    Worked: tuned for 8 samples in 2 micro-batches, shares 1 + 3, a last batch of 5 runs as 3 and 2
    samples. Rank 0 has ``sizes=(1, 0)`` and rank 1 ``sizes=(2, 2)``; both have
    ``micro_batch_sizes=(3, 2)`` and ``num_samples=5``. Rank 0's `batch` holds two samples: its own,
    and the stand-in for the second micro-batch.

    Raises:
        ConfigError: as many sizes as micro-batches are not given, a size is out of range, or the
            micro-batches do not sum to the samples.
    """

    batch: Any
    """This rank's samples of all micro-batches, in order, as the user's loader collates them. Where
    one of `sizes` is 0, one more follows at the end: the stand-in, a real sample of the same global
    batch that is run in every such micro-batch and counts nothing."""
    sizes: tuple[int, ...]
    """This rank's samples in each micro-batch, 0 for none; as many entries on every rank."""
    micro_batch_sizes: tuple[int, ...]
    """The samples of each micro-batch, of all ranks together."""
    num_samples: int
    """The samples of the global batch."""
    begins: str | None = None
    """Where an iteration begins with it, which epoch and batch that is: the same on every rank."""

    are_listed: bool | None = None
    """Whether lists in `batch` have an entry for each sample, where its sizes cannot tell."""

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.micro_batch_sizes):
            raise ConfigError(
                f"{len(self.sizes)} sizes for {len(self.micro_batch_sizes)} micro-batches: expected one for each, "
                "0 where the rank has no sample."
            )
        for number, (size, of_all) in enumerate(zip(self.sizes, self.micro_batch_sizes, strict=True)):
            checked_int(f"micro_batch_sizes[{number}]", of_all, at_least=1)
            if checked_int(f"sizes[{number}]", size, at_least=0) > of_all:
                raise ConfigError(f"sizes[{number}] is {size}: expected at most the micro-batch's {of_all} samples.")
        if sum(self.micro_batch_sizes) != self.num_samples:
            arithmetic = " + ".join(map(str, self.micro_batch_sizes)) or "nothing"
            raise ConfigError(
                f"micro_batch_sizes sum to {arithmetic} = {sum(self.micro_batch_sizes)}, but num_samples is "
                f"{self.num_samples}: expected the same."
            )

    def __iter__(self) -> NoReturn:
        raise self._is_no_batch("iterated or unpacked")

    def __getitem__(self, key: object) -> NoReturn:
        raise self._is_no_batch("indexed")

    def _is_no_batch(self, what: str) -> TypeError:
        return TypeError(
            f"a RankShare was {what}: it is this rank's part of a global batch of {self.num_samples} samples, and no "
            "batch itself. Expected config.micro_batches(share, model), which cuts it: for micro in "
            "config.micro_batches(batch, model): inputs, targets = micro.batch."
        )

    @property
    def has_stand_in(self) -> bool:
        """Whether the last sample of `batch` is the stand-in, which counts nothing."""
        return 0 in self.sizes
