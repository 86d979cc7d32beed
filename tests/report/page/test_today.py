"""What people do today, from the trials of a search: the batch halved until it fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.page.source import TrialRow
from splittune.report.page.today import halved_until_it_fits
from splittune.split import BatchSplit
from tests.report.page import folders


def even(steps: int, *, batch: int = 64) -> BatchSplit:
    return BatchSplit.even(global_batch_size=batch, accumulation_steps=steps, num_devices=4)


def ran(split: BatchSplit) -> Measurement:
    return Measurement(split=split, outcome=Outcome.OK, micro_step_times_s=(0.1,), update_times_s=(0.02,))


def row(split: BatchSplit, number: int = 0, outcome: Outcome = Outcome.OK) -> TrialRow:
    times = (0.1, 0.02) if outcome is Outcome.OK else (None, None)
    return TrialRow(
        number=number,
        kind="search",
        outcome=outcome,
        accumulation_steps=split.accumulation_steps,
        micro_batch_size=split.micro_batch_size,
        gpu0_bsz=split.gpu0_bsz,
        shard_sizes=split.shard_sizes,
        loss_placement="output",
        throughput=None if outcome is not Outcome.OK else 1.0,
        step_time_s=None,
        micro_step_time_s=times[0],
        update_time_s=times[1],
        relative_error=None,
        is_modelled=True,
        least_headroom_bytes=None,
        reason="",
        message="",
    )


def test_a_halved_batch_is_one_micro_step_and_one_update() -> None:
    """Of 64 samples in 4 steps 16 a step remain, in 120 ms."""
    found = halved_until_it_fits([row(even(2), 0, Outcome.OUT_OF_MEMORY), row(even(4), 1)], ran(even(4)))
    assert found is not None
    assert found.split == even(1, batch=16)
    assert found.rate == pytest.approx(16 / 0.12)
    assert found.trial == 1


def test_of_a_batch_in_three_steps_the_quarter_fits() -> None:
    """Halving passes by 3: what was tried in 4 steps counts, and without that nothing is said."""
    found = halved_until_it_fits([row(even(3), 0), row(even(4), 1), row(even(8), 2)], ran(even(3)))
    assert found is not None
    assert (found.split, found.trial) == (even(1, batch=16), 1)
    assert halved_until_it_fits([row(even(3), 0)], ran(even(3))) is None
    assert halved_until_it_fits([replace(row(even(4)), micro_step_time_s=None)], ran(even(3))) is None


def test_a_batch_that_fits_is_not_halved() -> None:
    """The even split in one step is what people do, and stands there already."""
    assert halved_until_it_fits([row(even(1)), row(even(2))], ran(even(1))) is None


@given(st.integers(1, 2048), st.integers(1, 9), st.integers(1, 40), st.data())
def test_for_any_split_a_halved_batch_is_a_power_of_two_smaller(
    batch: int, num_devices: int, steps: int, data: st.DataObject
) -> None:
    """And no larger than what the baseline runs at once; its shares are those of a trial that ran."""
    evens = [
        BatchSplit.even(global_batch_size=batch, accumulation_steps=min(each, batch), num_devices=num_devices)
        for each in data.draw(st.lists(st.integers(1, 64), max_size=8))
    ]
    baseline = BatchSplit.even(global_batch_size=batch, accumulation_steps=min(steps, batch), num_devices=num_devices)
    found = halved_until_it_fits([row(split) for split in evens], ran(baseline))
    if found is None:
        return
    turns = batch // found.split.global_batch_size
    assert found.split.global_batch_size * turns == batch
    assert turns.bit_count() == 1
    assert turns >= baseline.accumulation_steps > 1
    assert found.split.micro_batch_size <= baseline.micro_batch_size
    assert (turns, found.split.shard_sizes) in [(each.accumulation_steps, each.shard_sizes) for each in evens]


def test_the_report_has_both_ways(tmp_path: Path) -> None:
    """With the batch that each of them trains, and where the halved one's figure is from."""
    folders.search(folders.NORMAL).save(tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Beside what people do today" in page
    assert "the same batch, spread evenly" in page
    assert "the batch halved until it fits" in page
    assert "one micro-step and one update of trial" in page
