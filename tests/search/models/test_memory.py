from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.problems.problem import Problem
from benchmarks.search.problem import without_optional_readings
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search import MemoryModel
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.memory import MOST_MARGIN
from splittune.search.models.memory_readings import REPEATABILITY
from splittune.split import BatchSplit
from tests.search.models.predictions import B, interval, truth_of
from tests.search.models.readings import memory, ran
from tests.search.problem import MIB, card_memory, even, job, rows, split, trial, trials


@st.composite
def jobs(draw: st.DrawFn) -> Problem:
    """Any job whose memory is affine per phase, with cards of one kind or two, and room for all of
    it.
    """
    num_devices = draw(st.integers(1, 4))
    common = {
        "parameters": float(draw(st.integers(1, 2000))),
        "stays": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "sample": draw(st.sampled_from([0.0, 0.1, 3.0, 40.0, 500.0])),
    }
    first = {
        "state": common["parameters"] * draw(st.integers(0, 2)),
        "output": common["sample"] * draw(st.sampled_from([0.0, 0.1, 0.5])),
    }
    workspaces = [0.0, common["parameters"] * draw(st.sampled_from([0.0, 0.3]))]
    kinds = [draw(st.integers(0, 1)) for _ in range(num_devices)]
    return job(
        [
            card_memory(**common, **(first if i == 0 else {}), workspace=workspaces[kind], is_first=i == 0)
            for i, kind in enumerate(kinds)
        ],
        B=B,
    )


@st.composite
def ascending(draw: st.DrawFn, num_devices: int) -> list[BatchSplit]:
    """Splits of ever larger micro-batches: even ones, and others with any shards; the first
    accumulates.
    """
    steps = sorted(draw(st.sets(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), min_size=1, max_size=4)), reverse=True)
    splits = [even(B, 16, num_devices)]
    for k in steps:
        size = -(-B // k)
        gpu0 = draw(st.integers(0, size)) if num_devices > 1 else size
        one = BatchSplit.with_gpu0(global_batch_size=B, accumulation_steps=k, num_devices=num_devices, gpu0_bsz=gpu0)
        splits.append(draw(st.sampled_from([one, even(B, k, num_devices)])))
    return splits


def others(num_devices: int) -> list[BatchSplit]:
    """Splits of all sizes and many shares."""
    return [
        BatchSplit.with_gpu0(
            global_batch_size=B, accumulation_steps=k, num_devices=num_devices, gpu0_bsz=round(part * -(-B // k))
        )
        for k in (1, 2, 4, 16, 64)
        for part in ((0.0, 0.1, 1 / num_devices, 0.6, 1.0) if num_devices > 1 else (1.0,))
    ]


@settings(max_examples=60)
@given(data=st.data())
def test_the_interval_holds_the_truth_after_any_ascending_trials(data: st.DataObject) -> None:
    """Where memory is affine per phase, the peaks of every split lie within the interval, however
    few trials there are.
    """
    problem = data.draw(jobs())
    n = problem.num_devices
    model = MemoryModel((), n)
    for tried in data.draw(ascending(n)):
        model.observe([trial(problem, tried)])
        told, truth = interval(model, *others(n)), truth_of(problem, others(n))
        assert (told.least <= truth * (1 + REPEATABILITY) + MIB).all()
        assert (told.most >= truth * (1 - REPEATABILITY) - MIB).all()
        assert (told.least <= told.most + 1).all()
    assert max(model.errors, default=0) <= REPEATABILITY
    assert model.margin <= MOST_MARGIN
    assert model.warnings() == ()


def test_before_anything_ran_nothing_is_limited() -> None:
    """Without a trial that ran nothing is needed and room has no end; one that failed changes
    nothing of that.
    """
    out_of_memory = Measurement(split=even(B, 1, 2), outcome=Outcome.OUT_OF_MEMORY)
    for judged in ([], [JudgedTrial(measurement=out_of_memory)]):
        model = MemoryModel(judged, 2)
        assert (interval(model, even(B, 4, 2)).most == 0).all()
        assert np.isinf(model.budget_bytes).all()
        assert model.warnings() == ()


def test_trials_without_memory_readings_say_nothing_of_memory() -> None:
    """Where nobody reads memory the model stays without limits instead of failing."""
    ran = Measurement(split=even(B, 4, 2), outcome=Outcome.OK, whole_step_times_s=(1.0,))
    model = MemoryModel([JudgedTrial(measurement=ran)] * 2, 2)
    assert (interval(model, even(B, 1, 2)).most == 0).all()
    assert model.errors == []


def test_room_is_what_others_leave_at_most() -> None:
    """Room is the total less what others held, and the worst that any trial saw counts."""
    calm = job([card_memory(is_first=True, total=1000, outside=100), card_memory(total=2000)], B=B)
    busy = job([card_memory(is_first=True, total=1000, outside=300), card_memory(total=2000)], B=B)
    model = MemoryModel([trial(calm, even(B, 32, 2)), trial(busy, even(B, 16, 2)), trial(calm, even(B, 8, 2))], 2)
    assert model.budget_bytes == pytest.approx([700 * MIB, 2000 * MIB])


def test_one_trial_bounds_by_proportion_of_what_is_above_rest() -> None:
    """1010 MiB with 2 samples, 200 MiB of them at rest, is at most 200 + 4 x 810 with 8. Gradients are not held from
    one micro-batch to the next there, so nothing else may stand beside what rests, and it is no less, either.
    """
    replica = card_memory(parameters=100, sample=405)
    problem = job([card_memory(is_first=True), replica], B=B)
    model = MemoryModel([trial(problem, even(B, 16, 2))], 2)
    told = interval(model, even(B, 4, 2), even(B, 16, 2))
    assert told.foretold[0, 1] / MIB == pytest.approx(200 + 4 * 810, rel=0.005)
    assert told.most[0, 1] / MIB == pytest.approx(200 + 4 * 810 + MOST_MARGIN * 3 * 810, rel=0.005)
    assert told.foretold[1, 1] / MIB == pytest.approx(1010, rel=0.005)


def test_a_workspace_larger_than_the_model_is_found_out_by_a_second_size() -> None:
    """800 MiB that no sample needs look like samples after one trial, and no longer after two."""
    problem = job([card_memory(is_first=True), card_memory(parameters=100, workspace=800, sample=5)], B=B)
    model, truth = MemoryModel([trial(problem, even(B, 16, 2))], 2), truth_of(problem, [even(B, 2, 2)])[0, 1]
    assert interval(model, even(B, 2, 2)).least[0, 1] > 2 * truth
    model.observe([trial(problem, even(B, 8, 2))])
    assert interval(model, even(B, 2, 2)).least[0, 1] <= truth


def test_the_interval_narrows_with_data() -> None:
    """Each larger trial leaves less between the least and the most of the largest split, and
    predictions of it end sharp.
    """
    problem = job([card_memory(is_first=True, sample=30, output=5), card_memory(sample=30)], B=B)
    model, widths = MemoryModel((), 2), []
    for k in (32, 16, 8, 4, 2):
        model.observe([trial(problem, even(B, k, 2))])
        told = interval(model, even(B, 1, 2))
        widths.append(float(((told.foretold - told.least) / told.foretold).max()))
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]
    assert widths[-1] < 0.2
    assert interval(model, even(B, 1, 2)).foretold == pytest.approx(truth_of(problem, [even(B, 1, 2)]), rel=0.02)


def test_gpu0s_outputs_are_told_apart_from_its_samples() -> None:
    """GPU 0's trials with several shares of the same micro-batch tell what grows with its share
    from what with all.
    """
    problem = job([card_memory(is_first=True, sample=30, output=7), *[card_memory(sample=30)] * 2], B=B)
    tried = [
        split(B, 16, 1, 2, 1),
        split(B, 8, 4, 2, 2),
        split(B, 8, 0, 4, 4),
        split(B, 4, 4, 6, 6),
        split(B, 2, 20, 6, 6),
    ]
    wanted = [split(B, 2, 2, 15, 15), split(B, 2, 30, 1, 1)]
    told, truth = interval(MemoryModel(trials(problem, tried), 3), *wanted), truth_of(problem, wanted)
    assert (told.foretold[:, 0] >= truth[:, 0]).all()
    assert told.foretold[:, 0] == pytest.approx(truth[:, 0], rel=0.3)
    assert told.least[1, 0] == pytest.approx(truth[1, 0], rel=0.05)


def test_replicas_share_what_a_sample_costs() -> None:
    """What one replica's large share taught bounds another's, on which only a small one ran."""
    problem = job([card_memory(is_first=True), *[card_memory(sample=50)] * 2], B=B, shares="each")
    tried = [even(B, 16, 3), split(B, 8, 1, 6, 1), split(B, 4, 1, 14, 1)]
    told = interval(MemoryModel(trials(problem, tried), 3), split(B, 4, 1, 1, 14))
    assert told.foretold[0, 2] / MIB == pytest.approx(200 + 14 * 50, rel=0.02)


def test_replicas_of_two_kinds_keep_their_own_fixed_part() -> None:
    """A card that holds more with the same share is a kind of its own: its workspace is not put on
    the others.
    """
    kinds = [card_memory(sample=20), card_memory(sample=20, workspace=150), card_memory(sample=20)]
    problem = job([card_memory(is_first=True, sample=20), *kinds], B=B)
    model = MemoryModel(trials(problem, [even(B, k, 4) for k in (16, 8, 4, 2)]), 4)
    told, truth = interval(model, even(B, 1, 4)), truth_of(problem, [even(B, 1, 4)])
    assert told.foretold == pytest.approx(truth, rel=0.02)
    assert told.foretold[0, 2] > told.foretold[0, 1] + 140 * MIB
    assert told.foretold[0, 3] == told.foretold[0, 1]


def test_an_idle_replica_needs_nothing() -> None:
    """A card without a share holds no replica, whatever the others do; GPU 0 holds its own in any
    case.
    """
    problem = job([card_memory(is_first=True), card_memory()], B=B)
    model = MemoryModel([trial(problem, even(B, 16, 2))], 2)
    told = interval(model, split(B, 4, 16, 0), split(B, 4, 0, 16))
    assert told.most[0, 1] == told.least[0, 1] == 0
    assert told.least[1, 0] > 100 * MIB


def test_a_single_step_is_learned_from_the_peak_of_a_single_micro_batch() -> None:
    """Gradients that stay are told by `single_step_peak_bytes` of the very first trial; without it
    they are in doubt.
    """
    cards = [card_memory(is_first=True, parameters=400, stays=1.0), card_memory(parameters=400, stays=1.0)]
    problem = job(cards, B=B)
    ran = trial(problem, even(B, 32, 2))
    silent = [replace(reading, single_step_peak_bytes=None) for reading in ran.measurement.memory]
    untold = JudgedTrial(measurement=replace(ran.measurement, memory=tuple(silent)))
    one_step = split(B, 1, 63, 1)
    truth, foretold = truth_of(problem, [one_step]), []
    for one in (ran, untold):
        told = interval(MemoryModel([one], 2), one_step)
        assert (told.least <= truth).all()
        assert (told.most >= truth).all()
        foretold.append(float(told.foretold[0, 1]) / MIB)
    assert foretold == pytest.approx([410, 810], rel=0.02)


def test_a_single_step_rests_on_no_more_than_those_that_accumulate() -> None:
    """No trial told what rests, or ran with a single step. That half of the smallest peak rests is belied by the second
    size: a sample takes nearly all of it, in a single step as well."""
    problem = job([card_memory(parameters=10.0, sample=2000.0, is_first=i == 0) for i in range(2)], B=B)
    tried = [
        JudgedTrial.of(without_optional_readings(problem.measure(one)), 0) for one in (even(B, 16, 2), even(B, 8, 2))
    ]
    wanted = [even(B, 4, 2), even(B, 1, 2), split(B, 1, 8, 56)]
    told = interval(MemoryModel(tried, 2), *wanted)
    assert (told.foretold > 0.99 * truth_of(problem, wanted)).all()


def test_without_earlier_gradients_half_as_much_may_rest() -> None:
    """No trial told what rests, or ran with a single step. Two sizes with 800 MiB beside the samples leave 400 to 800
    of them to a single step, which takes 400: it may fit where that is what is free."""
    problem = job([card_memory(parameters=400, stays=1.0, is_first=i == 0) for i in range(2)], B=B)
    tried = [
        JudgedTrial.of(without_optional_readings(problem.measure(one)), 0) for one in (even(B, 16, 2), even(B, 8, 2))
    ]
    one_step = split(B, 1, 32, 32)
    truth, told = truth_of(problem, [one_step]), interval(MemoryModel(tried, 2), one_step)
    assert (told.least <= truth).all()
    assert (told.foretold >= truth).all()
    assert told.chance_below(1.02 * truth[0])[0] > 0


def keeping(problem: Problem, one: BatchSplit, kept_bytes: int) -> JudgedTrial:
    """A trial whose loop keeps so many bytes of each sample's output on GPU 0 until the next forward is over; then both
    were there, and one is gone before backward begins."""
    gpu0, *replicas = problem.measure(one).memory
    assert gpu0.resting_bytes is not None
    num_bytes = kept_bytes * one.micro_batch_size
    kept = replace(
        gpu0,
        resting_bytes=gpu0.resting_bytes + num_bytes,
        before_backward_bytes=gpu0.batch_peak_bytes - num_bytes,
    )
    return JudgedTrial(measurement=replace(problem.measure(one), memory=(kept, *replicas)))


@pytest.mark.parametrize("tried", [[even(B, 16, 2), even(B, 8, 2)], [even(B, 16, 2), split(B, 16, 0, 4)]])
def test_an_output_that_the_loop_keeps_grows_with_the_batch(tried: list[BatchSplit]) -> None:
    """Of 40 MiB that a sample's output takes on GPU 0 the loop keeps 20: two sizes tell that the bound on the third
    must not take them for parameters; and of one that they may be none.
    """
    problem = job([card_memory(is_first=True, stays=1.0, sample=3, output=40), card_memory(stays=1.0, sample=3)], B=B)
    model = MemoryModel([keeping(problem, one, 20 * MIB) for one in tried], 2)
    for one in (even(B, 4, 2), even(B, 2, 2), even(B, 1, 2), split(B, 1, 8, 56)):
        assert interval(model, one).foretold[0, 0] > 0.99 * truth_of(problem, [one])[0, 0]


def test_outputs_that_replace_those_of_the_batch_before_may_grow() -> None:
    """A forward left as much on GPU 0 as was kept there before it, so nothing seems to grow with the outputs."""
    problem = job([card_memory(is_first=True, stays=1.0, sample=3, output=40), card_memory(stays=1.0, sample=3)], B=B)
    one = keeping(problem, split(B, 32, 0, 2), 10 * MIB)
    gpu0, replica = one.measurement.memory
    gpu0 = replace(gpu0, before_backward_bytes=gpu0.resting_bytes)
    model = MemoryModel([replace(one, measurement=replace(one.measurement, memory=(gpu0, replica)))], 2)
    for wanted in (split(B, 16, 0, 4), split(B, 8, 0, 8)):
        assert interval(model, wanted).most[0, 0] > truth_of(problem, [wanted])[0, 0]


def test_the_micro_batch_may_be_given_apart_from_the_shards() -> None:
    """Asked for one device's shares alone, GPU 0's outputs are those of the micro-batch that is
    named.
    """
    problem = job([card_memory(is_first=True, output=20), card_memory()], B=B)
    model = MemoryModel(trials(problem, [even(B, 16, 2), split(B, 8, 1, 7), split(B, 4, 8, 8)]), 2)
    steps, shards = rows([split(B, 4, 4, 12)])
    alone = model.needed(steps, shards * [[1, 0]], np.array([16.0])).most[0, 0]
    assert alone == interval(model, split(B, 4, 4, 12)).most[0, 0]


def test_a_replica_that_never_had_a_share_is_taken_to_be_like_gpu0() -> None:
    """Where GPU 0 alone has worked so far, a replica is held to need at most what GPU 0 did."""
    problem = job([card_memory(is_first=True, output=5), card_memory()], B=B)
    model = MemoryModel([trial(problem, split(B, 16, 4, 0)), trial(problem, split(B, 8, 8, 0))], 2)
    told = interval(model, split(B, 8, 0, 8), split(B, 8, 8, 0))
    assert (told.foretold[0, 1] >= truth_of(problem, [split(B, 8, 0, 8)])[0, 1]).all()
    assert told.foretold[0, 1] <= told.foretold[1, 0] * 1.01


def test_what_ran_out_with_a_share_tells_nothing_of_none() -> None:
    """GPU 0 ran without a sample, and with one out of memory. With one of 4 it likely does, too; of 4 outputs that
    tells nothing."""
    problem = job([card_memory(is_first=True, sample=150, output=5, total=340), card_memory(sample=150)], B=B)
    ran, failed = trial(problem, split(B, 64, 0, 1)), trial(problem, split(B, 32, 1, 1))
    assert ran.ran
    assert failed.oom_devices == {0}
    asked = split(B, 16, 0, 4), split(B, 16, 1, 3)
    before, after = (interval(MemoryModel(told, 2), *asked).least_part[:, 0] for told in ([ran], [ran, failed]))
    assert after[0] == before[0] == before[1]
    assert after[1] > 2 * before[1]


def test_outputs_alone_go_on_as_they_grew_alone() -> None:
    """GPU 0 holds 300 MiB at rest, and at the end of a forward 150 more for a sample and 20 for an output, of which the
    backward keeps a half beside gradients: without a sample that is its peak, 430 MiB and 10 for an output.

    So of 11 outputs it is 540; samples tell of no such phase, and with them it goes on as it did: 820 with 2 of 11.
    """

    def one(steps: int, share: int, others: int) -> JudgedTrial:
        size = share + others
        forward = 300 + 150 * share + 20 * size
        gpu0 = memory(0, max(forward, 430 + 10 * size), resting_bytes=300, before_backward_bytes=forward)
        replica = memory(1, 200 + 150 * others, resting_bytes=200, before_backward_bytes=200 + 150 * others)
        return JudgedTrial.of(ran(split(B, steps, share, others), gpu0, replica), (0, 0))

    tried = [one(16, 1, 3), one(8, 1, 7), one(8, 2, 6), one(16, 0, 4), one(8, 0, 8)]
    told = interval(MemoryModel(tried, 2), split(B, 6, 0, 11), split(B, 6, 2, 9))
    for row, peak in enumerate((540, 820)):
        assert told.trend_least[row, 0] < peak * MIB < told.trend_most[row, 0]
        assert told.trend_most[row, 0] < 1.05 * told.trend_least[row, 0]
    assert told.chance_below(np.array([560, 2000]) * MIB)[0] > 0.5
