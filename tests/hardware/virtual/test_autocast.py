from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn import functional

from splittune.hardware import resolve_hardware
from splittune.hardware.virtual.allocator import CachingAllocator
from splittune.hardware.virtual.autocast import cuda_autocast
from splittune.split import BatchSplit

HALF = torch.bfloat16


def half(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=HALF, requires_grad=True)


def targets(num: int) -> Tensor:
    return torch.zeros(num, dtype=torch.long)


CALLS: dict[str, tuple[Callable[[], Tensor], torch.dtype]] = {
    "layer_norm": (lambda: functional.layer_norm(half(2, 8), (8,)), torch.float32),
    "layer_norm, weight": (lambda: nn.LayerNorm(8)(half(2, 8)), torch.float32),
    "group_norm": (lambda: functional.group_norm(half(2, 8, 3), 4), torch.float32),
    "softmax": (lambda: functional.softmax(half(2, 8), -1), torch.float32),
    "log_softmax": (lambda: half(2, 8).log_softmax(-1), torch.float32),
    "cross_entropy": (lambda: functional.cross_entropy(half(2, 8), targets(2)), torch.float32),
    "nll_loss": (lambda: functional.nll_loss(half(2, 8), targets(2)), torch.float32),
    "mse_loss": (lambda: functional.mse_loss(half(2, 8), half(2, 8)), torch.float32),
    "pow": (lambda: half(2, 8).pow(2), torch.float32),
    "**": (lambda: half(2, 8) ** 2.0, torch.float32),
    "exp": (lambda: half(2, 8).exp(), torch.float32),
    "rsqrt": (lambda: half(2, 8).rsqrt(), torch.float32),
    "sum": (lambda: half(2, 8).sum(-1), torch.float32),
    "sum of all": (lambda: half(2, 8).sum(), torch.float32),
    "sum, dtype": (lambda: half(2, 8).sum(dtype=HALF), HALF),
    "cumsum": (lambda: half(2, 8).cumsum(0), torch.float32),
    "vector norm": (lambda: torch.linalg.vector_norm(half(2, 8)), torch.float32),
    "interpolate": (lambda: functional.interpolate(half(1, 2, 4, 4), scale_factor=2.0, mode="bilinear"), torch.float32),
    "mv": (lambda: torch.mv(torch.ones(2, 8), torch.ones(8)), HALF),
    "linear": (lambda: functional.linear(torch.ones(2, 8), torch.ones(4, 8)), HALF),
    "einsum": (lambda: torch.einsum("ij,kj->ik", torch.ones(2, 8), torch.ones(4, 8)), HALF),
    "conv2d": (lambda: functional.conv2d(torch.ones(1, 2, 4, 4), torch.ones(3, 2, 1, 1)), HALF),
    "batch_norm": (lambda: nn.BatchNorm1d(8)(half(2, 8)), HALF),
    "gelu": (lambda: functional.gelu(half(2, 8)), HALF),
    "mean": (lambda: half(2, 8).mean(-1), HALF),
    "cat": (lambda: torch.cat([half(2, 8), torch.ones(2, 8)]), torch.float32),
    "dot": (lambda: torch.dot(half(8), torch.ones(8)), torch.float32),
    "softmax of double": (lambda: functional.softmax(torch.ones(2, 8, dtype=torch.double), -1), torch.double),
}


@pytest.mark.parametrize("name", CALLS)
def test_dtype_is_that_of_cuda(name: str) -> None:
    """What an operation gives under the CPU's autocast is in the precision that torch documents for CUDA's."""
    call, dtype = CALLS[name]
    with cuda_autocast(), torch.autocast("cpu", HALF):
        assert call().dtype == dtype


def test_the_cpus_own_autocast_comes_back() -> None:
    """The inner of two does not end it, and after the outer one the CPU casts as ever."""
    calls = [call for name, (call, _) in CALLS.items() if name not in ("mv", "dot")]  # unlike types raise on the CPU
    with torch.autocast("cpu", HALF):
        before = [call().dtype for call in calls]
        with cuda_autocast():
            with cuda_autocast():
                pass
            assert functional.layer_norm(half(2, 8), (8,)).dtype == torch.float32
        assert [call().dtype for call in calls] == before
        assert functional.layer_norm(half(2, 8), (8,)).dtype == HALF


def test_nothing_changes_without_autocast() -> None:
    """Half precision stays half precision where no autocast is on."""
    with cuda_autocast():
        assert functional.softmax(half(2, 8), -1).dtype == functional.layer_norm(half(2, 8), (8,)).dtype == HALF


@pytest.mark.parametrize("function", [functional.softmax, functional.log_softmax])
def test_softmax_has_its_gradient(function: Callable[..., Tensor]) -> None:
    """Values and gradient are those of a softmax in float32; the gradient is in half precision."""
    torch.manual_seed(0)
    values, weights = torch.randn(4, 8).to(HALF), torch.randn(4, 8)
    inputs = [values.clone().requires_grad_(), values.float().requires_grad_()]
    with cuda_autocast(), torch.autocast("cpu", HALF):
        ours = function(inputs[0], -1)
        (ours * weights).sum().backward()
    expected = function(inputs[1], -1)
    (expected * weights).sum().backward()
    assert inputs[0].grad is not None
    assert inputs[0].grad.dtype == HALF
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(inputs[0].grad.float(), inputs[1].grad, rtol=1e-2, atol=1e-2)


class Attention(nn.Module):
    """A transformer's block of one head, with attention as three operations."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out((query @ key.transpose(-2, -1)).softmax(-1) @ value)


class Residual(nn.Module):
    """A residual network's block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)) + x)


def saved(module: nn.Module, x: Tensor) -> Counter[tuple[torch.dtype, int]]:
    """Dtype and number of elements of each storage that is kept for the gradient, the module's own left out."""
    found: dict[int, Tensor] = {}
    own = {id(tensor.untyped_storage()) for tensor in (*module.parameters(), *module.buffers())}

    def note(tensor: Tensor) -> Tensor:
        if id(tensor.untyped_storage()) not in own:
            found[id(tensor.untyped_storage())] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, cuda_autocast(), torch.autocast("cpu", HALF):
        module(x)
    return Counter(
        (tensor.dtype, tensor.untyped_storage().nbytes() // tensor.element_size()) for tensor in found.values()
    )


def test_a_transformer_block_keeps_what_cuda_keeps() -> None:
    """What autograd saves of a block of 3 x 8 x 16 numbers in half precision, from its rules under CUDA's autocast."""
    tokens, maps = 3 * 8 * 16, 3 * 8 * 8
    assert saved(Attention(), half(3, 8, 16)) == Counter(
        {
            (torch.float32, tokens): 1,  # the input of layer_norm, cast
            (torch.float32, 3 * 8): 2,  # its mean and deviation
            (HALF, tokens): 2,  # the input of qkv, cast from float32; the input of out
            (HALF, 3 * tokens): 1,  # queries, keys and values: operands of both products
            (torch.float32, maps): 1,  # what softmax gives
            (HALF, maps): 1,  # its cast, an operand of the second product
            (HALF, 3 * 16 * 16): 1,  # the weights, cast
            (HALF, 16 * 16): 1,
        }
    )


def test_a_residual_block_keeps_what_cuda_keeps() -> None:
    """Convolution and batch_norm stay in half precision: one copy each, the cast weight and two float32 figures."""
    pixels = 2 * 16 * 4 * 4
    assert saved(Residual(), half(2, 16, 4, 4)) == Counter(
        {
            (HALF, pixels): 3,  # the inputs of convolution and of batch_norm; what ReLU gives
            (HALF, 16 * 16 * 9): 1,  # the weight, cast
            (torch.float32, 16): 2,  # mean and deviation of the batch
        }
    )


def test_fake_equals_real_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations in order and modelled time of a step under autocast, on shapes and on values."""
    model, batch = Attention(), torch.ones(2, 8, 16)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        copied = copy.deepcopy(model)
    real = allocations_of(model, batch, monkeypatch)
    with mode:
        assert allocations_of(copied, mode.from_tensor(batch), monkeypatch) == real
    assert len(real) > 20


def allocations_of(model: nn.Module, batch: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    hardware = resolve_hardware("1xRTX3090")
    sizes: list[float] = []
    allocate = CachingAllocator.allocate

    def noted(self: CachingAllocator, num_bytes: int) -> object:
        sizes.append(num_bytes)
        return allocate(self, num_bytes)

    with monkeypatch.context() as patched, hardware.metered():
        patched.setattr(CachingAllocator, "allocate", noted)
        wrapped = hardware.wrap(model, BatchSplit(global_batch_size=2, accumulation_steps=1, shard_sizes=(2,)))
        with torch.autocast("cpu", HALF):
            loss = wrapped(batch).softmax(-1).sum()
        loss.backward()
        return [*sizes, hardware.clock()]
