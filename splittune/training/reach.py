"""What a function reaches: the modules, optimizers and other state that it closes over, is bound to, or names."""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

# A choice: a training script's own objects are hundreds; a logger or a framework behind one of them may lead anywhere.
MAX_OBJECTS = 20_000
# As deep as the tensors of a list in a dict of dicts.
MAX_DEPTH = 6
_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_OF_THE_STDLIB = (SimpleNamespace, argparse.Namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Where a thing with state is held, by name: an attribute, a variable of a function or a module, an entry."""

    holder: Any
    """A dict of attributes or variables, or a function's cell."""
    name: str
    """Of the cell, empty."""
    value: Any

    def restore(self) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = self.value
        elif self.holder.get(self.name) is not self.value:
            self.holder[self.name] = self.value


@dataclass(slots=True)
class Reached:
    """What was found, each thing once, in the order of its distance."""

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[optim.Optimizer] = field(default_factory=list)
    stateful: list[Any] = field(default_factory=list)
    """Schedulers, gradient scalers, whatever else has a ``state_dict()``."""
    tensors: list[Tensor] = field(default_factory=list)
    """Those held directly; parameters and buffers are their modules'."""
    generators: list[Any] = field(default_factory=list)
    """Of random numbers: torch's, Python's and NumPy's."""
    containers: list[Any] = field(default_factory=list)
    """Dicts, lists and deques that hold any of these."""
    bindings: list[Binding] = field(default_factory=list)
    is_complete: bool = True
    """False where there was more than was looked at."""


def reach(roots: Iterable[object], *, max_objects: int = MAX_OBJECTS) -> Reached:
    """What can be come by from `roots`, functions or other objects, without running any code.

    - of a function: what it closes over, its defaults, and the variables of its module that it names, other functions
      among them; of a bound method the object, of a `functools.partial` its arguments;
    - of an object: its attributes and slots; of one whose class is not an installed package's, what the class names;
    - of a dict, list, tuple or set: its entries.

    Installed packages' own variables are not looked at, nor are data sets and loaders, nor weak references.
    """
    found = Reached()
    seen: dict[int, Any] = {}  # the things too, so that an id names one of them as long as this goes on
    waiting = deque(roots)
    while waiting:
        thing = waiting.popleft()
        if id(thing) in seen or _is(thing, _LEAVES):
            continue
        if len(seen) >= max_objects:
            found.is_complete = False
            break
        seen[id(thing)] = thing
        _sort_in(thing, found)
        waiting.extend(part for part in _parts_of(thing, found) if not _is(part, _LEAVES))
    return found


def _is(thing: Any, kinds: Any) -> bool:
    """`isinstance` by the type itself: a proxy may claim another class, or have lost what it stands for."""
    return issubclass(type(thing), kinds)


def _sort_in(thing: Any, found: Reached) -> None:
    if _is(thing, Tensor):
        if not (thing.is_meta or torch.nn.parameter.is_lazy(thing)):
            found.tensors.append(thing)
    elif _is(thing, nn.Module):
        found.modules.append(thing)
    elif _is(thing, optim.Optimizer):
        found.optimizers.append(thing)
    elif _is_generator(thing):
        found.generators.append(thing)
    elif _is(thing, (dict, list, deque)):
        # the variables of a module are bindings: what is defined meanwhile stays
        if _holds_state(thing) and not (_is(thing, dict) and "__builtins__" in thing):
            found.containers.append(thing)
    elif _has_state(thing):
        found.stateful.append(thing)


def _is_generator(thing: Any) -> bool:
    if _is(thing, (torch.Generator, random.Random)):
        return True
    return type(thing).__module__.startswith("numpy.random") and hasattr(thing, "bit_generator")


def _has_state(thing: Any) -> bool:
    """By its type: a proxy that answers to any name has none."""
    return not _is(thing, type) and callable(getattr(type(thing), "state_dict", None))


def _holds_state(thing: Any, depth: int = 0) -> bool:
    """Whether it is, or holds in dicts, lists and tuples, a tensor or a thing with a state of its own."""
    if _is(thing, (Tensor, nn.Module, optim.Optimizer)) or _is_generator(thing) or _has_state(thing):
        return True
    if depth < MAX_DEPTH and _is(thing, (dict, list, tuple, deque)):
        entries = thing.values() if _is(thing, dict) else thing
        return any(not _is(entry, _LEAVES) and _holds_state(entry, depth + 1) for entry in entries)
    return False


def _parts_of(thing: Any, found: Reached) -> Iterator[Any]:
    """What a thing leads to; of names that hold state the bindings are noted."""
    if _is(thing, FunctionType):
        yield from _of_function(thing, found)
    elif _is(thing, MethodType):
        yield from (thing.__self__, thing.__func__)
    elif _is(thing, partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif _is(thing, (staticmethod, classmethod)):
        yield thing.__func__
    elif _is(thing, property):
        yield from (thing.fget, thing.fset)
    elif _is(thing, dict):
        yield from list(thing.values())
    elif _is(thing, _CONTAINERS):
        yield from list(thing)
    elif _is(thing, type):
        if not is_installed(thing.__module__):
            yield from [*vars(thing).values(), *thing.__bases__]
    elif _is(thing, optim.Optimizer):
        yield from (value for name, value in vars(thing).items() if name not in ("state", "param_groups", "defaults"))
        yield from (parameter for group in thing.param_groups for parameter in group["params"])
    elif not _is_beside_the_job(thing):
        yield from _of_object(thing, found)


def _is_beside_the_job(thing: Any) -> bool:
    if _is(thing, (Tensor, ModuleType, Dataset, DataLoader)) or _is_generator(thing):
        return True
    return _is_standard(type(thing).__module__) and not _is(thing, _OF_THE_STDLIB)


def _of_object(thing: Any, found: Reached) -> Iterator[Any]:
    attributes = dict(getattr(thing, "__dict__", {}))
    if _is(thing, nn.Module):  # whose names are the snapshot's to keep
        yield from [part for name in ("_parameters", "_buffers", "_modules") for part in attributes.pop(name).values()]
    else:
        _note_bindings(vars(thing) if attributes else {}, attributes, found)
    yield from attributes.values()
    for cls in type(thing).__mro__:
        for name in _slots_of(cls):
            yield getattr(thing, name, None)
    yield type(thing)


def _slots_of(cls: type) -> list[str]:
    slots: Any = cls.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]


def _of_function(function: FunctionType, found: Reached) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if _holds_state(value):
            found.bindings.append(Binding(holder=cell, name="", value=value))
        yield value
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
    if is_installed(function.__globals__.get("__name__")):
        return
    names = _names_in(function.__code__)
    named = {name: function.__globals__[name] for name in names if name in function.__globals__}
    _note_bindings(function.__globals__, named, found)
    for value in named.values():
        if not _is(value, ModuleType):
            yield value
        elif not is_installed(value.__name__):  # a module of the job's own: what is named of it
            within = {name: vars(value)[name] for name in names if name in vars(value)}
            _note_bindings(vars(value), within, found)
            yield from within.values()


def _note_bindings(holder: dict[str, Any], names: Mapping[str, Any], found: Reached) -> None:
    held = ((name, value) for name, value in names.items() if _holds_state(value))
    found.bindings += [Binding(holder=holder, name=name, value=value) for name, value in held]


def _names_in(code: CodeType) -> set[str]:
    """The names of variables and attributes in a function's code, and in that of functions within it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


@cache
def is_installed(module_name: str | None) -> bool:
    """Whether a module belongs to Python, to an installed package or to splittune, rather than to the job."""
    name = module_name or ""
    if name == "__main__":  # the script itself, whose file may be a tool's that runs it
        return False
    return (
        name.partition(".")[0] in ("splittune", "torch") or _is_standard(name) or _is_within(name, _package_folders())
    )


@cache
def _is_standard(name: str) -> bool:
    """Whether a module is of the standard library; a job's own file may bear the name of one."""
    is_named_so = name != "__main__" and name.partition(".")[0] in sys.stdlib_module_names
    return is_named_so and _is_within(name, _standard_folders(), or_builtin=True)


def _is_within(name: str, folders: Iterable[Path], *, or_builtin: bool = False) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return or_builtin if file is None else any(Path(file).is_relative_to(folder) for folder in folders)


@cache
def _standard_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    return Path(paths["stdlib"]), Path(paths["platstdlib"])


@cache
def _package_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    named = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    return tuple(dict.fromkeys(Path(folder) for folder in (paths["purelib"], paths["platlib"], *named)))
