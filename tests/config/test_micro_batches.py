"""A loader's batch cut for one optimizer step: tuned sizes, short batches, weights that make means exact."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splittune.config import MicroBatch, SplitConfig
from splittune.config.micro_batches import cut_batch
from splittune.errors import ConfigError
from splittune.hardware.base import Device
from splittune.split import BatchSplit


def config(global_batch_size: int = 64, accumulation_steps: int = 4, num_devices: int = 4) -> SplitConfig:
    return SplitConfig(
        split=BatchSplit.even(
            global_batch_size=global_batch_size, accumulation_steps=accumulation_steps, num_devices=num_devices
        ),
        devices=tuple(
            Device(index=index, name="card", torch_device="cpu", total_bytes=1) for index in range(num_devices)
        ),
        min_headroom_bytes=(0,) * num_devices,
        is_modelled=True,
    )


def cut(num_samples: int, **sizes: int) -> list[MicroBatch]:
    return list(config(**sizes).micro_batches(torch.arange(num_samples)))


@st.composite
def sizes_and_samples(draw: st.DrawFn) -> tuple[int, int, int]:
    """A global batch, its accumulation steps, and a batch that is no larger."""
    global_batch_size = draw(st.integers(1, 200))
    return global_batch_size, draw(st.integers(1, global_batch_size)), draw(st.integers(1, global_batch_size))


def test_docstring_example() -> None:
    """The worked numbers: a full batch of 64 in 4 parts of weight 0.25, a last one of 20 in 2 of 10."""
    assert [(len(micro.batch), micro.weight) for micro in cut(64)] == [(16, 0.25)] * 4
    assert [(len(micro.batch), micro.weight) for micro in cut(20)] == [(10, 0.5)] * 2


@given(sizes=sizes_and_samples())
def test_every_sample_once_in_order_and_weights_sum_to_one(sizes: tuple[int, int, int]) -> None:
    """For any tuned split and any batch up to it: all samples, in order, with weights that sum to 1."""
    global_batch_size, steps, num_samples = sizes
    parts = cut(num_samples, global_batch_size=global_batch_size, accumulation_steps=steps)
    assert torch.equal(torch.cat([micro.batch for micro in parts]), torch.arange(num_samples))
    assert math.isclose(sum(micro.weight for micro in parts), 1)
    assert all(micro.weight == len(micro.batch) / num_samples for micro in parts)


@given(sizes=sizes_and_samples())
def test_sizes_are_the_tuned_ones_or_the_fewest_that_hold_a_short_batch(sizes: tuple[int, int, int]) -> None:
    """A full batch keeps the tuned steps; a short one takes the fewest, differing by at most one, none too large."""
    global_batch_size, steps, num_samples = sizes
    tuned = config(global_batch_size, steps).split
    parts = [
        len(micro.batch) for micro in cut(num_samples, global_batch_size=global_batch_size, accumulation_steps=steps)
    ]
    if num_samples == global_batch_size:
        assert tuple(parts) == tuned.micro_batch_sizes
    else:
        assert len(parts) == math.ceil(num_samples / tuned.micro_batch_size)
        assert max(parts) - min(parts) <= 1
    assert max(parts) <= tuned.micro_batch_size


@given(sizes=sizes_and_samples())
def test_weighted_mean_losses_are_the_mean_of_the_batch(sizes: tuple[int, int, int]) -> None:
    """Each micro-batch's mean times its weight, summed, is the mean over the whole batch."""
    global_batch_size, steps, num_samples = sizes
    batch = torch.linspace(-1, 3, num_samples, dtype=torch.float64)
    parts = config(global_batch_size, steps).micro_batches(batch)
    assert math.isclose(
        sum(float(micro.batch.mean()) * micro.weight for micro in parts), float(batch.mean()), abs_tol=1e-12
    )


def test_a_micro_batch_is_nested_as_the_batch() -> None:
    """Inputs, targets, strings of the samples and shared values come nested as the loader nests them."""
    names = [f"sample {index}" for index in range(8)]
    batch = [{"ids": torch.arange(16).view(8, 2), "scale": torch.tensor(2.0)}, (torch.arange(8), names)]
    first, second = config(8, 2, 2).micro_batches(batch)
    inputs, (targets, own_names) = second.batch
    assert type(second.batch) is list
    assert inputs["ids"].tolist() == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert inputs["scale"] is batch[0]["scale"]  # type: ignore[index]
    assert (targets.tolist(), own_names) == ([4, 5, 6, 7], names[4:])
    assert first.weight == second.weight == 0.5


def test_nothing_is_copied() -> None:
    """The parts are views of the batch, on the device where the loader left it."""
    batch = torch.arange(64)
    assert [micro.batch.data_ptr() for micro in config().micro_batches(batch)] == [
        batch[start:].data_ptr() for start in (0, 16, 32, 48)
    ]


def test_a_micro_batch_is_frozen() -> None:
    """A weight that was handed out cannot be changed by accident."""
    micro = cut(64)[0]
    with pytest.raises(FrozenInstanceError):
        micro.weight = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            torch.zeros(65),
            "a batch of 65 samples, 65 - 64 = 1 more than this config was tuned for (64 = 4 x (4 + 4 + 4 + 4))",
        ),
        (torch.zeros(65), "Set the loader's batch size to 64, or tune for 65."),
        (torch.zeros(0, 3), "a batch of 0 samples: expected at least 1"),
        ({"text": "no tensor"}, "a batch with no tensor"),
        ((torch.zeros(8, 3), torch.zeros(7)), "[0] has 8, [1] has 7"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_at_the_call(batch: Any, message: str) -> None:
    """Too many samples, none, no tensor, or targets of another size: refused before anything is yielded."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        config().micro_batches(batch)


# samples in lists


def test_lists_of_samples_are_cut_into_micro_batches() -> None:
    """A full batch tells what its lists are; a short one is told, by the model that has seen full ones."""
    split = BatchSplit.even(global_batch_size=16, accumulation_steps=4, num_devices=2)
    alike = [torch.full((3, 4, 4), float(index)) for index in range(16)]
    parts = [micro.batch[0] for micro in cut_batch((alike,), split)]
    assert [len(part) for part in parts] == [4, 4, 4, 4]
    assert [int(image[0, 0, 0]) for part in parts for image in part] == list(range(16))
    short = list(cut_batch((alike[:6],), split, listed=True))
    assert [len(micro.batch[0]) for micro in short] == [3, 3]
    assert sum(micro.weight for micro in short) == pytest.approx(1)


@pytest.mark.parametrize("num_samples", [16, 7, 1])
def test_a_count_of_the_batch_is_shared_out_by_weight(num_samples: int) -> None:
    """A sum over the whole batch's items, divided by their number, is the weighted mean of the micro-batches'."""
    split = BatchSplit.even(global_batch_size=16, accumulation_steps=3, num_devices=2)
    x = torch.arange(float(num_samples))
    total = 0.0
    for micro in cut_batch({"x": x, "num_items_in_batch": 40}, split):
        total += float(micro.batch["x"].sum() / micro.batch["num_items_in_batch"]) * micro.weight
    assert total == pytest.approx(float(x.sum() / 40))
