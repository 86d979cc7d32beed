from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.finalists import Confirmed, Estimates, confirm_finalists
from splittune.search.judged_trials import JudgedTrial
from splittune.split import BatchSplit, SplitSpace

SPACE = SplitSpace(global_batch_size=12, num_devices=2)
EVENS = list(SPACE.even_splits())


def uneven(gpu0_bsz: int) -> BatchSplit:
    return BatchSplit.with_gpu0(global_batch_size=12, accumulation_steps=1, num_devices=2, gpu0_bsz=gpu0_bsz)


def ran(split: BatchSplit, *step_times_s: float, headroom_bytes: int = 0, num_alloc_retries: int = 0) -> Measurement:
    memory = tuple(
        DeviceMemory(
            device=device,
            total_bytes=1000,
            outside_bytes=0,
            peak_allocated_bytes=1000 - headroom_bytes,
            peak_reserved_bytes=1000 - headroom_bytes,
        )
        for device in range(2)
    )
    return Measurement(
        split=split,
        outcome=Outcome.OK,
        whole_step_times_s=step_times_s,
        memory=memory,
        num_alloc_retries=num_alloc_retries,
    )


def failed(split: BatchSplit) -> Measurement:
    return Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY)


class Again:
    """Measures again what it was given, in the order asked; later turns as the first, unless told otherwise."""

    def __init__(self, *measurements: Measurement, second: tuple[Measurement, ...] = ()) -> None:
        self.answers = {(measurement.split, turn): measurement for measurement in measurements for turn in range(1, 5)}
        self.answers |= {(measurement.split, 2): measurement for measurement in second}
        self.asked: list[BatchSplit] = []
        self.turns: list[int] = []

    def __call__(self, split: BatchSplit, reason: str, turn: int) -> Measurement:
        self.asked.append(split)
        self.turns.append(turn)
        return self.answers[split, turn]


def confirm(searched: Sequence[Measurement], again: Again) -> Confirmed:
    """The last word on these trials."""
    trials = [JudgedTrial(measurement=measurement) for measurement in searched]
    return confirm_finalists(EVENS, trials, again)


def test_the_three_fastest_and_the_baseline_are_measured_again() -> None:
    """Besides the baseline, which comes first, the best three are confirmed and no other."""
    searched = [ran(EVENS[1], 9.0), *(ran(uneven(share), float(share)) for share in (5, 2, 4, 3))]
    again = Again(*searched)
    confirmed = confirm(searched, again)
    assert again.asked == [EVENS[1], uneven(2), uneven(3), uneven(4)]
    assert confirmed.best == ran(uneven(2), 2.0)
    assert confirmed.baseline == ran(EVENS[1], 9.0)


def test_the_first_trial_may_have_been_cold() -> None:
    """It took 5 % longer than the fastest, and when measured again is faster than all; one far behind is left."""
    rest = [ran(uneven(share), 4.0 + share / 100) for share in (2, 3, 4)]
    cold = ran(uneven(5), 4.2)
    again = Again(*rest, ran(uneven(5), 3.9))
    confirmed = confirm([cold, *rest], again)
    assert again.asked == [uneven(2), uneven(3), uneven(4), uneven(5)]
    assert confirmed.best == ran(uneven(5), 3.9)
    again = Again(*rest)
    confirm([ran(uneven(5), 5.5), *rest], again)
    assert uneven(5) not in again.asked


def test_the_fastest_as_confirmed_wins() -> None:
    """What was fastest in the search loses to what is fastest when measured again, the baseline included."""
    searched = [ran(EVENS[1], 9.0), ran(uneven(2), 2.0), ran(uneven(3), 3.0)]
    confirmed = confirm(searched, Again(ran(EVENS[1], 4.0), ran(uneven(2), 8.0), ran(uneven(3), 5.0)))
    assert confirmed.best == confirmed.baseline == ran(EVENS[1], 4.0)


def test_a_finalist_that_does_not_fit_again_gives_way_to_the_next() -> None:
    """A finalist that fails drops out, and the next best is confirmed in its place."""
    searched = [ran(EVENS[1], 9.0), *(ran(uneven(share), float(share)) for share in (2, 3, 4, 5))]
    again = Again(searched[0], failed(uneven(2)), *searched[2:])
    confirmed = confirm(searched, again)
    assert again.asked == [EVENS[1], uneven(2), uneven(3), uneven(4), uneven(5)]
    assert confirmed.best == ran(uneven(3), 3.0)


def test_a_baseline_that_does_not_fit_again_gives_way_to_more_steps() -> None:
    """The baseline is then the measured even split with the next more steps."""
    searched = [ran(EVENS[1], 2.0), ran(EVENS[3], 4.0)]
    confirmed = confirm(searched, Again(failed(EVENS[1]), ran(EVENS[3], 4.0)))
    assert confirmed.baseline == confirmed.best == ran(EVENS[3], 4.0)


def test_equals_go_to_more_headroom() -> None:
    """Of two equally fast splits the one that leaves more memory free wins."""
    searched = [ran(uneven(2), 2.0, headroom_bytes=10), ran(uneven(3), 2.0, headroom_bytes=20)]
    assert confirm(searched, Again(*searched)).best == searched[1]


def test_nothing_is_confirmed_when_nothing_fits_again() -> None:
    """Where every confirmation fails there is no best and no baseline."""
    searched = [ran(EVENS[1], 2.0), ran(uneven(3), 4.0)]
    confirmed = confirm(searched, Again(failed(EVENS[1]), failed(uneven(3))))
    assert confirmed.best is None
    assert confirmed.baseline is None


NOISY = (0.98, 1.0, 1.02)
"""A median of 1 with a standard error of 1.4 %."""


def noisy(split: BatchSplit, step_time_s: float, headroom_bytes: int = 0) -> Measurement:
    return ran(split, *(step_time_s * time for time in NOISY), headroom_bytes=headroom_bytes)


def test_splits_too_close_to_call_are_measured_again_in_the_opposite_order() -> None:
    """Those within the noise of the fastest take further turns, last first and first first; the others do not, and
    of a fifth nobody is asked."""
    searched = [noisy(EVENS[1], 2.0), noisy(uneven(2), 1.0), noisy(uneven(3), 1.004), noisy(uneven(4), 1.008)]
    again = Again(*searched)
    confirm(searched, again)
    down, up = [*map(uneven, (4, 3, 2))], [*map(uneven, (2, 3, 4))]
    assert again.asked == [EVENS[1], *up, *down, *up, *down]
    assert again.turns == [1] * 4 + [2] * 3 + [3] * 3 + [4] * 3


def test_turns_end_once_little_is_at_stake() -> None:
    """A second turn puts one 3 % behind, and neither is asked a third time; of splits as fast,
    give or take 0.1 %, none is asked a second."""
    searched = [noisy(uneven(2), 1.0), noisy(uneven(3), 1.01)]
    again = Again(*searched, second=(noisy(uneven(2), 0.97), noisy(uneven(3), 1.04)))
    confirm(searched, again)
    assert again.turns == [1, 1, 2, 2]
    searched = [ran(uneven(share), 0.999, 1.0, 1.001) for share in (2, 3)]
    again = Again(*searched)
    confirm(searched, again)
    assert again.turns == [1, 1]


def test_at_stake_is_the_expected_improvement_of_another() -> None:
    """Two that took as long are expected to differ by 0.4 of the deviation of their difference, one alone by none."""
    estimates = Estimates([noisy(EVENS[1], 9.0), noisy(uneven(2), 1.0), noisy(uneven(3), 1.0)])
    pair = [noisy(uneven(2), 1.0), noisy(uneven(3), 1.0)]
    assert estimates.at_stake(pair) == pytest.approx(0.3989 * 2**0.5 * 0.01447, rel=0.01)
    assert estimates.at_stake(pair[:1]) == 0.0


def test_all_turns_count() -> None:
    """The winner holds the steps of all turns, and the largest peaks of any."""
    searched = [noisy(uneven(2), 1.0), noisy(uneven(3), 1.01, headroom_bytes=20)]
    second = (noisy(uneven(2), 1.05), ran(uneven(3), 1.0, 1.0, 1.0, headroom_bytes=30))
    confirmed = confirm(searched, Again(*searched, second=second))
    assert confirmed.best is not None
    assert confirmed.best.split == uneven(3)
    assert confirmed.best.whole_step_times_s == (*searched[1].whole_step_times_s, 1.0, 1.0, 1.0)
    assert confirmed.best.memory[0].headroom_bytes == 20


def test_rounds_of_all_turns_count() -> None:
    """Measurements in rounds are put together part by part, unbroken rounds too."""

    def rounds(split: BatchSplit, *seconds: float) -> Measurement:
        measured = replace(ran(split, 1.0), micro_step_times_s=(1.0,) * 3, update_times_s=(0.5,) * 3)
        return replace(measured, whole_step_times_s=(), unbroken_round_times_s=seconds)

    searched = [rounds(uneven(2), 1.4, 1.45, 1.5), rounds(uneven(3), 1.4, 1.46, 1.5)]
    second = tuple(rounds(one.split, 1.3, 1.3, 1.3) for one in searched)
    best = confirm(searched, Again(*searched, second=second)).best
    assert best is not None
    assert best.unbroken_round_times_s[3:6] == (1.3, 1.3, 1.3)
    assert len(best.unbroken_round_times_s) == len(best.update_times_s) == len(best.micro_step_times_s) >= 6


def test_ties_within_the_noise_go_to_more_headroom() -> None:
    """Of splits that cannot be told apart the one that leaves more memory free wins, though it looked slower."""
    searched = [noisy(uneven(2), 1.0, headroom_bytes=10), noisy(uneven(3), 1.0008, headroom_bytes=20)]
    searched.append(noisy(uneven(4), 1.2, headroom_bytes=30))
    confirmed = confirm(searched, Again(*searched))
    assert confirmed.best is not None
    assert confirmed.best.split == uneven(3)


def test_headroom_is_worth_a_thousandth_however_noisy_the_clock_is() -> None:
    """A step that takes 1 % longer is within the noise of 10 %, and loses all the same."""
    wild = (0.9, 1.0, 1.1)
    searched = [ran(uneven(2), *wild), ran(uneven(3), *(1.01 * time for time in wild), headroom_bytes=200)]
    confirmed = confirm(searched, Again(*searched, second=tuple(searched)))
    assert confirmed.best is not None
    assert confirmed.best.split == uneven(2)


def test_a_tie_never_goes_to_what_looks_slower_than_the_baseline() -> None:
    """A split within the noise of the baseline, and behind it, is not chosen for its headroom."""
    searched = [noisy(EVENS[1], 1.0), noisy(uneven(3), 1.005, headroom_bytes=20)]
    confirmed = confirm(searched, Again(*searched))
    assert confirmed.best == confirmed.baseline
    assert confirmed.best is not None
    assert confirmed.best.split == EVENS[1]


def test_clocks_that_repeat_exactly_need_no_second_turn() -> None:
    """Without noise two splits are either equal or told apart at once."""
    searched = [ran(uneven(2), 1.0, 1.0, 1.0), ran(uneven(3), 1.0, 1.0, 1.0, headroom_bytes=20)]
    again = Again(*searched)
    confirmed = confirm(searched, again)
    assert again.asked == [uneven(3), uneven(2)]
    assert confirmed.best == searched[1]


def test_a_finalist_that_fails_in_its_second_turn_is_out() -> None:
    """A split that lacks memory when measured once more does not win, however fast it was."""
    searched = [noisy(uneven(2), 1.0), noisy(uneven(3), 1.01)]
    confirmed = confirm(searched, Again(*searched, second=(failed(uneven(2)),)))
    assert confirmed.best is not None
    assert confirmed.best.split == uneven(3)


def test_a_baseline_that_fails_in_its_second_turn_gives_way_to_more_steps() -> None:
    """Nothing is compared with a baseline that did not run: the next even split is measured in its place."""
    searched = [noisy(EVENS[1], 1.0), noisy(uneven(3), 1.01), noisy(EVENS[3], 4.0), noisy(EVENS[2], 3.0)]
    again = Again(*searched, second=(failed(EVENS[1]),))
    confirmed = confirm(searched, again)
    assert confirmed.baseline == searched[3]
    assert confirmed.best is not None
    assert confirmed.best.split == uneven(3)


def test_a_split_on_the_edge_gives_way_to_one_that_is_close() -> None:
    """Where the allocator had to retry, a split that is little slower and did not wins; one far behind does not."""
    edge = ran(uneven(2), 1.0, num_alloc_retries=1)
    for behind, expected in ((1.005, uneven(3)), (1.5, uneven(2))):
        searched = [edge, ran(uneven(3), behind)]
        confirmed = confirm(searched, Again(*searched))
        assert confirmed.best is not None
        assert confirmed.best.split == expected


def test_uneven_shares_must_gain_more_than_a_thousandth() -> None:
    """What is faster by less than anybody sees gives way to the even split; what gains more wins."""
    for faster, expected in ((0.9995, EVENS[1]), (0.998, uneven(3))):
        searched = [ran(EVENS[1], 1.0), ran(uneven(3), faster)]
        confirmed = confirm(searched, Again(*searched))
        assert confirmed.best is not None
        assert confirmed.best.split == expected


def test_estimates_weigh_by_inverse_variances() -> None:
    """A trial of 1.02 s, give or take 1.4 %, is pulled back by a confirmation of 1.00 s, give or take 2.9 %."""
    estimates = Estimates([noisy(EVENS[1], 2.0), noisy(uneven(2), 1.02)])
    own, other = 1 / 0.01447**2, 1 / 0.02893**2
    assert estimates.of(uneven(2)) == pytest.approx((0.0198, own**-0.5), rel=0.01)
    estimates.add(ran(uneven(2), 0.96, 1.0, 1.04))
    assert estimates.of(uneven(2)) == pytest.approx((own * 0.0198 / (own + other), (own + other) ** -0.5), rel=0.01)


def test_a_first_trial_that_was_cold_says_little() -> None:
    """It was 8 % slower than when measured again, when it is the fastest."""
    cold, rest = noisy(uneven(5), 1.08), [noisy(uneven(share), 1.02 + share / 1000) for share in (2, 3, 4)]
    warm = noisy(uneven(5), 1.0)
    confirmed = confirm([cold, *rest], Again(*rest, warm))
    assert confirmed.best is not None
    assert confirmed.best.split == uneven(5)
