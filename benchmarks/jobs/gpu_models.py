"""The jobs that `benchmarks.gpu` runs on a card: an MLP, a CNN, a vision and a text transformer, on made-up data.

No job reads a file or the network. `CARD` has sizes for a card of 80 GiB or more, where a whole
batch takes about a tenth of a second; `REHEARSAL` has sizes for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.wrapper.virtual import resnet18
from splittune.demo import NUM_BYTE_VALUES, ByteGPT
from splittune.training import TrainingTask

NUM_CLASSES = 10
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the jobs are; batch sizes are those in float32, bfloat16 takes twice as many samples."""

    mlp_width: int
    mlp_layers: int
    mlp_batch: int
    image_side: int
    cnn_batch: int
    vit_side: int
    vit_patch: int
    vit_width: int
    vit_layers: int
    vit_batch: int
    gpt_width: int
    gpt_layers: int
    gpt_context: int
    gpt_batch: int
    greedy_width: int
    greedy_batch: int
    """Of the job that runs out of memory in each phase: an MLP whose parameters alone fill segments."""
    tuned_batch: int
    """The global batch of the job that is tuned, by ourselves and by others: above twelve sizes of
    micro-batches, for of so few the search measures all."""


CARD = Sizes(
    mlp_width=4096,
    mlp_layers=8,
    mlp_batch=8192,
    image_side=64,
    cnn_batch=256,
    vit_side=224,
    vit_patch=16,
    vit_width=768,
    vit_layers=6,
    vit_batch=64,
    gpt_width=768,
    gpt_layers=6,
    gpt_context=512,
    gpt_batch=32,
    greedy_width=4096,
    greedy_batch=256,
    tuned_batch=64,
)
REHEARSAL = Sizes(
    mlp_width=64,
    mlp_layers=2,
    mlp_batch=32,
    image_side=16,
    cnn_batch=8,
    vit_side=16,
    vit_patch=8,
    vit_width=32,
    vit_layers=1,
    vit_batch=8,
    gpt_width=16,
    gpt_layers=1,
    gpt_context=768,
    gpt_batch=8,
    greedy_width=2048,
    greedy_batch=4,
    tuned_batch=48,
)


class SmallViT(nn.Module):
    """Patches, encoder layers of torch's own, a mean, a class: (N, 3, side, side) to logits (N, 10)."""

    def __init__(self, *, side: int, patch: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.embed_patch = nn.Conv2d(3, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, max(1, width // 64), 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.to_logits = nn.Linear(width, NUM_CLASSES)
        self.is_checkpointed = False

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed_patch(images).flatten(2).transpose(1, 2) + self.position
        tokens = _through(self.blocks, tokens, is_checkpointed=self.is_checkpointed)
        logits: Tensor = self.to_logits(self.norm(tokens).mean(dim=1))
        return logits


class SmallGPT(ByteGPT):
    """The demo's GPT, whose blocks can be checkpointed."""

    def __init__(self, *, width: int, num_layers: int, context: int) -> None:
        super().__init__(width=width, num_layers=num_layers, num_heads=max(1, width // 64), context=context)
        self.is_checkpointed = False

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embed_byte(tokens) + self.embed_position(positions)
        hidden = _through(self.blocks, hidden, is_checkpointed=self.is_checkpointed)
        logits: Tensor = self.to_logits(self.norm(hidden))
        return logits


def _through(blocks: Any, hidden: Tensor, *, is_checkpointed: bool) -> Tensor:
    for block in blocks:
        if is_checkpointed:
            hidden = checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden = block(hidden)
    return hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of model, made once, with what a whole batch of it takes."""

    name: str
    model: nn.Module
    batch_size: int
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    """So many samples: inputs and targets, in host memory."""
    loss_fn: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy

    @property
    def can_be_checkpointed(self) -> bool:
        return hasattr(self.model, "is_checkpointed")

    def task(
        self,
        *,
        optimizer: str = "AdamW",
        autocast_dtype: torch.dtype | None = None,
        is_checkpointed: bool = False,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> TrainingTask:
        """A job over one batch of made-up data; the model is shared, and a `Profiler` leaves it as it was."""
        num_samples = self.batch_size * (1 if autocast_dtype is None else 2) if batch_size is None else batch_size
        if self.can_be_checkpointed:
            self.model.is_checkpointed = is_checkpointed  # type: ignore[assignment]
        batch = self.draw(num_samples, torch.Generator().manual_seed(seed))
        return TrainingTask(
            self.model, [batch], loss_fn=self.loss_fn, optimizer=OPTIMIZERS[optimizer], autocast_dtype=autocast_dtype
        )


def mlp(sizes: Sizes) -> Family:
    """Wide layers: parameters, gradients and the optimizer's state weigh more than what a sample adds."""
    width = sizes.mlp_width
    layers: list[nn.Module] = [nn.Linear(width // 4, width), nn.ReLU()]
    for _ in range(sizes.mlp_layers - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))
    return Family(name="MLP", model=model, batch_size=sizes.mlp_batch, draw=partial(_vectors, (width // 4,)))


def cnn(sizes: Sizes) -> Family:
    """ResNet-18 on small images: convolutions, whose workspaces and kernels change with the size."""
    shape = (1, sizes.image_side, sizes.image_side)
    return Family(name="CNN", model=resnet18(NUM_CLASSES), batch_size=sizes.cnn_batch, draw=partial(_vectors, shape))


def vit(sizes: Sizes) -> Family:
    """A vision transformer."""
    model = SmallViT(side=sizes.vit_side, patch=sizes.vit_patch, width=sizes.vit_width, num_layers=sizes.vit_layers)
    shape = (3, sizes.vit_side, sizes.vit_side)
    return Family(name="ViT", model=model, batch_size=sizes.vit_batch, draw=partial(_vectors, shape))


def gpt(sizes: Sizes) -> Family:
    """A text transformer on bytes."""
    model = SmallGPT(width=sizes.gpt_width, num_layers=sizes.gpt_layers, context=sizes.gpt_context)
    return Family(
        name="GPT",
        model=model,
        batch_size=sizes.gpt_batch,
        draw=partial(_bytes, sizes.gpt_context),
        loss_fn=loss_of_tokens,
    )


def tuned_job(sizes: Sizes, seed: int) -> Callable[[], TrainingTask]:
    """What makes the job that is tuned: the GPT under bfloat16 autocast, with AdamW."""
    family = make("GPT", sizes, seed)
    return partial(family.task, autocast_dtype=torch.bfloat16, batch_size=sizes.tuned_batch, seed=seed)


FAMILIES: dict[str, Callable[[Sizes], Family]] = {"MLP": mlp, "CNN": cnn, "ViT": vit, "GPT": gpt}


def make(name: str, sizes: Sizes, seed: int) -> Family:
    """A family by name, its weights drawn from `seed` without moving torch's own random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return FAMILIES[name](sizes)


def loss_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all tokens: (N, T, classes) and (N, T)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _vectors(shape: Sequence[int], num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(num_samples, *shape, generator=generator)
    return inputs, torch.randint(NUM_CLASSES, (num_samples,), generator=generator)


def _bytes(context: int, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(NUM_BYTE_VALUES, (num_samples, context + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
