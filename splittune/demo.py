"""The demo's jobs: GPT-2, to plan with, and a byte-level GPT, to train on real text that every machine has.

The text is the source of Python's own standard library.
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from splittune.config import SplitConfig
from splittune.hardware import DeviceMemory, Hardware
from splittune.profiling.measurement import Measurement, Outcome
from splittune.split import BatchSplit
from splittune.training import TrainingTask

# Another program leaves 4 GiB of GPU 0: model, gradients and AdamW's state take two of them. A choice.
GPT2_DEVICES = "1xRTX3090:occupied=20GiB,3xRTX3090"
# The search ends by itself before these, and each kind of split costs seconds. A choice.
GPT2_MAX_TRIALS = 12
# Small cards, so that a model which trains on any CPU fills one; another program leaves 46 MiB of
# GPU 0. A choice.
DEMO_DEVICES = "1xT400-4GB:occupied=3776MiB,3xT400-4GB"
# Enough for the loss to fall by a third and more, in some seconds. A choice.
DEMO_STEPS = 10
# Modules that every CPython ships, long and of ordinary prose and code.
SOURCES = ("argparse.py", "ast.py", "datetime.py", "decimal.py", "difflib.py", "doctest.py", "inspect.py", "typing.py")
NUM_BYTE_VALUES = 256


class StandardLibraryText(Dataset[tuple[Tensor, Tensor]]):
    """Windows of bytes from the standard library's source, each with the bytes that follow.

    A sample is (context,) int64 twice.
    """

    def __init__(self, context: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        texts = [path.read_bytes() for name in SOURCES if (path := folder / name).is_file()]
        if not texts:
            raise FileNotFoundError(
                f"none of {', '.join(SOURCES)} in {folder}: the standard library's source is needed."
            )
        self._data = torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._data) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._data[index * self._context : (index + 1) * self._context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """A pre-norm transformer block with causal attention: (N, T, width) to the same."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width)
        self.from_heads = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        num_samples, length, width = x.shape
        qkv: Sequence[Tensor] = self.to_qkv(self.norm_attention(x)).chunk(3, dim=-1)
        query, key, value = (t.view(num_samples, length, self.num_heads, -1).transpose(1, 2) for t in qkv)
        heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_heads(heads.transpose(1, 2).reshape(num_samples, length, width))
        residual: Tensor = self.mlp(self.norm_mlp(x))
        return x + residual


class ByteGPT(nn.Module):
    """Predicts the next byte: (N, T) int64 to logits (N, T, 256)."""

    def __init__(
        self,
        *,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        context: int = 64,
        num_tokens: int = NUM_BYTE_VALUES,
    ) -> None:
        super().__init__()
        self.embed_byte = nn.Embedding(num_tokens, width)
        self.embed_position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.to_logits = nn.Linear(width, num_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.to_logits(
            self.norm(self.blocks(self.embed_byte(tokens) + self.embed_position(positions)))
        )
        return logits


class GPT2(nn.Module):
    """GPT-2 in its smallest size, which gives its own loss: two (N, T) int64, of tokens and of those that follow."""

    def __init__(self, *, num_layers: int = 12, context: int = 1024) -> None:
        super().__init__()
        self.to_logits = ByteGPT(width=768, num_layers=num_layers, num_heads=12, context=context, num_tokens=50_257)
        self.to_logits.to_logits = nn.Linear(768, 50_257, bias=False)
        self.to_logits.to_logits.weight = self.to_logits.embed_byte.weight  # 124 million parameters in all

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        return functional.cross_entropy(self.to_logits(tokens).flatten(0, 1), following.flatten())


def gpt2(batch_size: int = 64, *, num_layers: int = 12) -> TrainingTask:
    """A job of real size to plan with: GPT-2 (124 million parameters) at 1,024 tokens, AdamW, in bfloat16.

    ``splittune plan splittune/demo.py:gpt2 --devices 4xRTX3090``. Its tokens are bytes, of which a plan reads the
    sizes alone.
    """

    def step(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        loss: Tensor = model(*batch)
        return loss

    model = GPT2(num_layers=num_layers)
    loader = DataLoader(StandardLibraryText(1024), batch_size=batch_size)
    return TrainingTask(
        model, loader, optimizer=torch.optim.AdamW(model.parameters()), step_fn=step, autocast_dtype=torch.bfloat16
    )


def halved_until_it_fits(measure: Callable[[BatchSplit], Measurement], global_batch_size: int) -> Measurement | None:
    """What people do: the even split of the whole batch on four cards, of half of it, of a quarter, until one runs.

    None where not even a sample a card does.
    """
    while global_batch_size >= 4:
        found = measure(BatchSplit.even(global_batch_size=global_batch_size, num_devices=4, accumulation_steps=1))
        if found.outcome is Outcome.OK:
            return found
        global_batch_size //= 2
    return None


def byte_gpt(
    batch_size: int = 64, *, context: int = 64, width: int = 128, num_layers: int = 4, seed: int = 0
) -> TrainingTask:
    """The job of ``splittune demo``.

    ``splittune tune`` takes it too, as ``splittune/demo.py:byte_gpt``.
    """
    torch.manual_seed(seed)
    model = ByteGPT(width=width, num_layers=num_layers, context=context)
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(
        StandardLibraryText(context), batch_size=batch_size, shuffle=True, drop_last=True, generator=order
    )
    return TrainingTask(model, loader)


def train_under_config(
    config: SplitConfig, hardware: Hardware, *, num_steps: int = DEMO_STEPS
) -> tuple[list[float], tuple[DeviceMemory, ...]]:
    """Train a fresh model under `config` as a user would, with the meter running.

    Returns the loss of each step, and the devices' memory with its peaks.
    """
    task = byte_gpt(config.split.global_batch_size)
    optimizer = torch.optim.AdamW(task.model.parameters())
    losses = []
    with hardware.metered():
        model = config.wrap(task.model, hardware=hardware)
        for batch in itertools.islice(task.loader, num_steps):
            total = 0.0
            for micro in config.micro_batches(batch, model):
                inputs, targets = micro.batch
                logits = model(inputs)
                loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten().to(model.output_device))
                (loss * micro.weight).backward()
                total += loss.item() * micro.weight
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total)
        return losses, hardware.memory()
