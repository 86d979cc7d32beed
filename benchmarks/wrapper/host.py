"""The host's own work for a micro-step, beside that of torch's replication: Python, not kernels.

A card waits for the host where a micro-step is short. What the window engine adds to a micro-step is the
processor time of a step of 8 micro-batches on four positions, less that of the same forwards and backwards
on the bare module. nn.DataParallel replicates the module at every micro-batch: beside it stands what
`torch.nn.parallel.replicate` takes for that, its copies left out, for there are no cards; its scatter,
gather and reduction come on top.

The models are a few channels wide, and as deep as ResNet-50 and a GPT of 24 layers: the host's work does
not depend on widths. All four positions are the CPU, one after another.
"""

from __future__ import annotations

import contextlib
import gc
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import replicate

from splittune.parallel import BalancedDataParallel, accumulate
from splittune.parallel.data_parallel import Engine

NUM_POSITIONS = 4
ACCUMULATION_STEPS = 8
ROUNDS = 21


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut, as in ResNet-50."""

    def __init__(self, num_in: int, width: int, num_out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, num_out, 1, bias=False), nn.BatchNorm2d(num_out)
        self.downsample = None
        if num_in != num_out:
            self.downsample = nn.Sequential(nn.Conv2d(num_in, num_out, 1, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(functional.relu(self.bn2(self.conv2(out)))))
        return functional.relu(out + (x if self.downsample is None else self.downsample(x)))


def thin_resnet50() -> nn.Module:
    """ResNet-50's 161 parameters and 159 buffers, a few channels wide."""
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
    width = 4
    for num_blocks, num_out in ((3, 6), (4, 8), (6, 10), (3, 12)):
        for _ in range(num_blocks):
            layers.append(Bottleneck(width, 4, num_out))
            width = num_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def thin_gpt() -> nn.Module:
    """24 layers of a transformer, 8 numbers wide: 290 parameters, none shared."""
    layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True) for _ in range(24)]
    return nn.Sequential(nn.Embedding(16, 8), *layers, nn.Linear(8, 16))


def jobs() -> Iterator[tuple[str, nn.Module, Tensor]]:
    """(name, model, micro-batch of two samples for each position)."""
    torch.manual_seed(0)
    yield "ResNet-50, thin", thin_resnet50(), torch.randn(2 * NUM_POSITIONS, 3, 6, 6)
    yield "GPT of 24 layers, thin", thin_gpt(), torch.randint(16, (2 * NUM_POSITIONS, 4))


def processor() -> str:
    """This machine's processor, as Linux names it; its architecture elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _processor_s(work: Callable[[], Any]) -> float:
    begun_s = time.process_time()
    work()
    return time.process_time() - begun_s


def bare(model: nn.Module, batch: Tensor) -> None:
    """The same forwards and backwards without a wrapper."""
    for _ in range(ACCUMULATION_STEPS):
        for shard in batch.chunk(NUM_POSITIONS):
            model(shard).square().mean().backward()
    model.zero_grad(set_to_none=True)


def wrapped_step(wrapped: BalancedDataParallel, batch: Tensor) -> None:
    """One optimizer step's forwards and backwards through the wrapper."""
    for micro in accumulate(wrapped, [batch] * ACCUMULATION_STEPS):
        wrapped(micro).square().mean().backward()
    wrapped.zero_grad(set_to_none=True)


def torch_replicates(model: nn.Module) -> None:
    """As often as nn.DataParallel does in a step, on as many devices, without the copies themselves."""

    def aliases(tensors: Sequence[Tensor], devices: Sequence[int], *_: Any, **__: Any) -> list[list[Tensor]]:
        return [[tensor.detach() for tensor in tensors] for _ in devices]

    module = sys.modules[replicate.__module__]  # torch.nn.parallel has a function of the module's name
    with mock.patch.object(module, "_broadcast_coalesced_reshape", aliases):
        for _ in range(ACCUMULATION_STEPS):
            replicate(model, list(range(NUM_POSITIONS)))


def measure(name: str, model: nn.Module, batch: Tensor, num_rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """A row for each engine: milliseconds a micro-step, medians of rounds in which all take turns."""
    engines: tuple[Engine, ...] = ("window", "torch")
    wrappers = {
        engine: BalancedDataParallel(
            module=model, shard_sizes=(2,) * NUM_POSITIONS, device_ids=["cpu"] * NUM_POSITIONS, engine=engine
        )
        for engine in engines
    }
    gc.collect()
    gc.freeze()  # what was there before is no work of either
    times_s: dict[str, list[float]] = {"bare": [], "replicate": [], **{engine: [] for engine in engines}}
    works: dict[str, Callable[[], None]] = {
        "bare": partial(bare, model, batch),
        "replicate": partial(torch_replicates, model),
        **{engine: partial(wrapped_step, wrapper, batch) for engine, wrapper in wrappers.items()},
    }
    for number in range(num_rounds + 1):
        found = {name: _processor_s(work) for name, work in works.items()}
        if number:  # the first warms up
            for key, seconds in found.items():
                times_s[key].append(seconds)
    gc.unfreeze()
    rounds = pd.DataFrame(times_s) * 1e3 / ACCUMULATION_STEPS
    middle = rounds.median()
    return [
        {
            "model": name,
            "engine": engine,
            "accumulation_steps": ACCUMULATION_STEPS,
            "positions": NUM_POSITIONS,
            "rounds": num_rounds,
            "bare_ms": middle["bare"],
            "added_ms": (rounds[engine] - rounds["bare"]).median(),
            "torch_replicate_ms": middle["replicate"],
            # a machine's speed changes from round to round: within one, less so
            "added_to_replicate": ((rounds[engine] - rounds["bare"]) / rounds["replicate"]).median(),
        }
        for engine in engines
    ]
