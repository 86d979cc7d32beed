"""A thread for every replica, as on CUDA devices: each computes as the calling thread would."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody writes it

from splittune.parallel import BalancedDataParallel, Link
from splittune.parallel.data_parallel import Engine
from tests.parallel.models import Call, ThreadedLink, assert_same, mlp, vectors
from tests.processes import DEADLINE_S, assert_ends

LINKS = pytest.mark.parametrize("link", [None, ThreadedLink(3)], ids=["one thread", "threads"])


def wrap(
    module: nn.Module, *shard_sizes: int, link: Link | None = None, engine: Engine = "window"
) -> BalancedDataParallel:
    return BalancedDataParallel(
        module=module, shard_sizes=shard_sizes, device_ids=["cpu"] * len(shard_sizes), link=link, engine=engine
    )


def states(link: Link | None, context: AbstractContextManager[Any]) -> list[dict[str, Any]]:
    """What each of three replicas finds switched on when the wrapper is called inside `context`."""
    found: list[dict[str, Any]] = []

    def forward(module: Call, x: Tensor) -> Tensor:
        found.append(
            {
                "grad": torch.is_grad_enabled(),
                "inference": torch.is_inference_mode_enabled(),
                "autocast": torch.is_autocast_enabled("cpu"),
                "dtype": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
                "cache": torch.is_autocast_cache_enabled(),
                "cuda": torch.is_autocast_enabled("cuda"),
            }
        )
        return x * module.scale

    with context:
        wrap(Call(forward), 1, 1, 1, link=link)(torch.ones(3))
    return found


def test_every_replica_has_a_thread_of_its_own() -> None:
    """Replicas run at the same time: each waits here for all the others."""
    barrier = threading.Barrier(3, timeout=20)

    def forward(module: Call, x: Tensor) -> Tensor:
        barrier.wait()
        return x

    assert wrap(Call(forward), 2, 0, 1, 1, link=ThreadedLink(4))(torch.arange(4)).tolist() == [0, 1, 2, 3]


def noting(threads: list[int]) -> Call:
    """A module that notes which thread each of its forwards runs in."""
    return Call(lambda module, x: threads.append(threading.get_ident()) or x * module.scale)


def replica_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("replica ")]


@pytest.mark.parametrize("engine", ["window", "torch"])
def test_a_position_has_one_thread_for_good(engine: Engine) -> None:
    """What libraries keep for a thread is found again: later forwards make no thread, a lone replica's neither."""
    used: list[int] = []
    model = wrap(noting(used), 0, 2, 1, link=ThreadedLink(3), engine=engine)
    for _ in range(3):
        model(torch.ones(3)).sum().backward()
    model(torch.ones(1))  # on position 1 alone
    with torch.no_grad():
        model(torch.ones(3))
    assert len(used) == 9
    assert len(set(used)) == 2
    assert threading.get_ident() not in used


def test_a_wrapper_of_one_device_runs_in_the_calling_thread() -> None:
    """There is nothing to overlap, and the module itself runs as it would alone."""
    used: list[int] = []
    wrap(noting(used), 2, link=ThreadedLink(1))(torch.ones(2))
    assert used == [threading.get_ident()]


def test_threads_end_with_the_wrapper() -> None:
    """They are no leak, and neither is what they have run: no garbage collector is needed."""
    before = set(replica_threads())
    module = noting([])
    model = wrap(module, 1, 1, link=ThreadedLink(2))
    gc.disable()
    try:
        output = model(torch.ones(2))
        threads = set(replica_threads()) - before
        assert len(threads) == 2
        dead = weakref.ref(output)
        del output
        assert dead() is None
        del model
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
    finally:
        gc.enable()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_makes_threads_of_its_own(copied: Callable[[Any], Any]) -> None:
    """A copied or unpickled wrapper computes the same, in threads that are not the original's."""
    model = BalancedDataParallel(module=mlp(), shard_sizes=(1, 2), device_ids=["cpu", "cpu"])
    twin, batch = copied(model), vectors(3)
    assert torch.equal(model(batch), twin(batch))
    assert twin._threads is not model._threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_makes_threads_of_its_own() -> None:
    """After a fork the parent's threads are gone: the child's call does not wait for them."""
    model, batch = wrap(mlp(), 1, 2, link=ThreadedLink(2)), vectors(3)
    with torch.no_grad():
        expected = model(batch)
        child = os.fork()
        if not child:
            is_same = torch.equal(model(batch), expected)
            os._exit(0 if is_same else 1)
    assert_ends(child)
    assert os.waitpid(child, 0)[1] == 0


def test_two_callers_without_gradients_take_turns() -> None:
    """Serving threads that share a wrapper wait for one another, and each gets its own answer."""
    model = wrap(mlp(), 1, 2, link=ThreadedLink(2))
    batches = [vectors(3) + number for number in range(8)]
    with torch.no_grad():
        expected = [model.module(batch) for batch in batches]

    def answer(batch: Tensor) -> Tensor:
        with torch.no_grad():
            return model(batch)

    with ThreadPoolExecutor(4) as callers:
        for got, right in zip(callers.map(answer, batches), expected, strict=True):
            torch.testing.assert_close(got, right)


def test_two_callers_with_gradients_are_refused() -> None:
    """Both would add to the same gradients: the second is told so at once, and the first is not disturbed."""
    entered, leave = threading.Event(), threading.Event()

    def forward(module: Call, x: Tensor) -> Tensor:
        entered.set()
        leave.wait(DEADLINE_S)
        return x * module.scale

    model = wrap(Call(forward), 1, 1, link=ThreadedLink(2))
    with ThreadPoolExecutor(1) as other:
        first = other.submit(model, torch.ones(2))
        entered.wait(DEADLINE_S)
        with pytest.raises(RuntimeError, match="two threads at once"):
            model(torch.ones(2))
        leave.set()
        assert first.result().tolist() == [1, 1]


def test_a_replica_that_calls_the_wrapper_is_told() -> None:
    """It would wait for itself: an error says what was called by what."""
    holder: list[BalancedDataParallel] = []
    model = wrap(Call(lambda module, x: holder[0](x)), 1, 1, link=ThreadedLink(2))
    holder.append(model)
    with torch.no_grad(), pytest.raises(RuntimeError, match="called by one of its own replicas"):
        model(torch.ones(2))


@LINKS
@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (nullcontext, {"grad": True, "inference": False, "autocast": False, "dtype": None}),
        (torch.no_grad, {"grad": False, "inference": False}),
        (torch.inference_mode, {"grad": False, "inference": True}),
        (lambda: torch.autocast("cpu", torch.bfloat16), {"autocast": True, "dtype": torch.bfloat16, "cuda": False}),
        (lambda: torch.autocast("cpu", torch.float16), {"autocast": True, "dtype": torch.float16}),
        (lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False), {"autocast": True, "cache": False}),
        (lambda: torch.autocast("cpu", enabled=False), {"autocast": False}),
    ],
    ids=range(7),
)
def test_every_replica_computes_as_the_caller(
    link: Link | None, context: Callable[[], AbstractContextManager[Any]], expected: dict[str, Any]
) -> None:
    """Grad mode, inference mode and autocast with its dtype are the caller's in every replica."""
    found = states(link, context())
    assert len(found) == 3
    for state in found:
        assert state | expected == state


@LINKS
def test_autocast_keeps_its_dtype_and_gradients(link: Link | None) -> None:
    """Under bf16 autocast the output is bf16 and float32 gradients are those of one device."""
    torch.manual_seed(0)
    module, x, labels = mlp(), vectors(7), torch.randint(3, (7,))

    def step(model: nn.Module) -> dict[str, Tensor | None]:
        module.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
            assert output.dtype == torch.bfloat16
            F.cross_entropy(output, labels).backward()
        return {name: parameter.grad for name, parameter in module.named_parameters()}

    expected = step(module)
    assert_same(step(wrap(module, 1, 4, 2, link=link)), expected, tolerance=2e-2)


@LINKS
def test_inference_mode_gives_inference_tensors_and_no_trace(link: Link | None) -> None:
    """What inference mode returns needs no gradient, and training goes on afterwards."""
    module, x = mlp(), vectors(6)
    model = wrap(module, 1, 2, 3, link=link)
    with torch.inference_mode():
        output = model(x)
    assert output.is_inference()
    torch.testing.assert_close(output, module(x))
    model(x).sum().backward()
    assert module[0].weight.grad is not None


@LINKS
def test_statistics_advance_in_inference_mode(link: Link | None) -> None:
    """A train-mode pass under inference mode moves BatchNorm's statistics, without GPU 0 as well."""
    module = nn.BatchNorm1d(6)
    model = wrap(module, 0, 3, 3, link=link)
    with torch.inference_mode():
        model(vectors(6))
    assert module.num_batches_tracked == 1
    assert not module.running_mean.is_inference()
    model(vectors(6)).sum().backward()


def test_no_grad_needs_no_gradient() -> None:
    """Without gradients the output is a constant, from every kind of link."""
    for link in (None, ThreadedLink(2)):
        with torch.no_grad():
            assert not wrap(mlp(), 1, 2, link=link)(vectors(3)).requires_grad


def test_a_frozen_model_may_run_with_gradients_on() -> None:
    """A model without trainable parameters gives a constant, or the inputs' gradient alone."""
    module = mlp().requires_grad_(False)
    model = wrap(module, 1, 2, link=ThreadedLink(2))
    assert not model(vectors(3)).requires_grad
    x = vectors(3).requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None


def test_the_callers_state_is_left_alone() -> None:
    """After a call the calling thread is as it was, also when a replica has switched something."""

    def forward(module: Call, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x

    wrap(Call(forward), 1, 1, link=ThreadedLink(2))(torch.ones(2))
    assert torch.is_grad_enabled()
