"""`BatchSplit`: any legal split keeps the global batch exact, and anything else is refused with its arithmetic."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.errors import InvalidSplitError
from splittune.split import BatchSplit, fit_shards


@st.composite
def batch_and_steps(draw: st.DrawFn) -> tuple[int, int]:
    """A global batch and any number of accumulation steps that is legal for it."""
    global_batch_size = draw(st.integers(min_value=1, max_value=3000))
    return global_batch_size, draw(st.integers(min_value=1, max_value=global_batch_size))


@st.composite
def batch_splits(draw: st.DrawFn) -> BatchSplit:
    """Any legal split over up to six devices: every device's shard is its own."""
    global_batch_size, accumulation_steps = draw(batch_and_steps())
    rest = -(-global_batch_size // accumulation_steps)
    shards = []
    for _ in range(draw(st.integers(min_value=0, max_value=5))):
        shards.append(draw(st.integers(min_value=0, max_value=rest)))
        rest -= shards[-1]
    return BatchSplit(
        global_batch_size=global_batch_size, accumulation_steps=accumulation_steps, shard_sizes=(*shards, rest)
    )


@given(batch_splits())
def test_micro_batches_keep_the_global_batch_exact(split: BatchSplit) -> None:
    """For any k from 1 to B: k micro-batches that sum to B, none empty, differing by at most one, larger first."""
    sizes = split.micro_batch_sizes
    assert len(sizes) == split.accumulation_steps
    assert sum(sizes) == split.global_batch_size
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert list(sizes) == sorted(sizes, reverse=True)


def test_every_number_of_accumulation_steps_is_legal() -> None:
    """All of 1..B, not only the divisors of B."""
    for global_batch_size in range(1, 40):
        for accumulation_steps in range(1, global_batch_size + 1):
            split = BatchSplit.even(
                global_batch_size=global_batch_size, accumulation_steps=accumulation_steps, num_devices=3
            )
            assert sum(split.micro_batch_sizes) == global_batch_size
            assert max(split.micro_batch_sizes) - min(split.micro_batch_sizes) <= 1


@given(batch_splits())
def test_shards_are_those_of_the_largest_micro_batch(split: BatchSplit) -> None:
    """`micro_batch_size` is the first and largest, the shards sum to it, and `gpu0_bsz` is the first of them."""
    assert split.micro_batch_size == split.micro_batch_sizes[0] == sum(split.shard_sizes)
    assert split.gpu0_bsz == split.shard_sizes[0]
    assert split.num_devices == len(split.shard_sizes)


@given(batch_splits())
def test_every_micro_batch_fits_the_tuned_shards(split: BatchSplit) -> None:
    """Also the shorter micro-batches are spread completely, nobody above the tuned shard."""
    for size in split.micro_batch_sizes:
        shards = fit_shards(size, split.shard_sizes)
        assert sum(shards) == size
        assert all(shard <= tuned for shard, tuned in zip(shards, split.shard_sizes, strict=True))


@given(batch_and_steps(), st.integers(min_value=1, max_value=9))
def test_even_is_with_gpu0_at_the_smallest_even_share(case: tuple[int, int], num_devices: int) -> None:
    """The even split is the classic search's split at ``micro_batch_size // num_devices``."""
    global_batch_size, accumulation_steps = case
    even = BatchSplit.even(
        global_batch_size=global_batch_size, accumulation_steps=accumulation_steps, num_devices=num_devices
    )
    assert even.gpu0_bsz == even.micro_batch_size // num_devices
    assert even == BatchSplit.with_gpu0(
        global_batch_size=global_batch_size,
        accumulation_steps=accumulation_steps,
        num_devices=num_devices,
        gpu0_bsz=even.gpu0_bsz,
    )


def test_docstring_example() -> None:
    """10 samples in 3 steps over two devices."""
    split = BatchSplit(global_batch_size=10, accumulation_steps=3, shard_sizes=(1, 3))
    assert split.micro_batch_sizes == (4, 3, 3)
    assert fit_shards(3, split.shard_sizes) == (1, 2)
    assert str(split) == "10 = 3 x (1 + 3)"


def test_a_thousand_shares_are_counted() -> None:
    """Equal ones in a row; those of up to 16 devices are listed."""
    split = BatchSplit(
        global_batch_size=512 * 4 + 511 * 12 + 13, accumulation_steps=1, shard_sizes=(4,) * 512 + (12,) * 511 + (13,)
    )
    assert str(split) == "8193 = 1 x (512 x 4 + 511 x 12 + 13)"
    assert str(BatchSplit.even(global_batch_size=32, accumulation_steps=2, num_devices=16)).count("1 + ") == 15
    with pytest.raises(InvalidSplitError, match=r"shard_sizes sum to 1024 x 4 = 4096, but"):
        BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(4,) * 1024)


def test_gpu0_may_take_the_smaller_equal_or_larger_share() -> None:
    """The hand-tuned wrapper knows only 'smaller'."""
    sizes: dict[str, Any] = {"global_batch_size": 24, "accumulation_steps": 2, "num_devices": 3}
    assert BatchSplit.with_gpu0(**sizes, gpu0_bsz=2).shard_sizes == (2, 5, 5)
    assert BatchSplit.with_gpu0(**sizes, gpu0_bsz=4).shard_sizes == (4, 4, 4)
    assert BatchSplit.with_gpu0(**sizes, gpu0_bsz=8).shard_sizes == (8, 2, 2)
    assert BatchSplit.with_gpu0(**sizes, gpu0_bsz=12).shard_sizes == (12, 0, 0)


def test_a_share_below_the_accumulation_steps_does_not_become_zero() -> None:
    """Transformer-XL divides GPU 0's share by the chunks and rounds down, so 3 in 4 chunks idles GPU 0; ours is 3."""
    split = BatchSplit.with_gpu0(global_batch_size=64, accumulation_steps=4, num_devices=4, gpu0_bsz=3)
    assert split.shard_sizes == (3, 5, 4, 4)


def test_a_split_is_a_value() -> None:
    """Equal, hashable, picklable, frozen; a list of shards, as JSON gives it back, becomes a tuple."""
    split = BatchSplit(global_batch_size=10, accumulation_steps=3, shard_sizes=(1, 3))
    from_json = BatchSplit(**{**dataclasses.asdict(split), "shard_sizes": [1, 3]})
    assert from_json == split
    assert hash(from_json) == hash(split)
    assert pickle.loads(pickle.dumps(split)) == split
    with pytest.raises(dataclasses.FrozenInstanceError):
        split.global_batch_size = 11  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"global_batch_size": 0},
            r"global_batch_size is 0: expected an integer of at least 1, the samples behind one optimizer step\.",
            id="no samples",
        ),
        pytest.param({"global_batch_size": 10.0}, "global_batch_size is 10.0: expected an integer", id="float"),
        pytest.param({"global_batch_size": "10"}, "global_batch_size is '10': expected an integer", id="text"),
        pytest.param({"global_batch_size": True}, "global_batch_size is True: expected an integer", id="bool"),
        pytest.param(
            {"accumulation_steps": 0},
            r"accumulation_steps is 0: expected an integer from 1 to global_batch_size=10, so that no micro-batch is",
            id="no steps",
        ),
        pytest.param({"accumulation_steps": 11}, "accumulation_steps is 11: expected .* from 1 to .*=10", id="k > B"),
        pytest.param(
            {"global_batch_size": np.True_}, "global_batch_size is .*True.*: expected an integer", id="np.bool"
        ),
        pytest.param(
            {"global_batch_size": np.float64(10)}, "global_batch_size is .*10.*: expected an", id="np.float64"
        ),
        pytest.param({"accumulation_steps": 2.0}, r"accumulation_steps is 2\.0: expected an integer", id="float steps"),
        pytest.param({"shard_sizes": (5, -1)}, r"shard_sizes\[1\] is -1: expected an integer of at least 0", id="-1"),
        pytest.param({"shard_sizes": (1.0, 3)}, r"shard_sizes\[0\] is 1\.0: expected an integer", id="float shard"),
        pytest.param({"shard_sizes": (True, 3)}, r"shard_sizes\[0\] is True: expected an integer", id="bool shard"),
        pytest.param({"shard_sizes": ()}, r"shard_sizes sum to nothing = 0, but .* = 4 samples", id="no devices"),
    ],
)
def test_broken_arithmetic_is_refused(fields: dict[str, Any], message: str) -> None:
    """Each field's error names the field, what it got and what is expected."""
    legal: dict[str, Any] = {"global_batch_size": 10, "accumulation_steps": 3, "shard_sizes": (1, 3)}
    with pytest.raises(InvalidSplitError, match=message):
        BatchSplit(**(legal | fields))


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.array], ids=lambda kind: kind.__name__)
def test_numpys_integers_are_integers(kind: Callable[[int], Any]) -> None:
    """What an array's arithmetic gives is taken, and kept as plain integers, which JSON and hashes know."""
    split = BatchSplit(global_batch_size=10, accumulation_steps=3, shard_sizes=(1, 3))
    given = BatchSplit(global_batch_size=kind(10), accumulation_steps=kind(3), shard_sizes=(kind(1), kind(3)))
    assert given == split
    assert hash(given) == hash(split)
    assert {type(size) for size in (given.global_batch_size, given.accumulation_steps, *given.shard_sizes)} == {int}
    options = {"global_batch_size": kind(10), "accumulation_steps": kind(3), "num_devices": kind(2)}
    assert BatchSplit.with_gpu0(**options, gpu0_bsz=kind(1)) == split
    assert json.dumps(BatchSplit.even(**options).micro_batch_sizes) == "[4, 3, 3]"


def test_a_wrong_sum_is_refused_with_both_sides_of_the_arithmetic() -> None:
    """What, got, expected, and what to do."""
    with pytest.raises(InvalidSplitError) as caught:
        BatchSplit(global_batch_size=10, accumulation_steps=3, shard_sizes=(2, 3))
    assert str(caught.value) == (
        "shard_sizes sum to 2 + 3 = 5, but the largest micro-batch has ceil(10 / 3) = 4 samples. "
        "Change the shards so that they sum to 4."
    )


@given(batch_splits(), st.integers(min_value=-3, max_value=3).filter(bool))
def test_only_shards_that_sum_to_the_micro_batch_are_legal(split: BatchSplit, surplus: int) -> None:
    """One sample too many or too few on the last device, or a negative shard: always refused."""
    with pytest.raises(InvalidSplitError):
        dataclasses.replace(split, shard_sizes=(*split.shard_sizes[:-1], split.shard_sizes[-1] + surplus))


@pytest.mark.parametrize("make", ["even", "with_gpu0"])
def test_the_constructors_check_sizes_before_they_divide(make: str) -> None:
    """Zero accumulation steps or devices give our error, never a ZeroDivisionError."""
    share = {"gpu0_bsz": 1} if make == "with_gpu0" else {}
    constructor = getattr(BatchSplit, make)
    with pytest.raises(InvalidSplitError, match="accumulation_steps is 0"):
        constructor(global_batch_size=8, accumulation_steps=0, num_devices=2, **share)
    with pytest.raises(InvalidSplitError, match="num_devices=0"):
        constructor(global_batch_size=8, accumulation_steps=1, num_devices=0, **share)


def test_a_share_that_cannot_be_honoured_is_refused() -> None:
    """GPU 0 cannot take 5 of a micro-batch of 4; nothing falls back to even."""
    with pytest.raises(InvalidSplitError, match="gpu0_bsz=5 cannot be taken from a micro-batch of 4"):
        BatchSplit.with_gpu0(global_batch_size=10, accumulation_steps=3, num_devices=2, gpu0_bsz=5)
