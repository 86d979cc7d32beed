"""Who is named as holding a device's memory."""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from splittune.profiling.holders import Holders

CPU, META = torch.device("cpu"), torch.device("meta")


class Keeper:
    """Keeps what it is given, in one way or another."""

    def __init__(self) -> None:
        self.latest: object = None
        self.history: list[object] = []


def test_the_largest_are_named_by_shape_type_size_and_holder() -> None:
    """The three largest that have come on that device, each with what refers to it, and how many more there are."""
    holders = Holders()
    keeper = Keeper()
    keeper.latest = torch.zeros(1024, 512, device="meta", dtype=torch.float16)
    keeper.history.append(torch.zeros(2**20, device="meta"))
    keeper.history.append(torch.zeros(3, device="meta"))
    keeper.history.append(torch.zeros(5, device="meta"))
    told = holders.describe(META).split("; ")
    assert told == [
        "(1048576,) of torch.float32, 4.0 MiB, held by a list in Keeper.history",
        "(1024, 512) of torch.float16, 1.0 MiB, held by Keeper.latest",
        "(5,) of torch.float32, 0.0 MiB, held by a list in Keeper.history",
        "and 1 more",
    ]


def test_what_was_there_before_is_not_named() -> None:
    """Only what has come counts: not the job's own tensors."""
    kept = [torch.zeros(7, device="meta")]
    holders = Holders()
    assert "no tensor that Python knows of" in holders.describe(META)
    kept.append(torch.zeros(9, device="meta"))
    assert holders.describe(META).startswith("(9,) of torch.float32")


def test_views_of_one_storage_are_one() -> None:
    """Memory that several tensors share is named once, with all its bytes."""
    holders = Holders()
    whole = torch.zeros(2**20)
    views = [whole[start:] for start in range(5)]
    told = holders.describe(CPU)
    assert told.count("4.0 MiB") == 1
    assert len(views) == 5


def test_errors_closures_and_modules_are_told_apart() -> None:
    """A variable that a kept exception holds, a closure and a module's own variable are each called what they are."""

    def fail() -> None:
        activation = torch.zeros(2**20)
        raise KeyError(len(activation))

    def describe_with_a_kept_error() -> str:
        holders = Holders()
        try:
            fail()
        except KeyError as error:
            kept = error
        return f"{kept} {holders.describe(CPU)}"

    def describe_with_a_closure() -> str:
        holders = Holders()
        kept = torch.zeros(2**20)
        functions = [lambda: kept]
        return f"{len(functions)} {holders.describe(CPU)}"

    assert "held by a variable of fail()" in describe_with_a_kept_error()
    assert "held by a closure" in describe_with_a_closure()
    holders, module = Holders(), ModuleType("attic")
    module.stray = torch.zeros(2**20)
    assert "held by attic.stray" in holders.describe(CPU)


def test_tensors_are_not_kept() -> None:
    """Neither making it nor describing holds a tensor."""
    tensor = torch.zeros(3)
    before = sys.getrefcount(tensor)
    holders = Holders()
    holders.describe(CPU)
    assert sys.getrefcount(tensor) == before
