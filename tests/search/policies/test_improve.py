from __future__ import annotations

from splittune.search.policies.improve import ExpectedImprovement
from tests.search.policies.story import best_of, search, state_after
from tests.search.problem import CardTime, card_memory, even, job, split


def test_the_slow_card_is_relieved() -> None:
    """Where GPU 0 is half as fast, the search soon comes to shares that finish together; what
    trials are left only check."""
    slow, fast = CardTime(launch_s=0.002, sample_s=0.004), CardTime(launch_s=0.002, sample_s=0.002)
    problem = job(3, B=100, times=[slow, fast, fast])
    proposals, trials = search(problem)
    best = max((one for one in trials if one.fits), key=lambda one: one.throughput).split
    assert best == split(100, 1, 20, 40, 40)
    place = [one.split for one in trials].index(best)
    assert place < 6
    assert proposals[place].kind == "improve"
    assert len(trials) <= 12


def test_a_space_too_large_to_list_is_searched_by_balance() -> None:
    """With a share for every card the candidates are balanced in closed form, from each card's own curve and memory."""
    times = [CardTime(launch_s=0.002, sample_s=0.001 * factor) for factor in (1, 2, 1, 2, 4, 1)]
    memories = [card_memory(is_first=True, sample=10, total=700), *[card_memory(sample=10)] * 5]
    problem = job(memories, B=300, times=times, shares="each")
    _, trials = search(problem)
    assert best_of(problem, trials) >= 0.98
    assert problem.num_oom == 0


def test_a_knee_between_two_shares_that_were_measured_costs_less_than_a_tenth() -> None:
    """The slow card takes as long for 2 samples as for 1, which no line through 1 and 4 foretells: with it all could
    take part. What is found leaves that card out, or gives it one."""
    slow, fast = CardTime(launch_s=0.0006, sample_s=0.0015, knee=2), CardTime(launch_s=0.0005, sample_s=0.0008, knee=2)
    problem = job(7, B=26, times=[*[fast] * 5, slow, fast], shares="each", micro_step_s=0.0001)
    _, trials = search(problem, most=12)
    assert problem.best_throughput == problem.throughput(split(26, 1, 4, 4, 4, 4, 4, 2, 4))
    assert best_of(problem, trials) > 0.9


def test_a_smaller_gain_is_wanted_where_the_threshold_is_lower() -> None:
    """The same state and the same candidate: worth a trial from 0.1 % on, and not where 50 % are asked for."""
    problem = job(2, B=64, times=[CardTime(launch_s=0.01, sample_s=0.004), CardTime(launch_s=0.01, sample_s=0.002)])
    state = state_after(problem, [even(64, 32, 2), even(64, 2, 2), even(64, 1, 2)])
    wanted = ExpectedImprovement(min_gain=0.001).propose(state)
    assert wanted is not None
    assert wanted.split.gpu0_bsz < 32
    assert ExpectedImprovement(min_gain=0.5).propose(state) is None
