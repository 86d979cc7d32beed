"""A row of a plan: what limits it, where, and why."""

from __future__ import annotations

from dataclasses import replace

from splittune.report.capacity.row import LimitedBy, best_row
from tests.report.capacity.rows import EVEN, ONE_STEP, TUNED, lacking, lacking_row, memory, ran, row, trials_of


def test_the_card_with_the_least_headroom_limits() -> None:
    """GPU 0 holds 5 GiB of 8 and GPU 1 holds 4: the first limits, by the 2.5 GiB that no batch size changes."""
    found = row()
    assert found.limiting_device == 0
    assert found.limited_by is LimitedBy.FIXED
    assert found.why.startswith("GPU 0 is the fullest")
    assert [part.peak_bytes for part in found.parts] == [reading.peak_allocated_bytes for reading in ran(TUNED).memory]


def test_a_share_limits_where_it_is_the_most() -> None:
    """With 54 samples on GPU 1 their activations are the largest part of the fullest card."""
    much = ran(replace(TUNED, accumulation_steps=1, shard_sizes=(10, 54)))
    found = row(best=much, trials=(*row().trials, *trials_of(much)))
    assert found.limiting_device == 1
    assert found.limited_by is LimitedBy.SHARE


def test_others_limit_where_they_hold_the_most() -> None:
    """A card that other programs fill is limited by them."""
    best = ran(TUNED)
    held = replace(best, memory=(memory(0, 2, outside_gib=5.5), best.memory[1]))
    assert row(best=held, trials=trials_of(held)).limited_by is LimitedBy.OUTSIDE


def test_where_the_batch_fits_at_once_memory_does_not_limit() -> None:
    """An even split in one step that fits is said to, with what the fullest card has left."""
    found = row(baseline=ran(ONE_STEP))
    assert not found.needs_splitting
    assert found.why.startswith("Memory does not limit it")
    assert "GPU 0, with 2.75 GiB of 8.00 GiB left" in found.why


def test_what_does_not_fit_names_the_card_that_lacked_memory() -> None:
    """Of a search it is the smallest trial's; the reason is the search's own message."""
    found = lacking_row()
    assert not found.fits
    assert (found.limiting_device, found.limited_by, found.parts, found.speedup) == (1, None, (), None)
    assert found.why == "no split fits: device 1 lacked 2.00 GiB."


def test_a_given_split_has_nothing_beside_it() -> None:
    """It is not called the only one that fits, for nobody looked at others."""
    found = row(baseline=None, is_given=True)
    assert found.why == "The fullest card is GPU 0, with 2.75 GiB of 8.00 GiB left at 8 samples."
    assert lacking_row(best=lacking(EVEN), is_given=True).limiting_device == 1


def test_the_best_row_is_the_fastest_that_fits() -> None:
    """Of equals the first; None where nothing fits."""
    slow, fast = row(best=ran(TUNED, 1.0)), row()
    assert best_row([slow, lacking_row(), fast, row(devices="other")]) is fast
    assert best_row([lacking_row()]) is None
