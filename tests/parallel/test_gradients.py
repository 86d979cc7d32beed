"""Promise 1: any split gives the gradient of the whole batch on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from splittune.hardware import resolve_hardware
from splittune.parallel import BalancedDataParallel
from splittune.split import BatchSplit
from tests.parallel.models import (
    MODELS,
    TiedTransformer,
    assert_same,
    gradients,
    loss_of,
    mlp,
    tokens,
    train,
    vectors,
    whole_batch,
)
from tests.parallel.wrapped import in_threads, make, on_the_cpu, steps

Wrap = Callable[..., BalancedDataParallel]


@pytest.mark.parametrize("wrap", [on_the_cpu, in_threads])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=30, deadline=None)
@given(step=steps())
def test_gradients_are_the_whole_batchs(name: str, wrap: Wrap, step: tuple[tuple[int, ...], list[int]]) -> None:
    """Whatever the shards, the accumulation steps and the short batches, gradients are those of one device."""
    shard_sizes, micro_batch_sizes = step
    model, batch = make(name, sum(micro_batch_sizes))
    expected = whole_batch(model, batch)
    assert_same(train(wrap(model, shard_sizes), batch, micro_batch_sizes), expected)


@settings(max_examples=30, deadline=None)
@given(step=steps(), name=st.sampled_from(["mlp", "conv and group norm", "weight norm and parametrizations"]))
def test_in_double_precision_next_to_nothing_differs(name: str, step: tuple[tuple[int, ...], list[int]]) -> None:
    """The error is one of rounding: in float64 it shrinks with the precision."""
    shard_sizes, micro_batch_sizes = step
    model, batch = make(name, sum(micro_batch_sizes))
    model, batch = model.double(), batch.double()
    expected = whole_batch(model, batch)
    assert_same(train(on_the_cpu(model, shard_sizes), batch, micro_batch_sizes), expected, tolerance=1e-13)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_devices=st.integers(1, 4))
def test_gpu0_bsz_changes_no_gradient(data: st.DataObject, num_devices: int) -> None:
    """GPU 0's share may be none, smaller, equal, larger or all: also through the short batches that follow."""
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    sizes.sort(reverse=True)  # as epochs end: the largest first
    gpu0_bsz = data.draw(st.integers(0, sizes[0])) if num_devices > 1 else sizes[0]
    model, batch = make("mlp", sum(sizes))
    expected = whole_batch(model, batch)
    assert_same(train(BalancedDataParallel(gpu0_bsz, model, ["cpu"] * num_devices), batch, sizes), expected)


@pytest.mark.parametrize("metered", [False, True], ids=["unmetered", "metered"])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=10, deadline=None)
@given(step=steps(num_devices=4))
def test_virtual_gpus_give_the_same_gradients(
    name: str, metered: bool, step: tuple[tuple[int, ...], list[int]]
) -> None:
    """On virtual GPUs, with the meter running or not, gradients are those of one device."""
    shard_sizes, micro_batch_sizes = step
    model, batch = make(name, sum(micro_batch_sizes))
    expected = whole_batch(model, batch)
    hardware = resolve_hardware("4xRTX3090")
    split = BatchSplit(global_batch_size=sum(shard_sizes), accumulation_steps=1, shard_sizes=shard_sizes)
    with hardware.metered() if metered else nullcontext():
        got = train(hardware.wrap(model, split), batch, micro_batch_sizes)
    assert_same(got, expected)


@pytest.mark.parametrize("wrap", [on_the_cpu, in_threads])
@settings(max_examples=20, deadline=None)
@given(step=steps())
def test_inputs_get_their_gradients(wrap: Wrap, step: tuple[tuple[int, ...], list[int]]) -> None:
    """What is fed in, a leaf or the output of something else, gets the gradient it gets on one device."""
    shard_sizes, sizes = step
    model, batch = make("mlp", sizes[0])
    leaf = batch.clone().requires_grad_()
    loss_of(copy.deepcopy(model)(leaf * 2)).backward()
    mine = batch.clone().requires_grad_()
    loss_of(wrap(model, shard_sizes)(mine * 2)).backward()
    assert_same({"x": mine.grad}, {"x": leaf.grad})
    assert mine.is_leaf


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """A gradient penalty by inputs and by parameters, for models that are differentiated twice."""
    loss = loss_of(model(x))
    wanted = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    slopes = torch.autograd.grad(loss, wanted, create_graph=True)
    return loss + sum(slope.square().sum() for slope in slopes)


@pytest.mark.parametrize("wrap", [on_the_cpu, in_threads])
@settings(max_examples=20, deadline=None)
@given(step=steps())
def test_gradients_can_be_differentiated_again(wrap: Wrap, step: tuple[tuple[int, ...], list[int]]) -> None:
    """Double backward, through inputs and through parameters, is that of one device with torch's own replication."""
    shard_sizes, sizes = step
    model, batch = make("mlp", sizes[0])
    x, mine = batch.clone().requires_grad_(), batch.clone().requires_grad_()
    plain = copy.deepcopy(model)
    penalised(plain, x).backward()
    penalised(wrap(model, shard_sizes, engine="torch"), mine).backward()
    assert_same(gradients(model) | {"x": mine.grad}, gradients(plain) | {"x": x.grad}, tolerance=2e-5)


def test_gradients_can_be_differentiated_again_on_virtual_gpus() -> None:
    """The second backward pass finds every tensor on the virtual GPU it belongs to."""
    model, batch = make("mlp", 8)
    x, mine = batch.clone().requires_grad_(), batch.clone().requires_grad_()
    plain = copy.deepcopy(model)
    penalised(plain, x).backward()
    hardware = resolve_hardware("4xRTX3090")
    split = BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(0, 3, 3, 2))
    with hardware.metered():
        penalised(hardware.wrap(model, split, engine="torch"), mine).backward()
    assert_same(gradients(model) | {"x": mine.grad}, gradients(plain) | {"x": x.grad}, tolerance=2e-5)


@pytest.mark.parametrize("wrap", [on_the_cpu, in_threads])
@settings(max_examples=20, deadline=None)
@given(step=steps(), with_loss=st.booleans())
def test_a_gradient_penalty_on_inputs_needs_no_other_engine(
    wrap: Wrap, step: tuple[tuple[int, ...], list[int]], with_loss: bool
) -> None:
    """A penalty on the slope by the inputs, with the loss or alone, gives the parameters the
    gradients of one device."""
    shard_sizes, sizes = step
    model, batch = make("mlp", sizes[0])
    plain = copy.deepcopy(model)
    for each in (plain, wrap(model, shard_sizes)):
        x = batch.clone().requires_grad_()
        loss = loss_of(each(x))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = slope.square().sum()
        (loss + penalty if with_loss else penalty).backward()
    expected = gradients(plain)
    if not with_loss:  # the last bias has no part in any slope: on one device it may hold zeros, or nothing
        expected = {name: grad for name, grad in expected.items() if grad is not None and grad.any()}
    assert_same({name: gradients(model)[name] for name in expected}, expected, tolerance=2e-5)


@settings(max_examples=20, deadline=None)
@given(step=steps())
def test_the_same_tensor_may_be_given_twice(step: tuple[tuple[int, ...], list[int]]) -> None:
    """An input that is passed in two places gets the sum of both gradients."""
    shard_sizes, sizes = step
    batch = vectors(sizes[0]).requires_grad_()

    class Twice(nn.Module):
        def forward(self, left: Tensor, *, right: Tensor) -> Tensor:
            return left * right.sin()

    on_the_cpu(Twice(), shard_sizes)(batch, right=batch).sum().backward()
    x = batch.detach()
    assert_same({"x": batch.grad}, {"x": x.sin() + x * x.cos()})


def test_a_hook_on_a_parameter_sees_the_whole_gradient_once() -> None:
    """A hook that clips or logs runs once a backward pass, with the gradient of the whole micro-batch."""
    model, batch = make("mlp", 7)
    expected = whole_batch(model, batch)
    seen: list[Tensor] = []
    accumulated: list[Tensor] = []
    model[0].weight.register_hook(seen.append)
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: accumulated.append(parameter.grad.clone()))
    train(on_the_cpu(model, (1, 2, 4)), batch, [7])
    assert len(seen) == len(accumulated) == 1
    assert_same({"0.weight": seen[0]}, {"0.weight": expected["0.weight"]})
    assert torch.equal(seen[0], accumulated[0])


def test_backward_may_run_twice_through_one_graph() -> None:
    """With retain_graph the gradients of a second backward pass add to those of the first."""
    model, batch = make("mlp", 5)
    expected = whole_batch(model, batch)
    loss = loss_of(on_the_cpu(model, (2, 3))(batch))
    loss.backward(retain_graph=True)
    loss.backward()
    got = gradients(model)
    assert_same(got, {name: None if grad is None else 2 * grad for name, grad in expected.items()})


def test_a_parameter_given_as_input_gets_its_gradient_too() -> None:
    """A learned tensor with one row a sample is split like any input, and learns from every shard."""
    model, _ = make("mlp", 1)
    prompts = nn.Parameter(vectors(5))
    loss_of(on_the_cpu(model, (1, 4))(prompts)).backward()
    plain = nn.Parameter(prompts.detach().clone())
    loss_of(copy.deepcopy(model)(plain)).backward()
    assert_same({"prompts": prompts.grad}, {"prompts": plain.grad})


def test_new_weights_are_used_at_once() -> None:
    """Weights changed in place, or loaded, between two calls are those of the next call on every device."""
    model, batch = make("mlp", 6)
    wrapped = on_the_cpu(model, (1, 2, 3))
    wrapped(batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    torch.testing.assert_close(wrapped(batch), model(batch))


def test_training_follows_the_same_path_as_on_one_device() -> None:
    """Ten optimizer steps of two micro-batches each leave the weights where one device leaves them."""
    torch.manual_seed(0)
    plain: Any = TiedTransformer().double()
    wrapped = on_the_cpu(copy.deepcopy(plain), (1, 3, 3))
    ours = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(10):
        batch = tokens(11)
        train(wrapped, batch, [6, 5])
        train(plain, batch, [11])
        ours.step()
        theirs.step()
    assert_same(dict(wrapped.unwrap().named_parameters()), dict(plain.named_parameters()), tolerance=1e-9)


def test_mlp_is_split_as_asked() -> None:
    """The gradient tests do split: a counter on each replica sees the shard, not the whole batch."""
    sizes: list[int] = []
    model = mlp()
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    on_the_cpu(model, (1, 0, 2, 4))(vectors(7))
    assert sizes == [1, 2, 4]
