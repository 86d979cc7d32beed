"""Gradients of ranks with any shares are one device's, in real processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks.cases import Case, errors_of, train_on_one_device, train_on_ranks
from tests.ranks.pool import Pool

TOLERANCE = {True: 1e-12, False: 1e-5}  # by float64 or not: what the product promises
EXAMPLE = Case(sizes=(((5, 4), (4, 2), (0, 1)), ((1, 0), (0, 3), (0, 0))))


def check(pool: Pool, case: Case) -> None:
    truth = train_on_one_device(case)
    for trained in pool.run(train_on_ranks, case, num_ranks=case.num_ranks):
        errors = list(errors_of(trained, truth))
        assert len(errors) == len(case.sizes) + 1
        assert max(errors) <= TOLERANCE[case.float64], errors


@st.composite
def step_sizes(draw: st.DrawFn, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Samples of each rank in each micro-batch: any, but none of all ranks together."""
    num_micro_batches = draw(st.integers(1, 4))
    table = [[draw(st.integers(0, 4)) for _ in range(num_micro_batches)] for _ in range(num_ranks)]
    for number in range(num_micro_batches):
        if not any(row[number] for row in table):
            table[draw(st.integers(0, num_ranks - 1))][number] = 1
    return tuple(map(tuple, table))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 4))
    float64, leaves_unused = draw(st.booleans()), draw(st.booleans())
    options = {"gradient_as_bucket_view": draw(st.booleans())}
    if not leaves_unused and draw(st.booleans()):
        options["static_graph"] = True
    return Case(
        sizes=tuple(draw(step_sizes(num_ranks)) for _ in range(draw(st.integers(1, 2)))),
        counts_tokens=draw(st.booleans()),
        float64=float64,
        clips=draw(st.booleans()),
        scales=not float64 and draw(st.booleans()),
        freezes=draw(st.booleans()),
        leaves_unused=leaves_unused,
        loss_in_wrapper=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        ddp_options=options,
    )


@settings(max_examples=100)
@given(case=cases())
def test_gradients_are_one_devices(pool: Pool, case: Case) -> None:
    """For any ranks, shares and micro-batches, and any of the options: every step's gradient, and what it led to."""
    check(pool, case)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"counts_tokens": True},
        {"float64": False, "scales": True, "clips": True},
        {"ddp_options": {"static_graph": True}},
        {"ddp_options": {"static_graph": True}, "looks_first": True},
        {"ddp_options": {"static_graph": True, "gradient_as_bucket_view": True}},
        {"leaves_unused": True, "freezes": True},
        {"leaves_unused": True, "ddp_options": {"static_graph": True}},
        {"ddp_options": {"bucket_cap_mb": 1e-4}},
    ],
    ids=str,
)
def test_each_option_by_itself(pool: Pool, changes: dict[str, object]) -> None:
    """Three ranks, one of them without a sample in most micro-batches, under every option that changes the engine."""
    check(pool, replace(EXAMPLE, **changes))
