from __future__ import annotations

from collections.abc import Sequence
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
from splittune.search.models.memory import FADING, LEAST_WIDENING, MOST_MARGIN, Interval
from splittune.search.models.memory_readings import REPEATABILITY
from splittune.split import BatchSplit
from tests.search.problem import MIB, card_memory, even, job, rows, split, trial, trials

B = 64


def interval(model: MemoryModel, *wanted: BatchSplit) -> Interval:
    return model.needed(*rows(wanted))


def truth_of(problem: Problem, wanted: Sequence[BatchSplit]) -> np.ndarray:
    return problem.reserved(*rows(wanted))


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


def test_predictions_that_came_true_take_the_margin_away() -> None:
    """Of growth that no trial has shown as much again is held possible at first, then an eighth, then a 64th."""
    problem = job([card_memory(is_first=True), card_memory()], B=B)
    model = MemoryModel((), 2)
    margins = []
    for one in trials(problem, [even(B, k, 2) for k in (32, 8, 2)]):
        model.observe([one])
        margins.append(model.margin)
    assert margins == [MOST_MARGIN, MOST_MARGIN / FADING, MOST_MARGIN / FADING**2]


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


def test_running_out_of_memory_raises_the_least_to_what_was_there() -> None:
    """A device that ran out of memory at a split needs at least its room there, and more at larger
    ones.
    """
    problem = job([card_memory(is_first=True), card_memory(sample=60, total=1000)], B=B)
    failed, larger = split(B, 2, 8, 24), split(B, 1, 8, 56)
    before = trials(problem, [even(B, 32, 2)])
    one = trial(problem, failed)
    assert one.oom_devices == {1}
    model = MemoryModel(before, 2)
    model.observe([one])
    told = interval(model, failed, larger)
    assert told.least[0, 1] >= 0.99 * 1000 * MIB
    assert told.least[1, 1] > 1000 * MIB


class Steepening:
    """A job whose cards need more for large shares than its first trials say."""

    def __init__(self) -> None:
        self.before, self.after = (job([card_memory(is_first=True), card_memory()], B=B) for _ in range(2))
        for card in self.after.memories:
            card.power = 1.5
        self.model = MemoryModel(trials(self.before, [even(B, k, 2) for k in (32, 16, 8)]), 2)


def test_an_exceeded_prediction_widens_the_margin_and_is_told() -> None:
    """A trial above the most predicted is in `errors`, widens what is predicted from then on, and
    becomes a doubt.
    """
    story = Steepening()
    assert max(story.model.errors) <= REPEATABILITY
    assert story.model.margin < MOST_MARGIN
    predicted = interval(story.model, even(B, 2, 2)).most[0, 1]
    exceeding = trial(story.after, even(B, 2, 2))
    story.model.observe([exceeding])
    error = exceeding.measurement.memory[1].peak_reserved_bytes / predicted - 1
    assert error > 0.05
    assert story.model.errors[-1] == pytest.approx(error, rel=1e-6)
    assert story.model.margin == MOST_MARGIN, "it grew by more than had been foretold"
    beyond = interval(story.model, even(B, 1, 2)).most[0, 1] / exceeding.measurement.memory[1].peak_reserved_bytes
    assert beyond > 2
    assert story.model.warnings() == (), "the cards are far from full"
    fuller = [replace(memory, total_bytes=3 * memory.peak_reserved_bytes) for memory in exceeding.measurement.memory]
    measurement = replace(exceeding.measurement, memory=tuple(fuller))
    story.model.observe([JudgedTrial(measurement=measurement, oom_devices=frozenset())])
    (doubt,) = story.model.warnings()
    assert doubt.startswith("The memory model did not fit: ")


def test_the_margin_is_put_on_what_no_trial_has_shown() -> None:
    """After a surprise with 16 samples a card, 17 are raised by what one more takes, and 32 by as much as they grow."""
    story = Steepening()
    surprise = trial(story.after, even(B, 2, 2))
    story.model.observe([surprise])
    assert story.model.margin == MOST_MARGIN
    held = surprise.measurement.memory[1].peak_reserved_bytes
    near, far = interval(story.model, split(34, 1, 17, 17), even(B, 1, 2)).most[:, 1] / held
    assert 1 < near < 1.3
    assert far > 2


def test_less_than_was_held_is_no_growth() -> None:
    """GPU 0 gathers 2 samples of a card where it gathered 4, in a step that accumulates, too: no margin counts."""
    problem = job([card_memory(is_first=True, output=50), card_memory()], B=B)
    model = MemoryModel(trials(problem, [split(B, 16, 0, 4)]), 2)
    told = interval(model, split(B, 32, 0, 2), split(B, 8, 0, 8))
    assert model.margin == 1
    fewer, more = told.most[:, 0] / told.foretold[:, 0]
    assert fewer < 1.06
    assert more > 1.1


def test_a_share_that_was_held_is_held_again() -> None:
    """With 4 samples GPU 1 had 40 MiB in gaps, with 8 none: beside 14 of GPU 0 8 take as much again; 7 may not."""
    problem = job([card_memory(is_first=True), card_memory()], B=B)
    gaps = trials(problem, [split(B, 8, 4, 4), split(B, 4, 8, 8)])
    first, other = gaps[0].measurement.memory
    more = replace(other, peak_reserved_bytes=other.peak_allocated_bytes + 40 * MIB)
    model = MemoryModel([JudgedTrial(measurement=replace(gaps[0].measurement, memory=(first, more))), gaps[1]], 2)
    held = gaps[1].measurement.memory[1].peak_reserved_bytes
    told = interval(model, split(B, 3, 14, 8), split(B, 3, 15, 7))
    assert told.most[0, 1] == told.foretold[0, 1] == held
    assert told.most[1, 1] > held


def test_what_the_allocator_reserved_beside_is_not_sure_to_come_again() -> None:
    """A tenth was reserved beyond what was allocated with 1, 2 and 4 samples; with 8 there may be no gaps at all."""
    problem = job([card_memory(is_first=True, sample=1000), card_memory(sample=1000)], B=B)
    tried = []
    for one in trials(problem, [even(B, k, 2) for k in (32, 16, 8)]):
        held = [
            replace(told, peak_reserved_bytes=told.peak_allocated_bytes * 11 // 10) for told in one.measurement.memory
        ]
        tried.append(replace(one, measurement=replace(one.measurement, memory=tuple(held))))
    told, truth = interval(MemoryModel(tried, 2), even(B, 4, 2)), truth_of(problem, [even(B, 4, 2)])
    assert (told.least <= truth).all()
    assert (told.most >= 1.1 * truth * (1 - REPEATABILITY)).all()


def test_an_allocator_that_holds_more_for_less_is_no_growth() -> None:
    """4 samples held 5 MiB more than 8 had: it raises nothing, since gaps that are no larger were seen."""
    problem = job([card_memory(is_first=True), card_memory(sample=20)], B=B)
    small, large, less = trials(problem, [even(B, 32, 2), even(B, 4, 2), even(B, 8, 2)])

    def holding(one: JudgedTrial, gaps: Sequence[int]) -> JudgedTrial:
        memory = zip(one.measurement.memory, gaps, strict=True)
        held = [replace(told, peak_reserved_bytes=told.peak_allocated_bytes + gap) for told, gap in memory]
        return replace(one, measurement=replace(one.measurement, memory=tuple(held)))

    model = MemoryModel([holding(small, [100 * MIB] * 2), holding(large, [0, 0])], 2)
    more = large.measurement.memory[1].peak_allocated_bytes - less.measurement.memory[1].peak_allocated_bytes + 5 * MIB
    assert more < 100 * MIB
    margin = model.margin
    assert margin < MOST_MARGIN
    model.observe([holding(less, [0, more])])
    assert model.margin == margin


def test_a_failure_that_was_not_foreseen_widens_the_margin() -> None:
    """Running out of memory where that was held to be impossible widens the margin, and by no less
    than a least.
    """
    problem = job([card_memory(is_first=True), card_memory(sample=20, total=700)], B=B)
    model = MemoryModel(trials(problem, [even(B, 32, 2), even(B, 16, 2), even(B, 8, 2)]), 2)
    said = f"device 1: {Outcome.OUT_OF_MEMORY}"
    failed = Measurement(split=even(B, 4, 2), outcome=Outcome.OUT_OF_MEMORY, message=said)
    model.observe([JudgedTrial(measurement=failed, oom_devices=frozenset({1}))])
    assert model.errors[-1] > 0
    assert model.margin >= LEAST_WIDENING


def test_a_failure_counts_with_what_the_allocator_could_hand_back() -> None:
    """What was to fit once free blocks are handed back did not: the prediction was wrong, though
    more may have been held before, and from then on nothing is counted on to be handed back.
    """
    tried = trials(job([card_memory(is_first=True), card_memory(sample=20)], B=B), [even(B, k, 2) for k in (32, 16, 8)])

    def learned(total_bytes: int) -> MemoryModel:
        judged = []
        for one, extra in zip(tried, (0, 20, 20), strict=True):
            held = [
                replace(memory, peak_reserved_bytes=memory.peak_allocated_bytes + extra * MIB, total_bytes=total_bytes)
                for memory in one.measurement.memory
            ]
            judged.append(replace(one, measurement=replace(one.measurement, memory=tuple(held))))
        return MemoryModel(judged, 2)

    told = interval(learned(10**12), even(B, 4, 2))
    after_flush, most = told.most_after_cache_flush[0, 1], told.most[0, 1]
    assert most - after_flush > 15 * MIB
    model = learned(int(after_flush + most) // 2)
    failed = Measurement(split=even(B, 4, 2), outcome=Outcome.OUT_OF_MEMORY, message="device 1: out of memory")
    model.observe([JudgedTrial(measurement=failed, oom_devices=frozenset({1}))])
    assert model.errors[-1] > 0
    assert model.margin >= LEAST_WIDENING
    again = interval(model, even(B, 5, 2))
    assert again.most_after_cache_flush.tolist() == again.most.tolist()


def flat_then_rising() -> Problem:
    """The reduce holds 3,000 MiB on each card; a micro-step holds 2,000 and 100 for each sample, rest 2,000."""
    memories = [card_memory(is_first=i == 0, parameters=500, state=1000, sample=100) for i in range(2)]
    return job([replace(one, reduce=3000.0 * MIB) for one in memories], B=B)


def test_a_failure_of_nobody_knows_which_device_counts_for_the_fullest() -> None:
    """The prediction was too low by what the device that came nearest to its budget had left."""
    problem = job([card_memory(is_first=True), card_memory()], B=B)
    model = MemoryModel(trials(problem, [even(B, 32, 2), even(B, 16, 2)]), 2)
    told = interval(model, even(B, 2, 2))
    nearest = (model.budget_bytes / told.most_after_cache_flush[0]).min()
    assert nearest > 1
    before = interval(model, even(B, 1, 2)).most
    model.observe([JudgedTrial(measurement=Measurement(split=even(B, 2, 2), outcome=Outcome.OUT_OF_MEMORY))])
    assert model.errors[-1] == pytest.approx(nearest - 1)
    assert (interval(model, even(B, 1, 2)).most > before).all()


def test_what_the_allocator_holds_beyond_live_bytes_is_added() -> None:
    """MemoryReadings are compared with rooms as the allocator holds them: 10 % beyond what is live
    at large sizes stay 10 %.
    """
    card = card_memory(sample=200, parameters=1000)
    card.reserve = 0.1
    first = card_memory(is_first=True)
    problem = job([first, card], B=B)
    model = MemoryModel(trials(problem, [even(B, k, 2) for k in (32, 16, 8, 4, 2)]), 2)
    wanted = even(B, 1, 2)
    live = max(np.max(phase) for phase in card.phases(np.array([32.0]), np.array([64.0]), np.array([0.0])))
    assert interval(model, wanted).most[0, 1] > 1.05 * live


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
