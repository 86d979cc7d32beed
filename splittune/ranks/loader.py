"""A loader of one rank's part of every global batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from splittune.checks import checked_int
from splittune.errors import ConfigError
from splittune.ranks.collate import Collated, PartOf, PartOfBatch, PartOfSamples, Telling
from splittune.ranks.draws import AgreedDraws
from splittune.ranks.sampler import RankBatchSampler, SameOrder
from splittune.ranks.shardable import check_shardable, reads_whole_batches
from splittune.ranks.share import RankShare
from splittune.ranks.sources import OrderSources
from splittune.split import BatchSplit, rank_part


class ShardedLoader:
    """Yields a `RankShare` for every batch of `loader`: this rank's samples of it.

    The global batches are those that `loader` gives on one device, in the same order: each sample
    once an epoch, on one rank. `loader` is only read: its samplers are iterated and its data set is
    loaded from, by a `DataLoader` of the same options.

    The order, on every rank:

    - A sampler with a generator of its own, ``DataLoader(shuffle=True, generator=g)`` say, gives
      what it would on one device, epoch after epoch; `g` is to be seeded alike on all ranks.
    - One that draws from the generators that everybody shares, as ``shuffle=True`` without a
      generator does, gives in epoch e what it would after ``torch.manual_seed(seed + e)``,
      ``random.seed(seed + e)`` and ``numpy.random.seed(seed + e)``. The caller's own random numbers
      are not touched.

    Each ``iter()`` begins the next epoch. `set_epoch` sets it, and tells the user's samplers that
    want to know. A ``collate_fn`` that pads to the longest sample pads to that of the share. Where
    workers draw random numbers, those of each rank are seeded differently.

    Of an `IterableDataset`, or with ``batch_size=None``, every rank reads all and keeps its part;
    its workers are seeded alike. A stream must give all ranks the same samples: one that picks some
    by its rank is shared out already. Batches that come whole are cut as `select_batch` does.

    Worked: 13 samples in batches of 8, tuned as 2 micro-batches of 1 + 3. Rank 0 gets 2 samples of
    the first batch, and of the second, which has 5, one and a stand-in; rank 1 gets 6, then 4.

    Args:
        loader: as one device would use it, its batch size that of the whole global batch.
        split: the micro-batches, and a share for every rank.
        rank: this process's.
        num_ranks: as many as `split` has shards.
        seed: the same on every rank.

    Raises:
        ConfigError: a loader that cannot be shared out (see `check_shardable`), or another number
            of ranks than shards.
    """

    def __init__(self, loader: DataLoader[Any], split: BatchSplit, *, rank: int, num_ranks: int, seed: int = 0) -> None:
        given: object = loader
        if isinstance(given, ShardedLoader):
            raise ConfigError("loader is a ShardedLoader, shared out already: expected the loader that it was made of.")
        check_shardable(loader, split)
        if checked_int("num_ranks", num_ranks, at_least=1) != split.num_devices:
            raise ConfigError(
                f"{num_ranks} ranks for {split}, which has {split.num_devices} shards: expected one rank for each. "
                f"Start {split.num_devices} processes, or tune for {num_ranks}."
            )
        rank_part(1, split, rank)  # refuses a rank out of range
        self._loader, self._split, self._rank = loader, split, rank
        self._seed = checked_int("seed", seed, at_least=0)
        self._epoch = self._step = self._iteration = 0
        self._is_begun = self._are_workers_seeded = False
        self._epoch_told: int | None = None
        self._at_begin: dict[str, Any] = {}
        self._worker_seeds = torch.Generator()
        self._reads_all = reads_whole_batches(loader)
        self._sources = OrderSources(loader)
        self._order, self._inner = self._rank_loader()
        if self._reads_all and num_ranks > 1:
            what = "an IterableDataset" if isinstance(loader.dataset, IterableDataset) else "a loader of whole batches"
            warnings.warn(
                f"{what} is read in full by each of the {num_ranks} ranks, which keeps its part: loading a batch takes "
                f"each rank what it takes one device, and {num_ranks} times that of the disk they share. With a map-"
                "style Dataset, batched by its loader, each rank loads only its own samples.",
                stacklevel=2,
            )

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def batch_size(self) -> int:
        """The samples of a global batch, on all ranks together."""
        return self._split.global_batch_size

    @property
    def drop_last(self) -> bool:
        return bool(getattr(self._loader.batch_sampler, "drop_last", self._loader.drop_last))

    @property
    def num_workers(self) -> int:
        return self._loader.num_workers

    @property
    def sampler(self) -> Any:
        """The user's."""
        return self._loader.sampler

    @property
    def batch_sampler(self) -> Any:
        """The user's, of global batches; None where the data set gives whole batches."""
        return self._loader.batch_sampler

    def __len__(self) -> int:
        """Global batches in an epoch, on this rank as on every other.

        Raises:
            TypeError: the data set, or the sampler, does not know.
        """
        return len(self._loader)

    def __iter__(self) -> Iterator[RankShare]:
        if self._is_begun:  # given up before its end: as on one device, what follows is the next epoch
            self._epoch, self._step = self._epoch + 1, 0
        self._is_begun = True
        self._iteration += 1
        self._at_begin = self._order_now()
        draws = AgreedDraws(self._seed + self._epoch, torch_only=self._sources.are_torchs and not self._reads_all)
        self._seed_workers(draws)
        if self._order is not None:
            self._order.begin(draws, num_skipped=self._step)
        if not self._reads_all:
            return self._shares(self._sized(iter(self._inner)), self._iteration, num_to_read=0)
        with draws:
            found = iter(self._inner)
        num_to_read = self._step if self._order is None else 0
        return self._shares(draws.iterate(found), self._iteration, num_to_read=num_to_read)

    def set_epoch(self, epoch: int) -> None:
        """The next ``iter()`` is epoch `epoch`, from its first batch.

        Where a state of that epoch was loaded, it is what is left of it. Passed on to the user's
        sampler, batch sampler and data set, where they have `set_epoch`.
        """
        epoch = checked_int("epoch", epoch, at_least=0)
        if self._is_begun or epoch != self._epoch:
            self._step = 0
        self._epoch, self._is_begun = epoch, False
        self._iteration += 1  # one that is under way counts no more
        self._epoch_told = epoch
        self._sources.tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: the same on all ranks, and good for any number of them.

        Global batches are counted as they are yielded, whatever workers have loaded ahead. Saved in
        the loop, after a batch was trained on, training goes on with the next one. What of a
        sampler is neither in a generator nor in a ``state_dict`` of its own is not kept.
        """
        return {
            "epoch": self._epoch,
            "step": self._step,
            "seed": self._seed,
            "global_batch_size": self._split.global_batch_size,
            "samples": _length(self.dataset),
            "epoch_told": self._epoch_told,
            **(self._at_begin if self._is_begun else self._order_now()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: the next ``iter()`` yields the rest of that epoch.

        Indices are skipped, not loaded; of a stream, what is skipped is read.

        Raises:
            ConfigError: no state of a loader, or one of batches of another size or of other
                samplers; nothing is changed.
        """
        self._check_state(state)
        self._sources.put_back(state["order"])
        self._epoch_told = state["epoch_told"]
        if self._epoch_told is not None:
            self._sources.tell(self._epoch_told)
        self._epoch, self._step, self._seed = state["epoch"], state["step"], state["seed"]
        self._are_workers_seeded, self._is_begun = state["are_workers_seeded"], False
        self._iteration += 1

    def facts(self) -> dict[str, str]:
        """What must be the same on every rank, in words: to be compared before the first step.

        Worked: ``{"samples in the data set": "13", "global batch size": "8", ...}``. The last is a
        digest of the states of the samplers' own generators: it differs where those were seeded
        differently.
        """
        sampler = self._loader.batch_sampler if self._loader.batch_sampler is not None else self._loader.sampler
        draws_from = getattr(sampler, "sampler", sampler)
        return {
            "samples in the data set": _length(self.dataset),
            "global batch size": str(self.batch_size),
            "global batches in an epoch": _length(self),
            "drop_last": str(self.drop_last),
            "sampler": type(draws_from).__name__,
            **({"num_workers": str(self.num_workers)} if self._reads_all else {}),
            "seed": str(self._seed),
            "epoch and step": f"{self._epoch} and {self._step}",
            "state of the samplers": self._sources.digest(),
        }

    def _rank_loader(self) -> tuple[SameOrder | None, DataLoader[Any]]:
        """A loader like the user's that gives this rank's part, and what decides its order."""
        loader, split, rank = self._loader, self._split, self._rank
        options: dict[str, Any] = {
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "pin_memory_device": loader.pin_memory_device,
            "generator": self._worker_seeds,
            "in_order": True,  # all ranks must run the same batch in the same step
        }
        if not self._reads_all:
            assert loader.batch_sampler is not None  # else it reads all
            order = RankBatchSampler(loader.batch_sampler, split=split, rank=rank)
            return order, DataLoader(
                loader.dataset, batch_sampler=order, collate_fn=Telling(loader.collate_fn), **options
            )
        if loader.batch_size is not None:
            take = PartOfSamples(loader.collate_fn, split, rank)
            options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            return None, DataLoader(loader.dataset, collate_fn=take, **options)
        options |= {"batch_size": None, "collate_fn": PartOfBatch(loader.collate_fn, split, rank)}
        if isinstance(loader.dataset, IterableDataset):
            return None, DataLoader(loader.dataset, **options)
        same = SameOrder(loader.sampler)
        return same, DataLoader(loader.dataset, sampler=same, **options)

    def _seed_workers(self, draws: AgreedDraws) -> None:
        """Draw the workers' seed where one device draws it: what is drawn next is then the same.

        A loader draws it from the generator that its sampler may share: at every ``iter()``, unless
        its workers stay.
        """
        loader = self._loader
        rank = 0 if self._reads_all else self._rank
        self._worker_seeds.manual_seed(self._seed + self._epoch + rank)
        if self._are_workers_seeded and loader.persistent_workers:
            return
        with draws:
            before = loader.generator.get_state() if loader.generator is not None else torch.get_rng_state()
            drawn = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
        if rank:
            self._worker_seeds.manual_seed(drawn + rank)
        else:
            self._worker_seeds.set_state(before)  # rank 0's are one device's
        self._are_workers_seeded = True

    def _sized(self, batches: Iterator[Any]) -> Iterator[PartOf]:
        """The batches that were loaded, with the size of the global one."""
        assert isinstance(self._order, RankBatchSampler)
        sizes = self._order.sizes
        return (PartOf(sizes.popleft(), batch) for batch in batches)

    def _shares(self, parts: Iterator[PartOf], iteration: int, *, num_to_read: int) -> Iterator[RankShare]:
        begins: str | None = f"epoch {self._epoch}, batch {self._step}"
        for num_samples, batch in islice(parts, num_to_read, None):
            part = rank_part(num_samples, self._split, self._rank)
            if iteration == self._iteration:
                self._step += 1
            collated = batch if isinstance(batch, Collated) else Collated(batch, None)
            yield RankShare(
                batch=collated.batch,
                are_listed=collated.are_listed,
                sizes=part.sizes,
                micro_batch_sizes=part.micro_batch_sizes,
                num_samples=num_samples,
                begins=begins,
            )
            begins = None
        if iteration == self._iteration:
            self._epoch, self._step, self._is_begun = self._epoch + 1, 0, False

    def _order_now(self) -> dict[str, Any]:
        """What an epoch that begins now depends on."""
        return {"order": self._sources.captured(), "are_workers_seeded": self._are_workers_seeded}

    def _check_state(self, state: Any) -> None:
        expected = self.state_dict()
        if not isinstance(state, dict) or state.keys() != expected.keys():
            got = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
            raise ConfigError(
                f"no state of a sharded loader: got {got}, expected {sorted(expected)}. Pass what "
                "its state_dict() gave."
            )
        for name in ("epoch", "step", "seed"):
            checked_int(f"the state's {name}", state[name], at_least=0)
        if state["global_batch_size"] != self.batch_size:
            raise ConfigError(
                f"a loader's state in batches of {state['global_batch_size']} samples, after {state['step']} of them: "
                f"expected batches of {self.batch_size}. Go on with the batch size it was saved with, or begin anew."
            )
        if state["step"] and state["samples"] != expected["samples"]:
            raise ConfigError(
                f"a loader's state in the middle of an epoch of {state['samples']} samples, and the data set has "
                f"{expected['samples']}: expected as many, for the rest of that epoch is another one now. Go on with "
                "the data set it was saved with, or begin anew."
            )


def _length(sized: Any) -> str:
    try:
        return str(len(sized))
    except TypeError:
        return "unknown"
