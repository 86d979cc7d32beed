"""The loss in the replicas: the value and the gradient of one device, without gathering outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from splittune.config.micro_batches import cut_batch
from splittune.errors import ConfigError
from splittune.hardware import resolve_hardware
from splittune.parallel import BalancedDataParallel, accumulate
from splittune.split import BatchSplit

IGNORED = -100


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 5, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() <= 1e-5 * max(float(other.norm()), 1e-3)


def on_one_device(
    loss_fn: Callable[[Any, Any], Tensor], inputs: Tensor, targets: Tensor
) -> tuple[Tensor, list[Tensor]]:
    model = net()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    return loss.detach(), gradients(model)


@settings(max_examples=40)
@given(
    shards=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), engine=st.sampled_from(["window", "torch"])
)
def test_the_loss_and_its_gradient_are_those_of_one_device(shards: list[int], engine: Any) -> None:
    """For any shard vector the losses, weighted by shard size, are the whole micro-batch's."""
    inputs, targets = batch_of(sum(shards))
    expected, theirs = on_one_device(functional.cross_entropy, inputs, targets)
    model = net()
    wrapped = BalancedDataParallel(
        module=model,
        shard_sizes=shards,
        device_ids=["cpu"] * len(shards),
        loss_fn=functional.cross_entropy,
        engine=engine,
    )
    loss = wrapped(inputs, targets)
    loss.backward()
    assert loss.shape == ()
    assert torch.allclose(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same(gradients(model), theirs)


class ByName(nn.Module):
    """Takes its inputs as keywords, as models that are fed dicts do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        output: Tensor = self.net(x) * scale
        return output


@settings(max_examples=20)
@given(shards=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any))
def test_inputs_may_be_keywords(shards: list[int]) -> None:
    """``model(targets, **inputs)``: for any shard vector the loss and its gradient are those of one device."""
    inputs, targets = batch_of(sum(shards))
    expected, theirs = on_one_device(functional.cross_entropy, inputs, targets)
    model = ByName()
    wrapped = BalancedDataParallel(
        module=model, shard_sizes=shards, device_ids=["cpu"] * len(shards), loss_fn=functional.cross_entropy
    )
    loss = wrapped(targets, x=inputs, scale=1.0)
    loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same(gradients(model), theirs)


@settings(max_examples=30)
@example(sizes=[3, 3, 3], ignored=set(range(5)))  # the first micro-batch, and shards of the second, count nothing
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), ignored=st.sets(st.integers(0, 23)))
def test_a_mean_over_tokens_is_exact_with_a_weight_function(sizes: list[int], ignored: set[int]) -> None:
    """With padding spread unevenly, up to shards and micro-batches of padding alone, it is one device's gradient."""
    inputs, targets = batch_of(sum(sizes))
    targets[[index for index in ignored if index < len(targets) - 1]] = IGNORED
    expected, theirs = on_one_device(functional.cross_entropy, inputs, targets)
    model = net()
    split = BatchSplit.even(global_batch_size=len(inputs), accumulation_steps=len(sizes), num_devices=3)
    wrapped = BalancedDataParallel(
        module=model,
        shard_sizes=split.shard_sizes,
        device_ids=["cpu"] * 3,
        loss_fn=functional.cross_entropy,
        weight_fn=lambda targets: (targets != IGNORED).sum(),
    )
    total = torch.zeros(())
    for micro in accumulate(wrapped, cut_batch((inputs, targets), split, wrapped.weight_of)):
        loss = wrapped(*micro.batch) * micro.weight
        loss.backward()
        total += loss.detach()
    assert torch.allclose(total, expected, rtol=1e-5, atol=1e-6)
    assert_same(gradients(model), theirs)


CALLS: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "dict": lambda model, batch: model(**batch),
    "the tuner's way": lambda model, batch: model(batch["labels"], x=batch["x"]),
    "targets by name": lambda model, batch: model(batch["x"], labels=batch["labels"]),
    "positional": lambda model, batch: model(batch["x"], batch["labels"]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_batches_of_dicts_are_weighed_by_tokens_too(call: Callable[[nn.Module, Any], Tensor]) -> None:
    """However the targets are handed over, and with dicts cut into micro-batches, it is one device's gradient."""
    inputs, targets = batch_of(24)
    targets[[0, 1, 2, 3, 4, 5, 9]] = IGNORED
    expected, theirs = on_one_device(functional.cross_entropy, inputs, targets)
    model = ByName()
    split = BatchSplit.even(global_batch_size=24, accumulation_steps=3, num_devices=3)
    wrapped = BalancedDataParallel(
        module=model,
        shard_sizes=split.shard_sizes,
        device_ids=["cpu"] * 3,
        loss_fn=functional.cross_entropy,
        weight_fn=lambda targets: (targets != IGNORED).sum(),
    )
    batch, total = {"x": inputs, "labels": targets}, torch.zeros(())
    for micro in accumulate(wrapped, cut_batch(batch, split, wrapped.weight_of)):
        loss = call(wrapped, micro.batch) * micro.weight
        loss.backward()
        total += loss.detach()
    assert torch.allclose(total, expected, rtol=1e-5, atol=1e-6)
    assert_same(gradients(model), theirs)


def test_a_loss_with_weights_of_its_own_works_on_every_device() -> None:
    """Class weights, a module's buffer, are copied to each virtual GPU, and stay out of the wrapper's state_dict.

    Such a loss is a mean over the weights of the samples' classes, so these are what `weight_fn` counts.
    """
    inputs, targets = batch_of(9)
    classes = torch.tensor([0.5, 1.0, 2.0, 4.0])
    expected, theirs = on_one_device(nn.CrossEntropyLoss(weight=classes), inputs, targets)
    hardware = resolve_hardware("3xRTX3090")
    split = BatchSplit(global_batch_size=9, accumulation_steps=1, shard_sizes=(2, 3, 4))
    model = net()
    loss_fn = nn.CrossEntropyLoss(weight=classes.clone())
    with hardware.metered():
        wrapped = hardware.wrap(model, split, loss_fn=loss_fn, weight_fn=lambda targets: classes[targets].sum())
        loss = wrapped(inputs, targets)
        loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same(gradients(model), theirs)
    assert set(wrapped.state_dict()) == {f"module.{name}" for name in model.state_dict()}


def test_a_loss_that_learns_gets_its_gradient() -> None:
    """A parameter of the loss, a temperature say, is trained as on one device."""

    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def forward(self, output: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(output / self.temperature, targets)

    inputs, targets = batch_of(8)
    alone, shared = Tempered(), Tempered()
    on_one_device(alone, inputs, targets)
    BalancedDataParallel(2, net(), ["cpu"] * 3, loss_fn=shared)(inputs, targets).backward()
    assert alone.temperature.grad is not None
    assert shared.temperature.grad is not None
    assert torch.allclose(alone.temperature.grad, shared.temperature.grad, rtol=1e-5, atol=1e-6)


def test_no_output_travels() -> None:
    """GPU 0 gathers nothing: over its link go parameters and gradients, and its peak is lower by the outputs."""
    hardware = resolve_hardware("4xRTX3090")
    split = BatchSplit.even(global_batch_size=64, accumulation_steps=1, num_devices=4)
    inputs, targets = torch.randn(64, 16), torch.randint(0, 50_000, (64,))
    peaks, link_bytes = [], []
    for loss_fn in (None, functional.cross_entropy):
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 50_000))
        with hardware.metered():
            wrapped = hardware.wrap(model, split, loss_fn=loss_fn)
            loss = functional.cross_entropy(wrapped(inputs), targets) if loss_fn is None else wrapped(inputs, targets)
            loss.backward()
            peaks.append(hardware.memory()[0].peak_allocated_bytes)
            link_bytes.append(hardware.link_bytes()[0])
    num_output_bytes = 48 * 50_000 * 4
    assert link_bytes[0] - link_bytes[1] > 1.9 * num_output_bytes  # there, and the gradients back
    assert peaks[0] - peaks[1] > 2 * num_output_bytes


def test_misuse_is_told() -> None:
    """Targets left out, a weight that is no number, and a weight without a loss say what was expected."""
    inputs, targets = batch_of(4)
    wrapped = BalancedDataParallel(1, net(), ["cpu"] * 2, loss_fn=functional.cross_entropy)
    with pytest.raises(ConfigError, match=r"called with 1 positional arguments.*model\(inputs, targets\)"):
        wrapped(inputs)
    wrapped = BalancedDataParallel(
        1, net(), ["cpu"] * 2, loss_fn=functional.cross_entropy, weight_fn=lambda targets: "many"
    )
    with pytest.raises(ConfigError, match="weight_fn gave 'many': expected one number"):
        wrapped(inputs, targets)
    with pytest.raises(ConfigError, match=r"expected \(inputs, targets\), or a dict with one of \['labels'"):
        wrapped.weight_of(inputs, 4)
    with pytest.raises(ConfigError, match=r"or targets named one of \['labels'.*loss = model\(\*\*batch\)"):
        wrapped(x=inputs, z=targets)
    with pytest.raises(ConfigError, match="weight_fn is given without loss_fn"):
        BalancedDataParallel(1, net(), ["cpu"] * 2, weight_fn=len)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_a_weight_that_cannot_weigh_is_refused(weight: Any) -> None:
    """A weight that is negative, infinite or no number at all is refused, in the loop and in the wrapper."""
    inputs, targets = batch_of(4)
    wrapped = BalancedDataParallel(
        1, net(), ["cpu"] * 2, loss_fn=functional.cross_entropy, weight_fn=lambda targets: weight
    )
    split = BatchSplit.even(global_batch_size=4, accumulation_steps=2, num_devices=2)
    for refused in (lambda: wrapped(inputs, targets), lambda: cut_batch((inputs, targets), split, wrapped.weight_of)):
        with pytest.raises(
            ConfigError, match=f"weight_fn gave {float(weight)}: expected a finite number of at least 0"
        ):
            refused()


def test_a_batch_that_weighs_nothing_is_refused() -> None:
    """Where weight_fn gives 0 for all of a batch there is nothing to learn from, and it says so."""
    wrapped = BalancedDataParallel(1, net(), ["cpu"] * 2, loss_fn=functional.cross_entropy, weight_fn=lambda targets: 0)
    split = BatchSplit.even(global_batch_size=4, accumulation_steps=2, num_devices=2)
    with pytest.raises(ConfigError, match="the batch counts 0 by weight_fn: expected more"):
        cut_batch(batch_of(4), split, wrapped.weight_of)


def test_a_copy_of_the_wrapper_keeps_its_loss() -> None:
    """deepcopy gives a wrapper that computes the same loss."""
    inputs, targets = batch_of(6)
    wrapped = BalancedDataParallel(2, net(), ["cpu"] * 2, loss_fn=functional.cross_entropy)
    assert torch.equal(copy.deepcopy(wrapped)(inputs, targets), wrapped(inputs, targets))
