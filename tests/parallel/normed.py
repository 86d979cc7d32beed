"""Models with BatchNorm of every kind, and one device that trains them micro-batch by micro-batch to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.models import gradients, loss_of

CHANNELS = 4


class Twice(nn.Module):
    """One layer that is called twice, on maps of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.norm(x))[:, :, 1:] * 2)


class Sequences(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(2))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm3d(CHANNELS, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(3, (2, 2)))


def frozen() -> nn.Module:
    norm = nn.BatchNorm2d(CHANNELS)
    norm.weight.requires_grad_(False)
    return norm


NORMS: dict[str, Callable[[], nn.Module]] = {
    "2d": lambda: nn.BatchNorm2d(CHANNELS),
    "1d": lambda: Sequences(nn.BatchNorm1d(CHANNELS)),
    "3d": Volumes,
    "cumulative": lambda: nn.BatchNorm2d(CHANNELS, momentum=None),
    "not affine": lambda: nn.BatchNorm2d(CHANNELS, affine=False, momentum=0.3),
    "without running statistics": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "frozen scale": frozen,
    "in evaluation": lambda: nn.BatchNorm2d(CHANNELS).eval(),
    "called twice": Twice,
    "two in a row": lambda: nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.Tanh(), nn.BatchNorm2d(CHANNELS)),
    "on the inputs": nn.Identity,
}


class Checkpointed(nn.Module):
    """Its forward runs again in backward, and with it the running statistics are updated again, as on one device."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.Tanh(), nn.BatchNorm2d(CHANNELS))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.body, x, use_reentrant=self.use_reentrant)
        return out


CHECKPOINTED: dict[str, Callable[[], nn.Module]] = {
    "checkpointed": lambda: Checkpointed(use_reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(use_reentrant=True),
}
"""Where replicas of one process would have to wait in a backward that has one thread for all; ranks have their own."""


class Net(nn.Module):
    """Convolutions around the norm; of the images' channels two have means far larger than their variances."""

    def __init__(self, norm: nn.Module, *, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Identity() if first is None else first
        self.conv = nn.Conv2d(2, CHANNELS, 3, bias=False)
        self.norm = norm
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sigmoid(self.norm(self.conv(self.first(x)))).flatten(1))


def make(name: str, dtype: torch.dtype = torch.float64, memory_format: torch.memory_format | None = None) -> nn.Module:
    """The same one every time."""
    torch.manual_seed(0)
    model = Net((NORMS | CHECKPOINTED)[name](), first=nn.BatchNorm2d(2) if name == "on the inputs" else None)
    was_training = [module.training for module in model.modules()]
    model.eval()(images(2, torch.float32))  # the lazy layer takes its shape
    with torch.no_grad():
        for module, mode in zip(model.modules(), was_training, strict=True):
            module.training = mode
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model = model.to(dtype)
    return model if memory_format is None else model.to(memory_format=memory_format)


def images(num_samples: int, dtype: torch.dtype = torch.float64) -> Tensor:
    shift = torch.tensor([3.0, 0.0]).reshape(2, 1, 1)
    return (torch.randn(num_samples, 2, 6, 6) + shift + torch.randn(num_samples, 1, 1, 1)).to(dtype)


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Its buffers, the numbers of batches among them as floats."""
    named = model.named_buffers()
    return {name: buffer.clone() if buffer.is_floating_point() else buffer.double() for name, buffer in named}


def state_after(model: nn.Module, batch: Tensor, micros: Iterable[tuple[nn.Module, Tensor]]) -> dict[str, Tensor]:
    """Gradients, buffers and the gradient of the inputs after one step: `micros` gives modules to call and parts."""
    batch.grad = None
    outputs = []
    for module, part in micros:
        output = module(part)
        outputs.append(output.detach())
        (loss_of(output) * (len(part) / len(batch))).backward()
    state = {f"gradient of {name}": grad for name, grad in gradients(model).items() if grad is not None}
    state.update(statistics_of(model))
    assert batch.grad is not None
    return {**state, "outputs": torch.cat(outputs), "gradient of the inputs": batch.grad.clone()}


def one_device(model: nn.Module, batch: Tensor, sizes: Sequence[int]) -> dict[str, Tensor]:
    """That of one device that accumulates: it normalises each micro-batch by itself."""
    parts = batch.requires_grad_().split(list(sizes))
    return state_after(model, batch, ((model, part) for part in parts))
