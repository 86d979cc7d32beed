"""What a function reaches, by whatever way, and what it does not."""

from __future__ import annotations

import gc
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from splittune.training.reach import is_installed, reach

NET = nn.Linear(2, 2)
"""What the functions below name, each in its way."""


class Trainer:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def step(self, model: Any, batch: Any) -> Any:
        return None

    def by_name(self) -> Any:
        return NET

    def __call__(self, model: Any, batch: Any) -> Any:
        return self.step(model, batch)


class Slotted:
    __slots__ = ("net",)

    def __init__(self, net: nn.Module) -> None:
        self.net = net


class Hidden(nn.Module):
    """A module that keeps another from its parameters, as teachers are kept."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.kept = [net]


class WithClassAttribute:
    net: Any = None


def names_it() -> Any:
    return NET


def calls_another() -> Any:
    def inner() -> Any:
        return names_it()

    return inner


def closing_over(net: Any) -> Callable[[], Any]:
    return lambda: net


def wrapped(net: Any) -> Callable[[], Any]:
    @wraps(names_it)
    def step() -> Any:
        return net

    return torch.no_grad()(step)


def with_default(net: Any) -> Callable[..., Any]:
    def step(model: Any = None, *, other: Any = net) -> Any:
        return model, other

    return step


def through_a_class(net: Any) -> Callable[[], Any]:
    class Holder:
        net = None

    Holder.net = net
    return lambda: Holder


WAYS: dict[str, Callable[[Any], Any]] = {
    "closure": closing_over,
    "default": with_default,
    "partial": lambda net: partial(max, net, key=None),
    "keyword of a partial": lambda net: partial(max, key=net),
    "partial of a partial": lambda net: partial(partial(max, net), 1),
    "global": lambda net: names_it,
    "global of a function it calls": lambda net: calls_another,
    "bound method": lambda net: Trainer(net=net).step,
    "callable object": lambda net: Trainer(net=net),
    "method of a callable object": lambda net: Trainer(),
    "object in an object": lambda net: Trainer(inner=Trainer(net=net)).step,
    "list": lambda net: closing_over([1, [net]]),
    "dict": lambda net: closing_over(OrderedDict(a={"b": net})),
    "deque": lambda net: closing_over(deque([net])),
    "set": lambda net: closing_over({net}),
    "slot": lambda net: closing_over(Slotted(net)),
    "namespace": lambda net: closing_over(SimpleNamespace(net=net)),
    "decorated": wrapped,
    "class attribute": through_a_class,
    "hidden in a module": lambda net: closing_over(Hidden(net)),
    "child of a module": lambda net: closing_over(nn.Sequential(net)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_module_is_found_whichever_way_it_is_held(way: str) -> None:
    """Closures, defaults, partials, bound objects, globals, containers, slots: none of them hides a module."""
    assert NET in reach([WAYS[way](NET)]).modules


def test_every_kind_of_state_is_found_once() -> None:
    """Modules, optimizers, schedulers, scalers, generators, plain tensors and what holds them."""
    optimizer = optim.Adam(NET.parameters())
    scheduler, scaler = optim.lr_scheduler.StepLR(optimizer, 1), torch.amp.GradScaler("cpu")
    generators = [torch.Generator(), random.Random(0), np.random.default_rng(0)]
    centre, shadow = torch.zeros(3), {"weight": torch.ones(2)}
    found = reach([closing_over((NET, optimizer, scheduler, scaler, generators, centre, shadow, NET, shadow))])
    assert found.modules == [NET]
    assert found.optimizers == [optimizer]
    assert found.stateful == [scheduler, scaler]
    assert found.generators == generators
    ids = [id(tensor) for tensor in found.tensors]
    assert len(ids) == len(set(ids))
    assert {id(centre), id(shadow["weight"])} < set(ids)
    assert any(container is shadow for container in found.containers)
    assert found.is_complete


def test_of_what_is_bound_the_names_are_noted() -> None:
    """A variable that holds an average, say, may be bound anew: its cell or its attribute is known by what it held."""
    average = torch.zeros(2)
    trainer = Trainer(average=average, count=3)
    step = closing_over(average)
    found = reach([trainer.step, step])
    assert {binding.name for binding in found.bindings if binding.value is average} == {"average", ""}
    assert step.__closure__ is not None
    trainer.average, trainer.count, step.__closure__[0].cell_contents = 1, 4, 2  # type: ignore[attr-defined]
    for binding in found.bindings:
        binding.restore()
    assert vars(trainer) == {"average": average, "count": 4}
    assert step.__closure__[0].cell_contents is average


def test_of_a_module_of_the_jobs_own_what_is_named_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """``nets.discriminator`` leads to that one, and not to everything else in nets."""
    nets = ModuleType("nets_of_this_test")
    nets.discriminator, nets.unused = NET, nn.Linear(1, 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, nets.__name__, nets)
    names: dict[str, Any] = {"nets": nets, "__name__": __name__}
    exec("def step(model, batch):\n    return nets.discriminator(batch)", names)
    assert reach([names["step"]]).modules == [NET]


@pytest.mark.parametrize(
    "thing",
    [
        None,
        3,
        "text",
        torch.float32,
        print,
        np.zeros(3),
        nn.functional.cross_entropy,
        torch,
        max,
        DataLoader(TensorDataset(torch.zeros(2))),
        TensorDataset(torch.zeros(2)),
        Trainer,
        nn.Linear,
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_has_no_state_of_the_jobs_leads_nowhere(thing: Any) -> None:
    """Numbers, libraries, their functions and classes, data sets and loaders lead to nothing of the job's."""
    found = reach([thing if thing is not Trainer else WithClassAttribute])
    assert [*found.modules, *found.optimizers, *found.stateful, *found.tensors, *found.bindings] == []
    assert found.is_complete


def test_nothing_is_run_by_looking() -> None:
    """Properties, attribute hooks and iterators are the user's code, and are not called."""

    class Touchy:
        net = NET

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

        @property
        def running(self) -> Any:
            raise AssertionError("run")

    def generate() -> Any:
        raise AssertionError("run")
        yield

    assert reach([closing_over((Touchy(), generate()))]).modules == [NET]


def test_a_ring_ends_and_too_much_is_told() -> None:
    """Objects that refer to each other are looked at once; a walk over more than it may says that
    it is not complete."""
    ring: list[Any] = [NET]
    ring.append(ring)
    assert reach([closing_over(ring)]).is_complete
    many = [[number] for number in range(100)]
    assert not reach([closing_over(many)], max_objects=50).is_complete
    assert reach([closing_over(many)]).is_complete


def test_tensors_without_values_are_none() -> None:
    """What lies on the meta device, or is not there yet, has nothing to put back."""
    found = reach([closing_over((torch.zeros(2, device="meta"), nn.LazyLinear(2)))])
    assert not found.tensors


def test_nothing_is_kept() -> None:
    """The walk itself holds nothing but what it found."""
    trainer = Trainer(big=[object()])
    reach([trainer.step])
    assert not any(isinstance(each, dict) and id(trainer) in each for each in gc.get_referrers(trainer))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.nn", True),
        ("random", True),
        ("builtins", True),
        ("splittune.training.task", True),
        ("numpy", True),
        ("pytest", True),
        (__name__, False),
        ("__main__", False),
        ("nobody_has_this", False),
        (None, False),
    ],
)
def test_installed_is_not_the_jobs_own(name: str | None, expected: bool) -> None:
    """Python's, packages' and splittune's modules are told apart from the job's."""
    assert is_installed(name) is expected
