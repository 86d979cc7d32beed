"""Random numbers that all ranks have in common: seeded alike inside, the caller's own outside."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from splittune.ranks.draws import AgreedDraws, generators_in, put_back, state_of


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002 - the legacy generator is what everybody shares


@given(seed=st.integers(0, 2**40))
def test_inside_they_are_those_of_the_seed(seed: int) -> None:
    """Of torch, Python and NumPy; however much was drawn outside, and going on where they were."""
    draws, again = AgreedDraws(seed), AgreedDraws(seed)
    with draws:
        first = drawn()
        second = drawn()
    with again:
        assert drawn() == first
    drawn()
    with again:
        assert drawn() == second
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the legacy generator is what everybody shares
    assert drawn() == first


def test_outside_the_callers_are_as_found() -> None:
    """Nothing that is drawn inside, by one within the other too, is missed outside; nor after an exception."""
    draws = AgreedDraws(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - the legacy generator is what everybody shares
    with draws, draws:
        drawn()
    with pytest.raises(ZeroDivisionError), draws:
        drawn()[0] / 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # noqa: NPY002 - the legacy generator is what everybody shares


def test_what_draws_from_torch_only_leaves_the_others_alone() -> None:
    """Python's numbers go on inside, torch's are those of the seed."""
    random.seed(5)
    with AgreedDraws(3, torch_only=True):
        inside = drawn()
    assert inside[0] == float(torch.rand((), generator=torch.Generator().manual_seed(3)))
    assert inside[1] == random.Random(5).random()


def test_an_iterable_draws_inside_and_its_taker_outside() -> None:
    """Each item as if nothing had been drawn between."""

    def numbers() -> Iterator[float]:
        while True:
            yield drawn()[0]

    draws = AgreedDraws(3)
    found = []
    for number in draws.iterate(numbers()):
        found.append(number)
        drawn()
        if len(found) == 3:
            break
    generator = torch.Generator().manual_seed(3)
    assert found == [float(torch.rand((), generator=generator)) for _ in range(3)]


def test_generators_are_found_in_a_loader_and_its_samplers() -> None:
    """Each once, of torch, Python and NumPy, and in samplers that hold samplers."""
    shared, own = torch.Generator(), torch.Generator()
    sampler = RandomSampler(range(4), generator=own)
    sampler.of_python, sampler.of_numpy = random.Random(1), np.random.default_rng(1)
    loader = DataLoader(range(4), batch_sampler=BatchSampler(sampler, 2, False), generator=shared)
    found = generators_in(loader, sampler)
    assert {id(each) for each in found} == {id(shared), id(own), id(sampler.of_python), id(sampler.of_numpy)}
    assert len(found) == 4


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_a_generator_goes_on_from_a_state_of_it(kind: str) -> None:
    """The same numbers as after the state was taken."""
    generator = {"torch": torch.Generator(), "python": random.Random(1), "numpy": np.random.default_rng(1)}[kind]

    def draw() -> float:
        return float(torch.rand((), generator=generator)) if kind == "torch" else generator.random()

    draw()
    state = state_of(generator)
    expected = [draw(), draw()]
    put_back(generator, state)
    assert [draw(), draw()] == expected
