"""BalancedDataParallel on a card: one that is named three times is enough for the whole path."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

from splittune.cards import module_of
from splittune.hardware import is_out_of_memory
from splittune.parallel import BalancedDataParallel
from splittune.units import GIB
from tests.parallel.models import MODELS, Call, assert_same, gradients, mlp, train, vectors, whole_batch

pytestmark = [pytest.mark.gpu, pytest.mark.standin]


@pytest.fixture(autouse=True)
def exact_float32():
    """TF32 would round matrix products to ten bits, in another order for every shard."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def capped(card):
    """The process may take 1 GiB more than it holds."""
    module = module_of(card)
    torch.zeros(1, device=card)
    gc.collect()  # what other tests left in cycles must not go meanwhile
    module.empty_cache()
    total_bytes = module.get_device_properties(card).total_memory
    module.set_per_process_memory_fraction((module.memory_reserved(card) + 1 * GIB) / total_bytes, card)
    yield
    module.set_per_process_memory_fraction(1.0, card)
    module.empty_cache()


@pytest.fixture
def wrap(card):
    """Wraps a module on the card, which is named as often as there are shards."""

    def wrapped(module: nn.Module, *shard_sizes: int, **options) -> BalancedDataParallel:
        devices = [0] * len(shard_sizes)
        return BalancedDataParallel(module=module.to(card), shard_sizes=shard_sizes, device_ids=devices, **options)

    return wrapped


@pytest.mark.parametrize("shards", [(2, 3, 2), (0, 4, 3), (5, 1, 1), (0, 0, 7)])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_whole_batchs(card, wrap, name, shards):
    """On one card named three times gradients are those of the whole batch, accumulation and a short batch included."""
    torch.manual_seed(0)
    build, draw_inputs = MODELS[name]
    model, batch = build().to(card), draw_inputs(16).to(card)
    expected = whole_batch(model, batch)
    # kernels are chosen by shape, so sums are rounded in another order than on the CPU
    assert_same(train(wrap(model, *shards), batch, [7, 7, 2]), expected, tolerance=5e-5)


def test_inputs_may_come_from_the_host(wrap):
    """Each card is sent its own part of a batch in host memory, and gradients go back there complete."""
    torch.manual_seed(0)
    model, batch = mlp(), vectors(6)
    x, mine = batch.clone().requires_grad_(), batch.clone().requires_grad_()
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    wrap(model, 1, 2, 3)(mine).square().mean().backward()
    assert mine.grad.device.type == "cpu"
    assert_same({"x": mine.grad}, {"x": x.grad}, tolerance=5e-5)
    got = {name: None if grad is None else grad.cpu() for name, grad in gradients(model).items()}
    assert_same(got, gradients(plain), tolerance=5e-5)


def test_outputs_on_the_host_have_arrived(card, wrap):
    """With output_device="cpu" what is returned can be read at once: the copy is over, however busy the card is."""

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            module_of(card)._sleep(50_000_000)
            return x + 1

    x = torch.arange(3 * 2**20, device=card)
    for shards in ((2**20, 2**20, 2**20), (0, 3 * 2**20, 0)):
        output = wrap(Slow(), *shards, output_device="cpu")(x)
        assert output.device.type == "cpu"
        assert torch.equal(output, torch.arange(1, 3 * 2**20 + 1))


def test_replicas_run_in_threads_with_the_callers_autocast(card, wrap):
    """In every replica's thread autocast has the caller's dtype, and the card is the current device."""
    found = []

    def forward(module: Call, x: Tensor) -> Tensor:
        kind = card.type
        found.append(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), module_of(card).current_device())
        )
        return x @ x.T.mean(1, keepdim=True) * module.scale

    with torch.autocast(card.type, torch.bfloat16):
        output = wrap(Call(forward), 1, 2, 3)(torch.ones(6, 4, device=card))
    assert found == [(True, torch.bfloat16, 0)] * 3
    assert output.dtype == torch.bfloat16


def test_autocast_gradients_are_float32_and_close(card, wrap):
    """Under bf16 autocast gradients are float32, and those of one device to bf16's precision."""
    torch.manual_seed(0)
    model, batch = mlp().to(card), vectors(7).to(card)
    with torch.autocast(card.type, torch.bfloat16):
        expected = whole_batch(model, batch)
        got = train(wrap(model, 1, 4, 2), batch, [7])
    assert_same(got, expected, tolerance=3e-2)


def test_an_error_keeps_its_type_and_names_the_device(card, wrap):
    """A replica's own error arrives from its thread as it was raised."""

    class OwnError(Exception):
        def __init__(self, code: int, text: str) -> None:
            super().__init__(code, text)
            self.code = code

    def forward(module: Call, x: Tensor) -> Tensor:
        raise OwnError(7, "boom") if len(x) == 2 else ValueError("boom")

    with pytest.raises(OwnError) as caught:
        wrap(Call(forward), 2, 1)(torch.ones(3, device=card))
    assert caught.value.code == 7
    with pytest.raises(ValueError, match=rf"boom \(in replica 0 on device {card}, a shard of 1 samples\)"):
        wrap(Call(forward), 1, 2)(torch.ones(3, device=card))


def test_an_oom_in_a_replica_is_recognised_and_leaves_nothing(card, wrap, capped):
    """A replica that exceeds the card raises what is_out_of_memory knows; its memory is free once that is dropped."""

    def forward(module: Call, x: Tensor) -> Tensor:
        kept = [torch.empty(64 * 2**20, dtype=torch.uint8, device=x.device) for _ in range(8 * len(x))]
        return x * module.scale + len(kept)

    model = wrap(Call(forward), 1, 2, 3)
    x = torch.ones(6, device=card)
    before = module_of(card).memory_allocated(card)
    with pytest.raises(torch.OutOfMemoryError, match=rf"in replica \d on device {card}") as caught:
        model(x)
    assert is_out_of_memory(caught.value)
    del caught
    assert module_of(card).memory_allocated(card) == before


def test_statistics_advance_without_gpu0(card):
    """With gpu0_bsz=0 BatchNorm's running statistics on the first card are those of the first active replica."""
    torch.manual_seed(0)
    model = nn.BatchNorm1d(6).to(card)
    alone = copy.deepcopy(model)
    batch = vectors(8).to(card)
    alone(batch[:4])
    BalancedDataParallel(0, model, [0, 0, 0])(batch)
    torch.testing.assert_close(model.state_dict(), alone.state_dict())
