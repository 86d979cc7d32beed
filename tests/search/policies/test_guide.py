from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.problems.draw import draw
from benchmarks.problems.problem import CardTime, Problem
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.attempts import Attempt
from splittune.search.policies.guide import MAX_GROWTH, Guide, Proposal
from tests.search.truth import MIB, card_memory, even, job, rows, split, trial

AFFINE = [seed for seed in range(61_000, 61_030) if draw(seed).is_memory_affine and draw(seed).best_throughput]


def guided(problem: Problem, most: int = 30) -> tuple[list[Proposal], list[Attempt]]:
    """What the guide proposes until it is content, and what became of it."""
    demands = problem.min_headroom_bytes
    guide, proposals, attempts = Guide(problem.space(), demands), [], []
    while len(attempts) < most and (proposal := guide.propose(attempts)) is not None:
        proposals.append(proposal)
        attempts.append(trial(problem, proposal.split, demands))
    return proposals, attempts


def test_begins_with_the_smallest_even_split() -> None:
    """The first trial has a sample for each card, so that what does not fit there fits nowhere evenly."""
    proposal = Guide(job(4, B=64).space(), (0,) * 4).propose([])
    assert proposal == Proposal(split=even(64, 16, 4), reason="the smallest even split: a safe start")


def test_even_splits_grow_until_the_baseline() -> None:
    """Ever fewer steps are tried as far as memory is vouched for, and the last that fits is the baseline."""
    problem = job([card_memory(is_first=True, sample=20, total=800), *[card_memory(sample=20)] * 3], B=256)
    proposals, attempts = guided(problem)
    evens = [p.split for p in proposals if "even" in p.reason]
    steps = [one.accumulation_steps for one in evens]
    assert steps == sorted(steps, reverse=True)
    fits = [one for one in problem.space().even_splits() if problem.fits(*rows([one])).all()]
    assert evens[-1].accumulation_steps <= 1.06 * fits[0].accumulation_steps
    assert all(attempt.fits for attempt in attempts)


def test_shares_do_not_leap() -> None:
    """Whatever memory promises, no share is more than so many times the largest that ran."""
    proposals, _ = guided(job(2, B=4096))
    largest = 1
    for proposal in proposals:
        assert max(proposal.split.shard_sizes) <= MAX_GROWTH * largest
        largest = max(largest, *proposal.split.shard_sizes)
    assert largest >= 2048


def test_when_nothing_fitted_the_smallest_burden_on_the_suspect_comes_next() -> None:
    """After GPU 0 ran out of memory with one sample, splits that spare it are tried before all else."""
    problem = job([card_memory(is_first=True, sample=150, total=340), card_memory(sample=150)], B=16)
    proposals, attempts = guided(problem, most=6)
    assert attempts[0].lacking == {0}
    assert proposals[1].reason == "nothing fitted so far: the smallest split left"
    assert proposals[1].split == split(16, 16, 0, 1)
    assert attempts[1].fits
    assert all(proposal.split.gpu0_bsz == 0 for proposal in proposals[1:])


def test_it_gives_up_when_all_is_ruled_out() -> None:
    """Where no card holds a sample the guide ends, and nothing is open."""
    problem = job([card_memory(is_first=True, total=50), card_memory(total=50)], B=8)
    guide = Guide(problem.space(), problem.min_headroom_bytes)
    proposals, attempts = guided(problem)
    assert len(proposals) < 8
    assert guide.propose(attempts) is None
    assert not guide.has_open(attempts)


def test_the_slow_card_is_relieved() -> None:
    """Where GPU 0 is half as fast, the guide soon comes to shares that finish together; what trials are left only check."""
    slow, fast = CardTime(launch_s=0.002, sample_s=0.004), CardTime(launch_s=0.002, sample_s=0.002)
    problem = job(3, B=100, times=[slow, fast, fast])
    _, attempts = guided(problem)
    best = max((a for a in attempts if a.fits), key=lambda a: a.throughput).split
    assert best == split(100, 1, 20, 40, 40)
    assert best in [attempt.split for attempt in attempts[:5]]
    assert len(attempts) <= 12


def test_a_space_too_large_to_list_is_searched_by_balance() -> None:
    """With a share for every card the candidates are balanced in closed form, from each card's own curve and memory."""
    times = [CardTime(launch_s=0.002, sample_s=0.001 * factor) for factor in (1, 2, 1, 2, 4, 1)]
    memories = [card_memory(is_first=True, sample=10, total=700), *[card_memory(sample=10)] * 5]
    problem = job(memories, B=300, times=times, shares="each")
    _, attempts = guided(problem)
    best = max(attempt.throughput for attempt in attempts)
    assert problem.best_throughput is not None
    assert best >= 0.98 * problem.best_throughput
    assert problem.num_oom == 0


def test_a_promising_split_that_may_not_fit_is_approached() -> None:
    """What would gain much and is not sure to fit is preceded by splits that tell whether it does: nothing runs out."""
    problem = job(
        [card_memory(is_first=True, sample=40, output=10, total=6000), *[card_memory(sample=40, total=4000)] * 3],
        B=400,
        times=[CardTime(launch_s=0.080, sample_s=0.001)] * 4,
    )
    proposals, attempts = guided(problem)
    assert problem.num_oom == 0
    best = max(attempt.throughput for attempt in attempts)
    assert best >= 0.98 * (problem.best_throughput or 0)
    assert any("samples/s" in proposal.reason for proposal in proposals)


def test_it_depends_on_the_attempts_alone() -> None:
    """A fresh guide proposes after any number of attempts what the one that made them did."""
    problem = job([card_memory(is_first=True, sample=30, total=1500), *[card_memory(sample=30)] * 2], B=96)
    proposals, attempts = guided(problem)
    for place, proposal in enumerate(proposals):
        assert Guide(problem.space(), problem.min_headroom_bytes).propose(attempts[:place]) == proposal
    assert Guide(problem.space(), problem.min_headroom_bytes).propose(attempts) is None


def test_a_crash_is_left_alone() -> None:
    """A split that crashed is not proposed again, and says nothing of memory."""
    problem = job(2, B=64)
    guide = Guide(problem.space(), (0, 0))
    ran = [trial(problem, even(64, k, 2), (0, 0)) for k in (32, 2)]
    proposal = guide.propose(ran)
    assert proposal is not None
    crashed = Attempt(measurement=Measurement(split=proposal.split, outcome=Outcome.CRASHED))
    after = guide.propose([*ran, crashed])
    assert after is not None
    assert after.split != proposal.split


def test_a_device_filled_by_others_is_left_idle() -> None:
    """A card whose memory is taken to the last byte needs none where it has no share, so such splits are sure to fit."""
    problem = job([card_memory(is_first=True), card_memory(total=500, outside=500)], B=8)
    _, attempts = guided(problem)
    assert any(attempt.fits and attempt.split == split(8, 1, 8, 0) for attempt in attempts)


def test_warnings_of_both_models_are_passed_on() -> None:
    """Before anything ran there is nothing to warn of; then what either model says is heard."""
    problem = job(2, B=64)
    guide = Guide(problem.space(), (0, 0))
    assert guide.warnings([]) == ()
    wild = []
    for i, k in enumerate((32, 16, 8, 4, 2)):
        one = trial(problem, even(64, k, 2), (0, 0)).measurement
        times = tuple(time * (4.0 if i % 2 else 0.5) for time in one.micro_step_times_s)
        wild.append(Attempt(measurement=_with_times(one, times)))
    assert any("time model" in warning for warning in guide.warnings(wild))


def _with_times(one: Measurement, times: tuple[float, ...]) -> Measurement:
    return Measurement(
        split=one.split,
        outcome=one.outcome,
        micro_step_times_s=times,
        update_times_s=one.update_times_s,
        memory=one.memory,
    )


@pytest.mark.parametrize("B", [1, 2, 7])
def test_fewer_samples_than_cards_are_enough(B: int) -> None:
    """A batch smaller than the number of cards is searched like any other."""
    problem = job(8, B=B)
    _, attempts = guided(problem)
    assert max(attempt.throughput for attempt in attempts) == pytest.approx(problem.best_throughput, rel=0.02)


@pytest.mark.parametrize("seed", [200_166, 200_836, 202_567])
def test_where_memory_is_no_straight_line_a_likely_split_is_ventured(seed: int) -> None:
    """The best of these is never vouched for, since a trial took more than the model held possible; it is tried all the same."""
    problem = draw(seed)
    assert not problem.is_memory_affine
    assert problem.best_throughput is not None
    proposals, attempts = guided(problem, most=12)
    ventures = [place for place, one in enumerate(proposals) if "memory is no straight line here" in one.reason]
    assert ventures
    assert max(attempts[place].throughput for place in ventures) > 1.08 * max(
        a.throughput for a in attempts[: ventures[0]]
    )
    best = max(problem.throughput(attempt.split) for attempt in attempts if attempt.fits)
    assert best >= 0.95 * problem.best_throughput


@pytest.mark.parametrize("seed", AFFINE)
def test_where_memory_is_affine_nothing_is_ventured(seed: int) -> None:
    """No prediction is exceeded there, so nothing is tried that memory is not known to allow."""
    problem = draw(seed)
    proposals, attempts = guided(problem, most=12)
    assert not any("memory is no straight line here" in one.reason for one in proposals)
    began = next(place for place, attempt in enumerate(attempts) if attempt.measurement.throughput is not None)
    assert all(attempt.measurement.outcome is not Outcome.OUT_OF_MEMORY for attempt in attempts[began:])


def test_of_a_tiny_space_all_that_may_fit_is_measured() -> None:
    """Where memory jumps at 5 samples, the line through the small sizes rules none of the larger ones out: the best is found."""
    card = replace(card_memory(is_first=True, sample=100, total=2400), jump_at=5, jump=300.0 * MIB)
    problem = job([card], B=16)
    _, attempts = guided(problem)
    assert problem.best_throughput is not None
    assert max(attempt.throughput for attempt in attempts) == pytest.approx(problem.best_throughput)


@pytest.mark.parametrize("starts_at", [66, 68, 70])
def test_a_faster_kernel_beyond_all_that_was_measured_is_found(starts_at: int) -> None:
    """Nothing foretells that larger shares than the even split's take less time; one is tried while there are trials to spare."""
    times = [CardTime(launch_s=0.02, sample_s=0.002, switch_at=starts_at, switch_factor=0.85)] * 4
    problem = job(4, B=256, times=times, micro_step_s=0.02)
    assert problem.best_throughput is not None
    assert problem.throughput(even(256, 1, 4)) < 0.95 * problem.best_throughput
    proposals, attempts = guided(problem, most=12)
    assert any("unless another kernel runs" in one.reason for one in proposals)
    assert max(attempt.throughput for attempt in attempts) > 0.98 * problem.best_throughput


def test_a_faster_kernel_is_found_on_cards_of_every_share_of_their_own_too() -> None:
    """From 98 samples on cards are faster, and the even split's 91 do not tell: two cards are given more, GPU 0 what is left."""
    times = [CardTime(launch_s=0.75, sample_s=0.006, switch_at=98, switch_factor=0.9)] * 3
    memories = [card_memory(is_first=True, sample=100, total=9_900), *[card_memory(sample=100, total=11_500)] * 2]
    problem = job(memories, B=1904, times=times, shares="each")
    assert problem.best_throughput is not None
    assert problem.throughput(even(1904, 7, 3)) < 0.95 * problem.best_throughput
    proposals, attempts = guided(problem, most=12)
    assert any("unless another kernel runs" in one.reason for one in proposals)
    assert max(attempt.throughput for attempt in attempts) > 0.98 * problem.best_throughput


def test_a_share_between_two_that_were_measured_may_take_no_longer() -> None:
    """The slow card takes as long for 2 samples as for 1, which no line through 1 and 4 foretells; then all can take part."""
    slow, fast = CardTime(launch_s=0.0006, sample_s=0.0015, knee=2), CardTime(launch_s=0.0005, sample_s=0.0008, knee=2)
    problem = job(7, B=26, times=[*[fast] * 5, slow, fast], shares="each", micro_step_s=0.0001)
    _, attempts = guided(problem, most=12)
    assert problem.best_throughput is not None
    assert problem.best_throughput == problem.throughput(split(26, 1, 4, 4, 4, 4, 4, 2, 4))
    assert max(attempt.throughput for attempt in attempts) == pytest.approx(problem.best_throughput)


def test_what_one_card_had_no_headroom_for_is_not_tried_on_another_of_its_kind() -> None:
    """Cards 2 to 5 are alike: with 16 samples one of them kept too little, so none of them is given as many again."""
    problem = draw(194_109)
    _, attempts = guided(problem, most=12)
    short = [a.split.shard_sizes[i] for a in attempts for i in a.lacking & {2, 3, 4, 5}]
    assert short == [16]
    assert max(problem.throughput(a.split) for a in attempts if a.fits) == pytest.approx(problem.best_throughput)


def test_gpu0_may_be_in_doubt_where_the_others_are_sure() -> None:
    """GPU 0 had no share yet and holds more than the others; whether a sample fits there is tried with what fits for sure."""
    problem = draw(192_161)
    proposals, attempts = guided(problem, most=12)
    assert all(one.split.gpu0_bsz == 0 for one in proposals[1:3])
    assert max(problem.throughput(a.split) for a in attempts if a.fits) == pytest.approx(problem.best_throughput)


def test_a_card_of_another_kind_that_holds_more_makes_memory_no_less_straight() -> None:
    """What a card never used before took beyond what was foretold of it says nothing of lines: nothing runs out."""
    problem = draw(187_436)
    assert problem.is_memory_affine
    proposals, attempts = guided(problem, most=12)
    assert not any("memory is no straight line here" in one.reason for one in proposals)
    began = next(place for place, attempt in enumerate(attempts) if attempt.measurement.throughput is not None)
    assert all(attempt.measurement.throughput is not None for attempt in attempts[began:])


def test_too_little_headroom_with_one_share_rules_out_no_larger_one_that_is_ventured() -> None:
    """What the allocator holds varies from share to share: a split fits that demands no less than one which did not."""
    problem = draw(65_446)
    proposals, attempts = guided(problem, most=12)
    ventured = [one for one in attempts if one.fits and any(other.rules_out(one.split) for other in attempts)]
    assert ventured
    assert max(one.throughput for one in ventured) == max(attempt.throughput for attempt in attempts)
    assert any("memory is no straight line here" in one.reason for one in proposals)
