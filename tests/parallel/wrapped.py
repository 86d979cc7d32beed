"""Models in the wrapper, on devices of the CPU one after the other or in threads, and the steps they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from splittune.parallel import BalancedDataParallel, accumulate
from splittune.parallel.data_parallel import Engine
from tests.parallel.models import MODELS, ThreadedLink, gradients, loss_of


def on_the_cpu(model: nn.Module, shard_sizes: tuple[int, ...], engine: Engine = "window") -> BalancedDataParallel:
    devices = ["cpu"] * len(shard_sizes)
    return BalancedDataParallel(module=model, shard_sizes=shard_sizes, device_ids=devices, engine=engine)


def in_threads(model: nn.Module, shard_sizes: tuple[int, ...], engine: Engine = "window") -> BalancedDataParallel:
    devices, link = ["cpu"] * len(shard_sizes), ThreadedLink(len(shard_sizes))
    return BalancedDataParallel(module=model, shard_sizes=shard_sizes, device_ids=devices, engine=engine, link=link)


@st.composite
def steps(draw: st.DrawFn, num_devices: int | None = None) -> tuple[tuple[int, ...], list[int]]:
    """Any shards, zeros included, and the micro-batches of one step: none above the shards' sum, any of them short."""
    fewest, most = (1, 4) if num_devices is None else (num_devices, num_devices)
    shards = draw(st.lists(st.integers(0, 4), min_size=fewest, max_size=most).filter(any))
    sizes = draw(st.lists(st.integers(1, sum(shards)), min_size=1, max_size=3))
    return tuple(shards), sizes


def make(name: str, num_samples: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, draw_inputs = MODELS[name]
    return build(), draw_inputs(num_samples)


def window(
    model: nn.Module, batch: Tensor, sizes: Sequence[int], loss: Callable[[Tensor], Tensor] = loss_of
) -> dict[str, Tensor | None]:
    """The gradients after one window of micro-batches of these sizes, added to those that were there."""
    for micro in accumulate(model, batch.split(list(sizes))):
        (loss(model(micro)) * (len(micro) / len(batch))).backward()
    return gradients(model)
