"""Two strategies in a sentence: which is faster, and what makes most of the difference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.capacity.row import CapacityRow
from splittune.report.capacity.strategies import compared
from splittune.split import BatchSplit
from tests.report.capacity.rows import lacking_row, ran, row


def run(steps: int, micro_step_s: float, once_s: float) -> Measurement:
    """64 samples on two cards, in so many steps."""
    split = BatchSplit.even(global_batch_size=64, accumulation_steps=steps, num_devices=2)
    return Measurement(
        split=split,
        outcome=Outcome.OK,
        micro_step_times_s=(micro_step_s,),
        update_times_s=(once_s,),
        memory=ran(split).memory,
    )


def pair(process: Measurement, ranks: Measurement) -> tuple[CapacityRow, CapacityRow]:
    """Both rows, the even split of each at as many steps as its best."""
    return row(best=process, baseline=process), row(best=ranks, baseline=ranks, strategy="ddp")


NOT_ON_GPU0 = "for GPU 0 does not hold the optimizer's state, every card's outputs and the loss beside its share."
ONLY_ON_GPU0 = "for only GPU 0 holds gradients and the optimizer's state, and no card buckets."
OWN_PROCESSES = "for each card has a process that launches its kernels, and keeps its own outputs."
ALL_REDUCE = "ranks have what is left over of the all-reduce, and the slowest card's update."


@pytest.mark.parametrize(
    ("process", "ranks", "faster", "why"),
    [
        (run(4, 0.1, 0.1), run(2, 0.1, 0.05), "ddp", f"it needs 2 accumulation steps, not 4, {NOT_ON_GPU0}"),
        (run(1, 0.1, 0.1), run(2, 0.1, 0.2), "dp", f"it needs 1 accumulation step, not 2, {ONLY_ON_GPU0}"),
        (
            run(1, 0.3, 0.1),
            run(1, 0.1, 0.1),
            "ddp",
            f"forward and backward take 100.0 ms, not 300.0 ms, {OWN_PROCESSES}",
        ),
        (
            run(1, 0.1, 0.1),
            run(1, 0.1, 0.3),
            "dp",
            f"what comes once a step takes 100.0 ms, not 300.0 ms: {ALL_REDUCE}",
        ),
    ],
)
def test_the_reason_is_what_makes_most_of_the_difference(
    process: Measurement, ranks: Measurement, faster: str, why: str
) -> None:
    """Steps that memory allows, then micro-steps or what comes once a step."""
    other = {"dp": "ddp", "ddp": "dp"}[faster]
    said = f'2xCARD, batch 64: "{faster}" is 2.00 times as fast as "{other}" (modelled): {why}'
    assert compared(pair(process, ranks)) == (said,)


def test_as_fast_is_said_so() -> None:
    """To half a percent."""
    same = run(1, 0.1, 0.1)
    assert compared(pair(same, same)) == ('2xCARD, batch 64: "dp" and "ddp" are as fast (modelled).',)


def test_more_steps_that_memory_does_not_ask_for_are_no_reason() -> None:
    """Where the even split fits in one step, the micro-steps are compared."""
    process, ranks = pair(run(2, 0.2, 0.1), run(1, 0.2, 0.05))
    process = replace(process, baseline=run(1, 0.4, 0.1))
    assert "forward and backward take 200.0 ms, not 400.0 ms" in compared((process, ranks))[0]


def test_where_one_alone_fits_it_is_named() -> None:
    """With what the other holds; where neither does, that is said."""
    ranks = row(strategy="ddp", best=run(1, 0.1, 0.1), global_batch_size=128)
    (said,) = compared((lacking_row(), ranks))
    assert said.startswith('2xCARD, batch 128: only "ddp" fits (modelled). In one process GPU 0 holds')
    process = row(best=run(1, 0.1, 0.1), global_batch_size=128)
    (said,) = compared((process, lacking_row(strategy="ddp")))
    assert 'only "dp" fits (modelled). Ranks hold gradients' in said
    assert compared((lacking_row(), lacking_row(strategy="ddp"))) == (
        '2xCARD, batch 128: neither "dp" nor "ddp" fits.',
    )


def test_rows_of_one_strategy_are_not_compared() -> None:
    """Nor those of different batches or machines."""
    assert compared((row(), row(devices="3xCARD", strategy="ddp"), lacking_row(strategy="ddp"))) == ()
