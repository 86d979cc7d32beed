"""The judge of plans for many cards: its own arithmetic, the search held against it, and that it can find fault."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.distributed.optimum import Machine, Vessel, machine_of
from benchmarks.distributed.scale import LEAST_PART, MOST_OWN_S, MOST_PLAN_S, holds, judged_plan, words_of
from splittune.demo import gpt2
from splittune.hardware.virtual.ring import Ring

DEVICES = "256xT4,256xA10,256xV100-16GB,256xA100-40GB"


def lined(*vessels: Vessel, buckets: tuple[int, ...] = (1,)) -> Machine:
    """Cards without launches of their own, on links that take no time but what `buckets` say, at 1 GB/s."""
    ring = Ring(num_ranks=sum(vessel.count for vessel in vessels), bandwidth_bytes_per_s=1e9)
    return Machine(vessels=(vessels,) * 3, buckets=buckets, ring=ring, first_s=0.0, update_s=0.0)


def line(count: int, sample_s: float, most: int) -> Vessel:
    shares = np.arange(1, most + 1)
    return Vessel(count=count, shares=shares, times_s=shares * sample_s)


def test_straight_lines_have_the_harmonic_mean_for_their_optimum() -> None:
    """2 cards of 10 ms a sample and 4 of 20 ms do 400 a second: 101 samples in 252.5 ms, whole ones in 260."""
    machine = lined(line(2, 0.01, 1000), line(4, 0.02, 1000))
    assert machine.best_step_s(101) == pytest.approx(0.2525, rel=2e-3)  # hops of the ring beside it
    assert machine.best_step_s(101, whole=True) == pytest.approx(0.26, rel=2e-3)


def test_what_does_not_fit_is_done_in_more_steps() -> None:
    """A card of 10 samples at 1 ms and 1 of 1,000 at 2 ms: 75 samples are best done where neither waits."""
    machine = lined(line(1, 0.01, 10), line(1, 0.02, 1000))
    assert machine.best_step_s(75) == pytest.approx(75 / 150, rel=2e-3)  # in 5 steps of 10 + 5
    assert lined(line(1, 0.01, 1000), line(1, 0.02, 1000)).best_step_s(75) == pytest.approx(75 / 150, rel=2e-3)


def test_a_card_without_a_sample_runs_one_that_stands_in() -> None:
    """So a step is never shorter than the slowest card's first sample."""
    assert lined(line(8, 0.01, 100), line(1, 1.0, 100)).best_step_s(8) == pytest.approx(1.0, rel=2e-3)


def test_what_no_shares_hide_of_the_all_reduce_is_added() -> None:
    """One bucket of 100 MB at 1 GB/s between two cards comes after the backward, whatever the shares."""
    machine = lined(line(2, 0.01, 100), buckets=(10**8,))
    assert machine.best_step_s(20) == pytest.approx(0.1 + 0.1, rel=2e-3)


@pytest.fixture(scope="module")
def judged() -> Machine:
    return machine_of(gpt2(num_layers=2), DEVICES, largest=256)


@pytest.mark.parametrize("global_batch_size", [8192, 2**15, 2**19])
def test_a_plan_for_1024_cards_reaches_95_percent_of_the_optimum(judged: Machine, global_batch_size: int) -> None:
    """A GPT on four kinds of cards, in one step and in many, where memory holds some up; even shares are far off."""
    found = judged_plan(gpt2(num_layers=2), judged, DEVICES, global_batch_size)
    assert found.real_s <= found.step_s * (1 + 1e-6)  # nothing is better than the bound
    assert found.real_s >= LEAST_PART * found.step_s
    assert found.real_s < 0.75 * found.even_s  # which the judge finds at fault
    assert found.own_s_a_trial > 0
    assert words_of(found).count(" ") == 5


def test_a_row_keeps_its_bound_from_its_own_side() -> None:
    """A part of the optimum is at least so much, seconds are at most."""
    assert holds({"measure": "part of the harmonic optimum", "figure": 0.96, "bound": LEAST_PART})
    assert not holds({"measure": "part of the harmonic optimum", "figure": 0.94, "bound": LEAST_PART})
    assert not holds({"measure": "seconds of a plan", "figure": MOST_PLAN_S + 1, "bound": MOST_PLAN_S})
    assert holds({"measure": "the search's own seconds a trial", "figure": MOST_OWN_S / 2, "bound": MOST_OWN_S})
    assert holds({"measure": "samples/s", "figure": 1.0})
