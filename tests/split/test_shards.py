"""Shard arithmetic: nobody exceeds their share, whatever the sizes; and what the hand-tuned wrapper got wrong."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from splittune.errors import InvalidSplitError
from splittune.split import even_shards, fit_shards, shards_for, shards_with_gpu0, spread_evenly
from splittune.split.shards import checked_shares

sizes = st.integers(min_value=0, max_value=2000)
device_counts = st.integers(min_value=1, max_value=16)
tuned_shards = st.lists(st.integers(min_value=0, max_value=300), min_size=1, max_size=8).map(tuple)


@st.composite
def tuned_and_shorter(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    """Tuned shards and the size of a micro-batch that is no larger than they are together."""
    tuned = draw(tuned_shards)
    return tuned, draw(st.integers(min_value=0, max_value=sum(tuned)))


# spread_evenly


@given(num_samples=sizes, num_parts=st.integers(min_value=1, max_value=2100))
def test_even_parts_sum_and_differ_by_at_most_one_larger_first(num_samples: int, num_parts: int) -> None:
    """Parts sum to the whole, differ by at most one, and the larger come first, also with more parts than samples."""
    parts = spread_evenly(num_samples, num_parts)
    assert (len(parts), sum(parts)) == (num_parts, num_samples)
    assert max(parts) - min(parts) <= 1
    assert list(parts) == sorted(parts, reverse=True)


def test_spread_evenly_example() -> None:
    """The docstring's worked number."""
    assert spread_evenly(8, 3) == (3, 3, 2)


# shards_with_gpu0 and even_shards


@given(micro_batch_size=sizes, num_devices=st.integers(min_value=2, max_value=16), data=st.data())
def test_gpu0_gets_exactly_its_share(micro_batch_size: int, num_devices: int, data: st.DataObject) -> None:
    """Any share from none to all is honoured exactly, and the rest is even among the others."""
    gpu0_bsz = data.draw(st.integers(min_value=0, max_value=micro_batch_size))
    first, *others = shards_with_gpu0(micro_batch_size, num_devices, gpu0_bsz)
    assert first == gpu0_bsz
    assert first + sum(others) == micro_batch_size
    assert len(others) == num_devices - 1
    assert max(others) - min(others) <= 1
    assert others == sorted(others, reverse=True)


@given(micro_batch_size=sizes, num_devices=device_counts)
def test_even_shards_never_give_gpu0_the_remainder(micro_batch_size: int, num_devices: int) -> None:
    """The even split differs by at most one and GPU 0, which holds most besides, is never above the others."""
    shards = even_shards(micro_batch_size, num_devices)
    assert (len(shards), sum(shards)) == (num_devices, micro_batch_size)
    assert max(shards) - min(shards) <= 1
    assert shards[0] == min(shards)


def test_even_shards_example() -> None:
    """The docstring's worked number."""
    assert even_shards(10, 4) == (2, 3, 3, 2)


BROKEN = "breaks"

# (micro-batch, devices, GPU 0's share), what BalancedDataParallel makes of it, what we make of it.
# Its unit is (batch - share) // (devices - 1); a share that is not below the unit falls back to
# DataParallel's even chunks, silently.
BALANCED_DATA_PARALLEL = [
    pytest.param(13, 4, 3, (4, 4, 4, 1), (3, 4, 3, 3), id="fallback gives GPU 0 more than asked"),
    pytest.param(14, 4, 3, (4, 4, 4, 2), (3, 4, 4, 3), id="and starves the last GPU"),
    pytest.param(224, 4, 32, (32, 64, 64, 64), (32, 64, 64, 64), id="transformer-xl lm1b_base on 4"),
    pytest.param(224, 8, 32, (28,) * 8, (32, 28, 28, 28, 27, 27, 27, 27), id="transformer-xl lm1b_base on 8"),
    pytest.param(22, 4, 4, (4, 6, 6, 6), (4, 6, 6, 6), id="transformer-xl enwik8_base on 4"),
    pytest.param(22, 8, 4, (3, 3, 3, 3, 3, 3, 3, 1), (4, 3, 3, 3, 3, 2, 2, 2), id="transformer-xl enwik8_base on 8"),
    pytest.param(60, 4, 4, (4, 19, 19, 18), (4, 19, 19, 18), id="transformer-xl wt103_base on 4"),
    pytest.param(64, 4, 0, BROKEN, (0, 22, 21, 21), id="idle GPU 0, one version of three breaks"),
    pytest.param(2, 4, 0, BROKEN, (0, 1, 1, 0), id="fewer samples than GPUs, every version breaks"),
    pytest.param(3, 4, 2, BROKEN, (2, 1, 0, 0), id="partial last batch on 4"),
    pytest.param(1, 3, 1, BROKEN, (1, 0, 0), id="partial last batch on 3"),
    pytest.param(13, 1, 13, BROKEN, (13,), id="one GPU, where its arithmetic divides by zero"),
    pytest.param(10, 4, 7, (3, 3, 3, 1), (7, 1, 1, 1), id="GPU 0 above the others, which it cannot say"),
]


@pytest.mark.parametrize(("micro_batch_size", "num_devices", "gpu0_bsz", "theirs", "ours"), BALANCED_DATA_PARALLEL)
def test_settings_of_balanced_data_parallel(
    micro_batch_size: int, num_devices: int, gpu0_bsz: int, theirs: tuple[int, ...] | str, ours: tuple[int, ...]
) -> None:
    """Where BalancedDataParallel honours the share we agree with it; elsewhere we honour it all the same."""
    shards = shards_with_gpu0(micro_batch_size, num_devices, gpu0_bsz)
    assert shards == ours
    assert (shards[0], sum(shards)) == (gpu0_bsz, micro_batch_size)
    if theirs != BROKEN and theirs[0] == gpu0_bsz:
        assert shards == theirs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((13, 0, 3), r"num_devices=0: expected at least 1 device\."),
        ((13, 4, -1), r"gpu0_bsz=-1 cannot be taken from a micro-batch of 13: expected 0 <= gpu0_bsz <= 13\. Choose "),
        ((13, 4, 14), r"gpu0_bsz=14 cannot be taken from a micro-batch of 13: expected 0 <= gpu0_bsz <= 13\. Choose "),
        (
            (13, 1, 3),
            r"gpu0_bsz=3 of a micro-batch of 13 leaves 10 samples, and there is no other device .* use gpu0_bsz=13",
        ),
    ],
)
def test_a_share_that_cannot_be_honoured_is_refused(arguments: tuple[int, int, int], message: str) -> None:
    """Never a silent fallback: the error says what was asked, what is possible, and what to do."""
    with pytest.raises(InvalidSplitError, match=message):
        shards_with_gpu0(*arguments)


def test_even_shards_over_no_device_are_refused() -> None:
    """Zero devices is an error of ours, not a division by zero."""
    with pytest.raises(InvalidSplitError, match="num_devices=0: expected at least 1 device"):
        even_shards(8, 0)


# fit_shards


@given(tuned_and_shorter())
@example(((2, 4, 4), 5))
@example(((0, 0, 7), 3))
@example(((0,), 0))
def test_a_fitted_shard_never_exceeds_its_tuned_size(case: tuple[tuple[int, ...], int]) -> None:
    """For any shards and any shorter micro-batch: every sample has a place, and nobody gets more than tuned."""
    tuned, micro_batch_size = case
    fitted = fit_shards(micro_batch_size, tuned)
    assert len(fitted) == len(tuned)
    assert sum(fitted) == micro_batch_size
    assert all(0 <= shard <= most for shard, most in zip(fitted, tuned, strict=True))


@given(tuned_shards)
def test_the_largest_micro_batch_gets_the_tuned_shards(tuned: tuple[int, ...]) -> None:
    """The size that was tuned is split as it was tuned."""
    assert fit_shards(sum(tuned), tuned) == tuned


@given(tuned_and_shorter())
def test_a_fitted_shard_is_its_proportional_share_rounded(case: tuple[tuple[int, ...], int]) -> None:
    """Each shard is the exact proportion rounded down or up, so the devices' loads keep their ratio."""
    tuned, micro_batch_size = case
    for shard, most in zip(fit_shards(micro_batch_size, tuned), tuned, strict=True):
        exact = Fraction(micro_batch_size * most, max(sum(tuned), 1))
        assert math.floor(exact) <= shard <= math.ceil(exact)


@given(tuned_and_shorter(), st.data())
def test_shards_shrink_with_the_micro_batch(case: tuple[tuple[int, ...], int], data: st.DataObject) -> None:
    """A shorter micro-batch gives nobody more than one sample above what a longer one gives, and fewer in all."""
    tuned, longer = case
    shorter = data.draw(st.integers(min_value=0, max_value=longer))
    for less, more in zip(fit_shards(shorter, tuned), fit_shards(longer, tuned), strict=True):
        assert less <= more + 1


def test_one_sample_above_is_hamiltons_alabama_paradox() -> None:
    """The 'one sample above' does occur, and stays within the tuned size: device 2's 2 of 10, but 1 of 11."""
    assert fit_shards(10, (6, 6, 2)) == (4, 4, 2)
    assert fit_shards(11, (6, 6, 2)) == (5, 5, 1)


@pytest.mark.parametrize(
    ("micro_batch_size", "tuned", "fitted"),
    [
        pytest.param(5, (2, 4, 4), (1, 2, 2), id="docstring"),
        pytest.param(1, (1, 1), (0, 1), id="a tie goes away from GPU 0"),
        pytest.param(3, (2, 2, 2, 2), (0, 1, 1, 1), id="fewer samples than devices"),
        pytest.param(37, (4, 19, 19, 18), (2, 12, 12, 11), id="short last batch of wt103_base"),
        pytest.param(5, (0, 5, 5), (0, 2, 3), id="an idle device stays idle"),
        pytest.param(0, (3, 4), (0, 0), id="no samples"),
    ],
)
def test_fitted_shards_worked(micro_batch_size: int, tuned: tuple[int, ...], fitted: tuple[int, ...]) -> None:
    """Worked numbers."""
    assert fit_shards(micro_batch_size, tuned) == fitted


@given(tuned_and_shorter(), st.integers(min_value=1, max_value=6))
@example(((4, 9, 9, 10), 13), 2)
@example(((8, 8, 8, 8), 5), 2)
def test_a_minimum_moves_samples_and_breaks_nothing(case: tuple[tuple[int, ...], int], least: int) -> None:
    """For any shards, any shorter micro-batch and any minimum: every sample has a place, nobody
    exceeds the tuned size."""
    tuned, micro_batch_size = case
    fitted = fit_shards(micro_batch_size, tuned, least)
    assert (len(fitted), sum(fitted)) == (len(tuned), micro_batch_size)
    assert all(0 <= shard <= most for shard, most in zip(fitted, tuned, strict=True))


small_shards = st.lists(st.integers(min_value=0, max_value=7), min_size=1, max_size=4).map(tuple)


@given(tuned=small_shards, least=st.integers(min_value=1, max_value=4), data=st.data())
def test_a_minimum_is_kept_wherever_any_choice_of_shards_keeps_it(
    tuned: tuple[int, ...], least: int, data: st.DataObject
) -> None:
    """Held against every vector of shards there is: as many devices as can be take part, each with the minimum."""
    micro_batch_size = data.draw(st.integers(min_value=0, max_value=sum(tuned)))
    choices = [
        shards
        for shards in itertools.product(*(range(most + 1) for most in tuned))
        if sum(shards) == micro_batch_size and all(shard == 0 or shard >= least for shard in shards)
    ]
    fitted, plain = fit_shards(micro_batch_size, tuned, least), fit_shards(micro_batch_size, tuned)
    if plain in choices:
        assert fitted == plain
    elif choices:
        assert fitted in choices
        assert sum(map(bool, fitted)) == max(sum(map(bool, shards)) for shards in choices)
    else:
        assert fitted == plain


@given(st.lists(st.integers(min_value=3, max_value=40), min_size=1, max_size=8).map(tuple), st.data())
def test_two_samples_or_more_always_fit_shards_of_three(tuned: tuple[int, ...], data: st.DataObject) -> None:
    """Where every device may have 3, no micro-batch of 2 or more leaves anybody a single sample."""
    micro_batch_size = data.draw(st.integers(min_value=2, max_value=sum(tuned)))
    assert 1 not in fit_shards(micro_batch_size, tuned, 2)


@pytest.mark.parametrize(
    ("micro_batch_size", "tuned", "fitted"),
    [
        pytest.param(5, (2, 4, 4), (0, 2, 3), id="docstring"),
        pytest.param(3, (2, 2), (1, 2), id="docstring, no way to do it"),
        pytest.param(6, (8, 8, 8, 8), (0, 2, 2, 2), id="a short last batch on three cards of four"),
        pytest.param(2, (4, 9, 9, 10), (0, 0, 0, 2), id="on one"),
        pytest.param(11, (4, 9, 9, 10), (2, 3, 3, 3), id="still on all: only the smallest share grows"),
        pytest.param(1, (4, 4), (0, 1), id="a single sample is a single sample"),
        pytest.param(9, (1, 4, 4), (1, 4, 4), id="the tuned shards are the tuned shards"),
    ],
)
def test_shards_with_a_minimum_worked(micro_batch_size: int, tuned: tuple[int, ...], fitted: tuple[int, ...]) -> None:
    """Worked numbers, each with a minimum of 2."""
    assert fit_shards(micro_batch_size, tuned, 2) == fitted


def test_a_micro_batch_beyond_the_tuned_one_is_refused_with_the_arithmetic() -> None:
    """Growing a shard would break GPU 0's promise, so it is an error that shows the sum and the way out."""
    with pytest.raises(InvalidSplitError) as caught:
        fit_shards(12, (2, 4, 4))
    assert str(caught.value) == (
        "a micro-batch of 12 samples does not fit the tuned shards 2 + 4 + 4 = 10: 2 more than every device's share "
        "together. Send at most 10 samples at a time (SplitConfig.micro_batches cuts a batch accordingly), "
        "or tune for a larger batch."
    )


def test_a_negative_micro_batch_is_refused() -> None:
    """Fewer than no samples is an error too."""
    with pytest.raises(InvalidSplitError, match="a micro-batch of -1 samples: expected at least 0"):
        fit_shards(-1, (2, 4, 4))


# shards_for


EVALUATION = {"eval_batch_size": 40, "trains": False, "records": False}


@pytest.mark.parametrize(
    ("batch_size", "options", "shards"),
    [
        # every device's share was given
        (10, {"shard_sizes": (2, 4, 4)}, (2, 4, 4)),
        (5, {"shard_sizes": (2, 4, 4)}, (1, 2, 2)),
        (0, {"shard_sizes": (2, 4, 4)}, (0, 0, 0)),
        (30, {"shard_sizes": (2, 4, 4), **EVALUATION}, (6, 12, 12)),
        (5, {"shard_sizes": (2, 4, 4), **EVALUATION}, (1, 2, 2)),
        # GPU 0's was
        (13, {"gpu0_bsz": 3}, (3, 4, 3, 3)),
        (6, {"gpu0_bsz": 3}, (3, 1, 1, 1)),
        (6, {"gpu0_bsz": 3, "largest_trained": 13}, (1, 2, 1, 2)),
        (13, {"gpu0_bsz": 3, "largest_trained": 13}, (3, 4, 3, 3)),
        (20, {"gpu0_bsz": 3, "largest_trained": 13}, (3, 6, 6, 5)),
        (2, {"gpu0_bsz": 3, "trains": False}, (0, 1, 1, 0)),
        (0, {"gpu0_bsz": 3}, (0, 0, 0, 0)),
    ],
)
def test_a_wrappers_shards_worked(batch_size: int, options: dict[str, Any], shards: tuple[int, ...]) -> None:
    """The numbers of the docstring, and their neighbours."""
    assert shards_for(batch_size, num_devices=len(shards), **options) == shards


@given(case=tuned_and_shorter(), trains=st.booleans(), evaluation=st.none() | st.integers(1, 3000))
def test_within_the_tuned_shards_it_is_fit_shards(
    case: tuple[tuple[int, ...], int], trains: bool, evaluation: int | None
) -> None:
    """A micro-batch that is no larger than the tuned one is spread alike in training and evaluation."""
    tuned, size = case
    got = shards_for(
        size, num_devices=len(tuned), shard_sizes=tuned, eval_batch_size=evaluation, trains=trains, records=trains
    )
    assert got == fit_shards(size, tuned)


@given(tuned=tuned_shards.filter(any), size=sizes, evaluation=sizes)
def test_an_evaluation_may_grow_up_to_its_limit(tuned: tuple[int, ...], size: int, evaluation: int) -> None:
    """Without gradients every sample has a device, in proportion to within one; beyond the limit it is refused."""
    options: dict[str, Any] = {"num_devices": len(tuned), "shard_sizes": tuned, "eval_batch_size": evaluation}
    if size > max(evaluation, sum(tuned)):
        with pytest.raises(InvalidSplitError, match=f"a batch of {size} samples"):
            shards_for(size, trains=False, records=False, **options)
        return
    shards = shards_for(size, trains=False, records=False, **options)
    assert sum(shards) == size
    assert all(abs(shard - Fraction(size * own, sum(tuned))) < 1 for shard, own in zip(shards, tuned, strict=True))
    if size > sum(tuned):
        with pytest.raises(InvalidSplitError, match=r"or no_grad\(\)"):
            shards_for(size, records=True, **options)


@given(num_devices=st.integers(2, 8), largest=st.integers(1, 500), data=st.data())
def test_gpu0_never_gets_more_than_its_share(num_devices: int, largest: int, data: st.DataObject) -> None:
    """It gets exactly that of the largest micro-batch; of a smaller one nobody gets more than of that."""
    gpu0_bsz = data.draw(st.integers(0, largest))
    size = data.draw(st.integers(0, 2 * largest))
    trains = data.draw(st.booleans())
    shards = shards_for(size, num_devices=num_devices, gpu0_bsz=gpu0_bsz, largest_trained=largest, trains=trains)
    assert sum(shards) == size
    if size >= largest:
        assert shards[0] == gpu0_bsz
    else:
        most = shards_with_gpu0(largest, num_devices, gpu0_bsz)
        assert all(shard <= own for shard, own in zip(shards, most, strict=True))


@pytest.mark.parametrize(
    ("batch_size", "options", "message"),
    [
        (2, {"gpu0_bsz": 3}, "gpu0_bsz=3 exceeds the first micro-batch, of 2 samples, by 1. Use gpu0_bsz <= 2"),
        (11, {"shard_sizes": (2, 4, 4)}, "11 samples does not fit the tuned shards 2 + 4 + 4 = 10"),
        (11, {"shard_sizes": (2, 4, 4), "eval_batch_size": 40}, "Use SplitConfig.micro_batches, or no_grad()."),
        (41, {"shard_sizes": (2, 4, 4), **EVALUATION}, "at most eval_batch_size=40 in evaluation"),
        (3, {}, "got neither gpu0_bsz nor shard_sizes"),
    ],
)
def test_what_a_share_does_not_allow_is_refused(batch_size: int, options: dict[str, Any], message: str) -> None:
    """With the arithmetic that failed, and what to do."""
    with pytest.raises(InvalidSplitError, match=re.escape(message)):
        shards_for(batch_size, num_devices=3, **options)


def test_shares_may_be_numpys() -> None:
    """Integers of NumPy's are integers, and come back as Python's."""
    share, _ = checked_shares(np.int64(3), None, 2)
    _, sizes_ = checked_shares(None, np.array([1, 2]), 2)
    assert (share, sizes_) == (3, (1, 2))
    assert all(type(size) is int for size in (share, *sizes_))


@pytest.mark.parametrize("share", [True, 2.0, -1, np.float64(2), "2"])
def test_what_is_no_count_is_no_share(share: Any) -> None:
    """A truth value, a float, a negative number and a string are refused, for one device and for all."""
    with pytest.raises(InvalidSplitError, match="gpu0_bsz is"):
        checked_shares(share, None, 2)
    with pytest.raises(InvalidSplitError, match="shard_sizes is"):
        checked_shares(None, (1, share), 2)
