"""What fills the cards of ranks: a sample costs the same on each, and the rest is fixed."""

from __future__ import annotations

from splittune.hardware import Device, DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.ranks import parts_of_ranks, why_ranks
from splittune.search import Trial
from splittune.split import BatchSplit
from splittune.units import GIB


def run(*shards: int) -> Measurement:
    """1 GiB and a quarter for each sample, on cards of 8 GiB."""
    peaks = [GIB + share * GIB // 4 for share in shards]
    return Measurement(
        split=BatchSplit(global_batch_size=sum(shards), accumulation_steps=1, shard_sizes=shards),
        outcome=Outcome.OK,
        micro_step_times_s=(0.1,),
        update_times_s=(0.1,),
        memory=tuple(
            DeviceMemory(
                device=device,
                total_bytes=8 * GIB,
                outside_bytes=GIB // 4,
                peak_allocated_bytes=peak,
                peak_reserved_bytes=peak,
                micro_step_peak_bytes=peak,
            )
            for device, peak in enumerate(peaks)
        ),
        notes=("The all-reduce is over.",),
    )


def test_peaks_of_unlike_shares_tell_what_a_sample_costs() -> None:
    """Peaks of 3 GiB with 8 samples and 5 GiB with 16: 0.25 GiB a sample, 1 GiB fixed, nothing of the whole batch."""
    parts = parts_of_ranks((), run(8, 16))
    assert [part.per_share_bytes for part in parts] == [2 * GIB, 4 * GIB]
    assert [part.fixed_bytes for part in parts] == [GIB, GIB]
    assert [part.whole_batch_bytes for part in parts] == [0, 0]


def test_even_shares_are_told_by_another_trial() -> None:
    """Alone they tell nothing."""
    assert [part.fixed_bytes for part in parts_of_ranks((), run(8, 8))] == [None, None]
    trial = Trial(number=0, kind="search", measurement=run(4, 12), reason="a guess")
    assert [part.fixed_bytes for part in parts_of_ranks((trial,), run(8, 8))] == [GIB, GIB]


def test_the_fullest_card_is_named_with_what_it_holds_anyway() -> None:
    """Then what the measurement notes of the all-reduce."""
    cards = tuple(Device(index=i, name="CARD", torch_device="cpu", total_bytes=8 * GIB) for i in range(2))
    best = run(8, 16)
    assert why_ranks(best, parts_of_ranks((), best), 1, cards) == (
        "The fullest card is GPU 1 (CARD), with 2.75 GiB of 8.00 GiB left at 16 samples. 1.00 GiB of each card's "
        "memory do not depend on its share. The all-reduce is over."
    )
