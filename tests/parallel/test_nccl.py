"""Where NCCL is asked for, and that torch's functions are still those that are called."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

from splittune.parallel import nccl

CPU, ALSO_CPU = torch.device("cpu"), torch.device("cpu:0")


def test_torchs_functions_take_what_they_are_given() -> None:
    """`torch.cuda.nccl` is no public module: this says so should its functions change."""
    broadcast, reduce = (inspect.signature(getattr(torch.cuda.nccl, name)) for name in ("broadcast", "reduce"))
    broadcast.bind([], streams=[])
    reduce.bind([], output=None, streams=[])
    assert broadcast.parameters["root"].default == reduce.parameters["root"].default == 0
    assert reduce.parameters["op"].default == torch.cuda.nccl.SUM == 0


@pytest.mark.parametrize(
    "cards", [(), (CPU,), (CPU, CPU), (torch.device("cuda", 0), CPU), (torch.device("cuda", 0),) * 2]
)
def test_it_is_for_distinct_cards_of_cudas(cards: tuple[torch.device, ...]) -> None:
    """Other sets of devices are not tried, and nothing is said of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not nccl.is_nccl_usable(cards)


def test_where_it_cannot_work_that_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first try that fails, as torch's does for tensors on the CPU, is a warning and never an error."""
    monkeypatch.setattr(nccl, "KIND", "cpu")
    nccl.is_nccl_usable.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="NCCL cannot be used between cpu, cpu:0: .*ordinary copies"):
            assert not nccl.is_nccl_usable((CPU, ALSO_CPU))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not nccl.is_nccl_usable((CPU, ALSO_CPU))
    finally:
        nccl.is_nccl_usable.cache_clear()
