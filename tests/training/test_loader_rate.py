"""The loader's own rate, by a clock that the loader moves, and what the user is told of a slow one."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from splittune.training.loader_rate import MAX_BATCHES_TIMED, describe_slow_loader, measure_loader_rate, what_to_set


class SlowLoader:
    """Batches of `sizes`, the first after 10 s and each other after `seconds`."""

    def __init__(self, sizes: list[int], seconds: float, num_workers: int = 0) -> None:
        self.sizes, self.seconds, self.num_workers = sizes, seconds, num_workers
        self.now_s, self.num_given = 0.0, 0

    def __iter__(self):
        self.num_given = 0
        for number, size in enumerate(self.sizes):
            self.now_s += self.seconds if number else 10.0
            self.num_given += 1
            yield torch.zeros(size, 2), torch.zeros(size)

    def clock(self) -> float:
        return self.now_s


class Items(Dataset):
    """Eight samples of two numbers; the last one may be broken."""

    def __init__(self, is_broken: bool = False) -> None:
        self.is_broken = is_broken

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.is_broken and index == 7:
            raise KeyError("sample 7")
        return torch.zeros(2)


def test_worked_example() -> None:
    """The docstring's numbers: 32 samples every 0.25 s are 128 samples/s; the first batch's 10 s do not count."""
    loader = SlowLoader([32] * 50, 0.25)
    assert measure_loader_rate(loader, clock=loader.clock) == 128
    assert loader.num_given == 1 + 4, "a second is enough"


def test_sizes_may_differ() -> None:
    """Samples are counted, not batches: a short last one counts as it is."""
    loader = SlowLoader([32, 30, 10], 0.25)
    assert measure_loader_rate(loader, clock=loader.clock) == 80


def test_every_workers_first_batch_is_left_out() -> None:
    """Four workers' first batches come all at once, and say nothing of the rate."""
    loader = SlowLoader([100, 100, 100, 100, 8, 8], 0.5, num_workers=4)
    assert measure_loader_rate(loader, clock=loader.clock) == 16


def test_a_fast_loader_is_not_read_for_ever() -> None:
    """After a hundred batches it ends, however quickly they came."""
    loader = SlowLoader([1] * 10_000, 2**-10)
    assert measure_loader_rate(loader, clock=loader.clock) == 1024
    assert loader.num_given == 1 + MAX_BATCHES_TIMED


@pytest.mark.parametrize("sizes", [[], [8]])
def test_too_few_batches_tell_nothing(sizes: list[int]) -> None:
    """Without a batch after the first the rate is unknown."""
    loader = SlowLoader(sizes, 1.0)
    assert measure_loader_rate(loader, clock=loader.clock) is None


def test_a_clock_that_does_not_move_tells_nothing() -> None:
    """Batches that took no time at all are no rate."""
    assert measure_loader_rate(SlowLoader([8] * 9, 1.0), clock=lambda: 5.0) is None


@pytest.mark.parametrize("is_broken", [False, True])
def test_no_worker_is_left(is_broken: bool) -> None:
    """Of a loader that keeps its workers none are kept, also when the data set raises; its own exception passes."""
    loader = DataLoader(Items(is_broken), batch_size=2, num_workers=1, persistent_workers=True)
    found = dict(vars(loader))
    seconds = itertools.count()
    if is_broken:
        with pytest.raises(KeyError, match="sample 7"):
            measure_loader_rate(loader, measured_s=100, clock=lambda: float(next(seconds)))
    else:
        assert measure_loader_rate(loader, measured_s=100, clock=lambda: float(next(seconds))) == 2
    assert dict(vars(loader)) == found
    assert loader._iterator is None


# what is said


def test_a_loader_that_keeps_up_is_not_mentioned() -> None:
    """Exactly as fast as the cards is fast enough."""
    assert describe_slow_loader(what_to_set([]), 100.0, 100.0) is None


def advice(**options) -> str:
    told = describe_slow_loader(what_to_set(DataLoader(Items(), **options)), 850.0, 1200.4)
    assert told is not None
    return told


def test_a_slow_loader_is_told_with_both_rates() -> None:
    """What it gives, what is needed, and that no split will help."""
    assert advice().startswith(
        "The loader gives 850 samples/s and the cards train 1,200: they will wait for data, and no split will "
        "help with that. "
    )


@pytest.mark.parametrize(
    ("options", "named", "not_named"),
    [
        ({}, ["num_workers=4 or so (it is 0", "pin_memory=True", "non_blocking=True"], ["persistent_workers"]),
        ({"pin_memory": True}, ["num_workers=4"], ["pin_memory"]),
        ({"num_workers": 2}, ["more num_workers (they are 2)", "persistent_workers=True", "pin_memory"], ["=4"]),
        ({"num_workers": 2, "persistent_workers": True}, ["more num_workers", "pin_memory"], ["persistent_workers"]),
        (
            {"num_workers": 2, "persistent_workers": True, "pin_memory": True},
            ["more num_workers", "make each sample cheaper"],
            ["persistent_workers", "pin_memory"],
        ),
    ],
)
def test_only_what_is_not_set_yet_is_advised(options: dict, named: list[str], not_named: list[str]) -> None:
    """The loader's own options decide what is worth setting."""
    told = advice(**options)
    assert [text for text in named if text not in told] == []
    assert [text for text in not_named if text in told] == []


def test_a_loader_of_another_kind_is_told_of_dataloader() -> None:
    """A list or one's own class is called by its name, and DataLoader is offered."""
    told = describe_slow_loader(what_to_set(SlowLoader([], 1.0)), 5.0, 10.0)
    assert told is not None
    assert re.search(r"It is a SlowLoader, .* torch.utils.data.DataLoader\(..., num_workers=4, pin_memory=True\)", told)
