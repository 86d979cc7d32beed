"""What all ranks must have alike, compared before the first step: a difference is an error on every rank."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from reprlib import Repr
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from splittune.errors import ConfigError, DeviceError, InvalidSplitError

# Seconds that ranks wait for one another: they arrive as far apart as it takes the slowest to read its model and its
# data set. A choice; doubled, a rank that died is noticed as much later.
ARRIVAL_TIMEOUT_S = 60.0
# Seconds for what takes no work: that everybody has read an error before rank 0, which may be the store's host, ends.
_READING_TIMEOUT_S = 10.0
# Seconds after which it is said who has not come yet. A choice: what is shorter needs no word.
_LONG_S = 2.0

logger = logging.getLogger(__name__)

Prepared = TypeVar("Prepared")

_SHORT = Repr()
_SHORT.maxstring = 120
_meetings: Counter[str] = Counter()  # how often each group has met: every meeting has keys of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that every rank must have alike, such as the batch size."""

    name: str
    value: str
    """In words; of several lines the first that differs is quoted."""
    advice: str
    """What to do where ranks differ."""


def agree(
    stage: str,
    prepare: Callable[[], tuple[Prepared, Sequence[Fact]]],
    *,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = ARRIVAL_TIMEOUT_S,
) -> Prepared:
    """What `prepare` made on this rank, once all ranks of `group` have come to this `stage` with the same facts.

    `prepare` gives its result and the facts. What it raises of splittune's own errors becomes every rank's, by name of
    rank, so that none waits for one that has given up. Nothing but the group's store is used: neither a collective
    that could hang, nor the devices. Worked: of 3 ranks, rank 1 has a batch size of 16 and the others of 8. Each rank
    raises "the ranks differ in the batch size: '8' on ranks 0 and 2, '16' on rank 1".

    Raises:
        ConfigError: ranks differ, one of them cannot go on, or one has not come within `timeout_s`; the message names
            the ranks.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    meeting = _Meeting(stage, group, num_ranks, timeout_s)
    said: dict[str, Any] = {"stage": stage, "problem": None, "facts": []}
    prepared: list[Prepared] = []
    cause: Exception | None = None
    try:
        result, facts = prepare()
        prepared.append(result)
        said["facts"] = [(fact.name, fact.value, fact.advice) for fact in facts]
    except (ConfigError, DeviceError, InvalidSplitError) as error:
        said["problem"], cause = str(error), error
    verdict = meeting.hold(rank, json.dumps(said))
    if verdict:
        # this rank's own error stands in the verdict mostly: it is not shown twice
        raise ConfigError(verdict) from (None if cause is None or str(cause) in verdict else cause)
    return prepared[0]


class _Meeting:
    """One exchange over the group's store: rank 0 reads what all say, and all read what it found."""

    def __init__(self, stage: str, group: dist.ProcessGroup | None, num_ranks: int, timeout_s: float) -> None:
        name = dist.group.WORLD.group_name if group is None else group.group_name  # type: ignore[union-attr]
        _meetings[name] += 1
        self.store = PrefixStore(f"splittune/{name}/{_meetings[name]}", store_of(group))
        self.stage, self.num_ranks, self.timeout_s = stage, num_ranks, timeout_s

    def hold(self, rank: int, said: str) -> str:
        """What is wrong, in words; "" where nothing is."""
        deadline = time.monotonic() + self.timeout_s
        self.store.set(f"said/{rank}", said)
        if rank == 0:
            verdict = self._judged(deadline)
            self.store.set("verdict", verdict)
        elif self._has_come("verdict", deadline):
            verdict = self.store.get("verdict").decode()
        else:
            # Rank 0 may have come later than this rank, and still wait for somebody.
            return self._absence(self._absent(time.monotonic())) or self._absence([0])
        if verdict:
            self._let_everybody_read(rank)
        return verdict

    def _judged(self, deadline: float) -> str:
        absent = self._absent(min(deadline, time.monotonic() + _LONG_S))
        if absent:
            logger.info("%s: waiting for %s of %d", self.stage, named(absent), self.num_ranks)
            absent = self._absent(deadline)
        if absent:
            return self._absence(absent)
        return differences([json.loads(self.store.get(f"said/{rank}")) for rank in range(self.num_ranks)])

    def _absent(self, deadline: float) -> list[int]:
        return [rank for rank in range(self.num_ranks) if not self._has_come(f"said/{rank}", deadline)]

    def _has_come(self, key: str, deadline: float) -> bool:
        try:
            # a store waits for ever where it is told to wait for nothing
            self.store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
        except dist.DistNetworkError as error:
            raise ConfigError(
                f"{self.stage}: the process group's store cannot be reached any more ({error}). Expected its host, "
                "rank 0 or torchrun's agent, to live. Look for an earlier error there."
            ) from error
        except RuntimeError:  # what a store says after the time is a DistStoreError, a file's only this
            return False
        return True

    def _absence(self, ranks: Sequence[int]) -> str:
        if not ranks:
            return ""
        who, have = named(ranks), "has" if len(ranks) == 1 else "have"
        return (
            f"{self.stage}: {who} of {self.num_ranks} {have} not come within {self.timeout_s:g} s. Expected every rank "
            "to call it, in the same order as the others. Look for an earlier error on that rank; where one merely "
            "takes long to get there, give timeout_s."
        )

    def _let_everybody_read(self, rank: int) -> None:
        """Rank 0 often hosts the store, and ends after the error: not before the others know why."""
        self.store.set(f"read/{rank}", "")
        if rank == 0:
            deadline = time.monotonic() + _READING_TIMEOUT_S
            for other in range(1, self.num_ranks):
                self._has_come(f"read/{other}", deadline)


def differences(said: Sequence[dict[str, Any]]) -> str:
    """What the ranks' words have unlike, by name of rank; "" where they agree.

    Worked: ``[{"stage": "config.wrap", "problem": None, "facts": [["batch size", "8", "Use one."]]}, ...]``.
    """
    stages = {rank: each["stage"] for rank, each in enumerate(said)}
    if len(set(stages.values())) > 1:
        return (
            f"the ranks are at different places: {_spread(stages)}. Expected the same calls in the same order on all."
        )
    stage = said[0]["stage"]
    problems = {rank: each["problem"] for rank, each in enumerate(said) if each["problem"] is not None}
    if problems:
        lines = [f"{stage}, {named(ranks)}: {problem}" for problem, ranks in _by_value(problems)]
        return "\n".join(lines)
    lines = []
    for column in zip(*(each["facts"] for each in said), strict=True):
        name, _, advice = column[0]
        values = {rank: value for rank, (_, value, _) in enumerate(column)}
        if len(set(values.values())) > 1:
            lines.append(f"{stage}: the ranks differ in {name}: {_spread(_first_unlike(values))}. {advice}")
    return "\n".join(lines)


def named(ranks: Sequence[int]) -> str:
    """``"rank 2"``, ``"ranks 0, 1 and 3"``; runs of ranks are cut short: ``"ranks 0 to 6 and 9"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [
        word for run in runs for word in ([str(rank) for rank in run] if len(run) < 3 else [f"{run[0]} to {run[-1]}"])
    ]
    listed = " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def store_of(group: dist.ProcessGroup | None) -> Store:
    """The key-value store of a group, through which its ranks found each other.

    Raises:
        ConfigError: this torch does not give it out, or the group has none, as MPI's.
    """
    find = getattr(distributed_c10d, "_get_process_group_store", None)
    store = find(dist.group.WORLD if group is None else group) if find is not None else None
    if not isinstance(store, Store):
        raise ConfigError(
            "the process group gives out no store for its ranks to compare what they have: expected that of "
            "torch.distributed.init_process_group with gloo or nccl."
        )
    return store


def _by_value(values: dict[int, str]) -> list[tuple[str, list[int]]]:
    ranks = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return list(ranks.items())


def _spread(values: dict[int, str]) -> str:
    return ", ".join(f"{_SHORT.repr(value)} on {named(ranks)}" for value, ranks in _by_value(values))


def _first_unlike(values: dict[int, str]) -> dict[int, str]:
    """Of values of several lines the first that is not the same on all ranks."""
    rows = zip_longest(*(value.splitlines() or [""] for value in values.values()), fillvalue="nothing")
    row = next(row for row in rows if len(set(row)) > 1)
    return dict(zip(values, (line.strip() for line in row), strict=True))
