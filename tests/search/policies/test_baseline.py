from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.memory import MemoryModel
from splittune.search.policies.base import Proposal
from splittune.search.policies.baseline import FindBaseline, bisect_baseline
from splittune.split import SplitSpace
from tests.search.policies.story import of_kind, search, state_after
from tests.search.problem import MIB, CardTime, card_memory, even, job, rows


def test_even_splits_grow_until_the_baseline() -> None:
    """Ever fewer steps are tried as far as memory is vouched for, and the last that fits is the baseline."""
    problem = job([card_memory(is_first=True, sample=20, total=800), *[card_memory(sample=20)] * 3], B=256)
    proposals, trials = search(problem)
    steps = [one.split.accumulation_steps for one in of_kind("baseline", proposals)]
    assert steps
    assert steps == sorted(steps, reverse=True)
    fewest = problem.baseline()
    assert fewest is not None
    assert steps[-1] <= 1.06 * fewest.accumulation_steps
    assert all(one.fits for one in trials)


def test_a_few_steps_less_are_not_worth_a_trial() -> None:
    """In 2 steps of 64 it fitted; one step is half as many, and worth a trial only where less than
    half must be saved."""
    problem = job(2, B=64)
    state = state_after(problem, [even(64, 32, 2), even(64, 2, 2)])
    wanted = FindBaseline().propose(state)
    assert wanted is not None
    assert (wanted.split, wanted.kind) == (even(64, 1, 2), "baseline")
    assert FindBaseline(min_fewer_steps=0.6).propose(state) is None


def test_an_even_split_that_is_predicted_to_be_slower_is_not_worth_a_trial() -> None:
    """61 samples on four devices take 16 steps of one sample each, or 13 in which GPU 1, the only one with room, has
    two. Where samples take the time that is slower, 26 samples for 16, and where each step does it is faster."""
    totals = (1_500, 100_000, 800, 800)
    memories = [card_memory(is_first=i == 0, sample=300, total=total) for i, total in enumerate(totals)]

    def proposed(sample_s: float, micro_step_s: float) -> Proposal | None:
        times = [CardTime(launch_s=0.0, sample_s=sample_s)] * 4
        problem = job(memories, B=61, times=times, micro_step_s=micro_step_s)
        return FindBaseline().propose(state_after(problem, [even(61, 16, 4)]))

    assert proposed(sample_s=0.010, micro_step_s=0.0001) is None
    wanted = proposed(sample_s=0.0001, micro_step_s=0.1)
    assert wanted is not None
    assert wanted.split == even(61, 13, 4)


def test_where_memory_is_flat_its_strides_are_long() -> None:
    """The reduce holds 3,000 MiB, more than 5 samples do, and a sample may take 200 for all that is seen. On a card of
    6,000 MiB all 18 are taken at once, which is likely enough; where that is asked to be sure, fewer are."""
    memories = [card_memory(is_first=i == 0, parameters=500, state=1000, sample=100, total=6000) for i in range(2)]
    problem = job([replace(one, reduce=3000.0 * MIB) for one in memories], B=36)
    state = state_after(problem, [even(36, 18, 2), even(36, 4, 2)])
    wanted, surely = (FindBaseline(min_chance=chance).propose(state) for chance in (0.7, 1.0))
    assert wanted is not None
    assert surely is not None
    assert wanted.split == even(36, 1, 2)
    assert (state.memory.needed(*rows([wanted.split])).most > state.limits).any()
    assert wanted.split.accumulation_steps < surely.split.accumulation_steps
    assert (state.memory.needed(*rows([surely.split])).most <= state.limits).all()


def test_it_keeps_away_from_what_failed_on_a_device_that_nobody_names() -> None:
    """8 samples each ran out of memory, on GPU 1 as it seems, for which the models see no reason. After 2 each 7 are
    not next, as if a message had named it: they likely are too many, too, on any card like it, unless what is amiss
    begins with 8, the last of six. Nor are 3: it may have begun with them."""
    problem = job([card_memory(is_first=True), *[card_memory(total=450)] * 2], B=96)
    state = state_after(problem, [even(96, 32, 3), even(96, 16, 3)])
    before = FindBaseline().propose(state)
    assert before is not None
    assert max(before.split.shard_sizes) > 8
    gpu0, gpu1, gpu2 = problem.measure(even(96, 4, 3)).memory
    full = replace(gpu1, peak_reserved_bytes=gpu1.total_bytes - gpu1.outside_bytes)
    failed = Measurement(split=even(96, 4, 3), outcome=Outcome.OUT_OF_MEMORY, memory=(gpu0, full, gpu2))
    judged = JudgedTrial.of(failed, [0, 0, 0])
    assert not judged.oom_devices
    for one in (judged, replace(judged, oom_devices=frozenset({1}))):
        trials = [*state.trials, one]
        memory = MemoryModel(trials, 3)
        assert FindBaseline().propose(replace(state, trials=trials, memory=memory)) is None
        steps, shards = np.array([11.0, 5.0]), np.array([[3.0, 3.0, 3.0], [7.0, 7.0, 7.0]])
        three, seven = memory.needed(steps, shards).chance_below(state.limits)
        assert 0.95 < three < 0.99
        assert 0.0 < seven < 0.2


@pytest.mark.parametrize(
    ("fits_from", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 4, 3]),
        (5, [1, 2, 4, 8, 6, 5]),
        (64, [1, 2, 4, 8, 16, 32, 64, 48, 56, 60, 62, 63]),
    ],
)
def test_without_a_model_it_is_found_by_doubling_and_bisection(fits_from: int, expected: list[int]) -> None:
    """Steps are doubled until an even split fits, then halved between the last failure and that."""
    evens = list(SplitSpace(global_batch_size=64, num_devices=1).even_splits())
    trials: list[JudgedTrial] = []
    while (proposal := bisect_baseline(evens, trials)) is not None:
        if proposal.split.accumulation_steps >= fits_from:
            measurement = Measurement(split=proposal.split, outcome=Outcome.OK, whole_step_times_s=(1.0,))
        else:
            measurement = Measurement(split=proposal.split, outcome=Outcome.CRASHED)
        trials.append(JudgedTrial(measurement=measurement))
    assert [one.split.accumulation_steps for one in trials] == expected


def test_without_a_model_the_smallest_even_split_is_tried_before_giving_up() -> None:
    """When nothing fits, the last even split measured is the one with the most accumulation steps."""
    evens = list(SplitSpace(global_batch_size=24, num_devices=2).even_splits())
    trials: list[JudgedTrial] = []
    while (proposal := bisect_baseline(evens, trials)) is not None:
        assert proposal.kind == "baseline"
        trials.append(JudgedTrial(measurement=Measurement(split=proposal.split, outcome=Outcome.OUT_OF_MEMORY)))
    assert trials[-1].split == evens[-1]
    assert evens[-1].shard_sizes == (0, 1)
