"""Models of many kinds for the gradient tests, and the whole batch on one device to compare them with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812  as everybody writes it
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from splittune.parallel import TorchLink

CPU = torch.device("cpu")
WIDTH = 6
VOCABULARY = 11


class ThreadedLink(TorchLink):
    """The CPU as often as asked for, with a thread for every replica as on CUDA devices."""

    def __init__(self, num_devices: int) -> None:
        super().__init__([CPU] * num_devices)
        self.threaded = True


class Call(nn.Module):
    """A module whose forward is a function of the module and the arguments; `scale` is its one parameter, 1."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        images = x.reshape(-1, 2, 6, 6)
        return self.head(torch.tanh(self.norm(self.conv(images))).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(hidden[:, -1])


class TiedTransformer(nn.Module):
    """Input and output embeddings are one parameter; the mask is a buffer."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1), persistent=False)
        self.use_reentrant = use_reentrant

    def block(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + torch.softmax(q @ k.transpose(1, 2) / 3 + self.mask, -1) @ v

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = self.block(x) if self.use_reentrant is None else self.checkpointed(x)
        return self.head(x)

    def checkpointed(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return hidden


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 3 for _ in range(3)])
        self.heads = nn.ParameterDict({"a": torch.randn(WIDTH, 2), "b": torch.randn(WIDTH, 3)})

    def forward(self, x: Tensor) -> Tensor:
        first = next(self.parameters())
        for weight in self.weights:
            x = torch.tanh(x.to(first.dtype) @ weight)
        return torch.cat([x @ head for head in self.heads.values()], -1)


class Odd(nn.Module):
    """Parameters that travel in no common bucket or in an empty one, and buffers that learn or overlap themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(3, WIDTH).t())
        self.strided = nn.Parameter(torch.randn(WIDTH, 6)[:, ::2])
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.rotation = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("learned", torch.randn(3).requires_grad_())
        self.register_buffer("constant", torch.tensor([2.0]).expand(3))
        self.register_buffer("absent", None)
        self.register_parameter("missing", None)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ (self.transposed + self.strided) * self.scalar + self.learned * self.constant
        return y * (y * self.rotation).abs() + self.empty.sum()


class FastWeights(nn.Module):
    """Calls its child with other parameters than the child's own, as meta-learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        fast = {name: 2 * parameter + 0.1 for name, parameter in self.child.named_parameters()}
        slow: Tensor = self.child(x)
        quick: Tensor = functional_call(self.child, fast, (x,))
        return slow * torch.tanh(quick)


class Sparse(nn.Module):
    """Some samples need the table's gradient sparse, others dense."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.plain = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) if tokens[0, 0] % 2 else F.embedding(tokens, self.table.weight)
        return x * self.plain(tokens)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def unused() -> nn.Module:
    model = mlp()
    model.never_called = nn.Linear(3, 3)
    return model


def reparametrized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older one is deprecated and in wide use
        older = weight_norm(nn.Linear(WIDTH, 8))
    newer = parametrizations.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(older, nn.Tanh(), newer, parametrizations.orthogonal(nn.Linear(8, 3)))


def vectors(num_samples: int) -> Tensor:
    return torch.randn(num_samples, WIDTH)


def images(num_samples: int) -> Tensor:
    return torch.randn(num_samples, 72)


def tokens(num_samples: int) -> Tensor:
    return torch.randint(VOCABULARY, (num_samples, 5))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (mlp, vectors),
    "conv and group norm": (ConvNet, images),
    "lstm": (Recurrent, tokens),
    "tied transformer": (TiedTransformer, tokens),
    "checkpointed": (lambda: TiedTransformer(use_reentrant=False), tokens),
    "checkpointed, reentrant": (lambda: TiedTransformer(use_reentrant=True), tokens),
    "parameter lists": (Lists, vectors),
    "weight norm and parametrizations": (reparametrized, vectors),
    "odd parameters": (Odd, vectors),
    "fast weights": (FastWeights, vectors),
    "sparse embedding": (Sparse, tokens),
    "frozen parameters": (frozen, vectors),
    "unused parameters": (unused, vectors),
    "traced by fx": (lambda: torch.fx.symbolic_trace(Scaled()), vectors),
}


def loss_of(output: Tensor) -> Tensor:
    """A mean over samples that no output leaves out, and whose gradient no two outputs share."""
    flat = output.flatten(1)
    slope = torch.linspace(-1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return (flat.square() + flat * slope).sum(1).mean()


def train(model: nn.Module, batch: Tensor, micro_batch_sizes: Sequence[int]) -> dict[str, Tensor | None]:
    """The gradients of one step: micro-batches of these sizes, each weighted by its size."""
    model.zero_grad(set_to_none=True)
    edges = [sum(micro_batch_sizes[:index]) for index in range(len(micro_batch_sizes) + 1)]
    for start, stop in pairwise(edges):
        (loss_of(model(batch[start:stop])) * ((stop - start) / len(batch))).backward()
    return gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Of parameters and buffers that hold them, under the names of the model itself; a buffer that moved does not."""
    inner = model.unwrap() if hasattr(model, "unwrap") else model
    named: Iterable[tuple[str, Tensor]] = (*inner.named_parameters(), *inner.named_buffers())
    return {name: tensor.grad for name, tensor in named if tensor.requires_grad and tensor.is_leaf}


def whole_batch(model: nn.Module, batch: Tensor) -> dict[str, Tensor | None]:
    """The gradients of the whole batch at once on one device, without the wrapper; `model` keeps none of them."""
    wanted = train(model, batch, [len(batch)])
    model.zero_grad(set_to_none=True)
    for buffer in model.buffers():
        buffer.grad = None
    return wanted


def assert_same(
    got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], tolerance: float = 1e-5
) -> None:
    """Relative error of every tensor, by its norm; None equals None alone."""
    assert got.keys() == expected.keys()
    for name, right in expected.items():
        left = got[name]
        assert (left is None) == (right is None), f"{name}: one gradient is missing"
        if left is None or right is None:
            continue
        mine, wanted = left.detach().to_dense(), right.detach().to_dense()
        assert mine.shape == wanted.shape
        assert mine.dtype == wanted.dtype
        error = torch.linalg.vector_norm(mine - wanted)
        assert error <= tolerance * torch.linalg.vector_norm(wanted), f"{name}: {mine} is not {wanted}"
