"""The modules of a tree."""

from __future__ import annotations

from torch import nn

from splittune.parallel.modules import modules_of


def test_modules_come_in_torchs_order_and_once() -> None:
    """The docstring's worked case, and children that are None."""
    shared, tail = nn.Linear(1, 1), nn.ReLU()
    root = nn.Sequential(shared, nn.Sequential(tail, shared))
    assert modules_of(root) == [root, shared, root[1], tail]
    root.register_module("absent", None)
    assert modules_of(root) == list(root.modules())
