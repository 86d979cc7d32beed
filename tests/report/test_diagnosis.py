"""The diagnosis: which device is full and of what, what was bought, and the remedies that fit. Numbers, no words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.diagnosis import Advice, Diagnosis, Gain, Remedy, StepsLimit, UnsteadyMemory, diagnose
from splittune.split import BatchSplit
from splittune.units import MIB
from tests.report.job import LEVEL, Job, trials_of


def remedies(diagnosis: Diagnosis) -> list[Remedy]:
    return [advice.remedy for advice in diagnosis.advice]


# which device


def test_the_worked_example_of_the_docstring() -> None:
    """GPU 0 is the fullest; another card has so much more room that it should be GPU 0."""
    diagnosis = Job(totals=(60, 200, 300)).diagnosis(4, 22, 22)
    assert [memory.peak_reserved_bytes / MIB for memory in diagnosis.best.memory] == [43, 52, 52]
    assert (diagnosis.fullest, diagnosis.emptiest, diagnosis.are_level) == (0, 2, False)
    assert diagnosis.parts is not None
    assert diagnosis.parts.fixed_bytes == 10 * MIB
    assert diagnosis.advice[0] == Advice(remedy=Remedy.OTHER_GPU0, device=2, frees_bytes=240 * MIB)


def test_level_cards_need_no_advice() -> None:
    """Alike cards, alike full: none stands out. With the same fill on cards of other sizes one does."""
    level = Job(totals=(4000, 4000, 4000)).diagnosis(16, 16, 16)
    assert (level.are_level, level.advice, level.is_mostly_others) == (True, (), False)
    assert not Job(totals=(4000, 4000, 5000)).diagnosis(16, 16, 16).are_level
    full = Job(totals=(4000, 4000, 4000), outside=(3800, 3800, 3800)).diagnosis(16, 16, 16)
    assert (full.are_level, full.is_mostly_others) == (True, True)


def test_a_single_device_is_never_level() -> None:
    """Alone it is the fullest and the emptiest, and has its own advice."""
    job = Job(totals=(200,), outside=(0,))
    runs = [job.run(8), job.run(24)]
    diagnosis = diagnose(trials_of(*runs), runs[1], runs[1], job.devices(), is_modelled=False)
    assert (diagnosis.fullest, diagnosis.emptiest, diagnosis.are_level, diagnosis.gain) == (0, 0, False, None)
    assert diagnosis.advice == (Advice(remedy=Remedy.MORE_STEPS, frees_bytes=30 * MIB),)


def test_memory_that_was_not_recorded_leaves_the_rest_unknown() -> None:
    """Without a reading there is no fullest device; what was bought in steps and speed is known all the same."""
    split = BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(2, 6))
    even = BatchSplit(global_batch_size=8, accumulation_steps=2, shard_sizes=(2, 2))
    best = Measurement(split=split, outcome=Outcome.OK, whole_step_times_s=(1.0,))
    diagnosis = diagnose([], best, replace(best, split=even), (), is_modelled=False)
    assert (diagnosis.fullest, diagnosis.emptiest, diagnosis.parts, diagnosis.advice) == (None, None, None, ())
    assert diagnosis.gain == Gain(even_split=even, saves_steps=True, speedup=1.0)


# the remedies


def test_another_card_must_have_more_room_than_moves() -> None:
    """A card with more room by less than the fixed part would be no better off as GPU 0."""
    assert Remedy.OTHER_GPU0 not in remedies(Job(totals=(100, 109, 109)).diagnosis(4, 22, 22))
    assert Job(totals=(100, 111, 109)).diagnosis(4, 22, 22).advice[0].device == 1


def test_another_program_is_closed_where_it_has_the_bulk() -> None:
    """Where others hold more than this job on a card of any room, that is what to free; the context is not theirs."""
    diagnosis = Job(totals=(200, 200, 200), outside=(150, 100, 100)).diagnosis(4, 22, 22)
    assert diagnosis.is_mostly_others
    assert Advice(remedy=Remedy.CLOSE_PROGRAM, frees_bytes=50 * MIB) in diagnosis.advice


def test_what_every_card_has_outside_is_no_program() -> None:
    """Where others hold as much of each card, or nothing of another one, what could be closed is not told."""
    for outside in [(150, 150, 150), (150, 0, 0)]:
        diagnosis = Job(totals=(200, 220, 260), outside=outside).diagnosis(4, 22, 22)
        (closing,) = [advice for advice in diagnosis.advice if advice.remedy is Remedy.CLOSE_PROGRAM]
        assert closing.frees_bytes is None


def test_the_loss_moves_where_it_is_large() -> None:
    """A large whole-batch part calls for the loss in the replicas: all but GPU 0's own 4 of 48 samples leave it."""
    diagnosis = Job(totals=LEVEL, whole=1.5, share=0.5).diagnosis(4, 22, 22)
    assert diagnosis.advice == (Advice(remedy=Remedy.LOSS_IN_REPLICAS, frees_bytes=66 * MIB),)


def test_a_loss_in_the_replicas_is_not_advised_twice() -> None:
    """What is done already is not recommended."""
    job = Job(totals=LEVEL, whole=1, share=1)
    runs = [replace(trial.measurement, loss_placement="replica") for trial in job.trials()]
    diagnosis = diagnose(trials_of(*runs), runs[-1], None, job.devices(), is_modelled=False)
    assert Remedy.LOSS_IN_REPLICAS not in remedies(diagnosis)


def test_a_smaller_share_where_it_is_large() -> None:
    """A large share calls for a smaller one: 2 MiB for each sample."""
    diagnosis = Job(totals=(60, 66, 66), whole=0).diagnosis(16, 16, 16)
    assert diagnosis.advice == (Advice(remedy=Remedy.SMALLER_SHARE, frees_bytes=2 * MIB),)


def test_more_steps_where_all_else_is_small() -> None:
    """Small parts that still grow with the batch, 2 + 4.8 MiB, call for more accumulation steps."""
    (advice,) = Job(totals=LEVEL, whole=0.1, share=0.5, fixed0=50).diagnosis(4, 22, 22).advice
    assert advice.remedy is Remedy.MORE_STEPS
    assert advice.frees_bytes == pytest.approx(3.4 * MIB, abs=500)


@pytest.mark.parametrize("update", [0, 80])
def test_no_split_helps_against_what_is_fixed(update: float) -> None:
    """Where parameters and optimizer state are nearly all, or the update peaks highest, no split is recommended."""
    job = Job(totals=LEVEL, whole=0.001, share=0.01, fixed0=70, update=update, outside=(10, 0, 0))
    diagnosis = job.diagnosis(4, 22, 22)
    assert diagnosis.advice == (Advice(remedy=Remedy.NO_SPLIT),)
    assert diagnosis.parts is not None
    assert diagnosis.parts.update_peak_bytes == (80 * MIB if update else None)


def test_too_few_trials_give_no_advice() -> None:
    """Where the trials do not tell what the peak is made of, no remedy is known."""
    job = Job()
    best = job.run(4, 2, 2)
    diagnosis = diagnose(trials_of(best), best, best, job.devices()[:1], is_modelled=False)
    assert diagnosis.advice == ()
    assert diagnosis.fullest == 0


def test_a_full_replica_is_no_matter_of_gpu0() -> None:
    """Where another card is the fullest its parts are told, and no other GPU 0 is advised."""
    diagnosis = Job(totals=(500, 60, 60)).diagnosis(4, 22, 22)
    assert diagnosis.fullest == 1
    assert remedies(diagnosis) == [Remedy.SMALLER_SHARE]
    assert diagnosis.steps_limit is None


# what was bought, and what cannot be


def test_one_step_less_may_fit_with_no_share() -> None:
    """One step less needs 10 + 1 x 48 MiB on GPU 0 without a share of its own: 50 are too little, 60 are not."""
    limit = Job(totals=(50, 80, 80), whole=1).diagnosis(4, 10, 10).steps_limit
    assert limit == StepsLimit(micro_batch_size=48, needed_bytes=58 * MIB, available_bytes=50 * MIB)
    assert Job(totals=(60, 80, 80), whole=1).diagnosis(4, 10, 10).steps_limit is None
    assert Job(totals=(50, 80, 80), whole=1).diagnosis(4, 22, 22).steps_limit is None


def test_the_gain_over_the_even_split() -> None:
    """Fewer steps, more memory left on GPU 0, and the factor in samples/s, each where it is so."""
    job = Job(totals=(70, 200, 200))
    fewer = job.diagnosis(3, 22, 23, baseline=job.run(8, 8, 8)).gain
    assert fewer == Gain(even_split=job.run(8, 8, 8).split, saves_steps=True, speedup=2.0)
    same = job.diagnosis(3, 22, 23, baseline=job.run(16, 16, 16)).gain
    assert same == Gain(
        even_split=job.run(16, 16, 16).split,
        gpu0_headroom_bytes=29 * MIB,
        even_gpu0_headroom_bytes=3 * MIB,
        speedup=2.0,
    )


def test_that_one_fits_at_all_may_be_the_gain() -> None:
    """Where no even split fits, a smaller share of GPU 0 bought that; a share as large as the others' did not."""
    assert Job().diagnosis(4, 22, 22).gain == Gain(even_split=None)
    assert Job().diagnosis(16, 16, 16).gain is None


def test_an_even_winner_gained_nothing() -> None:
    """A best split whose share of GPU 0 is not smaller has bought nothing."""
    job = Job(totals=(100, 150, 150))
    assert job.diagnosis(16, 16, 16, baseline=job.run(16, 16, 16)).gain is None
    assert job.diagnosis(8, 8, 8, baseline=job.run(16, 16, 16)).gain is None


# whether memory can be relied on


def grown_by(job: Job, mib: float, shards: Sequence[int] = (4, 22, 22)) -> Measurement:
    """A run whose GPU 0 had so much more outside."""
    return replace(job, outside=(mib, 0, 0)).run(*shards)


def test_memory_that_changes_by_more_than_is_left_is_unsteady() -> None:
    """57 MiB left in one run and 17 in another: one more such change runs out of memory. 10 more are no risk."""
    job = Job()
    best = job.run(4, 22, 22)
    devices = job.devices()
    steady = diagnose(trials_of(best, grown_by(job, 10)), best, None, devices, is_modelled=False)
    assert steady.unsteady is None
    unsteady = diagnose(trials_of(best, grown_by(job, 40)), best, None, devices, is_modelled=False)
    assert unsteady.unsteady == UnsteadyMemory(device=0, changed_bytes=40 * MIB, least_headroom_bytes=17 * MIB)


def test_only_runs_of_the_best_split_are_compared() -> None:
    """Another split, or another place of the loss, takes other memory."""
    job = Job()
    best = job.run(4, 22, 22)
    others = [grown_by(job, 40, (5, 22, 21)), replace(grown_by(job, 40), loss_placement="replica")]
    assert diagnose(trials_of(best, *others), best, None, job.devices(), is_modelled=False).unsteady is None


@given(
    share=st.floats(0, 100),
    whole=st.floats(0, 100),
    fixed0=st.floats(0, 1000),
    update=st.floats(0, 1000),
    room=st.tuples(*[st.floats(1, 1000)] * 3),
    outside=st.tuples(*[st.floats(0, 1000)] * 3),
)
def test_facts_are_consistent_whatever_the_figures(
    share: float, whole: float, fixed0: float, update: float, room: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    """The fullest has least left; what advice frees is above 0; one piece of advice a remedy; its parts are its own."""
    job = Job(share=share, whole=whole, fixed0=fixed0, update=update)
    used = [memory.peak_reserved_bytes / MIB for memory in job.run(4, 22, 22).memory]
    totals = [sum(figures) for figures in zip(used, room, outside, strict=True)]
    job = replace(job, totals=totals, outside=outside)
    diagnosis = job.diagnosis(4, 22, 22, baseline=job.run(8, 8, 8))
    headrooms = [memory.headroom_bytes for memory in diagnosis.best.memory]
    assert diagnosis.fullest is not None
    assert diagnosis.emptiest is not None
    assert (headrooms[diagnosis.fullest], headrooms[diagnosis.emptiest]) == (min(headrooms), max(headrooms))
    assert diagnosis.parts is not None
    assert diagnosis.parts.device == diagnosis.fullest
    assert len(set(remedies(diagnosis))) == len(diagnosis.advice)
    assert all(advice.frees_bytes is None or advice.frees_bytes > 0 for advice in diagnosis.advice)
    assert diagnosis.unsteady is None or diagnosis.unsteady.changed_bytes > diagnosis.unsteady.least_headroom_bytes
