"""A thread for every replica, as on CUDA devices: each computes as the calling thread would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody writes it

from splittune.parallel import BalancedDataParallel, Link
from tests.parallel.models import Call, ThreadedLink, assert_same, mlp, vectors

LINKS = pytest.mark.parametrize("link", [None, ThreadedLink(3)], ids=["one thread", "threads"])


def wrap(module: nn.Module, *shard_sizes: int, link: Link | None = None) -> BalancedDataParallel:
    return BalancedDataParallel(
        module=module, shard_sizes=shard_sizes, device_ids=["cpu"] * len(shard_sizes), link=link
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
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


def test_one_replica_runs_in_the_calling_thread() -> None:
    """No thread is made where there is nothing to overlap."""
    names: list[str] = []
    model = wrap(Call(lambda module, x: names.append(threading.current_thread().name) or x), 0, 2, link=ThreadedLink(2))
    model(torch.ones(2))
    assert names == [threading.current_thread().name]


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
    assert torch.allclose(output, module(x))
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
