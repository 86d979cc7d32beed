"""Detection as its libraries batch it: lists of images and targets, a dict of losses, tuned and
trained as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from splittune import BatchSplit, autotune, verify
from splittune.training import TrainingTask
from tests.training.state import state_of

NUM_IMAGES = 22
BATCH = 8
UNEVEN = BatchSplit(global_batch_size=BATCH, accumulation_steps=2, shard_sizes=(0, 1, 1, 2))


class Detector(nn.Module):
    """Images of any size and their boxes in, a mean over the images of each loss out; in evaluation a dict an image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(3, 8, 3, padding=1)
        self.box, self.score = nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, images: Any, targets: Any = None) -> Any:
        features = [torch.relu(self.body(image[None])).mean((0, 2, 3)) for image in images]
        if targets is None:
            return [
                {"boxes": self.box(f).expand(len(i[0]), 4), "score": self.score(f)}
                for f, i in zip(features, images, strict=True)
            ]
        pairs = list(zip(features, targets, strict=True))
        box = torch.stack([(self.box(feature) - target["boxes"]).abs().sum() for feature, target in pairs])
        score = torch.stack([(self.score(feature) - target["difficulty"]).square().sum() for feature, target in pairs])
        return {"box": box.mean(), "score": score.mean()}


def image(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(3, 4 + index % 3, 5, generator=generator)


def target(index: int) -> dict[str, Any]:
    return {
        "boxes": torch.full((index % 4, 4), float(index)),
        "difficulty": torch.tensor(0.1 * index),
        "name": str(index),
    }


def as_lists(indices: list[int]) -> Any:
    return [image(index) for index in indices], [target(index) for index in indices]


def as_tuples(indices: list[int]) -> Any:
    return tuple(zip(*[(image(index), target(index)) for index in indices], strict=True))


def stacked(indices: list[int]) -> Any:
    return torch.stack([image(3 * index) for index in indices]), [target(index) for index in indices]


def alike(indices: list[int]) -> Any:
    """Three boxes in every image of three channels: nothing but the loader's batch size tells how
    many images there are."""
    return [image(3 * index) for index in indices], [
        {"boxes": torch.full((3, 4), float(index)), "difficulty": torch.tensor(0.1 * index)} for index in indices
    ]


def step_fn(model: nn.Module, batch: Any) -> Tensor:
    losses = model(*batch)
    return losses["box"] + losses["score"]  # type: ignore[no-any-return]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@pytest.mark.parametrize("collate", [as_lists, as_tuples, stacked, alike])
def test_a_detector_is_tuned_and_trained_as_on_one_device(collate: Callable[[list[int]], Any]) -> None:
    """An epoch with a short last batch, under the config and under an uneven one; the detector is found as it was."""
    loader = DataLoader(range(NUM_IMAGES), batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type, var-annotated]
    model, expected = Detector(), Detector()
    optimizer = sgd(expected.parameters())
    for batch in loader:
        step_fn(expected, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = state_of(model)
    options: dict[str, Any] = {"step_fn": step_fn, "optimizer": sgd}
    config = autotune(model, loader, devices="4xT4", max_trials=2, progress=False, **options).config
    assert config.split.global_batch_size == BATCH
    assert verify(config, TrainingTask(model, loader, **options), num_steps=3).is_verified
    assert state_of(model) == before
    for split in (config.split, UNEVEN):
        tuned, trained = replace(config, split=split), copy.deepcopy(model)
        wrapped = tuned.wrap(trained)
        optimizer = sgd(trained.parameters())
        for batch in loader:
            for micro in tuned.micro_batches(batch, wrapped):
                (step_fn(wrapped, micro.batch) * micro.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(trained.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_a_detector_evaluates_as_on_one_device() -> None:
    """One dict an image comes back for each image, in order, whatever was found in it."""
    model = Detector().eval()
    images = as_lists(list(range(5)))[0]
    config = autotune(
        model, [as_lists(list(range(5)))], step_fn=step_fn, devices="4xT4", max_trials=1, progress=False
    ).config
    wrapped = replace(
        config, split=BatchSplit(global_batch_size=5, accumulation_steps=1, shard_sizes=(1, 2, 1, 1))
    ).wrap(model)
    wrapped(*as_lists(list(range(5))))
    with torch.no_grad():
        got = wrapped.eval()(images)
        torch.testing.assert_close(got, model(images))


class Autoencoder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, images: list[Tensor]) -> Tensor:
        stack = torch.stack(list(images))
        return nn.functional.mse_loss(self.layer(stack), stack)


@pytest.mark.parametrize("layer", [nn.Linear(5, 5), nn.Conv2d(3, 3, 3, padding=1)], ids=["any shape", "conv"])
def test_channels_are_never_taken_for_samples(layer: nn.Module) -> None:
    """A list of 8 images alike, (3, 4, 5), is a batch of 8 where the loader says so; a short last one is what it is."""
    loader = DataLoader(range(NUM_IMAGES), batch_size=BATCH, collate_fn=lambda items: ([image(3 * i) for i in items],))  # type: ignore[arg-type, var-annotated]
    config = autotune(Autoencoder(layer), loader, devices="2xT4", max_trials=1, progress=False).config
    assert config.split.global_batch_size == BATCH
    wrapped = config.wrap(Autoencoder(layer))
    sizes = []
    for batch in loader:
        weights = []
        for micro in config.micro_batches(batch, wrapped):
            wrapped(*micro.batch).backward()
            weights.append(micro.weight)
            sizes.append(len(micro.batch[0]))
        assert sum(weights) == pytest.approx(1)
    assert sum(sizes) == NUM_IMAGES


class OfRecords(nn.Module):
    """Takes what is loaded as it is, one dict an image, and returns its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 3)

    def forward(self, records: list[dict[str, Any]]) -> dict[str, Tensor]:
        scores = self.layer(torch.stack([record["image"] for record in records])).mean((2, 3))
        return {"loss_class": nn.functional.cross_entropy(scores, torch.stack([record["label"] for record in records]))}


def test_a_loader_that_collates_nothing() -> None:
    """One dict an image is the model's only argument, and as many images as channels are no batch of channels."""
    torch.manual_seed(0)
    records = [{"image": torch.randn(3, 4, 5), "label": torch.tensor(i % 2), "file": f"{i}.png"} for i in range(6)]
    model, one_device = OfRecords(), OfRecords()
    one_device.load_state_dict(model.state_dict())
    config = autotune(model, [records], devices="3xT4", max_trials=1, progress=False).config
    config = replace(config, split=BatchSplit(global_batch_size=6, accumulation_steps=2, shard_sizes=(0, 1, 2)))
    wrapped = config.wrap(model)
    for micro in config.micro_batches(records, wrapped):
        (wrapped(micro.batch)["loss_class"] * micro.weight).backward()
    one_device(records)["loss_class"].backward()
    torch.testing.assert_close(model.layer.weight.grad, one_device.layer.weight.grad)
