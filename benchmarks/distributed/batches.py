"""Every sample once, in the batches of one device: random cases of a sharded loader.

A case has its data set, batch size, accumulation steps, shares, sampler, number of ranks, a step at
which it is broken off, and a number of ranks to go on with. One device's batches are those of
torch's own DataLoader; how a batch is to be dealt out is written here again, apart from what is
judged.

`python -m benchmarks.distributed.batches`; arguments: the number of cases, the seed.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from splittune.ranks import RankShare, ShardedLoader
from splittune.split import BatchSplit

NUM_CASES = 3000
SEED = 0
NUM_EPOCHS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train that is broken off and gone on with."""

    num_samples: int
    batch_size: int
    accumulation_steps: int
    shard_sizes: tuple[int, ...]
    """For each rank at first."""
    later_shard_sizes: tuple[int, ...]
    """For each rank after it was resumed."""
    sampler: str
    drop_last: bool
    seed: int
    """Of the user's own generators."""
    stop_epoch: int
    stop_step: int
    """Batches of that epoch after which the state is saved."""

    def split(self, shard_sizes: tuple[int, ...]) -> BatchSplit:
        return BatchSplit(
            global_batch_size=self.batch_size, accumulation_steps=self.accumulation_steps, shard_sizes=shard_sizes
        )


@dataclass(kw_only=True)
class Judged:
    """What the cases came to."""

    num_cases: int = 0
    num_batches: int = 0
    num_resumed: int = 0
    """Cases broken off in the middle of an epoch."""
    num_idle: int = 0
    """Micro-batches in which a rank had no sample."""
    of_sampler: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


# -- how a batch is dealt out, written again


def expected_sizes(num_samples: int, case: Case) -> list[int]:
    """A full batch in the tuned micro-batches, a short one in the fewest that hold it."""
    num_parts = case.accumulation_steps
    if num_samples < case.batch_size:
        largest = -(-case.batch_size // case.accumulation_steps)
        num_parts = next(parts for parts in range(1, num_samples + 1) if parts * largest >= num_samples)
    sizes = [0] * num_parts
    for sample in range(num_samples):
        sizes[sample % num_parts] += 1
    return sizes


def expected_shards(micro_batch_size: int, tuned: Sequence[int]) -> list[int]:
    """In proportion to the tuned shares, the largest remainders rounded up, the last of equals.

    Where that leaves a single sample to a rank, though no tuned share is one: on the most ranks that can have two.
    """
    shards = in_proportion(micro_batch_size, tuned)
    if 1 not in shards or 1 in tuned:
        return shards
    largest_first = sorted(range(len(tuned)), key=lambda rank: (tuned[rank], rank), reverse=True)
    for count in range(sum(map(bool, tuned)), 0, -1):
        beyond = [tuned[rank] - 2 if rank in largest_first[:count] else 0 for rank in range(len(tuned))]
        if 0 <= micro_batch_size - 2 * count <= sum(beyond):
            extra = in_proportion(micro_batch_size - 2 * count, beyond) if sum(beyond) else beyond
            return [2 + extra[rank] if rank in largest_first[:count] else 0 for rank in range(len(tuned))]
    return shards


def in_proportion(micro_batch_size: int, tuned: Sequence[int]) -> list[int]:
    """By largest remainders, the last of equals first."""
    quotas = [Fraction(micro_batch_size * share, sum(tuned)) for share in tuned]
    shards = [int(quota) for quota in quotas]
    order = sorted(range(len(tuned)), key=lambda rank: (quotas[rank] % 1, rank), reverse=True)
    for rank in order[: micro_batch_size - sum(shards)]:
        shards[rank] += 1
    return shards


def expected_parts(batch: Sequence[int], case: Case, tuned: Sequence[int]) -> tuple[list[int], list[list[list[int]]]]:
    """The micro-batches' sizes, and for each rank its samples of each."""
    sizes = expected_sizes(len(batch), case)
    rest = list(batch)
    parts: list[list[list[int]]] = [[] for _ in tuned]
    for size in sizes:
        for rank, shard in enumerate(expected_shards(size, tuned)):
            parts[rank].append(rest[:shard])
            rest = rest[shard:]
    return sizes, parts


# -- loaders of every kind


class Shuffled(Sampler[int]):
    """A user's own sampler: Python's generator, which everybody shares."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._num_samples))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self._num_samples


class OfUnlikeSizes(Sampler[list[int]]):
    """A user's own batch sampler: batches of any size up to the largest, drawn one by one."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self._num_samples, self._batch_size = num_samples, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        while start < self._num_samples:
            stop = min(start + int(torch.randint(1, self._batch_size + 1, ())), self._num_samples)
            yield list(range(start, stop))
            start = stop


class Stream(IterableDataset[int]):
    """Numbers that are shuffled in a small buffer, by a generator of its own."""

    def __init__(self, num_samples: int, generator: torch.Generator) -> None:
        self._num_samples, self.generator = num_samples, generator

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for sample in range(self._num_samples):
            buffer.append(sample)
            if len(buffer) == 4:
                yield buffer.pop(int(torch.randint(4, (), generator=self.generator)))
        yield from buffer


def whole_batches(case: Case) -> list[torch.Tensor]:
    """A data set of batches; it drops a short one itself, for a loader of whole batches cannot."""
    batches = list(torch.arange(case.num_samples).split(case.batch_size))
    return batches[:-1] if case.drop_last and len(batches[-1]) < case.batch_size else batches


def loader_of(case: Case, seed: int) -> DataLoader[Any]:
    """As a user would build it, generators seeded with `seed`."""
    data, generator = list(range(case.num_samples)), torch.Generator().manual_seed(seed)
    batched = partial(DataLoader, batch_size=case.batch_size, drop_last=case.drop_last)
    makers: dict[str, Callable[[], DataLoader[Any]]] = {
        "sequential": lambda: batched(data),
        "shuffled, own generator": lambda: batched(data, shuffle=True, generator=generator),
        "shuffled, shared generator": lambda: batched(data, shuffle=True),
        "random with replacement": lambda: batched(
            data, sampler=RandomSampler(data, replacement=True, num_samples=case.num_samples, generator=generator)
        ),
        "weighted": lambda: batched(
            data, sampler=WeightedRandomSampler([1 + n for n in data], case.num_samples, generator=generator)
        ),
        "subset": lambda: batched(data, sampler=SubsetRandomSampler(data[::2] or data)),
        "user's sampler": lambda: batched(data, sampler=Shuffled(case.num_samples)),
        "batch sampler": lambda: DataLoader(
            data, batch_sampler=BatchSampler(SequentialSampler(data), case.batch_size, case.drop_last)
        ),
        "user's batch sampler": lambda: DataLoader(
            data, batch_sampler=OfUnlikeSizes(case.num_samples, case.batch_size)
        ),
        "stream": lambda: batched(Stream(case.num_samples, generator)),
        "whole batches": lambda: DataLoader(whole_batches(case), batch_size=None, shuffle=True, generator=generator),
    }
    return makers[case.sampler]()


SAMPLERS = (
    "sequential",
    "shuffled, own generator",
    "shuffled, shared generator",
    "random with replacement",
    "weighted",
    "subset",
    "user's sampler",
    "batch sampler",
    "user's batch sampler",
    "stream",
    "whole batches",
)
# They draw with replacement: a sample may come twice, on one device as on many.
REPEATING = ("random with replacement", "weighted")
# An epoch of theirs has not every sample.
PARTIAL = ("subset",)


def one_device(case: Case, seed: int) -> list[list[list[int]]]:
    """The batches of each epoch, from torch's loader alone."""
    loader, epochs = loader_of(case, case.seed), []
    for epoch in range(NUM_EPOCHS):
        seed_shared(seed + epoch)
        epochs.append([batch.tolist() for batch in loader])
    return epochs


def seed_shared(seed: int) -> None:
    """Seed the generators that everybody shares.

    ``torch.manual_seed`` would keep a note for the cards, each time.
    """
    torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
    random.seed(seed)


# -- judging


def draw_case(draws: random.Random) -> Case:
    """Up to 30 samples in batches of up to 12, on up to 5 ranks: small, so that edges are met."""
    num_samples, batch_size = draws.randint(1, 30), draws.randint(1, 12)
    accumulation_steps = draws.randint(1, batch_size)
    largest = -(-batch_size // accumulation_steps)
    num_ranks, num_later = draws.randint(1, 5), draws.randint(1, 5)
    num_steps = -(-num_samples // batch_size)
    sampler = draws.choice(SAMPLERS)
    if sampler == "whole batches" and num_samples < batch_size:
        num_samples = batch_size  # a loader of nothing cannot shuffle
    return Case(
        num_samples=num_samples,
        batch_size=batch_size,
        accumulation_steps=accumulation_steps,
        shard_sizes=draw_shards(draws, largest, num_ranks),
        later_shard_sizes=draw_shards(draws, largest, num_later),
        sampler=sampler,
        drop_last=draws.random() < 0.3,
        seed=draws.randrange(2**31),
        stop_epoch=draws.randrange(NUM_EPOCHS),
        stop_step=draws.randint(0, num_steps),
    )


def draw_shards(draws: random.Random, total: int, num_ranks: int) -> tuple[int, ...]:
    """Any shares, 0 too: samples that fall to ranks one by one, by weights that are far apart."""
    weights = [draws.random() ** 3 for _ in range(num_ranks)]
    fallen = Counter(draws.choices(range(num_ranks), weights, k=total))
    return tuple(fallen[rank] for rank in range(num_ranks))


def complaint_about(case: Case, judged: Judged) -> str | None:
    """What is wrong with the case's batches; None where all is as on one device."""
    seed = case.seed // 2
    epochs = one_device(case, seed)
    if case.sampler not in REPEATING + PARTIAL and not case.drop_last:
        for batches in epochs:
            if sorted(sample for batch in batches for sample in batch) != list(range(case.num_samples)):
                return "one device does not see every sample once"
    before = sharded(case, case.shard_sizes, seed, user_seed=case.seed)
    after = sharded(case, case.later_shard_sizes, seed + 1, user_seed=case.seed + 1)
    for epoch in range(case.stop_epoch + 1):
        stop = case.stop_step if epoch == case.stop_epoch else None
        found = [taken(loader, stop, rank) for rank, loader in enumerate(before)]
        complaint = complaint_about_epoch(case, case.shard_sizes, found, epochs[epoch][:stop], judged)
        if complaint:
            return f"epoch {epoch}: {complaint}"
    states = [loader.state_dict() for loader in before]
    if any(str(other) != str(states[0]) for other in states):
        return "the ranks' states differ"
    for loader in after:
        loader.load_state_dict(states[0])
    ended = case.stop_step > len(epochs[case.stop_epoch])  # then its iteration came to an end
    first, step = (case.stop_epoch + 1, 0) if ended else (case.stop_epoch, case.stop_step)
    judged.num_resumed += 0 < step < len(epochs[case.stop_epoch])
    for epoch in range(first, NUM_EPOCHS):
        rest = epochs[epoch][step if epoch == first else 0 :]
        found = [taken(loader, None, rank) for rank, loader in enumerate(after)]
        complaint = complaint_about_epoch(case, case.later_shard_sizes, found, rest, judged)
        if complaint:
            return f"resumed at epoch {first}, step {step}; epoch {epoch}: {complaint}"
    return None


def sharded(case: Case, shard_sizes: tuple[int, ...], seed: int, *, user_seed: int) -> list[ShardedLoader]:
    """One for each rank, of a loader of its own, as every process builds one."""
    num_ranks, split = len(shard_sizes), case.split(shard_sizes)
    return [
        ShardedLoader(loader_of(case, user_seed), split, rank=rank, num_ranks=num_ranks, seed=seed)
        for rank in range(num_ranks)
    ]


def taken(loader: ShardedLoader, stop: int | None, rank: int) -> list[RankShare]:
    """Its shares up to `stop`; the process has drawn other numbers than those of other ranks."""
    seed_shared(1000 + rank)
    return list(islice(iter(loader), stop))


def complaint_about_epoch(
    case: Case, tuned: tuple[int, ...], found: list[list[RankShare]], batches: list[list[int]], judged: Judged
) -> str | None:
    """What is wrong with the shares that each rank found of these batches."""
    if [len(shares) for shares in found] != [len(batches)] * len(tuned):
        return f"{[len(shares) for shares in found]} steps on the ranks, {len(batches)} on one device"
    for step, batch in enumerate(batches):
        sizes, parts = expected_parts(batch, case, tuned)
        judged.num_batches += 1
        for rank, own in enumerate(parts):
            share = found[rank][step]
            expected = [sample for part in own for sample in part]
            num_own = [len(part) for part in own]
            is_idle = 0 in num_own
            judged.num_idle += num_own.count(0)
            got = share.batch.tolist()
            if (list(share.sizes), list(share.micro_batch_sizes), share.num_samples) != (num_own, sizes, len(batch)):
                return f"step {step}, rank {rank}: {share}, expected {num_own} of {sizes} of {len(batch)}"
            if got[: len(expected)] != expected or len(got) != len(expected) + is_idle:
                return f"step {step}, rank {rank}: samples {got}, expected {expected}"
            if is_idle and got[-1] not in batch:
                return f"step {step}, rank {rank}: sample {got[-1]} stands in, and is not of the batch {batch}"
    return None


def judge(num_cases: int = NUM_CASES, seed: int = SEED) -> Judged:
    """So many random cases; the global random numbers are left as found."""
    draws, judged = random.Random(seed), Judged()
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is read in full by each", category=UserWarning)
            for _ in range(num_cases):
                case = draw_case(draws)
                complaint = complaint_about(case, judged)
                judged.num_cases += 1
                judged.of_sampler[case.sampler] += 1
                if complaint:
                    judged.failures.append(f"{case}: {complaint}")
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
    return judged


def main(arguments: Sequence[str] = ()) -> int:
    """Print what the cases came to; 0 where none failed."""
    num_cases, seed = [*map(int, arguments), *(NUM_CASES, SEED)[len(arguments) :]]
    judged = judge(num_cases, seed)
    print(
        f"{judged.num_cases} random cases (seed {seed}), {judged.num_resumed} resumed in the middle of an epoch: "
        f"{judged.num_batches} global batches, {judged.num_idle} times a rank without a sample in a micro-batch, "
        f"{len(judged.failures)} failures"
    )
    for sampler, count in sorted(judged.of_sampler.items()):
        print(f"  {count:5} {sampler}")
    for failure in judged.failures:
        print(failure)
    return bool(judged.failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
