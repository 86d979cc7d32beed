"""The benchmark of ranks: its own arithmetic, and that its judge can find fault."""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
import pytest
import torch.distributed as dist

from benchmarks.distributed import __main__ as command
from benchmarks.distributed import agreement, slow_rank
from benchmarks.distributed.gradients import draw_cases, judge_on_rank
from splittune.config import SplitConfig


def test_shares_by_speed_are_the_best_there_are() -> None:
    """No other shares of the batch end earlier, as trying all of them shows."""
    times_s = [3.0, 1.0, 2.0]
    found = slow_rank.shares_by_speed(times_s, 11)
    others = [shares for shares in itertools.product(range(12), repeat=3) if sum(shares) == 11]
    assert sum(found) == 11
    assert slow_rank.slowest_s(found, times_s) == min(slow_rank.slowest_s(shares, times_s) for shares in others)
    assert slow_rank.shares_by_speed([3, 1, 1, 1], 64) == (6, 20, 19, 19)


def test_cases_are_the_same_on_every_rank() -> None:
    """Each rank draws them by the seed, and another seed draws others."""
    assert draw_cases(3, 5, 0) == draw_cases(3, 5, 0) != draw_cases(3, 5, 1)


def test_gradients_are_written_beside_their_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Few cases on one and two ranks, no slow ones: the CSV has each world size, and the status is 0."""
    monkeypatch.setattr(command, "NUM_RANKS", 2)
    monkeypatch.setattr(command, "slow_ranks", lambda seed: [])
    monkeypatch.setattr(command.scale, "scales", list)
    monkeypatch.setattr(agreement, "NUM_TRIALS", 5)
    assert command.main(["--cases", "4", "--batches", "3", "--out", str(tmp_path / "out.csv")]) == 0
    table = pd.read_csv(tmp_path / "out.csv")
    assert set(table["ranks"]) == {1, 2}
    is_gradient = table["measure"].str.startswith("gradient")
    assert (table["figure"] <= table["bound"])[is_gradient].all()
    assert list(table["measure"][~is_gradient]) == ["agreement, s a trial"] * 2  # which depends on the machine


def test_a_weight_that_is_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge can find fault: micro-batches that each count as the whole batch are reported, on one rank even."""
    judged = [case for case in draw_cases(1, 20, 0) if case.split.accumulation_steps > 1]
    cut = SplitConfig.micro_batches

    def weighed_wrongly(self: SplitConfig, *args: Any) -> Any:
        return (micro.__class__(batch=micro.batch, weight=1.0) for micro in cut(self, *args))

    monkeypatch.setattr(SplitConfig, "micro_batches", weighed_wrongly)
    assert judged
    assert min(_judge_here(judged)) > 1e-3


def _judge_here(cases: list[Any]) -> list[float]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return judge_on_rank(cases)
    finally:
        dist.destroy_process_group()
