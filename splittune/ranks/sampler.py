"""One rank's indices of every global batch, drawn as one device draws them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

from splittune.errors import ConfigError
from splittune.ranks.draws import AgreedDraws
from splittune.split import BatchSplit, rank_part


class SameOrder(Sampler[Any]):
    """The entries of a sampler in the order that all ranks have in common.

    The sampler is iterated on every rank. What it draws from the generators that everybody shares
    comes from `draws`; what it draws from its own must be seeded alike by the user.

    Args:
        entries: the user's sampler or batch sampler: iterated anew at every ``iter()``.
    """

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries, self._draws, self._num_skipped = entries, AgreedDraws(0), 0

    def begin(self, draws: AgreedDraws, *, num_skipped: int = 0) -> None:
        """What the next ``iter()`` draws from, and how many entries it passes over.

        Those are drawn, and not loaded. `draws` has the same seed on every rank.
        """
        self._draws, self._num_skipped = draws, num_skipped

    def __iter__(self) -> Iterator[Any]:
        return islice(self._draws.iterate(self._entries), self._num_skipped, None)


class RankBatchSampler(SameOrder):
    """The indices that one rank loads of each global batch; see `rank_part`.

    Together the ranks load each batch of `batches` once, in its order, and as many batches each.
    Where the rank has no sample in a micro-batch its indices end with the stand-in.

    Worked: of the batches [[6, 1, 4, 0, 3, 7, 5, 2], [8, 9, 10, 11, 12]], tuned for 8 samples in 2
    micro-batches of 1 + 3, rank 0 yields [6, 3] and then [8, 8], rank 1 [1, 4, 0, 7, 5, 2] and then
    [9, 10, 11, 12].

    Args:
        batches: the indices of every global batch, a `torch.utils.data.BatchSampler` say.
        split: the micro-batches, and a share for every rank.
        rank: whose indices to give.
    """

    def __init__(self, batches: Iterable[Sequence[Any]], *, split: BatchSplit, rank: int) -> None:
        super().__init__(batches)
        self._split, self._rank = split, rank
        self.sizes: deque[int] = deque()
        """Of the latest ``iter()``: the samples of each global batch that it has given indices of.
        Workers are given theirs ahead of time: whoever gets what they loaded takes its size from
        the left."""

    def __iter__(self) -> Iterator[list[Any]]:
        self.sizes = deque()  # an iteration that was given up keeps its own
        return self._indices(enumerate(super().__iter__(), self._num_skipped), self.sizes)

    def _indices(self, batches: Iterator[tuple[int, Any]], sizes: deque[int]) -> Iterator[list[Any]]:
        for number, batch in batches:
            indices = list(batch)
            try:
                part = rank_part(len(indices), self._split, self._rank)
            except ConfigError as error:
                raise ConfigError(f"batch {number} of the batch sampler: {error}") from error
            sizes.append(len(indices))
            yield [indices[position] for position in part.positions_to_load]
