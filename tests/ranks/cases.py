"""Steps of training on ranks with any shares, and the same steps on one device to compare them with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody writes it

from splittune.config import SplitConfig
from splittune.hardware.base import Device
from splittune.ranks.share import RankShare
from splittune.split import BatchSplit

WIDTH = 5
CLASSES = 3
LENGTH = 4  # tokens of a sample
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps of ``sizes[step][rank][micro_batch]`` samples, and how they are trained."""

    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    counts_tokens: bool = False
    """The loss is a mean over tokens, and samples have from none to all of them."""
    float64: bool = True
    clips: bool = False
    scales: bool = False
    freezes: bool = False
    leaves_unused: bool = False
    loss_in_wrapper: bool = False
    looks_first: bool = False
    """The model is called once before the first step, and nothing is done with what it gives."""
    seed: int = 0
    ddp_options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return len(self.sizes[0])

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.float64 else torch.float32


class Net(nn.Module):
    """A frozen part, a part that is never used, and one that gives ``view(len(x), -1)`` something to do."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.frozen = nn.Linear(7, 6)
        self.frozen.requires_grad_(not case.freezes)
        self.unused = nn.Linear(2, 2) if case.leaves_unused else None
        self.last = nn.Linear(6, CLASSES * (LENGTH if case.counts_tokens else 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        return self.last(hidden.view(hidden.size(0), -1))


def config_of(num_ranks: int, strategy: str = "ddp", **fields: Any) -> SplitConfig:
    defaults: dict[str, Any] = {
        "split": BatchSplit.even(global_batch_size=12 * num_ranks, accumulation_steps=3, num_devices=num_ranks),
        "devices": tuple(
            Device(index=index, name="cpu", torch_device="cpu", total_bytes=1) for index in range(num_ranks)
        ),
        "min_headroom_bytes": (0,) * num_ranks,
        "is_modelled": True,
        "strategy": strategy,
        "versions": {"torch": "any"},
        "created": "2026-01-31T12:00:00+00:00",
    }
    return SplitConfig(**defaults | fields)


def net_of(case: Case) -> Net:
    torch.manual_seed(case.seed)
    return Net(case).to(case.dtype)


def batches_of(case: Case) -> list[tuple[Tensor, Tensor]]:
    """The global batch of every step."""
    generator = torch.Generator().manual_seed(case.seed)
    batches = []
    for step in case.sizes:
        num_samples = sum(map(sum, step))
        x = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64).to(case.dtype)
        y = torch.randint(CLASSES, (num_samples, LENGTH) if case.counts_tokens else (num_samples,), generator=generator)
        if case.counts_tokens:
            # whole samples without a token are what makes a mean over nothing
            y[torch.rand(num_samples, generator=generator) < 0.7] = IGNORED
            y[0, 0] = 1
        batches.append((x, y))
    return batches


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """A mean over what counts, written out: of nothing it is NaN, and so is its gradient."""
    flat = targets.view(-1)
    losses = F.cross_entropy(output.view(-1, CLASSES), flat.clamp(min=0), reduction="none")
    return (losses * (flat != IGNORED)).sum() / tokens_in(flat)


def tokens_in(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum()


def share_of(batch: tuple[Tensor, Tensor], sizes: tuple[tuple[int, ...], ...], rank: int) -> RankShare:
    """Rank by rank within a micro-batch, micro-batch by micro-batch within the batch."""
    micro_batch_sizes = tuple(sum(column) for column in zip(*sizes, strict=True))
    chosen: list[int] = []
    start = 0
    for number, size in enumerate(micro_batch_sizes):
        first = start + sum(sizes[other][number] for other in range(rank))
        chosen += range(first, first + sizes[rank][number])
        start += size
    if 0 in sizes[rank]:
        chosen.append(len(batch[0]) - 1)
    return RankShare(
        batch=tuple(tensor[chosen] for tensor in batch),
        sizes=sizes[rank],
        micro_batch_sizes=micro_batch_sizes,
        num_samples=start,
    )


@dataclass
class _Trainer:
    """What happens to gradients once they are there."""

    case: Case
    model: nn.Module

    def __post_init__(self) -> None:
        learned = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(learned, lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.case.scales)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> dict[str, Tensor]:
        """The gradients of this step, as they were when the optimizer took them."""
        self.scaler.unscale_(self.optimizer)
        if self.case.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        gradients = {
            name.removeprefix("module."): parameter.grad.clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return gradients


Trained = tuple[list[dict[str, Tensor]], dict[str, Tensor]]


def train_on_one_device(case: Case) -> Trained:
    """The gradients of every step, and the parameters at the end."""
    model = net_of(case)
    trainer = _Trainer(case, model)
    gradients = []
    for x, y in batches_of(case):
        trainer.backward(loss_of(model(x), y))
        gradients.append(trainer.update())
    return gradients, _detached(model)


def train_on_ranks(group: dist.ProcessGroup | None, case: Case) -> Trained:
    """The same on this rank."""
    config = config_of(case.num_ranks)
    options = {"find_unused_parameters": case.leaves_unused, **case.ddp_options}
    if group is not None:
        options["process_group"] = group
    in_wrapper = case.loss_in_wrapper or case.counts_tokens
    model = config.wrap(
        net_of(case),
        loss_of if in_wrapper else None,
        weight_fn=tokens_in if case.counts_tokens else None,
        ddp_options=options,
    )
    trainer = _Trainer(case, model)
    gradients = []
    if case.looks_first:
        (model.module if in_wrapper else model)(batches_of(case)[0][0])
    for batch, sizes in zip(batches_of(case), case.sizes, strict=True):
        share = share_of(batch, sizes, dist.get_rank(group))
        for micro in config.micro_batches(share, model):
            inputs, targets = micro.batch
            loss = model(inputs, targets) if in_wrapper else loss_of(model(inputs), targets)
            trainer.backward(loss * micro.weight)
        gradients.append(trainer.update())
    return gradients, _detached(model.unwrap())


def errors_of(trained: Trained, truth: Trained) -> Iterator[float]:
    """Of each step's gradients, and of the parameters at the end: the largest difference over the largest value."""
    for mine, true in zip([*trained[0], trained[1]], [*truth[0], truth[1]], strict=True):
        assert mine.keys() == true.keys()
        scale = max(float(value.abs().max()) for value in true.values())
        worst = [float((mine[name] - value).abs().max()) for name, value in true.items()]
        yield float("inf") if any(error != error for error in worst) else max(worst) / scale  # noqa: PLR0124


def _detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
