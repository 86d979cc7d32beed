from __future__ import annotations

import numpy as np
import pytest

from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.memory import MemoryModel
from splittune.search.models.overhead import QUANTUM_BYTES, STEADY, AllocatorOverhead, OverheadOfOutputs, Overheads
from tests.search.models.readings import memory, ran
from tests.search.problem import MIB, even, split

B = 32


def test_blocks_of_the_allocator_are_a_constant_and_the_rest_a_proportion() -> None:
    """Up to a block beyond what is live says nothing of larger sizes, and is handed back when
    short; more grows with them.
    """
    held = [memory(1, 500, peak_reserved_bytes=572), memory(2, 50, peak_reserved_bytes=54)]
    overhead = AllocatorOverhead.of([ran(split(B, 4, 0, 4, 4), 0, *held)], (1, 2), accumulates=True, gathers=False)
    live = np.array([1000.0 * MIB])
    assert overhead.most(live)[0] == pytest.approx(QUANTUM_BYTES + 0.1 * live[0])
    assert overhead.after_flush(live)[0] == pytest.approx(4 * MIB + 0.1 * live[0])


def test_each_device_has_gaps_of_its_own_allocator() -> None:
    """A small share of one leaves gaps of a half, a large one of another of a tenth; who held nothing takes both."""
    held = memory(0, 1000, peak_reserved_bytes=1122), memory(1, 100, peak_reserved_bytes=172), 0
    seen = [ran(split(B, 4, 4, 4, 0), *held)]
    live = np.array([2000.0 * MIB])
    for device, ratio in ((0, 0.1), (1, 0.5), (2, 0.5)):
        most = AllocatorOverhead.of(seen, [device], accumulates=True, gathers=device == 0).most(live)[0]
        assert most == pytest.approx(QUANTUM_BYTES + ratio * live[0])


def test_each_kind_of_step_has_gaps_of_its_own() -> None:
    """A tenth beside gradients that stay and a half beside such as come and go; a kind without a trial takes both."""
    accumulates = ran(even(B, 4, 2), *[memory(i, 1000, peak_reserved_bytes=1122) for i in range(2)])
    whole = ran(even(B, 1, 2), *[memory(i, 1000, peak_reserved_bytes=1522) for i in range(2)])
    live = np.array([2000.0 * MIB])
    for trials, ratios in (((accumulates, whole), (0.5, 0.1)), ((accumulates,), (0.1, 0.1)), ((whole,), (0.5, 0.5))):
        for kind, ratio in zip((False, True), ratios, strict=True):
            most = AllocatorOverhead.of(trials, range(2), accumulates=kind, gathers=False).most(live)[0]
            assert most == pytest.approx(QUANTUM_BYTES + ratio * live[0])


def test_where_gpu0_gathers_outputs_it_has_gaps_of_its_own() -> None:
    """Alone GPU 0 left gaps of a fifth, beside outputs of others none: with more of both it leaves none, and alone a
    fifth again. Before it was seen alone as well, what was seen tells of both.
    """
    gathers = ran(split(B, 4, 4, 4), memory(0, 1000), memory(1, 500))
    alone = ran(split(B, 4, 8, 0), memory(0, 1000, peak_reserved_bytes=1222), 0)
    live, sizes = np.full(2, 2000.0 * MIB), np.array([[8.0, 16.0], [16.0, 16.0]])
    for trials, more in (([gathers, alone], [0, 422]), ([gathers], [0, 0]), ([alone], [422, 422])):
        told = Overheads(trials, [(0,), (1,)]).most(0, sizes, live, accumulates=True)
        assert told == pytest.approx(np.array(more) * MIB)


@pytest.mark.parametrize(
    ("excess", "steady"),
    [([10], 0), ([10, 21], STEADY), ([21, 10], STEADY), ([10, 40], 0), ([30, 30], 0), ([30, 20], 0), ([2, 0], STEADY)],
)
def test_gaps_are_steady_where_they_are_as_large_a_part_of_larger_peaks(excess: list[int], steady: float) -> None:
    """Of one size nobody knows; a tenth of 100 MiB beside the rest is one of 200, but for a segment, and a fifth, or
    as much in all, is not. Which came first does not count."""
    larger = [100, 200] if excess != [21, 10] else [200, 100]
    trials = [
        ran(even(B, 4, 2), memory(0, 50 + live, peak_reserved_bytes=50 + live + more, resting_bytes=50), 0)
        for live, more in zip(larger, excess, strict=False)
    ]
    assert AllocatorOverhead.of(trials, [0], accumulates=True, gathers=True).steady == steady


def test_gaps_between_outputs_alone_are_none_of_a_share() -> None:
    """A half beside outputs alone, a tenth beside a share: what GPU 0 reserves goes by which of them it has, and a
    device that never had a share takes the gaps of such as had one."""
    shares = ran(split(B, 4, 4, 4), *[memory(i, 1000, peak_reserved_bytes=1122, resting_bytes=0) for i in range(2)])
    outputs = ran(split(B, 4, 0, 8), memory(0, 1000, peak_reserved_bytes=1522, resting_bytes=0), memory(1, 1000))
    live = np.array([2000.0 * MIB])
    own = AllocatorOverhead.of([shares, outputs], [0], accumulates=True, gathers=True)
    assert own.most(live)[0] == pytest.approx(QUANTUM_BYTES + 0.1 * live[0])
    model = MemoryModel([JudgedTrial.of(one, (0, 0)) for one in (shares, outputs)], 2)
    wanted = [split(B, 4, 4, 4), split(B, 4, 0, 8)]
    told = model.needed(np.full(2, 4.0), np.array([one.shard_sizes for one in wanted], dtype=float))
    alive = told.foretold[:, 0] - told.overhead[:, 0]
    assert told.overhead[:, 0] / alive == pytest.approx([0.1, 0.5], abs=0.025)


def test_outputs_leave_gaps_as_large_as_they_are() -> None:
    """Where GPU 0 has no share, what rests leaves none: of 1000 MiB 200 rest, so a quarter of 800 is a quarter of 1000
    MiB more. The largest part of several trials counts, and none of a trial with a share, or without a reading at
    rest."""
    gpu0 = memory(0, 1000, resting_bytes=200, peak_reserved_bytes=1222)
    told = ran(split(B, 4, 0, 8), gpu0, 90)
    smaller = ran(split(B, 8, 0, 4), memory(0, 600, resting_bytes=200, peak_reserved_bytes=642), 50)
    with_share, unknown = ran(split(B, 4, 1, 7), gpu0, 90), ran(split(B, 4, 0, 8), memory(0, 1000), 90)
    live = np.array([1000.0, 2000.0]) * MIB
    assert OverheadOfOutputs.of([smaller, told, with_share]).most(live) == pytest.approx(np.array([200, 450]) * MIB)
    assert OverheadOfOutputs.of([with_share, unknown]).most(live).tolist() == [0, 0]


@pytest.mark.parametrize(("share", "is_handed_back"), [(0, False), (1, True)])
def test_gaps_between_outputs_are_not_handed_back(share: int, is_handed_back: bool) -> None:
    """Of what GPU 0 reserves for twice the outputs a flush frees nothing, and with a sample of its own a block."""
    gpu0 = memory(0, 1000, total_bytes=8000, resting_bytes=800, peak_reserved_bytes=1210)
    smaller = ran(split(B, 8, share, 4 - share), memory(0, 900, total_bytes=8000, resting_bytes=800), 50)
    trials = [smaller, ran(split(B, 4, share, 8 - share), gpu0, 90)]
    told = MemoryModel([JudgedTrial.of(one, [0, 0]) for one in trials], 2).needed(
        np.array([2.0]), np.array([[share, 16.0 - share]])
    )
    assert (told.most_after_cache_flush < told.most)[0, 0] == is_handed_back


def test_up_to_what_ran_without_a_share_others_do_not_tell() -> None:
    """Outputs of 8 samples left 100 MiB of gaps beside 1000: of 4 no more is reserved, whatever those with a share
    leave; of 16 it may be."""
    outputs = ran(split(B, 4, 0, 8), memory(0, 1000, peak_reserved_bytes=1100, resting_bytes=0), memory(1, 1000))
    sizes, live = np.array([[0.0, 4.0], [0.0, 16.0], [2.0, 4.0]]), np.full(3, 1000.0 * MIB)
    told = OverheadOfOutputs.of([outputs])
    assert told.at_most(sizes, live, np.full(3, 500.0 * MIB)) == pytest.approx(np.array([100, 500, 500]) * MIB)
    assert told.at_least(sizes, live, np.full(3, 500.0 * MIB)) == pytest.approx(np.array([100, 500, 500]) * MIB)
