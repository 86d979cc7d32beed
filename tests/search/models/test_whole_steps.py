from __future__ import annotations

import numpy as np
import pytest

from benchmarks.problems.problem import CardTime
from benchmarks.search import physics
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search import TimeModel
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.whole_steps import WholeSteps
from splittune.split import BatchSplit
from tests.search.models.predictions import B, doubts, model_of, predicted, truth
from tests.search.problem import card_memory, even, job, split, trials


def test_without_busy_times_the_slowest_card_is_told_by_whole_steps() -> None:
    """Steps alone show, with several shares of GPU 0, what moving samples off it gains."""
    slow, fast = CardTime(launch_s=0.005, sample_s=0.004), CardTime(launch_s=0.005, sample_s=0.002)
    problem = job(3, B=B, times=[slow, fast, fast], tells_busy=False)
    tried = [even(B, 8, 3), even(B, 2, 3), split(B, 2, 8, 12, 12), split(B, 2, 4, 14, 14), split(B, 2, 16, 8, 8)]
    model = model_of(problem, tried)
    wanted = [split(B, 1, 14, 25, 25), split(B, 1, 30, 17, 17)]
    assert predicted(model, *wanted) == pytest.approx(truth(problem, *wanted), rel=0.1)
    assert len(model.curves) == 3
    assert model.curves[0].ratio == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize("ratio", [0.45, 0.8, 1.25, 2.3])
def test_without_busy_times_gpu0s_speed_is_told_closely(ratio: float) -> None:
    """Between the ratios that are tried first, too, where its share and the others' take as long is
    found.
    """
    times = [CardTime(launch_s=0.0, sample_s=0.002 * ratio), *[CardTime(launch_s=0.0, sample_s=0.002)] * 2]
    problem = job(3, B=B, times=times, tells_busy=False)
    tried = [even(B, 8, 3), even(B, 2, 3), split(B, 2, 4, 14, 14), split(B, 2, 20, 6, 6), split(B, 1, 36, 14, 14)]
    wanted = [split(B, 1, share, (B - share) // 2, (B - share) // 2) for share in (10, 16, 20, 24, 30)]
    assert predicted(model_of(problem, tried), *wanted) == pytest.approx(truth(problem, *wanted), rel=0.04)


def test_without_busy_times_cards_of_gpu0s_memory_may_share_its_speed() -> None:
    """Three fast cards of one memory beside a slow one of another: what the last has decides, not
    what GPU 0 has.
    """
    fast, slow = CardTime(launch_s=0.005, sample_s=0.001), CardTime(launch_s=0.005, sample_s=0.003)
    memories = [card_memory(is_first=i == 0, total=10**6 if i < 3 else 10**5) for i in range(4)]
    problem = job(memories, B=B, times=[fast, fast, fast, slow], tells_busy=False)
    tried = [even(B, 8, 4), even(B, 2, 4), split(B, 2, 5, 9, 9, 9), split(B, 3, 1, 7, 7, 7), split(B, 4, 1, 6, 5, 4)]
    wanted = [split(B, 1, 1, 22, 21, 20), split(B, 1, 16, 17, 16, 15), split(B, 3, 1, 8, 7, 6)]
    assert predicted(model_of(problem, tried), *wanted) == pytest.approx(truth(problem, *wanted), rel=0.03)


def test_without_busy_times_one_fast_kind_among_slow_ones_is_one_change() -> None:
    """Of three kinds the one that the others' ratios are relative to is the fast one: from equal ratios no change of a
    single other makes the trials likelier, and without it the fast card would be foretold up to 62 % too long."""
    times = [CardTime(launch_s=0.0, sample_s=0.002 * ratio) for ratio in (2.4, 1, 2.4)]
    memories = [card_memory(is_first=i == 0, total=(i + 1) * 10**6) for i in range(3)]
    problem = job(memories, B=18, times=times, shares="each", tells_busy=False)
    tried = [even(18, 3, 3), even(18, 2, 3), split(18, 2, 4, 3, 2), split(18, 2, 2, 4, 3), split(18, 2, 3, 4, 2)]
    tried += [split(18, 3, 2, 3, 1), split(18, 2, 2, 3, 4)]
    wanted = [split(18, 2, 2, 5, 2), split(18, 1, 4, 10, 4)]
    assert predicted(model_of(problem, tried), *wanted) == pytest.approx(truth(problem, *wanted), rel=0.15)


def test_without_busy_times_what_each_kind_took_alone_tells_their_speeds() -> None:
    """Five kinds with a sixth to the whole of one's speed: found one after the other, from equal ones, they would end
    40 % off; what each took alone, less what is constant, begins near them."""
    times = [CardTime(launch_s=0.0, sample_s=0.002 * ratio) for ratio in (1, 6, 4, 6, 2)]
    memories = [card_memory(is_first=i == 0, total=(i + 1) * 10**6) for i in range(5)]
    problem = job(memories, B=B, times=times, shares="each", tells_busy=False)
    alone = [split(B, 8, *(8 if i == device else 0 for i in range(5))) for device in range(5)]
    model = model_of(problem, [even(B, 16, 5), even(B, 4, 5), *alone])
    wanted = [split(B, 2, 17, 2, 3, 2, 8), even(B, 2, 5)]
    assert predicted(model, *wanted) == pytest.approx(truth(problem, *wanted), rel=0.1)


def test_without_busy_times_what_takes_as_long_for_few_samples_is_not_held_to_be_the_further_devices() -> None:
    """Of seven cards four take 17 ms for up to 112 samples, and three of another kind for up to 64. By a straight
    line a few samples on each of seven take less than 56 on one; they took as long, so each further card would cost the
    rest: with that the first is foretold 23 % too long."""
    fast = CardTime(launch_s=0.0, sample_s=0.00015, knee=112)
    slow = CardTime(launch_s=0.0, sample_s=0.00026, knee=64)
    memories = [card_memory(is_first=i == 0, total=10**6 if i < 4 else 10**5) for i in range(7)]
    problem = job(memories, B=840, times=[fast] * 4 + [slow] * 3, shares="each", tells_busy=False)
    tried = [even(840, k, 7) for k in (120, 24, 5, 2)]
    tried += [split(840, 15, *(56 if i == device else 0 for i in range(7))) for device in range(7)]
    tried += [split(840, 3, 0, 150, 130, 0, 0, 0, 0), split(840, 1, 0, 90, 90, 230, 143, 143, 144)]
    tried += [split(840, 1, 0, 286, 41, 0, 171, 171, 171)]
    wanted = [split(840, 1, 150, 150, 150, 150, 80, 80, 80), split(840, 2, 75, 75, 75, 75, 40, 40, 40)]
    model = TimeModel(trials(problem, tried), range(7))
    assert predicted(model, *wanted) == pytest.approx(truth(problem, *wanted), rel=0.12)


def test_without_busy_times_the_loss_is_not_held_to_be_the_cards_own_work() -> None:
    """Three fast cards and three slow ones, whose further samples take less than the first; then the loss takes 7 ms
    for each of all samples. As work of the cards' own it makes the fast ones seem slow: they are foretold to take 20 %
    longer than they do, give or take 7 %.
    """

    def micro_step_s(of: BatchSplit) -> float:
        sample_s = (0.16, 0.055, 0.055, 0.16, 0.055, 0.16)
        own = [each * (s + 2.6 * (1 - np.exp(-s / 2.6))) for each, s in zip(sample_s, of.shard_sizes, strict=True)]
        return float(0.54 + max(own) + 0.0072 * of.micro_batch_size)

    def measured(of: BatchSplit) -> JudgedTrial:
        update_s = 0.04 + 0.39 * (sum(share > 0 for share in of.shard_sizes) - 1)
        times = {"micro_step_times_s": (micro_step_s(of),) * 3, "update_times_s": (update_s,) * 3}
        return JudgedTrial.of(Measurement(split=of, outcome=Outcome.OK, **times), [])

    alone = [split(676, 113, *(6 if i == device else 0 for i in range(6))) for device in range(6)]
    tried = [*(even(676, k, 6) for k in (113, 76, 46, 30, 20, 17)), *alone, split(676, 12, 0, 15, 15, 6, 15, 6)]
    model = TimeModel([measured(one) for one in tried], kinds=range(6))
    wanted = [split(676, 10, 0, 21, 21, 5, 21, 0), split(676, 9, 0, 22, 21, 6, 21, 6)]
    took = [measured(one).measurement.step_time_s for one in wanted]
    off = np.log(predicted(model, *wanted)) - np.log(np.array(took, dtype=float))
    assert (np.abs(off) < 1.5 * doubts(model, *wanted)).all()
    assert (np.abs(off) < 0.15).all()


def test_without_busy_times_slow_cards_take_longer_for_few_samples_than_fast_ones_for_many() -> None:
    """Of three kinds each reaches half of its best rate with 4 samples. After even splits and each card alone the best
    is known within 3 %; with as much work in 12 samples of the slow ones as in 64 of the fast ones it is 17 % off."""

    def micro_step_s(of: BatchSplit) -> float:
        relative = (5.35, 3.11, 1, 5.35, 3.11, 3.11, 1)
        return 0.0086 + max(0.0022 * r * (s + 4) * (s > 0) for r, s in zip(relative, of.shard_sizes, strict=True))

    def measured(of: BatchSplit) -> JudgedTrial:
        update_s = 0.0008 + 0.0136 * (sum(share > 0 for share in of.shard_sizes) - 1)
        times = {"micro_step_times_s": (micro_step_s(of),) * 3, "update_times_s": (update_s,) * 3}
        return JudgedTrial.of(Measurement(split=of, outcome=Outcome.OK, **times), [])

    alone = [split(935, 78, *(12 if i == device else 0 for i in range(7))) for device in range(7)]
    model = TimeModel([measured(one) for one in (*(even(935, k, 7) for k in (134, 16, 11)), *alone)], range(7))
    wanted = [split(935, 4, 0, 22, 84, 0, 22, 22, 84), split(935, 4, 11, 20, 76, 11, 20, 20, 76)]
    took = [measured(one).measurement.step_time_s for one in wanted]
    assert predicted(model, *wanted) == pytest.approx(took, rel=0.03)


@pytest.mark.parametrize("gpu0_part", [0.1, 0.2, 0.4, 1.0])
def test_without_busy_times_what_gpu0_works_on_the_whole_micro_batch_is_found(gpu0_part: float) -> None:
    """Cards of one speed, 2 ms a sample; while the others work GPU 0 works on each sample of the micro-batch, too."""

    def step_s(of: BatchSplit) -> float:
        gpu0, *others = of.shard_sizes
        slowest_s = 0.002 * max(gpu0 + gpu0_part * of.micro_batch_size, *others)
        return of.accumulation_steps * (0.005 + slowest_s) + 0.01

    def measured(of: BatchSplit) -> JudgedTrial:
        measurement = Measurement(split=of, outcome=Outcome.OK, whole_step_times_s=(step_s(of),) * 3)
        return JudgedTrial.of(measurement, [])

    alone = [split(B, 8, 8, 0, 0), split(B, 4, 0, 8, 8)]
    tried = [even(B, 8, 3), even(B, 2, 3), *alone, split(B, 2, 4, 14, 14), split(B, 4, 6, 5, 5)]
    model = TimeModel([measured(one) for one in tried], kinds=(0, 1, 1))
    wanted = [split(B, 1, gpu0, (B - gpu0) // 2, (B - gpu0) // 2) for gpu0 in (0, 8, 16, 24, 30)]
    assert predicted(model, *wanted) == pytest.approx([step_s(one) for one in wanted], rel=0.03)


def test_without_busy_times_what_cards_take_that_nothing_told_apart_is_within_its_doubt() -> None:
    """Three fast cards and two slow ones: that slow are the two, or all but one, explains the trials."""
    fast, slow = CardTime(launch_s=0.0, sample_s=0.0006), CardTime(launch_s=0.0, sample_s=0.002)
    memories = [card_memory(is_first=i == 0, total=(2 if i < 3 else 1) * 10**6) for i in range(5)]
    problem = job(memories, B=B, times=[fast, fast, fast, slow, slow], shares="each", tells_busy=False)
    tried = [even(B, 16, 5), even(B, 4, 5), split(B, 3, 8, 8, 2, 2, 2), split(B, 3, 2, 2, 2, 8, 8)]
    model = TimeModel(trials(problem, tried), kinds=range(5))
    wanted = [split(B, 2, 9, 9, 9, 3, 2), even(B, 2, 5)]
    off = np.log(predicted(model, *wanted) / truth(problem, *wanted))
    deviation = doubts(model, *wanted)
    assert (np.abs(off) < 2 * deviation).all()
    assert deviation.max() < 0.5


def test_without_busy_times_tiles_are_found() -> None:
    """Whole steps whose shares of 10, 12 and 15 take as long, and 17 twice that, show tiles of 16."""
    problem = job(
        2, B=B, times=[CardTime(launch_s=0.002, sample_s=0.004, tile=16, tile_weight=1.0)] * 2, tells_busy=False
    )
    tried = [even(B, 32, 2), split(B, 3, 10, 12), split(B, 3, 7, 15), split(B, 2, 15, 17)]
    wanted = [even(B, 2, 2), split(B, 4, 1, 15), split(B, 3, 8, 14)]
    assert predicted(model_of(problem, tried), *wanted) == pytest.approx(truth(problem, *wanted), rel=0.07)


def test_without_busy_times_a_tile_that_no_share_filled_is_believed() -> None:
    """GPU 0 with 3 samples beside others with 1 takes as long as those alone: 3 on it alone may take no longer than 1,
    as they do, with tiles of 4. By the tiles that a share filled alone it would be three deviations off."""
    problem = physics.draw(1_090_007)
    alone = [(9, *np.eye(4, dtype=int)[card].tolist()) for card in range(4)]
    tried = [(3, 0, 1, 1, 1), *alone, (2, 3, 1, 0, 1), (2, 2, 1, 1, 1)]
    judged = [JudgedTrial(measurement=problem.measure(split(9, *one))) for one in tried]
    wanted = split(9, 3, 3, 0, 0, 0)
    model = TimeModel(judged)
    off = np.log(9 / predicted(model, wanted)[0]) - np.log(problem.throughput(wanted))
    assert abs(off) < 2.2 * doubts(model, wanted)[0] < 0.5


def test_without_busy_times_each_card_fills_tiles_of_its_own_share() -> None:
    """Both work on tiles of 8, and card 1 takes 2.5 times as long: 9 samples cost it two tiles, not the three that
    9 x 2.5 would fill on the fast one."""
    times = [CardTime(launch_s=0.002, sample_s=0.002 * ratio, tile=8, tile_weight=1.0) for ratio in (1, 2.5)]
    memories = [card_memory(is_first=i == 0, total=(2 - i) * 10**6) for i in range(2)]
    problem = job(memories, B=96, times=times, shares="each", tells_busy=False)
    tried = [even(96, 48, 2), even(96, 12, 2), even(96, 6, 2), even(96, 4, 2), split(96, 4, 24, 0), split(96, 4, 0, 24)]
    tried += [split(96, 2, 33, 15), split(96, 2, 40, 8), split(96, 2, 31, 17)]
    wanted = [split(96, 1, 72, 24), split(96, 1, 71, 25), split(96, 3, 23, 9), split(96, 3, 15, 17)]
    model = TimeModel(trials(problem, tried), kinds=range(2))
    assert predicted(model, *wanted) == pytest.approx(truth(problem, *wanted), rel=0.03)


def test_without_busy_times_tiles_are_found_beside_the_ratios_of_kinds_alone() -> None:
    """Card 2 alone takes 5 ms for 1 sample, 9 for 8 and 13 for 10, the slow ones 9.8 ms for 1: of tiles of 4, in which
    they take 2.2 times as long. By what is sought without tiles they take far longer, beside which no tile helps.
    """
    times = [CardTime(launch_s=0.001, sample_s=0.001 * r, tile=4, tile_weight=1.0) for r in (2.2, 2.2, 1, 2.2)]
    memories = [card_memory(is_first=i == 0, total=(i + 1) * 10**6) for i in range(4)]
    problem = job(memories, B=59, times=times, shares="each", tells_busy=False)
    tried = [even(59, 15, 4), even(59, 10, 4), *(split(59, 59, *np.eye(4, dtype=int)[i].tolist()) for i in range(4))]
    tried += [split(59, 6, 0, 0, 10, 0), split(59, 6, 0, 0, 8, 2), split(59, 5, 0, 2, 9, 1), split(59, 8, 0, 0, 8, 0)]
    wanted = [split(59, 15, 0, 0, 4, 0), split(59, 4, 0, 3, 12, 0), split(59, 5, 0, 0, 12, 0)]
    model = TimeModel(trials(problem, tried), kinds=range(4))
    assert predicted(model, *wanted) == pytest.approx(truth(problem, *wanted), rel=0.03)


def test_without_busy_times_work_of_gpu0_is_sought_beside_each_tile() -> None:
    """Card 1 takes as long for 1 to 4 samples, and twice as long for 5; GPU 0 takes longer the more the micro-batch is.
    Beside tiles of 2, too, such work explains the trials: if they were, 4 samples on card 1 would take twice as long as
    with the tiles of 4 that are there."""
    problem = physics.draw(1_070_126)
    tried = [(5, 1, 1), (10, 1, 0), (4, 1, 2), (10, 0, 1), (2, 0, 5), (2, 1, 4), (2, 2, 3)]
    judged = [JudgedTrial(measurement=problem.measure(split(10, *one))) for one in tried]
    wanted = split(10, 3, 0, 4)
    model = TimeModel(judged, kinds=range(2))
    off = np.log(10 / predicted(model, wanted)[0]) - np.log(problem.throughput(wanted))
    assert abs(off) < 2 * doubts(model, wanted)[0] < 0.5


def test_without_busy_times_a_share_too_small_to_matter_is_in_no_doubt() -> None:
    """Of unlike cards GPU 0 with 2 samples and the others with 31 is as good as known once it was 1
    and 31.
    """
    memories = [card_memory(is_first=i == 0, total=total) for i, total in enumerate((10**6, 10**5, 10**4))]
    problem = job(memories, B=B, tells_busy=False)
    model = model_of(problem, [even(B, k, 3) for k in (16, 4)] + [split(B, 1, 1, 31, 32)])
    near, far = doubts(model, split(B, 1, 4, 30, 30), split(B, 1, 40, 12, 12))
    assert near < 0.04 < far


def test_without_busy_times_what_was_not_tried_is_in_doubt() -> None:
    """After even splits alone nobody knows which card is slow: an uneven one is in doubt, an even
    one is not.
    """
    problem = job(3, B=B, tells_busy=False)
    model = model_of(problem, [even(B, k, 3) for k in (16, 8, 4)])
    known, unknown = doubts(model, even(B, 6, 3), split(B, 4, 10, 3, 3))
    assert unknown > 0.03
    assert unknown > 2 * known


def test_without_busy_times_two_slow_cards_may_explain_what_all_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six cards 1 and 5 take 25 % longer, and one of them always had the 4 samples: that all are slow explains it as
    well. By the likeliest alone what gives both 3 is more than two deviations faster than predicted; by what is drawn
    it is less so."""
    slow, fast = CardTime(launch_s=0.0, sample_s=0.25), CardTime(launch_s=0.0, sample_s=0.20)
    problem = job(6, B=63, times=[fast, slow, fast, fast, fast, slow], shares="each", tells_busy=False)
    tried = [
        even(63, 21, 6),
        even(63, 9, 6),
        split(63, 3, 3, 4, 4, 4, 3, 3),
        split(63, 3, 3, 3, 4, 4, 3, 4),
        split(63, 3, 4, 4, 3, 3, 4, 3),
        split(63, 3, 4, 3, 4, 3, 3, 4),
    ]
    wanted = split(63, 3, 3, 3, 4, 4, 4, 3)

    def beyond_two_deviations() -> float:
        model = TimeModel(trials(problem, tried), kinds=range(6))
        off = float(np.log(predicted(model, wanted) / truth(problem, wanted))[0])
        return off - 2 * float(doubts(model, wanted)[0])

    drawn = beyond_two_deviations()
    monkeypatch.setattr(WholeSteps, "_drawn", lambda self, ratios, work, log: [(log, self._at(ratios, work=work)[1])])
    assert 0 < beyond_two_deviations() > drawn + 0.02


def test_many_kinds_of_cards_that_nothing_tells_apart_are_all_believed() -> None:
    """Six cards, each of a kind of its own, give more than a hundred hypotheses of about one weight."""
    problem = job(6, B=B, tells_busy=False)
    ran = trials(problem, [even(B, 8, 6)])
    model = TimeModel(ran, kinds=range(6))
    assert predicted(model, even(B, 8, 6)) == pytest.approx(truth(problem, even(B, 8, 6)), rel=0.01)


def test_without_busy_times_too_a_card_whose_launches_alone_were_seen_is_in_doubt() -> None:
    """GPU 1 took as long as GPU 0 with the one sample that it had: with 64 it may not."""
    times = [CardTime(launch_s=0.0, sample_s=0.001, knee=8)] * 2
    problem = job(2, B=64, times=times, shares="each", tells_busy=False)
    tried = [split(64, 64, 1, 0), split(64, 64, 0, 1), split(64, 1, 64, 0), split(64, 2, 32, 0)]
    model = TimeModel(trials(problem, tried), kinds=(0, 0))
    known, unknown = doubts(model, split(64, 1, 63, 1), split(64, 1, 1, 63))
    assert known < 0.2
    assert unknown > 0.5
