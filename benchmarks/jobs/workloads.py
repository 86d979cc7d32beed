"""Small real training jobs: a CNN with BatchNorm on scanned digits, and an MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_DIGITS = 1797
NUM_HELD_OUT_DIGITS = 360


class Workload(NamedTuple):
    """A job by the names `splittune.autotune` gives its parts: ``autotune(**workload._asdict())``."""

    model: nn.Module
    loader: DataLoader[tuple[Tensor, ...]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    """From parameters to an optimizer."""


def digits_cnn(batch_size: int = 64, seed: int = 0) -> Workload:
    """A CNN with BatchNorm on scikit-learn's digits: inputs (N, 1, 8, 8) float32, integer targets (N,).

    1,437 samples, so the last batch of 64 has 29. Two passes of SGD read over 90 % of the held-out digits.
    """
    with _seeded(seed):
        model = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )
    return Workload(
        model=model,
        loader=_shuffled(digits(held_out=False), batch_size, seed),
        loss_fn=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    )


def digits(*, held_out: bool) -> TensorDataset:
    """The digits a job trains on, or the 360 held out: always the same ones. Pixels from 0 to 1.

    The 1,797 scans ship with scikit-learn (from the UCI repository's 'Optical Recognition of Handwritten Digits').

    Raises:
        ModuleNotFoundError: scikit-learn is not installed; the message says how to install it.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is not installed: pip install scikit-learn", name=error.name
        ) from error
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.float32).unsqueeze(1) / 16
    targets = torch.from_numpy(bunch.target).to(torch.int64)
    order = torch.randperm(NUM_DIGITS, generator=torch.Generator().manual_seed(0))
    chosen = order[:NUM_HELD_OUT_DIGITS] if held_out else order[NUM_HELD_OUT_DIGITS:]
    return TensorDataset(images[chosen], targets[chosen])


def mlp(
    batch_size: int = 16,
    seed: int = 0,
    *,
    num_samples: int = 64,
    num_features: int = 12,
    hidden: int = 24,
    dtype: torch.dtype = torch.float32,
) -> Workload:
    """An MLP without BatchNorm on made-up regression: inputs (N, num_features), float targets (N, 1).

    Nothing in it couples the samples, so any split gives the whole batch's gradient; ``dtype=torch.float64`` makes
    the rounding that is left negligible.
    """
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, num_features, generator=random, dtype=dtype)
    targets = inputs.square().mean(dim=1, keepdim=True) + inputs[:, :1]
    with _seeded(seed):
        model = nn.Sequential(
            nn.Linear(num_features, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
        )
    return Workload(
        model=model.to(dtype),
        loader=_shuffled(TensorDataset(inputs, targets), batch_size, seed),
        loss_fn=nn.functional.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
    )


def _shuffled(dataset: TensorDataset, batch_size: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """A loader with a random number generator of its own, so that iterating it draws nothing from torch's."""
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(seed))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch's CPU random numbers start at `seed` inside, and go on outside as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
