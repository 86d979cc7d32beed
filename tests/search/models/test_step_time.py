from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.problems.problem import CardTime, Problem
from benchmarks.search import layered
from benchmarks.search.tabled import TabledProblem
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search import TimeModel
from splittune.search.judged_trials import JudgedTrial
from splittune.split import BatchSplit
from tests.search.models.predictions import B, doubts, model_of, predicted, truth
from tests.search.problem import card_memory, even, job, split, trials


@st.composite
def jobs(draw: st.DrawFn) -> Problem:
    """Any job of the model's form, not bound by the host, with cards of one kind or two."""
    num_devices = draw(st.integers(2, 4))
    slow = draw(st.sampled_from([1.0, 2.0]))
    launch_s, sample_s = draw(st.sampled_from([0.0, 0.01])), draw(st.sampled_from([0.0005, 0.002]))
    kinds = [CardTime(launch_s=launch_s, sample_s=sample_s * factor) for factor in (1.0, slow)]
    return job(
        num_devices,
        B=B,
        times=[kinds[draw(st.integers(0, 1))] for _ in range(num_devices)],
        micro_step_s=draw(st.sampled_from([0.0, 0.005])),
        output_s=draw(st.sampled_from([0.0, 1e-5])),
        update_s=draw(st.sampled_from([0.001, 0.05])),
    )


@settings(max_examples=40)
@given(problem=jobs())
def test_a_job_of_the_models_form_is_foretold_exactly(problem: Problem) -> None:
    """Without noise a few even splits and an uneven one give the time of every other split with as
    many cards.
    """
    n = problem.num_devices
    tried = [even(B, k, n) for k in (16, 8, 4, 2)] + [split(B, 4, 16 - 2 * (n - 1), *[2] * (n - 1))]
    wanted = [even(B, 1, n), split(B, 2, 32 - 5 * (n - 1), *[5] * (n - 1)), even(B, 5, n)]
    model = model_of(problem, tried)
    assert predicted(model, *wanted) == pytest.approx(truth(problem, *wanted), rel=0.02)
    assert model.residual_rms < 0.005
    assert model.warnings() == ()


def test_a_knee_is_learned() -> None:
    """Where a card is not full below 12 samples, smaller shares are known to take no less time."""
    problem = job(2, B=B, times=[CardTime(launch_s=0.002, sample_s=0.002, knee=12)] * 2)
    model = model_of(problem, [even(B, k, 2) for k in (32, 16, 8, 4, 2)])
    wanted = [even(B, 1, 2), even(B, 11, 2)]
    assert predicted(model, *wanted) == pytest.approx(truth(problem, *wanted), rel=0.1)


class FewAreSlower(CardTime):
    """Each of few samples takes longer than each of many."""

    def __call__(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """(N,) shares to (N,) seconds."""
        return self.sample_s * (shares + 3 * np.sqrt(shares))


def test_samples_that_take_less_the_more_they_are_are_foretold() -> None:
    """One takes 8 ms, and 7 take 30: a line through what 1 to 7 took has 32 take a fifth longer than they do."""
    problem = job(2, B=B, times=[FewAreSlower(launch_s=0.0, sample_s=0.002)] * 2)
    model = model_of(problem, [even(B, k, 2) for k in (32, 16, 11, 8, 5)])
    wanted = [even(B, 2, 2), even(B, 1, 2)]
    assert predicted(model, *wanted) == pytest.approx(truth(problem, *wanted), rel=0.03)
    assert (doubts(model, *wanted) < 0.1).all()


def test_what_the_form_does_not_explain_is_followed_where_it_was_measured() -> None:
    """A split that takes 30 % longer than any form has it is predicted so, a neighbour partly, a
    far one not.
    """
    problem = job(3, B=B)
    judged = trials(problem, [even(B, k, 3) for k in (16, 8, 4, 2)])
    odd = split(B, 2, 2, 15, 15)
    measured = trials(problem, [odd])[0].measurement
    slow = replace(measured, micro_step_times_s=tuple(1.3 * time for time in measured.micro_step_times_s))
    straight, model = TimeModel(judged), TimeModel([*judged, JudgedTrial(measurement=slow)])
    step_s = slow.step_time_s
    assert step_s is not None
    assert predicted(model, odd)[0] == pytest.approx(step_s, rel=0.05)
    far = even(B, 16, 3)
    assert predicted(model, far)[0] == pytest.approx(predicted(straight, far)[0], rel=0.1)


def test_doubt_grows_away_from_data() -> None:
    """A measured split is in little doubt, one beside it in more, and one far beyond in most."""
    problem = job(3, B=B)
    model = model_of(problem, [even(B, k, 3) for k in (32, 16, 8)])
    measured, near, far = doubts(model, even(B, 16, 3), even(B, 6, 3), split(B, 1, 60, 2, 2))
    assert measured < 0.01
    assert measured < near < far


def test_noise_is_no_misfit() -> None:
    """Clocks that scatter by 3 % give no doubt about the form, and the fit stays near the truth."""
    problem = job(4, B=B, noise=0.03)
    model = model_of(problem, [even(B, k, 4) for k in (16, 8, 4, 2, 1)])
    assert model.noise > 0.002
    assert model.warnings() == ()
    wanted = [even(B, 3, 4), split(B, 1, 10, 18, 18, 18)]
    assert predicted(model, *wanted) == pytest.approx(truth(problem, *wanted), rel=0.06)


def test_times_that_no_form_explains_are_told() -> None:
    """Where the form leaves more than noise, the model says that it did not fit."""
    problem = job(2, B=B)
    judged = trials(problem, [even(B, k, 2) for k in (32, 16, 8, 4, 2, 1)])
    wild = [
        JudgedTrial(
            measurement=replace(
                a.measurement,
                device_busy_s=None,
                micro_step_times_s=tuple(t * (3.0 if i % 2 else 0.4) for t in a.measurement.micro_step_times_s),
            )
        )
        for i, a in enumerate(judged)
    ]
    (doubt,) = TimeModel(wild).warnings()
    assert doubt.startswith("The time model did not fit: its form leaves ")


def test_cards_of_two_speeds_have_their_own_curves() -> None:
    """Busy times of equal shares tell kinds apart; cards of a kind share a curve."""
    slow, fast = CardTime(launch_s=0.005, sample_s=0.004), CardTime(launch_s=0.005, sample_s=0.001)
    problem = job(3, B=B, times=[slow, fast, slow], shares="each")
    model = model_of(problem, [even(B, k, 3) for k in (16, 8, 4)])
    assert model.curves[0] is model.curves[2] is not model.curves[1]
    sample = np.array([20.0])
    assert model.curves[0](sample)[0] == pytest.approx(0.085, rel=0.02)
    assert model.curves[1](sample)[0] == pytest.approx(0.025, rel=0.02)


def test_a_card_behind_a_slow_link_is_told_by_whole_steps() -> None:
    """Outputs of GPU 2 take 8 ms a sample to come to GPU 0, those of GPU 1 take none, and no card works longer
    for it: what whole steps take beside the busy times tells whose samples they are."""
    memories = [card_memory(is_first=i == 0, total=total) for i, total in enumerate((10**6, 10**6, 10**5))]
    problem = job(memories, B=B, times=[CardTime(launch_s=0.01, sample_s=0.004)] * 3, shares="each")

    def linked(tried: BatchSplit) -> JudgedTrial:
        judged = trials(problem, [tried])[0]
        more = 0.008 * tried.shard_sizes[2]
        times = tuple(time + more for time in judged.measurement.micro_step_times_s)
        return replace(judged, measurement=replace(judged.measurement, micro_step_times_s=times))

    model = TimeModel([linked(one) for one in (even(B, 16, 3), even(B, 8, 3), even(B, 4, 3), split(B, 4, 6, 8, 2))])
    wanted = [split(B, 4, 8, 6, 2), split(B, 4, 4, 4, 8)]
    assert predicted(model, *wanted) == pytest.approx([linked(one).measurement.step_time_s for one in wanted], rel=0.04)


def test_a_card_that_never_worked_is_hoped_to_be_like_its_kind() -> None:
    """Of a card without a share its memory tells the kind; one of a memory of its own is hoped to
    be like the fastest.
    """
    times = [CardTime(launch_s=0.01, sample_s=0.002 * (i + 1)) for i in (0, 1, 2, 2)]
    memories = [card_memory(is_first=i == 0, total=total) for i, total in enumerate((10**6, 10**5, 10**5, 10**4))]
    problem = job(memories, B=B, times=times, shares="each")
    model = model_of(problem, [split(B, 8, 4, 4, 0, 0), split(B, 4, 8, 8, 0, 0)])
    assert model.curves[2] is model.curves[1]
    assert model.curves[3] is model.curves[0]


def test_a_card_that_never_worked_is_in_doubt() -> None:
    """GPU 2 had no share yet: its single sample may take half or twice what the others' does if it has another memory,
    and a fifth more or less if it has as much.
    """

    def doubt_of_gpu2(total: int) -> float:
        memories = [card_memory(is_first=i == 0, total=10**6 if i < 2 else total) for i in range(3)]
        problem = job(memories, B=B, times=[CardTime(launch_s=0.005, sample_s=0.002)] * 3, shares="each")
        model = model_of(problem, [split(B, 64, 0, 1, 0), split(B, 32, 0, 2, 0)])
        return float(doubts(model, split(B, 64, 0, 0, 1))[0])

    assert 0.2 < doubt_of_gpu2(10**6) < 0.3
    assert 0.4 < doubt_of_gpu2(10**7) < 0.5


def test_a_card_that_never_worked_is_compared_where_all_were_measured() -> None:
    """A single share of a slow card tells nothing of larger ones, so what it may take there makes
    it no faster.
    """
    fast, slow = CardTime(launch_s=0.0002, sample_s=0.0014), CardTime(launch_s=0.0003, sample_s=0.0023)
    problem = job(4, B=16, times=[fast, fast, fast, slow], shares="each")
    model = model_of(problem, [split(16, 8, 0, 1, 1, 0), split(16, 6, 0, 1, 1, 1), split(16, 4, 0, 2, 2, 0)])
    assert model.curves[0] is model.curves[1] is not model.curves[3]


def test_fewer_cards_than_ever_tried_may_wait_less_for_the_host() -> None:
    """Where every card had a share, what its cards do not explain may be the host's time for each
    of them.
    """
    problem = job(4, B=B, times=[CardTime(launch_s=0.1, sample_s=1e-6)] * 4, replica_s=0.05, micro_step_s=0.0)
    model = model_of(problem, [even(B, k, 4) for k in (16, 8, 4, 2)])
    three = split(B, 3, 0, 8, 7, 7)
    best = predicted(model, three)[0] * np.exp(-doubts(model, three)[0])
    assert best <= 1.02 * truth(problem, three)[0]


def test_fewer_cards_than_ever_tried_get_a_chance() -> None:
    """Where all trials had every card, what seems constant may be each card's: fewer are hoped for."""
    problem = job(2, B=16, micro_step_s=0.0, update_s=0.001, reduce_s=0.05)
    model = model_of(problem, [even(16, 4, 2), even(16, 2, 2), even(16, 1, 2)])
    alone = split(16, 2, 8, 0)
    as_constant = truth(problem, alone)[0] + 0.05
    assert predicted(model, alone)[0] < 0.9 * as_constant


def test_gpu0_alone_tells_nothing_of_another_alone() -> None:
    """One that is behind a link: what seems constant in a micro-step may be each further card's."""
    problem = job(3, B=16, shares="each", micro_step_s=0.05)
    model = model_of(problem, [even(16, 4, 3), even(16, 2, 3), split(16, 2, 8, 0, 0)])
    own, other = doubts(model, split(16, 2, 8, 0, 0), split(16, 2, 0, 8, 0))
    assert own < 0.02
    assert other > 0.2


def test_an_update_may_be_all_the_links() -> None:
    """Most of a step is gradients and parameters on their way: a single card, which has none, is hoped for."""
    problem = job(2, B=16, micro_step_s=0.0, update_s=0.001, reduce_s=0.1)
    model = model_of(problem, [even(16, 4, 2), even(16, 2, 2), even(16, 1, 2)])
    alone = split(16, 2, 8, 0)
    assert predicted(model, alone)[0] * np.exp(-doubts(model, alone)[0]) <= truth(problem, alone)[0]


@pytest.mark.parametrize("seed", range(4))
def test_an_update_tells_by_itself_what_many_micro_steps_hide(seed: int) -> None:
    """With two cards an update takes 610 ms and alone 10, beside 256 micro-steps of 170 ms with noise of 2 %. By whole
    steps alone the whole batch on one card is foretold up to 55 % too long."""
    times = [CardTime(launch_s=0.001, sample_s=0.0004)] * 2
    problem = job(2, B=2048, times=times, micro_step_s=0.17, update_s=0.01, reduce_s=0.6, noise=0.02)
    problem.seed = seed
    model = model_of(problem, [*(even(2048, k, 2) for k in (64, 8, 2, 1)), split(2048, 256, 8, 0)])
    alone = split(2048, 1, 2048, 0)
    assert predicted(model, alone) == pytest.approx(truth(problem, alone), rel=0.02)


def test_a_host_that_launches_for_all_is_found() -> None:
    """Where the cards wait for the host, a larger share of a small micro-batch takes no longer."""
    problem = job(4, B=B, replica_s=0.020, times=[CardTime(launch_s=0.001, sample_s=0.001)] * 4, micro_step_s=0.001)
    model = model_of(problem, [even(B, k, 4) for k in (16, 8, 4, 2)])
    wanted = [even(B, 1, 4), split(B, 2, 17, 5, 5, 5)]
    assert predicted(model, *wanted) == pytest.approx(truth(problem, *wanted), rel=0.03)


def test_a_single_trial_that_waits_by_far_tells_of_the_host() -> None:
    """Two samples on each card take 2 ms and 40 pass, for the host; shares of 64 and more keep it busy: it costs them
    nothing.
    """
    problem = job(2, B=512, replica_s=0.020, times=[CardTime(launch_s=0.0, sample_s=0.001)] * 2, micro_step_s=0.001)
    model = model_of(problem, [even(512, k, 2) for k in (128, 4, 2, 1)])
    wanted = [even(512, 3, 2), even(512, 6, 2), even(512, 64, 2)]
    assert predicted(model, *wanted) == pytest.approx(truth(problem, *wanted), rel=0.03)


@pytest.mark.parametrize("replica_s", [0.012, 0.02, 0.027, 0.035, 0.05])
def test_what_a_host_takes_for_each_device_is_found_beside_what_it_takes_for_all(replica_s: float) -> None:
    """A micro-step costs the host 107 ms, and a device some more while which it may work: few samples on both wait."""
    times = [CardTime(launch_s=0.001, sample_s=0.0012), CardTime(launch_s=0.001, sample_s=0.0007)]
    problem = job(2, B=1062, replica_s=replica_s, times=times, micro_step_s=0.107, update_s=0.15)
    small = [split(1062, 531, 1, 1), split(1062, 118, 4, 5), split(1062, 40, 13, 14), split(1062, 15, 35, 36)]
    large = [split(1062, 20, 0, 54), split(1062, 29, 37, 0), split(1062, 7, 0, 152), split(1062, 5, 60, 153)]
    model = model_of(problem, [*small, *large])
    wanted = [split(1062, 6, 37, 140), split(1062, 10, 36, 71), split(1062, 4, 100, 166)]
    assert predicted(model, *wanted) == pytest.approx(truth(problem, *wanted), rel=0.01)


@pytest.mark.parametrize("seed", [0, 11, 31])
def test_a_trial_that_took_a_little_longer_does_not_tell_of_the_host(seed: int) -> None:
    """A sample on one card, on two and on three, with noise of 2 %: where three took some percent longer the host was
    held to have been just too slow for them, and four cards were foretold to take a third longer than they do."""
    times = [CardTime(launch_s=0.01, sample_s=0.86)] * 8
    problem = job(8, B=144, times=times, micro_step_s=0.01, update_s=0.02, reduce_s=0.2, noise=0.02)
    problem.seed = seed
    tried = [split(144, 144 // cards, 0, *[1] * cards, *[0] * (7 - cards)) for cards in (1, 2, 3, 4)]
    model = model_of(problem, tried[:-1])
    assert predicted(model, tried[-1]) == pytest.approx(truth(problem, tried[-1]), rel=0.05)


def test_only_what_ran_counts() -> None:
    """Failures have no times; a split that kept too little headroom ran, and counts."""
    problem = job(2, B=B)
    ran = trials(problem, [even(B, k, 2) for k in (16, 4)])
    failed = JudgedTrial(measurement=Measurement(split=even(B, 1, 2), outcome=Outcome.OUT_OF_MEMORY))
    tight = JudgedTrial(measurement=replace(ran[1].measurement, outcome=Outcome.NO_HEADROOM))
    both = [TimeModel([ran[0], failed, ran[1]]), TimeModel([ran[0], tight])]
    assert predicted(both[0], even(B, 1, 2)) == pytest.approx(predicted(both[1], even(B, 1, 2)))


def test_a_single_trial_is_enough_to_begin_with() -> None:
    """One trial predicts itself, hopes for no worse with fewer steps, and doubts what is far."""
    problem = job(2, B=B)
    model = model_of(problem, [even(B, 32, 2)])
    same, fewer = even(B, 32, 2), even(B, 8, 2)
    assert predicted(model, same) == pytest.approx(truth(problem, same), rel=0.01)
    assert predicted(model, fewer)[0] < predicted(model, same)[0]
    assert doubts(model, fewer)[0] > 0.1 > doubts(model, same)[0]


def test_whole_steps_alone_are_enough() -> None:
    """Measurements with whole steps only, without micro-steps, busy times or memory, are fitted
    too.
    """
    problem = job(2, B=B)
    ran = [
        JudgedTrial(
            measurement=Measurement(
                split=tried, outcome=Outcome.OK, whole_step_times_s=(float(truth(problem, tried)[0]),) * 3
            )
        )
        for tried in (even(B, 16, 2), even(B, 8, 2), even(B, 4, 2))
    ]
    assert predicted(TimeModel(ran), even(B, 2, 2)) == pytest.approx(truth(problem, even(B, 2, 2)), rel=0.1)


def test_a_card_that_had_nothing_to_do_is_like_no_other() -> None:
    """A busy time of 0 seconds tells nothing of its speed: the card is taken to be like its kind."""
    problem = job(3, B=B)
    ran = trials(problem, [even(B, k, 3) for k in (16, 8, 4)])
    idle = [
        JudgedTrial(
            measurement=replace(one.measurement, device_busy_s=(0.0, *(one.measurement.device_busy_s or ())[1:]))
        )
        for one in ran
    ]
    assert predicted(TimeModel(idle), even(B, 2, 3)) == pytest.approx(truth(problem, even(B, 2, 3)), rel=0.02)


def test_cards_alike_at_one_share_alone_have_their_own_curves_once_another_tells() -> None:
    """With one sample launches take longest, and all cards as long; with two GPU 1 is slower. GPU 2, which had one,
    is not put with both."""
    slow, fast = CardTime(launch_s=0.0, sample_s=0.010), CardTime(launch_s=0.0, sample_s=0.005, knee=2)
    problem = job(3, B=30, times=[fast, slow, fast], shares="each")
    curves = model_of(problem, [even(30, 10, 3), split(30, 6, 2, 2, 1)]).curves
    assert curves[0](np.array([2.0]))[0] == pytest.approx(0.010, rel=0.01)
    assert curves[1](np.array([2.0]))[0] == pytest.approx(0.020, rel=0.01)


def test_cards_join_those_that_they_were_like_with_more_samples() -> None:
    """GPU 0 is like 1 and 2 with one sample, and never had as many as they had otherwise. They were like GPU 3 with 14,
    and GPU 0 was not with 12: so 1 and 2 are of its kind, not of GPU 0's."""
    fast, slow = CardTime(launch_s=0.0, sample_s=0.004, knee=5), CardTime(launch_s=0.0, sample_s=0.010, knee=2)
    problem = job(4, B=50, times=[fast, slow, slow, slow], shares="each")
    tried = [even(50, 13, 4), split(50, 1, 8, 14, 14, 14), split(50, 1, 12, 13, 13, 12)]
    curves = model_of(problem, tried).curves
    assert [float(curve(np.array([40.0]))[0]) for curve in curves] == pytest.approx([0.16, 0.4, 0.4, 0.4], rel=0.02)


def test_a_card_whose_launches_alone_were_seen_is_in_doubt_with_more_samples() -> None:
    """GPU 1 had one sample, which takes as long as 8: nothing tells yet whether it is as fast as GPU 0 with 64."""
    problem = job(2, B=64, times=[CardTime(launch_s=0.0, sample_s=0.001, knee=8)] * 2, shares="each")
    model = model_of(problem, [even(64, 32, 2), split(64, 1, 64, 0), split(64, 2, 32, 0), split(64, 4, 16, 0)])
    known, unknown = doubts(model, split(64, 1, 63, 1), split(64, 1, 1, 63))
    assert known < 0.05
    assert unknown > 0.5


def test_the_more_its_samples_took_the_less_a_card_is_in_doubt() -> None:
    """GPU 1 had 2 samples, and GPU 0 up to 64. 2 take a half, a quarter or 1/32 longer than one: of half of what 63 may
    take longer, in logarithms, nothing is in doubt, half, or nearly all."""

    def doubt_of_gpu1(launch_s: float) -> float:
        problem = job(2, B=64, times=[CardTime(launch_s=launch_s, sample_s=0.001)] * 2, shares="each")
        model = model_of(problem, [even(64, 16, 2), split(64, 1, 64, 0), split(64, 2, 32, 0), split(64, 4, 16, 0)])
        return float(doubts(model, split(64, 1, 1, 63))[0])

    told, half_told, untold = (doubt_of_gpu1(launch_s) for launch_s in (0.001, 0.003, 0.031))
    assert told < 0.05
    assert half_told == pytest.approx(np.log(66 / 5) / 2 / 2, rel=0.02)
    assert untold == pytest.approx((1 - 1 / 16) * np.log(94 / 33) / 2, rel=0.02)


def test_a_micro_steps_own_time_tells_the_update_from_the_gathering_of_gradients() -> None:
    """Steps over two cards and over one tell their sum alone."""
    problem = job(2, B=64, shares="each", update_s=0.010, reduce_s=0.200, replica_s=0.0)
    model = model_of(problem, [even(64, 32, 2), even(64, 2, 2), split(64, 64, 1, 0)])
    wanted = split(64, 1, 64, 0)
    assert predicted(model, wanted)[0] == pytest.approx(truth(problem, wanted)[0], rel=0.05)


def test_links_and_further_cards_that_nothing_tells_apart_are_both_believed() -> None:
    """One card's step is faster than two cards': for GPU 1's samples, or since there is one more. GPU 1 alone, which
    takes 41 ms, is foretold 58 ms, give or take 60 %."""
    problem = job(2, B=13, shares="each", micro_step_s=0.0, output_s=0.002)
    model = model_of(problem, [split(13, 2, 3, 4), split(13, 1, 13, 0)])
    alone = split(13, 1, 0, 13)
    off = np.log(predicted(model, alone) / truth(problem, alone))
    assert 0.5 < doubts(model, alone)[0] < 0.7
    assert abs(off[0]) < 2 * doubts(model, alone)[0]


def drawn(seed: int, tried: list[BatchSplit]) -> tuple[TimeModel, TabledProblem]:
    problem = layered.draw(seed)
    return TimeModel([JudgedTrial.of(problem.measure(one), problem.min_headroom_bytes) for one in tried]), problem


def test_what_gpu0_does_with_each_output_is_no_cost_of_every_micro_step() -> None:
    """Alone, with 7 and 5 samples, it takes 14 ms more for each: with 1 no more in 13 micro-steps than in 2. As a cost
    of every micro-step that split was foretold to take twice as long."""
    alone = [split(13, -(-13 // share), share, *[0] * 6) for share in (7, 5)]
    model, problem = drawn(970_374, [even(13, 2, 7), even(13, 1, 7), *alone])
    wanted = split(13, 13, 1, *[0] * 6)
    assert predicted(model, wanted)[0] == pytest.approx(13 / problem.throughput(wanted), rel=0.02)


def test_a_cold_first_trial_does_not_tell_of_the_host() -> None:
    """It took a tenth longer than it does now. By a host that is just too slow for its six cards seven would take a
    quarter longer than they do."""
    rows = (0, 0, 0, 2, 0, 0, 2, 0), (1, 2, 2, 2, 1, 1, 1, 1), (0, 0, 0, 3, 2, 2, 3, 1), (1, 1, 1, 4, 0, 0, 4, 0)
    tried = [split(11, 2, 0, 1, 1, 1, 1, 1, 1, 0), *[split(11, -(-11 // sum(row)), *row) for row in rows]]
    model, problem = drawn(970_485, tried)
    wanted = split(11, 1, 0, 1, 1, 3, 1, 1, 3, 1)
    assert predicted(model, wanted)[0] == pytest.approx(11 / problem.throughput(wanted), rel=0.05)
