"""Random numbers that are the same on every rank while samples are drawn."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


class GlobalRandom(NamedTuple):
    """The states of the generators that everybody shares; None of one that is left as it is."""

    torch: Tensor
    """Of the CPU."""
    python: tuple[Any, ...] | None
    numpy: Any

    @classmethod
    def now(cls, *, torch_only: bool) -> GlobalRandom:
        if torch_only:
            return cls(torch.get_rng_state(), None, None)
        return cls(torch.get_rng_state(), random.getstate(), _numpy().get_state() if _numpy() else None)

    @classmethod
    def of_seed(cls, seed: int, *, torch_only: bool) -> GlobalRandom:
        """As after seeding each with `seed`; they are not touched."""
        state = torch.Generator().manual_seed(seed).get_state()
        if torch_only:
            return cls(state, None, None)
        numpy = _numpy().RandomState(seed % 2**32).get_state() if _numpy() else None
        return cls(state, random.Random(seed).getstate(), numpy)

    def put_in_place(self) -> None:
        torch.set_rng_state(self.torch)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            _numpy().set_state(self.numpy)


class AgreedDraws:
    """Inside ``with draws:`` the shared generators draw the same numbers on all ranks.

    They are torch's of the CPU, Python's, and NumPy's where that is loaded. Outside they are the
    caller's, as found: a rank's dropout does not change what is drawn next. What draws from a
    generator of its own is not concerned.

    Worked: the first ``torch.randperm(4)`` inside ``AgreedDraws(3)`` is what it is after
    ``torch.manual_seed(3)``, on every rank and however much was drawn outside.

    Args:
        seed: the same on every rank.
        torch_only: leave Python's and NumPy's generators as they are, for what does not draw from
            them. Exchanging NumPy's takes a tenth of a millisecond, torch's a hundredth of that.
    """

    def __init__(self, seed: int, *, torch_only: bool = False) -> None:
        self._own = GlobalRandom.of_seed(seed, torch_only=torch_only)
        self._torch_only = torch_only
        self._callers: GlobalRandom | None = None
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._callers = GlobalRandom.now(torch_only=self._torch_only)
            self._own.put_in_place()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and self._callers is not None:
            self._own = GlobalRandom.now(torch_only=self._torch_only)
            self._callers.put_in_place()
            self._callers = None

    def iterate(self, source: Iterable[Item]) -> Iterator[Item]:
        """The items of `source`, which draws inside; who takes them is outside."""
        with self:
            items = iter(source)
        while True:
            with self:
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


def generators_in(*owners: object) -> list[Any]:
    """The generators that `owners` keep as attributes, or in samplers that they keep, each once.

    torch's, Python's and NumPy's; of a `DataLoader` its own and its samplers'.
    """
    found: dict[int, Any] = {}
    waiting, seen = list(owners), set()
    while waiting:
        owner = waiting.pop(0)
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for value in getattr(owner, "__dict__", {}).values():
            if _is_generator(value):
                found[id(value)] = value
            elif isinstance(value, torch.utils.data.Sampler):
                waiting.append(value)
    return list(found.values())


def state_of(generator: Any) -> Any:
    """The state of a generator of torch, Python or NumPy."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def put_back(generator: Any, state: Any) -> None:
    """What `state_of` gave."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _is_generator(value: object) -> bool:
    return isinstance(value, torch.Generator | random.Random) or (
        type(value).__module__.startswith("numpy.random") and hasattr(value, "bit_generator")
    )


def _numpy() -> Any:
    return sys.modules["numpy"].random if "numpy" in sys.modules else None
