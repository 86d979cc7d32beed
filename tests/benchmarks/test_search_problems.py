"""The problems that judge the search know their best split, and measure as real cards would."""

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.search import layered, physics, recorded
from benchmarks.search.makespan import least_makespans
from benchmarks.search.network import WITHOUT_LIMIT, Replay
from benchmarks.search.noise import Noise
from benchmarks.search.problem import Problem, without_optional_readings
from splittune.profiling.measurement import Outcome
from splittune.split import BatchSplit
from splittune.units import GIB

GENERATORS = pytest.mark.parametrize(
    "generator", [physics, layered, recorded], ids=lambda module: module.__name__.rpartition(".")[2]
)
SEEDS = st.integers(0, 100_000)
MOST_SPLITS = 800


def some_splits(problem: Problem, seed: int, count: int = 12) -> list[BatchSplit]:
    """Even ones and random ones."""
    space, rng = problem.space(), np.random.default_rng(seed)
    found = list(space.even_splits())[:: max(1, space.global_batch_size // 6)]
    while len(found) < count:
        steps = int(rng.integers(1, space.global_batch_size + 1))
        largest = -(-space.global_batch_size // steps)
        if space.shares == "each":
            cuts = np.sort(rng.integers(0, largest + 1, space.num_devices - 1))
            shares = tuple(int(share) for share in np.diff([0, *cuts, largest]))
            split = BatchSplit(global_batch_size=space.global_batch_size, accumulation_steps=steps, shard_sizes=shares)
        else:
            split = BatchSplit.with_gpu0(
                global_batch_size=space.global_batch_size,
                accumulation_steps=steps,
                num_devices=space.num_devices,
                gpu0_bsz=int(rng.integers(0, largest + 1)) if space.num_devices > 1 else largest,
            )
        found += [split] if split in space else [next(iter(space))]
    return found


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_the_least_makespan_is_that_of_all_shares(data: st.DataObject) -> None:
    """Monotone or not, with cards that lack memory for some shares: what all shares together show."""
    num_cards = data.draw(st.integers(1, 4))
    m = data.draw(st.integers(1, 8))
    min_share = data.draw(st.integers(0, 1))
    times = st.lists(st.sampled_from([0.0, 1.0, 2.0, 2.5, 3.0, 4.0, 5.0, inf]), min_size=m + 1, max_size=m + 1)
    table = np.array([data.draw(times) for _ in range(num_cards)])
    if data.draw(st.booleans()):
        table.sort(axis=1)
    least = [inf] * (num_cards + 1)
    for shares in product(range(min_share, m + 1), repeat=num_cards):
        if sum(shares) == m:
            active = sum(share > 0 for share in shares)
            makespan = max(table[card, share] for card, share in enumerate(shares))
            least[active:] = [min(known, makespan) for known in least[active:]]
    assert least_makespans(table, min_share).tolist() == least


@GENERATORS
@given(seed=SEEDS)
@settings(max_examples=12, deadline=None)
def test_the_best_is_what_every_split_of_the_space_says(generator: object, seed: int) -> None:
    """Brute force over small spaces finds the same throughput."""
    problem = generator.draw(seed)  # type: ignore[attr-defined]
    assume(problem.space().num_splits <= MOST_SPLITS)
    fitting = [split for split in problem.space() if problem.fits(split)]
    best = max((problem.throughput(split) for split in fitting), default=None)
    assert problem.best_throughput == (best if best is None else pytest.approx(best, rel=1e-12))


@GENERATORS
@given(seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_what_is_measured_is_the_truth_where_nothing_scatters(generator: object, seed: int) -> None:
    """A trial and a confirmation give the true throughput, and the outcome that memory allows."""
    problem = generator.draw(seed)  # type: ignore[attr-defined]
    problem.noise = Noise()
    for split in some_splits(problem, seed):
        for measurement in (problem.measure(split), problem.confirm(split)):
            if not problem.runs(split):
                assert measurement.outcome is Outcome.OUT_OF_MEMORY
                continue
            assert measurement.outcome is (Outcome.OK if problem.fits(split) else Outcome.NO_HEADROOM)
            assert measurement.throughput == pytest.approx(problem.throughput(split))


@GENERATORS
@given(seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_readings_are_those_a_card_could_give(generator: object, seed: int) -> None:
    """Nobody reserves less than is allocated, nor more than the card has; no phase exceeds the whole."""
    problem = generator.draw(seed)  # type: ignore[attr-defined]
    for split in some_splits(problem, seed):
        for card in problem.measure(split).memory:
            assert 0 <= card.peak_allocated_bytes <= card.peak_reserved_bytes
            assert card.headroom_bytes >= 0
            if card.micro_step_peak_bytes is None:
                continue
            assert card.update_peak_bytes is not None
            assert card.peak_allocated_bytes >= max(card.micro_step_peak_bytes, card.update_peak_bytes)
            assert card.resting_bytes is not None
            assert card.before_backward_bytes is not None
            assert card.resting_bytes <= card.before_backward_bytes <= card.micro_step_peak_bytes
            if split.accumulation_steps == 1:
                assert card.single_step_peak_bytes is None
            else:
                assert card.single_step_peak_bytes is not None
                assert card.single_step_peak_bytes <= card.micro_step_peak_bytes


@given(seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_the_least_that_is_reserved_is_never_more_than_what_is(seed: int) -> None:
    """The bound that spares replays rules nothing out that would fit."""
    problem = layered.draw(seed)
    for split in some_splits(problem, seed):
        m = split.micro_batch_size
        least = problem.machine.least_reserved_bytes(m)
        for card, share in enumerate(split.shard_sizes):
            assert least[card, share] <= problem.machine.reserved_by(card, share, m)


@given(seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_a_full_card_hands_back_what_is_free_before_it_runs_out(seed: int) -> None:
    """With as much as it would reserve it runs, and with less than is alive at once it does not; between, it may."""
    machine, share = layered.draw(seed).machine, int(np.random.default_rng(seed).integers(1, 9))
    assert isinstance(machine, layered.LayeredMachine)
    network = machine.network

    def replay(capacity_bytes: int) -> Replay:
        return Replay(network, share, 12, is_first=True, is_held=seed % 2 == 0, capacity_bytes=capacity_bytes)

    free = replay(WITHOUT_LIMIT)
    alive = max(free.peaks.values())
    assert free.ran
    assert alive <= free.reserved_bytes
    assert (replay(free.reserved_bytes).ran, replay(free.reserved_bytes).peaks) == (True, free.peaks)
    assert not replay(alive - 1).ran
    for capacity_bytes in np.linspace(alive, free.reserved_bytes, 4)[:-1].astype(int).tolist():
        full = replay(capacity_bytes)
        assert max(full.peaks.values()) <= full.reserved_bytes <= capacity_bytes


def test_what_runs_once_free_segments_are_handed_back_is_no_oom() -> None:
    """A replica of 4 samples would reserve 10.31 GiB where its card has 10.306, of which 8.42 are alive at once.

    But it keeps nothing free, not even where no more than a byte is asked.
    """
    problem = layered.draw(352_249)
    split = BatchSplit(global_batch_size=52, accumulation_steps=2, shard_sizes=(3, 4, 4, 3, 3, 3, 3, 3))
    assert problem.runs(split)
    assert not problem.fits(split)
    measurement = problem.measure(split)
    assert measurement.outcome is Outcome.NO_HEADROOM
    assert measurement.memory[1].peak_allocated_bytes / GIB == pytest.approx(8.42, abs=0.01)
    assert measurement.memory[1].headroom_bytes == 0


@pytest.mark.parametrize("seed", range(len(recorded.names())))
def test_every_split_of_a_recording_is_known(seed: int) -> None:
    """No split of its space is missing, and some fit."""
    problem = recorded.draw(seed)
    fits = [problem.fits(split) for split in problem.space()]
    assert any(fits)
    assert problem.best_throughput is not None


@GENERATORS
def test_a_seed_is_a_problem(generator: object) -> None:
    """Drawn twice it measures the same, and counts what it measured."""
    first, second = (generator.draw(5) for _ in range(2))  # type: ignore[attr-defined]
    splits = some_splits(first, 1)
    assert [first.measure(split) for split in splits] == [second.measure(split) for split in splits]
    assert first.measured == splits
    assert first.num_oom == sum(not first.runs(split) for split in splits)


@GENERATORS
def test_a_split_of_another_space_is_refused(generator: object) -> None:
    """Whoever measures outside the space hears what the space is."""
    problem = generator.draw(3)  # type: ignore[attr-defined]
    other = BatchSplit.even(
        global_batch_size=problem.space().global_batch_size + 1, accumulation_steps=1, num_devices=2
    )
    with pytest.raises(ValueError, match="not in the space"):
        problem.measure(other)


def test_without_optional_readings_only_what_is_required_stays() -> None:
    """Every field with a default of None is None again; times and outcome are as they were."""
    problem = physics.draw(11)
    measurement = next(m for m in map(problem.measure, some_splits(problem, 1)) if m.outcome is Outcome.OK)
    bare = without_optional_readings(measurement)
    assert bare.device_busy_s is None
    for card in bare.memory:
        optional = (
            card.micro_step_peak_bytes,
            card.update_peak_bytes,
            card.single_step_peak_bytes,
            card.resting_bytes,
        )
        assert optional == (None,) * 4
    assert bare.step_time_s == measurement.step_time_s
    assert [card.peak_reserved_bytes for card in bare.memory] == [c.peak_reserved_bytes for c in measurement.memory]
