"""The user's job as it was found: kept in host memory, put back bit by bit."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from splittune.cards import count_cards, kind_of_cards, module_of
from splittune.training.reach import MAX_OBJECTS, Binding, Reached, reach
from splittune.training.saved import (
    SavedAttributes,
    SavedContainer,
    SavedModule,
    SavedObject,
    SavedOptimizer,
    SavedTensor,
    is_told_by_storage,
)

logger = logging.getLogger(__name__)


class Snapshot:
    """Model, optimizer, random generators, the loader's among them, and what else a step reaches, at one moment.

    Kept: every parameter and buffer (which object, its values, its device), gradients,
    requires_grad, train or eval mode and hooks of each submodule, the optimizer's state, groups and
    parameters, the generators of torch on the CPU and each card, of Python and of NumPy
    where it is loaded, and those the loader was given. `restore` puts all of it back into the same
    objects and may be called any number of times. Gradients are taken off the parameters, so that
    they hold no device memory meanwhile. Other attributes of modules, of their `config`, of
    optimizer and loader get back the object they held.

    The same holds for what `reach` finds from the model and from `others`: further modules and optimizers, schedulers,
    gradient scalers and other objects with a ``state_dict()``, plain tensors, generators, and the dicts, lists and
    names in which these are held. Numbers that a step counts up, and lists without any of these, are not undone.

    Args:
        model: what is trained.
        optimizer: the one that trains it, where it exists already.
        loader: what gives the batches.
        others: what else training may change, or reaches it by: a loss with parameters of its own, a step function.
        told: objects whose attributes are all kept by value, whatever they are.
        at_once: copy the values of all parameters, buffers and tensors now. False for a job that is hardly ever written
            to: those of one are copied when `before_use` is told of it, or something inside `watching` takes it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer | None = None,
        loader: Iterable[Any] = (),
        *,
        others: Sequence[object] = (),
        told: Sequence[object] = (),
        at_once: bool = True,
    ) -> None:
        found = reach((model, *([] if optimizer is None else [optimizer]), *told, *others))
        if not found.is_complete:
            logger.warning(
                "the job's functions reach more than %d objects, and not all were looked at: what training changes "
                "beyond the model may not be put back afterwards. Name it: TrainingTask(..., "
                "other_state=(discriminator, ...)).",
                MAX_OBJECTS,
            )
        modules = list(dict.fromkeys(module for root in (model, *found.modules) for module in root.modules()))
        tensors = [tensor for module in modules for tensor in _tensors_of(module)] + found.tensors
        self._bindings, self._containers = found.bindings, [SavedContainer(each) for each in found.containers]
        self._modules = [SavedModule(module) for module in modules]
        each_once = {id(tensor): tensor for tensor in tensors}.values()
        self._tensors = [SavedTensor(tensor, at_once=at_once) for tensor in each_once]
        self._unkept: dict[int, list[SavedTensor]] = {}
        """By storage, those whose values are not copied yet."""
        for tensor in self._tensors:
            if tensor.values is None:
                self._unkept.setdefault(_storage_of(tensor.tensor), []).append(tensor)
        self._optimizers = [SavedOptimizer(each) for each in found.optimizers]
        stateful = {id(each): each for each in (*found.stateful, *(each for each in told if _is_plain(each)))}
        self._objects = [SavedObject(each) for each in stateful.values()]
        self._loader = [SavedAttributes(owner) for owner in _parts_of(loader)]
        self._random = _SavedRandom(loader, found)
        for tensor in self._tensors:
            tensor.take_gradient()

    def before_use(self, values: Iterable[Any]) -> None:
        """Copy what is not copied yet of the tensors that an operation takes: these are its arguments."""
        for value in values if self._unkept else ():
            if isinstance(value, list | tuple):
                self.before_use(value)
            elif isinstance(value, Tensor) and is_told_by_storage(value):
                for saved in self._unkept.pop(_storage_of(value), ()):
                    saved.keep_values()

    def keep_values(self) -> None:
        """Copy all that is not copied yet: the job is about to be trained."""
        for storage in list(self._unkept):
            for saved in self._unkept.pop(storage):
                saved.keep_values()

    def watching(self) -> AbstractContextManager[Any]:
        """Inside, no operation of torch's takes a tensor whose values are not copied; NumPy's are not seen."""
        return _Watching(self.before_use) if self._unkept else nullcontext()

    def restore(self, *, on_host_only: bool = False) -> None:
        """Put everything back. Call it once what the trial left on the devices has been freed.

        `on_host_only` is for devices that an error of theirs has made unusable: no value on them is touched.
        """
        named: list[Binding | SavedContainer | SavedModule] = [*self._bindings, *self._containers, *self._modules]
        for each in named:
            each.restore()
        valued: list[SavedTensor | SavedOptimizer | SavedObject] = [*self._tensors, *self._optimizers, *self._objects]
        for thing in valued:
            thing.restore(on_host_only=on_host_only)
        for owner in self._loader:
            owner.restore()
        self._random.restore(on_host_only=on_host_only)

    def restore_gradients(self, *, on_host_only: bool = False) -> None:
        """Put the gradients back as well: last of all, since they take device memory."""
        for tensor in self._tensors:
            tensor.restore_gradient(on_host_only=on_host_only)


class _Watching(TorchDispatchMode):
    """Tells of the arguments of each operation before it is run."""

    def __init__(self, before_use: Callable[[Iterable[Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before_use = before_use

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._before_use((*args, *kwargs.values()))
        return func(*args, **kwargs)


class _SavedRandom:
    """The generators that everybody shares, the loader's, and those that were found besides."""

    def __init__(self, loader: Iterable[Any], reached: Reached) -> None:
        self.python = random.getstate()
        self.numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self.cpu = torch.get_rng_state()
        self.cards = module_of(kind_of_cards())
        self.of_cards = self.cards.get_rng_state_all() if count_cards() else []
        found = [*(getattr(owner, "generator", None) for owner in _parts_of(loader)), *reached.generators]
        generators = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
        self.generators = [(generator, generator.get_state()) for generator in generators.values()]
        self.of_python = [(each, each.getstate()) for each in found if isinstance(each, random.Random)]
        of_numpy = (getattr(each, "bit_generator", None) for each in found)
        self.of_numpy = [(each, each.state) for each in of_numpy if each is not None]

    def restore(self, *, on_host_only: bool) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.of_cards and not on_host_only:
            self.cards.set_rng_state_all(self.of_cards)
        for generator, state in self.generators:
            if generator.device.type == "cpu" or not on_host_only:
                generator.set_state(state)
        for own, internal in self.of_python:
            own.setstate(internal)
        for bit_generator, internal in self.of_numpy:
            bit_generator.state = internal


def _parts_of(loader: Iterable[Any]) -> list[object]:
    """A DataLoader and its samplers, whose generators, and whatever else they keep, iterating advances."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(part): part for part in parts if part is not None}.values())


def _storage_of(tensor: Tensor) -> int:
    """Its address, on the host or a card."""
    return tensor.untyped_storage().data_ptr()


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """The module's own parameters and buffers; those without values, lazy or on the meta device, have none to keep."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return [tensor for tensor in own if not (tensor.is_meta or nn.parameter.is_lazy(tensor))]


def _is_plain(thing: object) -> bool:
    """Whether it is an object that is kept by its attributes."""
    kept_otherwise = (nn.Module, optim.Optimizer, Tensor, dict, list, tuple)
    return not isinstance(thing, kept_otherwise) and hasattr(thing, "__dict__")
