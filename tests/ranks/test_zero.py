"""How ZeroRedundancyOptimizer deals out parameters, beside torch's own, and what that would free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splittune.errors import ConfigError
from splittune.ranks.zero import describe_zero, state_bytes_of, zero_partition, zero_state_bytes
from splittune.units import GIB

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """60 optimizers on two gloo processes, as torch itself dealt their parameters out."""
    folder = tmp_path_factory.mktemp("zero")
    arguments = [str(folder / "store"), str(folder / "found.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.zero_job", str(rank), *arguments],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return json.loads((folder / "found.json").read_text())


def test_parameters_are_dealt_out_as_torch_does(found: list[dict[str, Any]]) -> None:
    """On 1 to 6 ranks, in one group or several, of sizes that are alike or not."""
    assert len(found) == 60
    for case in found:
        assert sorted(case["partitions"]) == [str(num_ranks) for num_ranks in range(1, 7)]
        for num_ranks, partition in case["partitions"].items():
            expected = zero_partition(case["sizes"], int(num_ranks), group_lengths=case["group_lengths"])
            assert partition == [list(part) for part in expected]


def test_each_rank_holds_the_state_that_was_foretold(found: list[dict[str, Any]]) -> None:
    """After a real step: of its own parameters only, as much as a plain optimizer holds for them."""
    for case in found:
        foretold = zero_state_bytes(case["plain"], case["sizes"], 2, group_lengths=case["group_lengths"])
        assert [sum(held) for held in case["held"]] == list(foretold)
        assert [first + second for first, second in zip(*case["held"], strict=True)] == case["plain"]
        assert sum(case["before"]) == 0


def test_docstring_examples() -> None:
    """The worked numbers."""
    assert zero_partition([4, 9, 2, 3], 2) == ((1,), (0, 3, 2))
    assert zero_state_bytes([72, 32], [9, 4], 2) == (72, 32)
    assert describe_zero([3 * GIB, GIB], [3, 1], 2) == (
        "ZeroRedundancyOptimizer would keep 1.00 to 3.00 GiB of the 4.00 GiB of optimizer state on each of 2 cards "
        "(modelled): it frees at least 1.00 GiB, for it deals out whole parameters, and the largest has 3.00 GiB."
    )


@given(sizes=st.lists(st.integers(0, 50), max_size=20), num_ranks=st.integers(1, 8))
def test_every_parameter_is_on_one_rank(sizes: list[int], num_ranks: int) -> None:
    """And no rank has more than another by more than the largest parameter."""
    parts = zero_partition(sizes, num_ranks)
    assert sorted(position for part in parts for position in part) == list(range(len(sizes)))
    totals = [sum(sizes[position] for position in part) for part in parts]
    assert max(totals) - min(totals) <= max(sizes, default=0)


@pytest.mark.parametrize(
    ("state", "num_ranks", "expected"),
    [
        ([8, 8], 1, ""),
        ([0, 0], 4, ""),
        ([8], 4, ""),
        ([2 * GIB, 2 * GIB], 2, "would keep 2.00 GiB of the 4.00 GiB of"),
        ([2 * GIB, 2**20], 2, "would keep 1.0 MiB to 2.00 GiB of the 2.00 GiB of"),
    ],
    ids=["one rank", "no state", "one parameter", "halves", "units"],
)
def test_it_says_nothing_where_nothing_would_be_freed(state: list[int], num_ranks: int, expected: str) -> None:
    """One rank, no state, or one parameter that has all of it; else the least and the most that a card keeps."""
    sentence = describe_zero(state, state, num_ranks)
    assert expected in sentence
    assert bool(sentence) == bool(expected)


def test_a_plain_optimizers_state_is_read() -> None:
    """AdamW's two moments and a step counter, of what has a gradient; SGD's none."""
    weight, frozen = torch.nn.Parameter(torch.ones(10)), torch.nn.Parameter(torch.ones(5), requires_grad=False)
    weight.grad = torch.ones(10)
    for optimizer, expected in ((torch.optim.AdamW([weight, frozen]), 10 * 8 + 4), (torch.optim.SGD([weight]), 0)):
        optimizer.step()
        assert state_bytes_of(optimizer)[0] == expected
        assert sum(state_bytes_of(optimizer)) == expected


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"num_ranks": 0}, "num_ranks is 0"), ({"num_ranks": 2, "group_lengths": [1, 1]}, r"1 \+ 1 = 2 .*expected 3")],
)
def test_a_partition_that_cannot_be_is_refused(options: dict[str, Any], complaint: str) -> None:
    """With the sum that fails."""
    with pytest.raises(ConfigError, match=complaint):
        zero_partition([1, 2, 3], **options)
