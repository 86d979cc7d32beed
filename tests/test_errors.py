"""The exceptions are the documented tree, and can be caught as what they mean."""

from __future__ import annotations

import re

import pytest

import splittune
from splittune import errors

BRANCH = re.compile(r"^(?P<indent>[ │]*)[├└]── (?P<name>\w+)(?:\((?P<builtin>\w+)\))?")


def documented_tree() -> dict[str, tuple[str, ...]]:
    """Each exception of the docstring's drawing with the names of its bases."""
    assert errors.__doc__ is not None
    ancestors = ["SplittuneError"]
    tree: dict[str, tuple[str, ...]] = {"SplittuneError": ("Exception",)}
    for line in errors.__doc__.splitlines():
        if branch := BRANCH.match(line):
            depth = len(branch["indent"]) // 4  # the drawing itself is indented by four
            tree[branch["name"]] = (ancestors[depth - 1], *filter(None, [branch["builtin"]]))
            ancestors[depth:] = [branch["name"]]
    return tree


def defined_exceptions() -> dict[str, type[BaseException]]:
    """The exceptions that the module defines."""
    return {
        name: thing
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and thing.__module__ == errors.__name__
    }


def all_subclasses(error: type[BaseException]) -> list[type[BaseException]]:
    return [below for each in error.__subclasses__() for below in (each, *all_subclasses(each))]


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    """Every exception is drawn once, under its base, with the built-in it also is."""
    defined = {name: tuple(base.__name__ for base in error.__bases__) for name, error in defined_exceptions().items()}
    assert documented_tree() == defined


@pytest.mark.parametrize(
    ("name", "caught_as"),
    [
        ("InvalidSplitError", ValueError),
        ("ConfigError", ValueError),
        ("NvmlUnavailableError", errors.DeviceError),
        ("NoFeasibleSplitError", errors.SplittuneError),
        ("RanksError", errors.SplittuneError),
        ("WorkerError", errors.SplittuneError),
    ],
)
def test_errors_are_caught_as_what_they_mean(name: str, caught_as: type[BaseException]) -> None:
    """Wrong input is a ValueError, NVML's absence a device error."""
    with pytest.raises(caught_as, match="what, got, expected"):
        raise getattr(errors, name)("what, got, expected")


@pytest.mark.parametrize("name", sorted(defined_exceptions()))
def test_every_error_is_a_splittune_error_that_says_what_it_means(name: str) -> None:
    """One `except SplittuneError` catches all, and each class has a sentence of its own."""
    error = defined_exceptions()[name]
    assert issubclass(error, errors.SplittuneError)
    assert error.__doc__
    assert error.__doc__.endswith(".")


def test_every_error_is_exported() -> None:
    """`splittune.ConfigError` is what a user catches: each exception of the tree is found there,
    and nowhere else is one made."""
    for name, error in defined_exceptions().items():
        assert getattr(splittune, name) is error
        assert name in splittune.__all__
    modules = {error.__module__ for error in all_subclasses(errors.SplittuneError)}
    assert {module for module in modules if module.startswith("splittune.")} == {errors.__name__}


def test_no_error_of_ours_is_an_out_of_memory_error() -> None:
    """Torch's out-of-memory error is a RuntimeError; none of ours is taken for one, nor hides a user's."""
    assert not any(issubclass(error, RuntimeError) for error in defined_exceptions().values())
