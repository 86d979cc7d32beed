"""A snapshot that copies a tensor's values only once something is about to take them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from splittune.training import Snapshot, saved


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of what is copied, in order."""
    sizes: list[tuple[int, ...]] = []
    copy = saved._host_copy

    def noted(tensor: Tensor) -> Tensor:
        sizes.append(tuple(tensor.shape))
        return copy(tensor)

    monkeypatch.setattr(saved, "_host_copy", noted)
    return sizes


def test_only_what_an_operation_takes_is_copied(copied: list[tuple[int, ...]]) -> None:
    """The weight that is read by itself, once; not the bias, which `keep_values` brings."""
    model = nn.Linear(4, 3)
    snapshot = Snapshot(model, at_once=False)
    with snapshot.watching():
        model.weight.sum()
        model.weight.sum()
        assert copied == [(3, 4)]
    snapshot.keep_values()
    assert copied == [(3, 4), (3,)]
    snapshot.keep_values()
    assert len(copied) == 2


def test_a_view_and_a_list_are_as_the_tensor_itself(copied: list[tuple[int, ...]]) -> None:
    """What shares memory with a parameter, two parameters of one memory among them, and what stands in a list."""
    model = nn.Linear(4, 3)
    model.register_buffer("row", model.weight.data[1])
    row, before = model.row, model.weight.clone()
    assert isinstance(row, Tensor)
    snapshot = Snapshot(model, at_once=False)
    with snapshot.watching():
        torch._foreach_add_([row], 1.0)
    assert sorted(copied) == [(3, 4), (4,)]
    snapshot.restore()
    assert torch.equal(model.weight, before)
    assert model.row is row


def test_memory_that_was_exchanged_comes_back(copied: list[tuple[int, ...]]) -> None:
    """A parameter given other memory, whose own was never written to, gets it back without a copy."""
    model = nn.Linear(4, 3)
    address = model.weight.data_ptr()
    snapshot = Snapshot(model, at_once=False)
    with snapshot.watching():
        model.weight.data = torch.ones(3, 4)
        model.weight.data.mul_(2)
    snapshot.restore()
    assert model.weight.data_ptr() == address
    assert not copied


def test_a_sparse_tensor_is_copied_at_once(copied: list[tuple[int, ...]]) -> None:
    """It has no memory of its own by which an operation on it could be told."""
    model = nn.Linear(4, 3)
    model.register_buffer("adjacency", torch.eye(5).to_sparse())
    Snapshot(model, at_once=False)
    assert copied == [(5, 5)]
