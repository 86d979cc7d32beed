"""The window engine: over any window of micro-batches, gradients, hooks and buffers are those of one device."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from splittune.hardware import resolve_hardware
from splittune.parallel import BalancedDataParallel, accumulate
from splittune.parallel.data_parallel import Engine
from splittune.split import BatchSplit
from tests.parallel.models import MODELS, Call, assert_same, gradients, loss_of, mlp, vectors, whole_batch
from tests.parallel.wrapped import in_threads, make, on_the_cpu, steps, window

Step = tuple[tuple[int, ...], list[int]]


@pytest.mark.parametrize("wrap", [on_the_cpu, in_threads])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15, deadline=None)
@given(step=steps())
def test_a_windows_gradients_are_the_whole_batchs(name: str, wrap: Callable[..., Any], step: Step) -> None:
    """Whatever the shards and however many micro-batches a window has, short ones included, nothing differs."""
    shard_sizes, sizes = step
    model, batch = make(name, sum(sizes))
    expected = whole_batch(model, batch)
    wrapped = wrap(model, shard_sizes)
    assert_same(window(wrapped, batch, sizes), expected)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.grad = None
    assert_same(window(wrapped, batch, sizes[::-1]), expected)


@pytest.mark.parametrize("metered", [False, True], ids=["unmetered", "metered"])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=5, deadline=None)
@given(step=steps(num_devices=4))
def test_virtual_gpus_give_a_windows_gradients(name: str, metered: bool, step: Step) -> None:
    """On virtual GPUs, with the meter running or not, a window's gradients are those of one device."""
    shard_sizes, sizes = step
    model, batch = make(name, sum(sizes))
    expected = whole_batch(model, batch)
    hardware = resolve_hardware("4xRTX3090")
    split = BatchSplit(global_batch_size=sum(shard_sizes), accumulation_steps=1, shard_sizes=shard_sizes)
    with hardware.metered() if metered else nullcontext():
        got = window(hardware.wrap(model, split), batch, sizes)
    assert_same(got, expected)


def bytes_of_a_step(engine: Engine, accumulation_steps: int) -> list[int]:
    torch.manual_seed(0)
    model, batch = nn.Linear(64, 32), torch.randn(24, 64)  # sizes that need no padding
    hardware = resolve_hardware("3xRTX3090")
    micro = 24 // accumulation_steps
    split = BatchSplit(global_batch_size=24, accumulation_steps=accumulation_steps, shard_sizes=(micro // 3,) * 3)
    with hardware.metered():
        wrapped = hardware.wrap(model, split, engine=engine)
        window(wrapped, batch, [micro] * accumulation_steps)
        first = hardware.link_bytes()
        window(wrapped, batch, [micro] * accumulation_steps)
        return [after - before for before, after in zip(first, hardware.link_bytes(), strict=True)]


def test_bytes_over_the_links_do_not_depend_on_the_accumulation_steps() -> None:
    """Parameters and gradients travel once an optimizer step; torch's replication sends them with every micro-batch."""
    once = bytes_of_a_step("window", 1)
    assert bytes_of_a_step("window", 2) == bytes_of_a_step("window", 8) == once
    parameter_bytes = 4 * (64 * 32 + 32)
    eight = bytes_of_a_step("torch", 8)
    ends, between = 7 * 2 * parameter_bytes, 7 * 4 * parameter_bytes  # they pass from card to card: out and home
    more = [many - few for many, few in zip(eight, bytes_of_a_step("torch", 1), strict=True)]
    assert more == [ends, between, ends]


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("wide", ["parameters", "activations"])
def test_other_cards_hold_no_more_than_with_torchs_replication(wide: str, accumulation_steps: int) -> None:
    """Though the loss is kept, their copies are gone after a step; their peaks are torch's with one micro-batch.

    With several a replica keeps the window's gradients, which torch's sends home at once, and adds to them in buckets.
    """
    found: dict[str, tuple[list[int], list[int]]] = {}
    for engine in ("torch", "window"):
        torch.manual_seed(0)
        width, rows = (512, 2) if wide == "parameters" else (32, 2048)
        model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        hardware = resolve_hardware("3xRTX3090")
        batch = torch.randn(3 * rows * accumulation_steps, width)
        split = BatchSplit(global_batch_size=len(batch), accumulation_steps=accumulation_steps, shard_sizes=(rows,) * 3)
        with hardware.metered():
            wrapped = hardware.wrap(model, split, engine=engine)
            for _ in range(2):
                hardware.reset_peaks()
                for micro in accumulate(wrapped, batch.split(3 * rows)):
                    loss = wrapped(micro).square().mean()
                    loss.backward()
            memory = hardware.memory()
            allocated = hardware.allocated_bytes()
        assert loss.isfinite()
        found[engine] = (list(allocated[1:]), [each.peak_allocated_bytes for each in memory[1:]])
    sizes = [parameter.nbytes for parameter in model.parameters()]  # less than a bucket
    held, peaks = found["window"]
    assert held == found["torch"][0] == [0, 0]
    spare = 0 if accumulation_steps == 1 else 2 * sum(sizes)
    assert all(peak <= most + spare for peak, most in zip(peaks, found["torch"][1], strict=True))


def test_evaluation_sends_the_parameters_once() -> None:
    """A second forward without gradients finds them on the devices; after a step they are sent again."""
    model, batch = nn.Linear(64, 32), torch.randn(6, 64)
    hardware = resolve_hardware("3xRTX3090")
    split = BatchSplit(global_batch_size=6, accumulation_steps=1, shard_sizes=(2, 2, 2))
    parameter_bytes = 4 * (64 * 32 + 32)

    def sent(wrapped: nn.Module) -> int:
        before = hardware.link_bytes()[2]  # the last: nobody's parameters pass through it
        with torch.no_grad():
            wrapped(batch)
        return hardware.link_bytes()[2] - before

    with hardware.metered():
        wrapped = hardware.wrap(model, split)
        first, second = sent(wrapped), sent(wrapped)
        wrapped(batch).sum().backward()
        with torch.no_grad():
            model.weight -= model.weight.grad
        assert (first - second, sent(wrapped) - second, sent(wrapped)) == (parameter_bytes, parameter_bytes, second)
        with torch.no_grad():
            assert torch.allclose(wrapped(batch), model(batch), atol=1e-6)


def test_what_an_evaluation_sets_on_a_replica_is_gone() -> None:
    """Copies serve the next evaluation; an attribute that forward assigned does not, as in nn.DataParallel."""
    found: list[Any] = []

    def forward(module: Call, x: Tensor) -> Tensor:
        found.append(getattr(module, "last", None))
        module.last = x
        return x * module.scale

    model = Call(forward)
    wrapped = on_the_cpu(model, (0, 1, 1))
    with torch.no_grad():
        wrapped(torch.ones(2))
        wrapped(torch.ones(2))
    assert found == [None] * 4


@pytest.mark.parametrize("wrap", [on_the_cpu, in_threads])
@pytest.mark.parametrize("order", ["reversed", "retained", "disjoint"])
def test_a_graph_that_is_left_keeps_what_it_needs(wrap: Callable[..., Any], order: str) -> None:
    """A window's end takes nothing from another graph: backwards may come in any order, twice, or part by part."""
    torch.manual_seed(0)
    model, batch = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]), vectors(6)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = model

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.heads[0](x)), torch.tanh(self.heads[1](x))

    def run(net: nn.Module) -> None:
        left, right = net(batch)
        if order == "disjoint":
            left.square().mean().backward()
            right.square().mean().backward()
        elif order == "retained":
            loss = left.square().mean() + right.square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        else:
            later = [each.square().mean() for each in net(batch * 2)]
            sum(later).backward()
            (left.square().mean() + right.square().mean()).backward()

    plain = Heads()
    expected_model = copy.deepcopy(plain)
    run(expected_model)
    run(wrap(plain, (1, 2, 3)))
    assert_same(gradients(plain), gradients(expected_model))


def test_gradients_that_are_one_tensor_are_not_added_to_twice() -> None:
    """Autograd hands the same tensor to both terms of a sum: what accumulates in one must not show in the other."""
    model = nn.ParameterList([torch.zeros(3), torch.zeros(3)])

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.terms = model

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.terms[0] + self.terms[1])

    batch = torch.randn(6, 3)
    plain = Sum()
    expected_model = copy.deepcopy(plain)
    expected = whole_batch(expected_model, batch)
    assert_same(window(on_the_cpu(plain, (1, 1)), batch, [2, 2, 2]), expected)
    first, second = (term.grad for term in plain.terms)
    assert first is not None
    assert second is not None
    first.zero_()
    assert second.any()


def test_without_no_sync_every_backward_brings_its_gradients_home() -> None:
    """A loop that knows nothing of windows sees each micro-batch's gradient at once, as it expects."""
    model, batch = make("mlp", 8)
    wrapped, plain = on_the_cpu(model, (1, 3)), copy.deepcopy(model)
    for micro in batch.split(4):
        loss_of(wrapped(micro)).backward()
        loss_of(plain(micro)).backward()
        assert_same(gradients(wrapped), gradients(plain))


class DataSgd(torch.optim.SGD):
    """Writes through ``.data``, which moves no version counter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


def between_windows(index: int, model: nn.Module, plain: nn.Module) -> None:
    """What users do between two steps."""
    for each in (model, plain):
        inner: Any = each.unwrap() if isinstance(each, BalancedDataParallel) else each
        if index == 1:
            inner.load_state_dict({name: value * 0.5 for name, value in inner.state_dict().items()})
        if index == 2:
            inner[0].weight.requires_grad_(False)
        if index == 3:
            inner[0].weight.requires_grad_(True)
            inner[1] = nn.Sigmoid()
        if index == 4:
            inner.eval()
        each.zero_grad(set_to_none=index % 2 == 0)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, DataSgd])
@pytest.mark.parametrize("shard_sizes", [(1, 3), (0, 2, 2)])
def test_training_over_windows_follows_one_device(optimizer: Any, shard_sizes: tuple[int, ...]) -> None:
    """Clipping, loading, freezing, swapping a module and switching modes between windows: every
    step is one device's."""
    model, _ = make("mlp", 1)
    plain = copy.deepcopy(model)
    wrapped = on_the_cpu(model, shard_sizes)
    optimizers = [optimizer(each.parameters(), lr=0.05) for each in (wrapped, plain)]
    for index in range(6):
        batch = vectors(11)
        between_windows(index, wrapped, plain)
        window(wrapped, batch, [4, 4, 3])
        window(plain, batch, [11])
        for each, step in zip((wrapped, plain), optimizers, strict=True):
            nn.utils.clip_grad_norm_(each.parameters(), 0.3)
            step.step()
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_grad_scaler_sees_the_gradients_of_one_device() -> None:
    """Scaled losses over a window, one of which overflows, update weights and scale as on one device."""
    model, _ = make("mlp", 1)
    plain = copy.deepcopy(model)
    results = []
    batches = [vectors(8) for _ in range(3)]
    batches[1][0] = float("inf")
    for each in (on_the_cpu(model, (1, 3)), plain):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for batch in batches:
            window(each, batch, [4, 4], lambda output, scaler=scaler: scaler.scale(loss_of(output)))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(scaler.get_scale())
    assert results == [128.0, 128.0]
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("shard_sizes", [(2, 2), (0, 2, 2)])
def test_a_module_may_change_within_a_window(shard_sizes: tuple[int, ...]) -> None:
    """Attributes, submodules, modes and requires_grad set between two micro-batches hold for the
    second on every device."""
    torch.manual_seed(0)
    model = Call(lambda self, x: self.body(x) * self.factor * self.scale)
    model.body, model.factor = mlp(), 1.0
    plain, batch = copy.deepcopy(model), vectors(24)
    for each in (on_the_cpu(model, shard_sizes), plain):
        inner: Any = each.unwrap() if isinstance(each, BalancedDataParallel) else each
        for index, micro in enumerate(accumulate(each, batch.split(4))):
            inner.factor = 0.5 + index / 7  # the old float is freed: its address is soon another's
            inner.body[1] = [nn.Tanh(), nn.Sigmoid(), nn.Tanh()][index % 3]
            inner.body[0].weight.requires_grad_(index != 2)
            inner.train(index != 3)
            loss_of(each(micro)).backward()
    assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize("shard_sizes", [(2, 2), (0, 1, 3), (0, 3, 1)])
def test_running_statistics_are_those_of_torchs_replication(shard_sizes: tuple[int, ...]) -> None:
    """BatchNorm's buffers after windows with short micro-batches are what per-forward replication makes of them."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4)), vectors(9)
    other = copy.deepcopy(model)
    for each, engine in ((model, "window"), (other, "torch")):
        wrapped = on_the_cpu(each, shard_sizes, engine=engine)
        for _ in range(2):
            for micro in accumulate(wrapped, batch.split([4, 1, 4])):
                loss_of(wrapped(micro)).backward()
    for name, buffer in other.named_buffers():
        torch.testing.assert_close(buffer, dict(model.named_buffers())[name])
    assert_same(gradients(model), gradients(other))


@pytest.mark.parametrize("shard_sizes", [(1, 2), (0, 2, 1)])
def test_hooks_see_the_whole_windows_gradient_once(shard_sizes: tuple[int, ...]) -> None:
    """A hook that masks runs once a window, on the sum, and its result is what the parameter gets."""
    model, batch = make("mlp", 9)
    model[0].weight.register_hook(lambda grad: grad * (grad > 0))
    expected = whole_batch(model, batch)
    seen: list[Tensor] = []
    after: list[Tensor] = []
    model[0].weight.register_hook(seen.append)
    model[2].bias.register_post_accumulate_grad_hook(lambda parameter: after.append(parameter.grad.clone()))
    assert_same(window(on_the_cpu(model, shard_sizes), batch, [3, 3, 3]), expected)
    assert len(seen) == len(after) == 1
    assert_same({"bias": after[0]}, {"bias": expected["2.bias"]})


def test_gradients_that_are_there_already_are_added_to() -> None:
    """What a parameter holds before the window stays, and is the same tensor afterwards."""
    model, batch = make("mlp", 9)
    expected = whole_batch(model, batch)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    got = window(on_the_cpu(model, (1, 2)), batch, [3, 3, 3])
    assert_same(got, {name: None if grad is None else grad + 1 for name, grad in expected.items()})
    assert all(got[name] is grad for name, grad in before.items())


def game(model: nn.Module, batch: Tensor) -> None:
    """Two forwards, then one backward of both; a second backward through one of them."""
    first, second = model(batch[:4]), model(batch[4:])
    (loss_of(first) - 2 * loss_of(second)).backward(retain_graph=True)
    loss_of(first).backward()


def two_losses(model: nn.Module, batch: Tensor) -> None:
    left, right = model(batch).chunk(2, dim=1)
    left.square().mean().backward(retain_graph=True)
    right.sum().backward()


def with_penalty(model: nn.Module, batch: Tensor) -> None:
    """A penalty on the parameters themselves, from the second micro-batch on, in the same backward."""
    inner = model.unwrap() if isinstance(model, BalancedDataParallel) else model
    for index, micro in enumerate(accumulate(model, batch.split(2))):
        loss = loss_of(model(micro))
        (loss + sum(p.square().sum() for p in inner.parameters()) if index else loss).backward()


def with_validation(model: nn.Module, batch: Tensor) -> None:
    for micro in accumulate(model, batch.split(2)):
        loss = loss_of(model(micro))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                model.eval()(batch[:3])
                model.train()
        loss.backward()


def with_checkpoint(model: nn.Module, batch: Tensor) -> None:
    for micro in accumulate(model, batch.split(4)):
        inputs = micro.clone().requires_grad_()
        loss_of(checkpoint(model, inputs, use_reentrant=False)).backward()


@pytest.mark.parametrize("shard_sizes", [(2, 2), (0, 2, 2)])
@pytest.mark.parametrize("story", [game, two_losses, with_penalty, with_validation, with_checkpoint])
def test_any_order_of_forwards_and_backwards(story: Callable[..., None], shard_sizes: tuple[int, ...]) -> None:
    """However forwards, backwards, validation and recomputation follow each other, gradients are
    those of one device."""
    model, batch = make("mlp", 8)
    plain = copy.deepcopy(model)
    wrapped = on_the_cpu(model, tuple(2 * shard for shard in shard_sizes))
    for _ in range(2):
        story(wrapped, batch)
        story(plain, batch)
    assert_same(gradients(model), gradients(plain), tolerance=2e-5)


@pytest.mark.parametrize("shard_sizes", [(2, 2), (0, 2, 2)])
def test_a_dense_penalty_may_join_a_sparse_gradient(shard_sizes: tuple[int, ...]) -> None:
    """A penalty on a table whose own gradient is sparse is added once, and nothing is lost."""
    model, batch = make("sparse embedding", 8)
    plain = copy.deepcopy(model)
    with_penalty(on_the_cpu(model, shard_sizes), batch)
    with_penalty(plain, batch)
    assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize("wrap", [on_the_cpu, in_threads])
def test_passes_within_a_pass_end_with_it(wrap: Callable[..., Any]) -> None:
    """Each replica's checkpoints run backward passes of their own: a hook still sees the window's gradient, once."""
    model, batch = make("checkpointed, reentrant", 8)
    expected = whole_batch(copy.deepcopy(model), batch)
    seen: list[Tensor] = []
    model.qkv.weight.register_hook(seen.append)
    for number in range(3):
        model.zero_grad()
        assert_same(window(wrap(model, (1, 2, 1)), batch, [4, 4]), expected)
        assert len(seen) == number + 1
        assert_same({"": seen[-1]}, {"": expected["qkv.weight"]})


def test_a_pass_that_failed_does_not_hold_up_the_next() -> None:
    """A backward that raises, with passes within it begun, is gone: the next one on the same graph brings all home."""
    model, batch = make("checkpointed, reentrant", 4)
    expected = whole_batch(copy.deepcopy(model), batch)
    wrapped = on_the_cpu(model, (2, 2))
    fails = [True]

    def fail_once(grad: Tensor) -> None:
        if fails.pop():
            raise ValueError("the user's own")

    output = wrapped(batch)
    loss = loss_of(output)
    output.register_hook(fail_once)
    with pytest.raises(ValueError, match="the user's own"):
        loss.backward(retain_graph=True)
    fails.append(False)
    loss.backward()
    assert_same(gradients(model), expected)


def test_hooks_run_once_for_two_forwards_and_one_backward() -> None:
    """A backward through two forwards gives a hook one gradient, that of both."""
    model, batch = make("mlp", 8)
    seen: list[Tensor] = []
    model[0].weight.register_hook(seen.append)
    wrapped = on_the_cpu(model, (2, 2))
    (loss_of(wrapped(batch[:4])) + loss_of(wrapped(batch[4:]))).backward()
    assert len(seen) == 1


def slope_penalty(critic: nn.Module, x: Tensor) -> Tensor:
    """As in Wasserstein GANs: what made the slope is gone when the function has ended."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("wrap", [on_the_cpu, in_threads])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("shard_sizes", [(2, 2), (0, 2, 2)])
def test_a_penalty_whose_forward_is_gone_counts(
    wrap: Callable[..., Any], shard_sizes: tuple[int, ...], alone: bool
) -> None:
    """A gradient penalty that a function returns, alone or beside losses of other forwards, is one device's."""
    model, batch = make("mlp", 4)
    plain = copy.deepcopy(model)
    for each in (wrap(model, shard_sizes), plain):
        for micro in accumulate(each, [batch, 1 - batch]):
            loss = slope_penalty(each, micro)
            (loss if alone else loss + each(micro).mean() - each(2 * micro).mean()).backward()
    expected = gradients(plain)
    if alone:  # the last bias has no part in any slope: on one device it may hold zeros, or nothing
        expected = {name: grad for name, grad in expected.items() if grad is not None and grad.any()}
    assert_same({name: gradients(model)[name] for name in expected}, expected, tolerance=2e-5)


def test_a_penalty_leaves_nothing_behind() -> None:
    """Its leaves go with its graph, without the garbage collector's help, and the window is closed."""
    model, batch = make("mlp", 4)
    wrapped = on_the_cpu(model, (2, 2))
    gc.disable()
    try:
        slope_penalty(wrapped, batch).backward()
        engine: Any = wrapped._window
        assert list(engine._live) == []
        penalty = slope_penalty(wrapped, batch)
        assert len(engine._live) == 1
        del penalty
        assert list(engine._live) == []
    finally:
        gc.enable()


def test_a_wrapper_with_an_open_window_can_be_copied_and_pickled() -> None:
    """Copies begin with no window; the original's goes on undisturbed."""
    model, batch = make("mlp", 8)
    expected = whole_batch(model, batch)
    wrapped = on_the_cpu(model, (1, 3))
    with wrapped.no_sync():
        (loss_of(wrapped(batch[:4])) / 2).backward()
    twins = [copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))]
    (loss_of(wrapped(batch[4:])) / 2).backward()
    assert_same(gradients(wrapped), expected)
    for twin in twins:
        twin.zero_grad()
        assert_same(window(twin, batch, [4, 4]), expected)


def test_no_memory_is_kept_after_a_step() -> None:
    """Once a window is over and its output gone, so are the replicas, without the garbage collector's help."""
    model, batch = make("mlp", 8)
    wrapped = on_the_cpu(model, (1, 3))
    engine: Any = None
    gc.disable()
    try:
        window(wrapped, batch, [4, 4])
        engine = wrapped._window
        assert list(engine._live) == []
        dead = weakref.ref(wrapped)
        del wrapped
        assert dead() is None
    finally:
        gc.enable()


def test_the_private_callback_of_torchs_engine_is_there_and_runs_once_at_the_end() -> None:
    """If this fails: see how DistributedDataParallel ends its backward in this torch, and do so in engine.py."""
    queue = getattr(torch.autograd.Variable._execution_engine, "queue_callback", None)
    assert callable(queue), "torch has renamed Variable._execution_engine.queue_callback, which engine.py depends on"
    events: list[str] = []
    first, last = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    first.register_hook(lambda grad: events.append("first leaf"))
    output = first * 2 * last
    output.register_hook(lambda grad: queue(lambda: events.append("end")))
    last.register_post_accumulate_grad_hook(lambda leaf: events.append("last leaf"))
    output.backward()
    assert sorted(events[:2]) == ["first leaf", "last leaf"]
    assert events[2:] == ["end"]
    assert torch._C._current_graph_task_id() == -1, "engine.py tells a recomputation inside backward by it"


def learned_buffer_that_moved() -> tuple[nn.Module, Tensor]:
    """An mlp whose output is scaled by a buffer that is computed from the leaf, as ``model.to(card)`` leaves it."""
    model, leaf = mlp(), torch.randn(3, requires_grad=True)
    model.register_buffer("learned", leaf.clone())
    model.register_forward_hook(lambda module, _args, output: output * module.learned)
    return model, leaf


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_learning_buffer_that_is_no_leaf_gets_its_gradient_at_the_windows_end(gives_up: bool) -> None:
    """Nothing is shown of it before, which torch would warn of; zero_grad() of the parameters gives its part up too."""
    torch.manual_seed(0)
    (model, leaf), batch = learned_buffer_that_moved(), vectors(8)
    wrapped = on_the_cpu(model, (1, 3))
    if gives_up:
        with wrapped.no_sync():
            loss_of(wrapped(batch[:4])).backward()
        model.zero_grad()
    window(wrapped, batch, [4, 4])
    got = leaf.grad
    model.zero_grad()
    leaf.grad = None
    loss_of(model(batch)).backward()
    assert got is not None
    assert_same({"learned": got}, {"learned": leaf.grad})
