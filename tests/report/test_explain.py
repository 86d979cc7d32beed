"""The words of a diagnosis: a plain paragraph with figures, and two facts and a remedy in short."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.diagnosis import UnsteadyMemory, diagnose
from splittune.report.explain import explain, facts_of, paragraph_of, remedy_of, risks_of
from splittune.split import BatchSplit
from splittune.units import MIB
from tests.report.job import LEVEL, Job, trials_of


def paragraph(job: Job, *shards: int, baseline: Measurement | None = None, is_modelled: bool = False) -> str:
    return paragraph_of(job.diagnosis(*shards, baseline=baseline, is_modelled=is_modelled))


def is_plain(text: str) -> bool:
    """One paragraph with figures in it, and nothing that a program would print for what it does not know."""
    words = text.replace("/", " ").replace(",", " ").split()
    is_whole = text.endswith(".") and "\n" not in text and "  " not in text
    return is_whole and "iB" in text and not {"None", "nan", "inf"} & set(words)


# the remedies


def test_another_gpu0_is_named_as_devices_takes_it() -> None:
    """The order of real devices that does it, or the name of a virtual one."""
    job = Job(totals=(60, 200, 300))
    assert 'tune again with `devices=["cuda:2", "cuda:0", "cuda:1"]`' in paragraph(job, 4, 22, 22)
    virtual = paragraph(job, 4, 22, 22, is_modelled=True)
    assert "name it, a CARD2, first in `devices`" in virtual
    assert "cuda" not in virtual
    assert "Memory is accounted and time modelled" in virtual


def test_what_to_close_and_how_much_it_holds() -> None:
    """The program's amount where it is told."""
    job = Job(totals=(200, 200, 200), outside=(150, 100, 100))
    assert "close what else runs on GPU 0, which holds about 50.0 MiB" in paragraph(job, 4, 22, 22)


def test_where_the_loss_could_be() -> None:
    """What it takes on GPU 0, what leaves it, and the option."""
    text = paragraph(Job(totals=LEVEL, whole=1.5, share=0.5), 4, 22, 22)
    assert "72.0 MiB for the outputs and the loss of the whole micro-batch of 48 samples" in text
    assert 'about 66.0 MiB less there. Tune with `loss_placement="either"`' in text


def test_what_a_smaller_share_frees() -> None:
    """For each sample, and that it costs speed."""
    text = paragraph(Job(totals=(60, 66, 66), whole=0), 16, 16, 16)
    assert "lower gpu0_bsz; each sample fewer on GPU 0 frees about 2.0 MiB, at the price of speed." in text


def test_what_more_steps_free() -> None:
    """With micro-batches of half the size."""
    text = paragraph(Job(totals=LEVEL, whole=0.1, share=0.5, fixed0=50), 4, 22, 22)
    assert "take more accumulation steps; micro-batches of half the size free about 3.4 MiB" in text


@pytest.mark.parametrize(("update", "what"), [(0, "what no batch size changes"), (80, "the optimizer's update")])
def test_that_no_split_helps(update: float, what: str) -> None:
    """What the peak is, and what would help instead."""
    job = Job(totals=LEVEL, whole=0.001, share=0.01, fixed0=70, update=update, outside=(10, 0, 0))
    text = paragraph(job, 4, 22, 22)
    assert f"neither gpu0_bsz nor more accumulation steps can help, as the peak is {what}" in text
    assert ("The optimizer's update peaks higher, at 80.0 MiB." in text) == bool(update)


def test_a_full_replica_hands_samples_to_gpu0() -> None:
    """Where another card is the fullest, gpu0_bsz goes up instead of down, and the optimizer is not in its way."""
    text = paragraph(Job(totals=(500, 60, 60)), 4, 22, 22)
    assert "GPU 1 is the fullest card" in text
    assert "raise gpu0_bsz" in text
    assert "optimizer state" not in text
    assert "whole micro" not in text


def test_what_gpu0_bsz_cannot_do_is_said() -> None:
    """What one step less would need, and what there is."""
    text = paragraph(Job(totals=(50, 80, 80), whole=1), 4, 10, 10)
    assert "No gpu0_bsz can bring fewer than 2 accumulation steps" in text
    assert "would need about 58.0 MiB even without a share of its own, and has 50.0 MiB" in text


# what the tuned split bought


def test_the_gain_over_the_even_split_is_told() -> None:
    """Steps saved and the factor in samples/s, modelled where it is, follow the smaller share."""
    job = Job(totals=(70, 200, 200))
    text = paragraph(job, 3, 22, 23, baseline=job.run(8, 8, 8), is_modelled=True)
    assert "a smaller share, 3 of 48 samples where the even split gives it 8 of 24" in text
    assert "1 accumulation step instead of 2" in text
    assert "2.00 times the samples per second (modelled)" in text
    same_steps = paragraph(job, 3, 22, 23, baseline=job.run(16, 16, 16))
    assert "buys 29.0 MiB left on GPU 0 instead of 3.0 MiB and 2.00 times the samples per second" in same_steps
    assert "modelled" not in same_steps


def test_no_even_split_is_said() -> None:
    """Where no even split fits, that one fits at all is what the smaller share bought."""
    text = paragraph(Job(), 4, 22, 22)
    assert "No even split fits; this one does, with GPU 0 taking only 4 of 48 samples." in text


def test_an_even_winner_claims_nothing() -> None:
    """A best split whose share of GPU 0 is not smaller has bought nothing."""
    job = Job(totals=(100, 150, 150))
    assert "smaller share" not in paragraph(job, 16, 16, 16, baseline=job.run(16, 16, 16))


# where memory is not what decides


def test_where_memory_is_ample_it_is_said_and_nothing_is_advised() -> None:
    """The batch fits in one step and every card stays half empty: no remedy would gain anything."""
    job = Job(totals=(1000, 2000, 2000))
    found = job.diagnosis(4, 22, 22, baseline=job.run(16, 16, 16))
    assert found.advice
    assert remedy_of(found) == ""
    assert facts_of(found)[0] == (
        "Memory does not limit it: the batch fits in one step, evenly spread, and the fullest card, GPU 0, has "
        "957.0 MiB of 1000.0 MiB left."
    )


def test_where_memory_may_decide_it_is_not_called_ample() -> None:
    """More steps, no even split, a trial that lacked memory, or a card that is more than half full."""
    job = Job(totals=(1000, 2000, 2000))
    best, even = job.run(4, 22, 22), job.run(16, 16, 16)
    lacking = job.run(0, 24, 24, outcome=Outcome.NO_HEADROOM)
    full = Job(totals=(80, 2000, 2000))
    cases = [
        diagnose(trials_of(best), best, None, job.devices(), is_modelled=False),
        diagnose(trials_of(best), best, job.run(8, 8, 8), job.devices(), is_modelled=False),
        diagnose(trials_of(best, lacking), best, even, job.devices(), is_modelled=False),
        diagnose(trials_of(best), replace(best, memory=()), even, job.devices(), is_modelled=False),
        full.diagnosis(4, 22, 22, baseline=full.run(16, 16, 16)),
    ]
    assert [case.is_ample for case in cases] == [False] * 5
    assert diagnose(trials_of(best), best, even, job.devices(), is_modelled=False).is_ample


# the paragraph


def test_level_cards_need_one_sentence() -> None:
    """Alike cards, alike full: one sentence and no advice."""
    text = paragraph(Job(totals=(4000, 4000, 4000)), 16, 16, 16)
    assert text.startswith("The cards are evenly filled at the best split: 3.8")
    assert text.count(". ") == 0
    assert "held outside" not in text
    full = paragraph(Job(totals=(4000, 4000, 4000), outside=(3800, 3800, 3800)), 16, 16, 16)
    assert full.endswith("most of what fills them is held outside this job: 3.71 GiB on each.")


def test_a_single_device_has_no_other_to_be_compared_with() -> None:
    """What is left on it, and no word of the whole micro-batch, which is its share."""
    job = Job(totals=(200,), outside=(0,))
    runs = [job.run(8), job.run(24)]
    text = explain(trials_of(*runs), runs[1], runs[1], job.devices(), is_modelled=False)
    assert is_plain(text)
    assert text.startswith("At the best split GPU 0 has 129.0 MiB left free.")
    assert "whole micro" not in text


def test_too_few_trials_are_said() -> None:
    """Where the trials do not tell, the paragraph says so, and still gives the free memory of the cards."""
    job = Job()
    best = job.run(4, 2, 2)
    diagnosis = diagnose(trials_of(best), best, best, job.devices()[:1], is_modelled=False)
    text = paragraph_of(diagnosis)
    assert is_plain(text)
    assert "too few trials" in text
    assert "A search with more trials would tell which remedy fits." in text
    assert "too few trials" in facts_of(diagnosis)[0]
    assert remedy_of(diagnosis) == ""


def test_memory_that_was_not_recorded_is_said() -> None:
    """Without a reading there is no figure to give."""
    split = BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(4, 4))
    best = Measurement(split=split, outcome=Outcome.OK, whole_step_times_s=(1.0,))
    assert "not recorded" in explain([], best, None, (), is_modelled=False)


def test_large_cards_are_told_in_gib() -> None:
    """Figures carry the unit that people read."""
    text = paragraph(Job(totals=(16 * 1024, 24 * 1024, 24 * 1024), fixed0=9 * 1024), 4, 22, 22)
    assert "Of GPU 0's 16.00 GiB" in text


# in short


@pytest.mark.parametrize(
    ("job", "fact"),
    [
        (Job(totals=(200, 200, 200), outside=(150, 100, 100)), "150.0 MiB of GPU 0's 200.0 MiB are held outside"),
        (Job(totals=LEVEL, whole=1.5, share=0.5), "most of it is the outputs and the loss of all shares (72.0 MiB)"),
        (Job(totals=LEVEL, fixed0=50), "GPU 0 is the fullest, with 17.0 MiB left; most of it is what no batch size"),
        (Job(totals=(500, 60, 60)), "GPU 1 is the fullest, with 8.0 MiB left; most of it is its share of the batch"),
        (Job(totals=LEVEL, update=80, outside=(10, 0, 0)), "the optimizer's update fills it, 80.0 MiB."),
    ],
)
def test_the_first_fact_is_what_fills_the_fullest(job: Job, fact: str) -> None:
    """Other programs, or the largest part of what this job holds there."""
    assert fact in facts_of(job.diagnosis(4, 22, 22))[0]


def test_the_second_fact_is_what_was_bought() -> None:
    """The shares of GPU 0 and the steps; where nothing was bought, why there are not fewer steps."""
    job = Job(totals=(70, 200, 200))
    _, bought = facts_of(job.diagnosis(3, 22, 23, baseline=job.run(8, 8, 8)))
    assert bought == "GPU 0 now takes 3 of 48 samples, not 8 of 24: 1 accumulation step instead of 2."
    _, same = facts_of(job.diagnosis(3, 22, 23, baseline=job.run(16, 16, 16)))
    assert same == "GPU 0 now takes 3 of 48 samples, not 16 of 48."
    _, alone = facts_of(Job().diagnosis(4, 22, 22))
    assert alone == "No even split fits; this one does, with GPU 0 taking only 4 of 48 samples."
    limited = Job(totals=(50, 80, 80), whole=1)
    _, limit = facts_of(limited.diagnosis(4, 10, 10, baseline=limited.run(4, 10, 10)))
    assert limit.startswith("No gpu0_bsz can bring fewer than 2 accumulation steps")
    assert len(facts_of(Job(totals=(100, 150, 150)).diagnosis(16, 16, 16))) == 1
    level = Job(totals=(4000, 4000, 4000))
    _, unused = facts_of(level.diagnosis(24, 24, 0, baseline=level.run(16, 16, 16)))
    assert unused == "GPU 2 takes no samples: no split that uses it was found to be faster."
    _, both = facts_of(level.diagnosis(48, 0, 0, baseline=level.run(16, 16, 16)))
    assert both == "GPU 1-2 take no samples: no split that uses them was found to be faster."


def test_risks_are_told_with_what_to_do() -> None:
    """A device whose memory cannot be relied on, and an allocator at its limit; mostly there is none."""
    diagnosis = Job().diagnosis(4, 22, 22)
    assert risks_of(diagnosis) == ()
    unsteady = UnsteadyMemory(device=1, changed_bytes=40 * MIB, least_headroom_bytes=17 * MIB)
    risky = replace(diagnosis, unsteady=unsteady, best=replace(diagnosis.best, num_alloc_retries=1))
    first, second = risks_of(risky)
    assert first.startswith("the free memory of GPU 1 changed by 40.0 MiB between two runs of this split, and 17.0 MiB")
    assert "free its cache and try again 1 time under this split" in second
    assert all("--min-headroom-bytes" in risk for risk in (first, second))


@given(
    share=st.floats(0, 100),
    whole=st.floats(0, 100),
    fixed0=st.floats(0, 1000),
    update=st.floats(0, 1000),
    room=st.tuples(*[st.floats(0, 1000)] * 3),
    outside=st.tuples(*[st.floats(0, 1000)] * 3),
    is_modelled=st.booleans(),
)
def test_all_is_plain_words_and_figures(
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
    diagnosis = job.diagnosis(4, 22, 22, baseline=job.run(8, 8, 8), is_modelled=is_modelled)
    text, short = paragraph_of(diagnosis), " ".join(facts_of(diagnosis))
    assert is_plain(text)
    assert is_plain(short)
    assert is_modelled or "modelled" not in text
    assert not remedy_of(diagnosis).endswith(".")
