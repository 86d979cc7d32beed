"""What a sample leaves for the backward, as bounds: no forward that agrees with the readings is outside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.memory import MemoryModel
from splittune.search.models.memory_readings import MemoryReadings
from splittune.search.models.saved import OUTPUTS_ON_TOP, Slopes, larger_on_gpu0, saved_slopes
from splittune.split import BatchSplit
from tests.search.problem import MIB, split

B = 64
PARAMETERS = 200
REST = 2 * PARAMETERS
# Bounds are that wide for the repeatability of readings; a chord of near shares makes more of it.
ROUNDING = 1e-6


def run_of(
    tried: BatchSplit,
    sample: float,
    copied: float = 0.0,
    output: float = 0.0,
    peak: float = 990,
    gradients: float = PARAMETERS,
) -> Measurement:
    """A trial whose forward leaves so many MiB: of a sample, in copies, and of an output on GPU 0.

    Parameters and gradients rest on every device.
    """
    rest = PARAMETERS + gradients
    told = [
        rest + copied + sample * share + (0.0 if device else output) * tried.micro_batch_size
        for device, share in enumerate(tried.shard_sizes)
    ]
    return Measurement(
        split=tried,
        outcome=Outcome.OK,
        whole_step_times_s=(1.0,),
        memory=tuple(
            DeviceMemory(
                device=device,
                total_bytes=1000 * MIB,
                outside_bytes=0,
                peak_allocated_bytes=int(max(peak, live) * MIB),
                peak_reserved_bytes=int(max(peak, live) * MIB),
                resting_bytes=int(rest * MIB),
                before_backward_bytes=int(live * MIB),
            )
            for device, live in enumerate(told)
        ),
    )


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=4),
    st.floats(1, 90),
    st.floats(0, PARAMETERS / 2),
    st.floats(0, 30),
    st.floats(0, PARAMETERS),
)
def test_what_a_forward_really_leaves_is_within_the_bounds(
    shares: list[tuple[int, int]], sample: float, copied: float, output: float, gradients: float
) -> None:
    """Of a sample and of an output, whatever copies of parameters the forward makes, and however many are frozen."""
    runs = [run_of(split(3 * sum(s), 3, *s), sample, copied, output, gradients=gradients) for s in shares]
    least, most = saved_slopes(MemoryReadings(2, runs), [1])
    assert least.share * (1 - ROUNDING) <= sample * MIB <= most.share * (1 + ROUNDING)
    assert least.micro_batch * (1 - ROUNDING) - 1 <= output * MIB <= most.micro_batch * (1 + ROUNDING) + 1


def test_two_shares_tell_copies_of_parameters_from_samples() -> None:
    """One share leaves both possible; with another what a sample leaves is the rise between them."""
    one = run_of(split(B, 16, 2, 2), 60, copied=100)
    other = run_of(split(B, 4, 8, 8), 60, copied=100)
    once, _ = saved_slopes(MemoryReadings(2, [one]), [1])
    twice, _ = saved_slopes(MemoryReadings(2, [one, other]), [1])
    assert once.share / MIB == pytest.approx(10, rel=0.03)  # (220 - 400 / 2) / 2
    assert twice.share / MIB == pytest.approx(60, rel=0.03)


def test_where_more_is_left_than_in_proportion_the_rise_counts() -> None:
    """40 MiB of 1 sample and 400 of 8: each further one leaves 51, and nothing of GPU 0's is held for outputs."""
    runs = [run_of(split(B, 32, 1, 1), 40), run_of(split(B, 4, 8, 8), 50)]
    least, most = saved_slopes(MemoryReadings(2, runs), [1])
    assert least.share == most.share == pytest.approx(360 / 7 * MIB, rel=0.01)
    assert least.micro_batch == 0 <= most.micro_batch < 0.1 * MIB


def test_nothing_is_known_where_no_trial_tells() -> None:
    """Neither of trials without the reading, nor of replicas whose parameters the forward itself brought."""
    run = run_of(split(B, 16, 2, 2), 20)
    silent = replace(run, memory=tuple(replace(card, before_backward_bytes=None) for card in run.memory))
    single = run_of(split(4, 1, 2, 2), 20)
    for trial in (silent, single):
        least, most = saved_slopes(MemoryReadings(2, [trial]), [1])
        assert (least.share, most.share) == (0.0, np.inf)
    assert saved_slopes(MemoryReadings(2, [silent]), [1]) == (Slopes(0.0, 0.0), Slopes(np.inf, np.inf))


def needed(sample: float | None, peak: float, shares: tuple[int, int]) -> tuple[float, float]:
    """The least that surely grows and the most foretold of the replica, in MiB, after a trial with 2 samples each."""
    run = run_of(split(B, 16, 2, 2), sample or 0.0, peak=peak)
    if sample is None:
        run = replace(run, memory=tuple(replace(card, before_backward_bytes=None) for card in run.memory))
    model = MemoryModel([JudgedTrial.of(run, [0, 0])], 2)
    told = model.needed(np.array([4.0]), np.array([shares], dtype=float))
    return float(told.sure[0, 1]) / MIB, float(told.foretold[0, 1]) / MIB


def test_what_samples_left_grows_where_another_phase_holds_the_peak() -> None:
    """Of 700 MiB with 2 samples 300 lie above what rests; that samples took them is sure where it was read."""
    unread, read = needed(None, 700, (8, 8)), needed(150, 700, (8, 8))
    assert unread[0] < 710
    assert read[0] == pytest.approx(REST + 8 * (300 - REST / 2) / 2, rel=0.01)


def test_a_peak_of_another_phase_does_not_grow_with_samples_that_leave_little() -> None:
    """Of the same peak nothing says without the reading that it is not the samples'; 5 MiB each are far from that."""
    unread, read = needed(None, 700, (8, 8)), needed(5, 700, (8, 8))
    assert read[1] < 850
    assert unread[1] > 1500


def test_what_no_gradient_explains_may_be_computed_again() -> None:
    """A peak beyond what rests, and as much again, is of samples though they left nothing: of checkpoints, say."""
    assert needed(1, 2000, (8, 8))[1] > 4 * (2000 - 2 * REST)


def phases_of(
    tried: BatchSplit,
    sample: float,
    output: float,
    beyond: float = 0.0,
    loss: float = 0.0,
    flat: tuple[float, ...] = (),
) -> Measurement:
    """As `run_of`, with peaks in MiB: `beyond` a sample and `loss` an output on top of what the forward left, or `flat`
    on each device, without samples."""
    run = run_of(tried, sample, output=output)
    peaks = [
        max(
            (card.before_backward_bytes or 0) / MIB
            + beyond * share
            + (0.0 if card.device else loss * output * tried.micro_batch_size),
            floor,
        )
        for card, share, floor in zip(run.memory, tried.shard_sizes, flat or (0.0,) * len(run.memory), strict=True)
    ]
    return replace(
        run,
        memory=tuple(
            replace(card, peak_allocated_bytes=int(peak * MIB), peak_reserved_bytes=int(peak * MIB))
            for card, peak in zip(run.memory, peaks, strict=True)
        ),
    )


@given(
    st.integers(0, 6),
    st.integers(1, 12),
    st.integers(1, 12),
    st.floats(1, 90),
    st.floats(0, 20),
    st.floats(0, 90),
    st.floats(0, OUTPUTS_ON_TOP),
    st.tuples(st.floats(0, 3000), st.floats(0, 1000)),
)
def test_gpu0_holds_no_more_than_replicas_show(
    own: int,
    more: int,
    others: int,
    sample: float,
    output: float,
    beyond: float,
    loss: float,
    flat: tuple[float, float],
) -> None:
    """Whatever phase held the peaks so far, of the loss or of parameters alone, with the share that a replica had."""
    told = (sample, output, beyond, loss, (flat[0], flat[1], flat[1]))
    shares = [(own, own or 1, others), (own, own + more, others)]
    runs = [phases_of(split(3 * sum(each), 3, *each), *told) for each in shares]
    readings = MemoryReadings(3, runs)
    _, most = saved_slopes(readings, [1, 2])
    points = larger_on_gpu0(readings, most.micro_batch, accumulates=True)
    assert {share for share, *_ in points} == {share for share in {own or 1, own + more, others} if share > own}
    for share, size, most_bytes in points:
        tried = split(3 * int(size), 3, int(share), int(size) - int(share), 0) if size >= share else None
        truth = phases_of(tried, *told).memory[0].batch_peak_bytes if tried else 0
        assert truth <= most_bytes * (1 + ROUNDING) + 1


def test_a_second_sample_on_gpu0_fits_where_replicas_held_two() -> None:
    """GPU 0 holds 800 MiB of gradients alone, and replicas show that 2 samples of 100 MiB stay below: by what GPU 0
    held alone, a second sample takes up to 100 MiB more."""
    flat = (800.0, 500.0, 500.0)
    runs = [phases_of(split(B, B // sum(shares) + 1, *shares), 100, 1, flat=flat) for shares in ((1, 1, 1), (1, 2, 2))]
    sizes = np.array([4.0]), np.array([[2.0, 2.0, 1.0]])
    silent = [
        replace(run, memory=(replace(run.memory[0], before_backward_bytes=None), *run.memory[1:])) for run in runs
    ]
    read, unread = (
        float(MemoryModel([JudgedTrial.of(run, [0, 0, 0]) for run in trials], 3).needed(*sizes).foretold[0, 0]) / MIB
        for trials in (runs, silent)
    )
    assert read == pytest.approx(800, rel=0.03)
    assert unread > 880


def test_another_card_tells_nothing_of_gpu0() -> None:
    """What comes on top of samples may be another algorithm there."""
    runs = [phases_of(split(12, 3, *shares), 50, 1) for shares in ((1, 1, 2), (1, 2, 1))]
    larger = [replace(run, memory=(replace(run.memory[0], total_bytes=2000 * MIB), *run.memory[1:])) for run in runs]
    assert larger_on_gpu0(MemoryReadings(3, runs), 1.0, accumulates=True)
    assert not larger_on_gpu0(MemoryReadings(3, larger), 1.0, accumulates=True)
