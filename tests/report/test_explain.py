"""The explanation: what a peak is made of is recovered from the trials, and the remedy that fits is named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.hardware.base import Device, DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.explain import MemoryParts, Remedy, explain, memory_parts, other_gpu0, remedies
from splittune.search import Trial
from splittune.split import BatchSplit
from splittune.units import MIB

BATCH = 48


@dataclass(frozen=True, kw_only=True)
class Job:
    """A made-up job whose peaks are straight lines, on cards of these sizes; in MiB."""

    share: float = 2
    whole: float = 0.5
    fixed0: float = 10
    fixed: float = 7
    update: float = 0
    totals: Sequence[float] = (100, 1000, 1000)
    outside: Sequence[float] = (0, 0, 0)

    def run(self, *shards: int, outcome: Outcome = Outcome.OK, is_split: bool = True, time_s: float = 1) -> Measurement:
        steps = BATCH // sum(shards)
        split = BatchSplit(global_batch_size=BATCH, accumulation_steps=steps, shard_sizes=shards)
        ran = outcome in (Outcome.OK, Outcome.NO_HEADROOM)
        return Measurement(
            split=split,
            outcome=outcome,
            whole_step_times_s=(time_s,) if ran else (),
            memory=tuple(self.memory(device, shard, sum(shards), is_split) for device, shard in enumerate(shards)),
        )

    def memory(self, device: int, shard: int, micro_batch: int, is_split: bool) -> DeviceMemory:
        base = self.fixed if device else self.fixed0 + self.whole * micro_batch
        micro_step, update = round((base + self.share * shard) * MIB), round(self.update * MIB)
        peak = max(micro_step, update)
        return DeviceMemory(
            device=device,
            total_bytes=round(self.totals[device] * MIB),
            outside_bytes=round(self.outside[device] * MIB),
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak + MIB,
            micro_step_peak_bytes=micro_step if is_split else None,
            update_peak_bytes=update if is_split else None,
        )

    def trials(self, is_split: bool = True) -> list[Trial]:
        return trials_of(*(self.run(*shards, is_split=is_split) for shards in [(2, 3, 3), (4, 2, 2), (4, 22, 22)]))

    def explain(self, *shards: int, baseline: Measurement | None = None, is_modelled: bool = False) -> str:
        best = self.run(*shards, is_split=False, time_s=0.5)
        return explain(self.trials(), best, baseline, self.devices(), is_modelled=is_modelled)

    def devices(self) -> tuple[Device, ...]:
        return tuple(
            Device(index=index, name=f"CARD{index}", torch_device=f"cuda:{index}", total_bytes=round(total * MIB))
            for index, total in enumerate(self.totals)
        )

    def remedies(self, *shards: int) -> tuple[Remedy, ...]:
        best = self.run(*shards)
        return remedies(memory_parts(self.trials(), best)[0], best, self.devices())


LEVEL = (100.0, 100.0, 100.0)


def trials_of(*runs: Measurement) -> list[Trial]:
    return [Trial(number=i, kind="search", measurement=run, reason="") for i, run in enumerate(runs)]


def sums_up(parts: MemoryParts) -> bool:
    assert parts.per_share_bytes is not None
    assert parts.whole_batch_bytes is not None
    assert parts.fixed_bytes is not None
    assert min(parts.per_share_bytes, parts.whole_batch_bytes, parts.fixed_bytes) >= 0
    return parts.per_share_bytes + parts.whole_batch_bytes + parts.fixed_bytes == parts.peak_bytes


def is_plain(text: str) -> bool:
    """One paragraph with figures in it, and nothing that a program would print for what it does not know."""
    words = text.replace("/", " ").replace(",", " ").split()
    is_whole = text.endswith(".") and "\n" not in text and "  " not in text
    return is_whole and "iB" in text and not {"None", "nan", "inf"} & set(words)


# the parts


def test_the_worked_number_of_the_docstring() -> None:
    """Peaks of 18, 22 and 40 MiB on GPU 0: of the last, 6 are its share, 24 the whole micro-batch, 10 neither."""
    job = Job()
    runs = [job.run(2, 2, 4), job.run(4, 2, 2), job.run(3, 22, 23)]
    assert [run.memory[0].peak_allocated_bytes / MIB for run in runs] == [18, 22, 40]
    parts = memory_parts(trials_of(*runs), runs[-1])
    assert [parts[0].per_share_bytes, parts[0].whole_batch_bytes, parts[0].fixed_bytes] == [6 * MIB, 24 * MIB, 10 * MIB]
    assert [parts[2].per_share_bytes, parts[2].whole_batch_bytes, parts[2].fixed_bytes] == [46 * MIB, 0, 7 * MIB]


@given(
    share=st.floats(0, 100),
    whole=st.floats(0, 100),
    fixed0=st.floats(0, 10_000),
    fixed=st.floats(0, 10_000),
    is_split=st.booleans(),
)
def test_known_slopes_are_recovered(share: float, whole: float, fixed0: float, fixed: float, is_split: bool) -> None:
    """Whatever the lines behind the trials, the parts are what they say to a few hundred bytes, and add up."""
    job = Job(share=share, whole=whole, fixed0=fixed0, fixed=fixed)
    best = job.run(4, 22, 22, is_split=is_split)
    for parts in memory_parts(job.trials(is_split), best):
        expected = (share * best.split.shard_sizes[parts.device], 0 if parts.device else whole * 48)
        assert parts.per_share_bytes == pytest.approx(expected[0] * MIB, abs=500)
        assert parts.whole_batch_bytes == pytest.approx(expected[1] * MIB, abs=500)
        assert sums_up(parts)


@given(peaks=st.lists(st.tuples(*[st.integers(0, 10**12)] * 3), min_size=3, max_size=3))
def test_parts_add_up_whatever_was_measured(peaks: list[tuple[int, int, int]]) -> None:
    """Peaks on no line at all still give parts of at least 0 that sum to the peak."""
    runs = [
        Measurement(
            split=BatchSplit(global_batch_size=BATCH, accumulation_steps=BATCH // sum(shards), shard_sizes=shards),
            outcome=Outcome.OK,
            whole_step_times_s=(1.0,),
            memory=tuple(
                DeviceMemory(
                    device=i, total_bytes=10**12, outside_bytes=0, peak_allocated_bytes=peak, peak_reserved_bytes=peak
                )
                for i, peak in enumerate(row)
            ),
        )
        for shards, row in zip([(2, 3, 3), (4, 2, 2), (4, 22, 22)], peaks, strict=True)
    ]
    assert all(sums_up(parts) for parts in memory_parts(trials_of(*runs), runs[-1]))


def test_the_update_does_not_bend_the_lines() -> None:
    """Where the update peaks higher in the small trials, forward and backward alone are what is fitted."""
    job = Job(update=25)
    best = job.run(4, 22, 22)
    parts = memory_parts([*job.trials(), *trials_of(job.run(4, 2, 2, is_split=False))], best)[0]
    assert (parts.per_share_bytes, parts.whole_batch_bytes, parts.update_peak_bytes) == (8 * MIB, 24 * MIB, None)


def test_failed_trials_do_not_count() -> None:
    """A trial that ran out of memory stopped before its peak; one that lacked headroom reached it."""
    job = Job()
    failed = Job(share=0).run(8, 20, 20, outcome=Outcome.OUT_OF_MEMORY)
    lacking = [job.run(2, 3, 3, outcome=Outcome.NO_HEADROOM), job.run(4, 2, 2, outcome=Outcome.NO_HEADROOM)]
    parts = memory_parts(trials_of(failed, *lacking), job.run(4, 22, 22))[0]
    assert (parts.per_share_bytes, parts.whole_batch_bytes) == (8 * MIB, 24 * MIB)


def test_what_the_trials_do_not_tell_is_none() -> None:
    """One size of share leaves all unknown; one size of micro-batch leaves GPU 0's other parts unknown."""
    job = Job()
    best = job.run(4, 2, 2)
    for parts in memory_parts([], best)[:1]:
        assert (parts.per_share_bytes, parts.whole_batch_bytes, parts.fixed_bytes) == (None, None, None)
    first, second, _ = memory_parts(trials_of(job.run(2, 3, 3)), best)
    assert (first.per_share_bytes, first.whole_batch_bytes, first.fixed_bytes) == (8 * MIB, None, None)
    assert (second.per_share_bytes, second.whole_batch_bytes, second.fixed_bytes) == (4 * MIB, 0, 7 * MIB)


def test_a_single_device_has_one_part_for_the_batch() -> None:
    """Alone, GPU 0's share is the micro-batch, and one slope holds both."""
    job = Job(totals=(200,), outside=(0,))
    runs = [job.run(8), job.run(24)]
    (parts,) = memory_parts(trials_of(*runs), runs[1])
    assert (parts.per_share_bytes, parts.whole_batch_bytes, parts.fixed_bytes) == (60 * MIB, 0, 10 * MIB)
    text = explain(trials_of(*runs), runs[1], runs[1], job.devices(), is_modelled=False)
    assert is_plain(text)
    assert text.startswith("At the best split GPU 0 has 129.0 MiB left free.")
    assert "whole micro" not in text
    assert "take more accumulation steps; micro-batches of half the size free about 30.0 MiB" in text


# the remedies


def test_another_card_is_gpu0_where_it_has_more_room() -> None:
    """More room elsewhere than the fixed part calls for another GPU 0, with the order of devices that does it."""
    job = Job(totals=(60, 200, 300))
    assert job.remedies(4, 22, 22)[0] is Remedy.OTHER_GPU0
    assert 'tune again with `devices=["cuda:2", "cuda:0", "cuda:1"]`' in job.explain(4, 22, 22)
    virtual = job.explain(4, 22, 22, is_modelled=True)
    assert "name that card, a CARD2, first in the `devices` string" in virtual
    assert "cuda" not in virtual
    assert "memory is accounted, not measured" in virtual


def test_another_card_must_have_more_room_than_moves() -> None:
    """A card with more room by less than the fixed part would be no better off as GPU 0."""
    job = Job(totals=(100, 109, 109))
    best = job.run(4, 22, 22)
    assert other_gpu0(memory_parts(job.trials(), best)[0], best, job.devices()) is None
    roomier = Job(totals=(100, 111, 109))
    best = roomier.run(4, 22, 22)
    assert other_gpu0(memory_parts(roomier.trials(), best)[0], best, roomier.devices()) == 1


def test_another_program_is_closed_where_it_has_the_bulk() -> None:
    """Where others hold more than this job on a card of any room, that is what to free; the context is not theirs."""
    job = Job(totals=(200, 200, 200), outside=(150, 100, 100))
    assert Remedy.CLOSE_PROGRAM in job.remedies(4, 22, 22)
    assert "close what else runs on GPU 0, which holds about 50.0 MiB" in job.explain(4, 22, 22)


def test_the_loss_moves_where_it_is_large() -> None:
    """A large whole-batch part calls for the loss in the replicas: all but GPU 0's own 4 of 48 samples leave it."""
    job = Job(totals=LEVEL, whole=1.5, share=0.5)
    assert job.remedies(4, 22, 22) == (Remedy.LOSS_IN_REPLICAS,)
    text = job.explain(4, 22, 22)
    assert "72.0 MiB for the outputs and the loss of the whole micro-batch of 48 samples" in text
    assert 'about 66.0 MiB less there. Tune with `loss_placement="either"`' in text


def test_a_loss_in_the_replicas_is_fitted_alone() -> None:
    """Trials with the loss elsewhere lie on other lines, and what is done already is not recommended."""
    gathered, own = Job(totals=LEVEL, whole=1.5, share=0.5), Job(totals=LEVEL, whole=1, share=1)
    runs = [replace(trial.measurement, loss_placement="replica") for trial in own.trials()]
    best = runs[-1]
    parts = memory_parts([*gathered.trials(), *trials_of(*runs)], best)[0]
    assert (parts.per_share_bytes, parts.whole_batch_bytes, parts.fixed_bytes) == (4 * MIB, 48 * MIB, 10 * MIB)
    assert Remedy.LOSS_IN_REPLICAS not in remedies(parts, best, own.devices())


def test_a_smaller_share_where_it_is_large() -> None:
    """A large share calls for a smaller one."""
    job = Job(totals=LEVEL, whole=0, share=2)
    assert job.remedies(16, 16, 16) == (Remedy.SMALLER_SHARE,)
    text = Job(totals=(60, 66, 66), whole=0).explain(16, 16, 16)
    assert "lower gpu0_bsz; each sample fewer on GPU 0 frees about 2.0 MiB, at the price of speed." in text


def test_more_steps_where_all_else_is_small() -> None:
    """Small parts that still grow with the batch call for more accumulation steps."""
    job = Job(totals=LEVEL, whole=0.1, share=0.5, fixed0=50)
    assert job.remedies(4, 22, 22) == (Remedy.MORE_STEPS,)
    assert "take more accumulation steps; micro-batches of half the size free about 3.4 MiB" in job.explain(4, 22, 22)


@pytest.mark.parametrize(("update", "what"), [(0, "what no batch size changes"), (80, "the optimizer's update")])
def test_no_split_helps_against_what_is_fixed(update: float, what: str) -> None:
    """Where parameters and optimizer state are nearly all, or the update peaks highest, no split is recommended."""
    job = Job(totals=LEVEL, whole=0.001, share=0.01, fixed0=70, update=update, outside=(10, 0, 0))
    assert job.remedies(4, 22, 22) == (Remedy.NO_SPLIT,)
    text = job.explain(4, 22, 22)
    assert f"neither gpu0_bsz nor more accumulation steps can help, as the peak is {what}" in text
    assert ("The optimizer's update peaks higher, at 80.0 MiB." in text) == bool(update)


def test_a_full_replica_hands_samples_to_gpu0() -> None:
    """Where another card is the fullest, gpu0_bsz goes up instead of down, and the optimizer is not in its way."""
    text = Job(totals=(500, 60, 60)).explain(4, 22, 22)
    assert "GPU 1 is the fullest card" in text
    assert "raise gpu0_bsz" in text
    assert "optimizer state" not in text
    assert "whole micro" not in text


def test_what_gpu0_bsz_cannot_do_is_said() -> None:
    """One step less needs 10 + 1 x 48 MiB on GPU 0 without a share of its own, and 50 are there."""
    job = Job(totals=(50, 80, 80), whole=1)
    text = job.explain(4, 10, 10)
    assert "No gpu0_bsz can bring fewer than 2 accumulation steps" in text
    assert "would need about 58.0 MiB even without a share of its own, and has 50.0 MiB" in text
    assert "No gpu0_bsz" not in Job(totals=(60, 80, 80), whole=1).explain(4, 10, 10)


# what the tuned split bought


def test_the_gain_over_the_even_split_is_told() -> None:
    """Steps saved and the factor in samples/s, modelled where it is, follow the smaller share."""
    job = Job(totals=(70, 200, 200))
    text = job.explain(3, 22, 23, baseline=job.run(8, 8, 8), is_modelled=True)
    assert "a smaller share, 3 of 48 samples where the even split gives it 8 of 24" in text
    assert "1 accumulation step instead of 2" in text
    assert "2.00 times the samples per second (modelled)" in text
    same_steps = job.explain(3, 22, 23, baseline=job.run(16, 16, 16))
    assert "buys 29.0 MiB left on GPU 0 instead of 3.0 MiB and 2.00 times the samples per second" in same_steps
    assert "modelled" not in same_steps


def test_no_even_split_is_said() -> None:
    """Where no even split fits, that one fits at all is what the smaller share bought."""
    assert "No even split fits; this one does, with GPU 0 taking only 4 of 48 samples." in Job().explain(4, 22, 22)


def test_an_even_winner_claims_nothing() -> None:
    """A best split whose share of GPU 0 is not smaller has bought nothing."""
    job = Job(totals=(100, 150, 150))
    assert "smaller share" not in job.explain(16, 16, 16, baseline=job.run(16, 16, 16))


# the paragraph


def test_level_cards_need_one_sentence() -> None:
    """Alike cards, alike full: one sentence and no advice."""
    text = Job(totals=(4000, 4000, 4000)).explain(16, 16, 16)
    assert text.startswith("The cards are evenly filled at the best split: 3.8")
    assert text.count(". ") == 0
    assert "held outside" not in text
    full = Job(totals=(4000, 4000, 4000), outside=(3800, 3800, 3800)).explain(16, 16, 16)
    assert full.endswith("most of what fills them is held outside this job: 3.71 GiB on each.")


def test_too_few_trials_are_said() -> None:
    """Where the trials do not tell, the paragraph says so, and still gives the free memory of the cards."""
    job = Job()
    best = job.run(4, 2, 2)
    text = explain(trials_of(best), best, best, job.devices()[:1], is_modelled=False)
    assert is_plain(text)
    assert "too few trials" in text
    assert "A search with more trials would tell which remedy fits." in text


def test_memory_that_was_not_recorded_is_said() -> None:
    """Without a reading there is no figure to give."""
    split = BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(4, 4))
    best = Measurement(split=split, outcome=Outcome.OK, whole_step_times_s=(1.0,))
    assert "not recorded" in explain([], best, None, (), is_modelled=False)
    assert memory_parts([], best) == ()


@given(
    share=st.floats(0, 100),
    whole=st.floats(0, 100),
    fixed0=st.floats(0, 1000),
    update=st.floats(0, 1000),
    room=st.tuples(*[st.floats(0, 1000)] * 3),
    outside=st.tuples(*[st.floats(0, 1000)] * 3),
    is_modelled=st.booleans(),
)
def test_the_paragraph_is_plain_words_and_figures(
    share: float,
    whole: float,
    fixed0: float,
    update: float,
    room: tuple[float, ...],
    outside: tuple[float, ...],
    is_modelled: bool,
) -> None:
    """Whatever the figures: one paragraph, with units, without None or nan, and modelled only where it is."""
    job = Job(share=share, whole=whole, fixed0=fixed0, update=update)
    used = [memory.peak_reserved_bytes / MIB for memory in job.run(4, 22, 22).memory]
    totals = [math.ceil(sum(figures)) for figures in zip(used, room, outside, strict=True)]
    job = Job(share=share, whole=whole, fixed0=fixed0, update=update, totals=totals, outside=outside)
    text = job.explain(4, 22, 22, baseline=job.run(8, 8, 8), is_modelled=is_modelled)
    assert is_plain(text)
    assert is_modelled or "modelled" not in text


def test_large_cards_are_told_in_gib() -> None:
    """Figures carry the unit that people read."""
    text = Job(totals=(16 * 1024, 24 * 1024, 24 * 1024), fixed0=9 * 1024).explain(4, 22, 22)
    assert "Of GPU 0's 16.00 GiB" in text
