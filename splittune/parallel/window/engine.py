"""The wrapper's own engine: parameters go out once and gradients come home once for each accumulation window."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splittune.errors import WindowError
from splittune.parallel.link import Link
from splittune.parallel.nesting import tensors_of
from splittune.parallel.replicas import rebuild, unique_tensors
from splittune.parallel.transfer import add_to_home, copy_to_each, plus

# Private, and what DistributedDataParallel and FSDP end their backward with. tests/parallel/window/test_engine.py checks it.
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class WindowEngine:
    """Replicas whose parameters are leaves on their own devices.

    A window is the forwards and backwards that make one optimizer step. Its first forward copies the parameters out;
    each backward leaves the gradients with the replicas; the last one, the one outside `no_sync`, adds them up where the
    module lives, and they appear in the module's own parameters as one device would have made them, hooks included (a
    hook sees the whole window's gradient, once). Without `no_sync` every backward is the last of its window.

    Nothing is ever reused in silence after it may have changed: copies serve one window only, and within it they are
    made anew when a parameter, a buffer, a mode or the module tree has changed. What is written through ``.data`` moves
    no version counter: within a window that is not seen, the next window has it.

    While a window is open the module's parameters show the first device's part of the gradient, so that ``zero_grad()``
    discards the window here as it would on one device. Limits are DistributedDataParallel's: ``torch.autograd.grad``
    or ``backward(inputs=...)`` with respect to the module's parameters, and gradients that carry a graph themselves,
    need ``engine="torch"``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: list[Copies] = []  # the open window's: their gradients outlive their graphs
        self._live: weakref.WeakSet[Copies] = weakref.WeakSet()
        self.in_backward = False
        self._marks: list[_Mark] = []
        self._lock = threading.Lock()  # backward has a thread for each device

    def copy_out(self, positions: Sequence[int], link: Link, *, last: bool) -> Copies:
        """Replicas for these positions, their parameters as the module's are now.

        `last` says that the backward of this forward ends the window.

        Raises:
            WindowError: the open window was misused; it is discarded, and the next call begins anew.
        """
        records = torch.is_grad_enabled()
        if records and torch._C._current_graph_task_id() == -1:  # else a checkpoint around the wrapper recomputes it
            self._check_window()
        state = _state_of(self._module)
        copies = self._kept[-1] if self._kept and records else None
        if copies is None or copies.state.fixed != state.fixed or not copies.positions.issuperset(positions):
            copies = Copies(self._module, self, link, positions if copies is None else copies.positions | {*positions})
            self._live.add(copies)
        elif copies.home_was_idle or copies.state.buffers != state.buffers:
            copies.renew_buffers(self._module, link)
        # Then a replica's buffers are written back to the module's, through .data, and no other replica has them.
        copies.home_was_idle = 0 not in positions
        if records:
            copies.is_last = last
            # Kept for the window alone. Otherwise the graph keeps them, and the next forward copies again.
            if (self._kept or not last) and copies not in self._kept:
                self._kept.append(copies)
        return copies

    def watch(self, output: Any, copies: Copies) -> None:
        """Have the backward pass through `output` end with the gradients coming home, or staying for the window."""
        for _, tensor in tensors_of(output):
            if tensor.requires_grad:
                # It holds the copies, so that they live as long as the graph that leaves gradients with them.
                tensor.register_hook(partial(_on_backward, self, copies, copies.is_last))

    def discard(self) -> None:
        """Drop the open window: the copies, the gradients that the replicas hold, and what the parameters show of them."""
        self._hide_partial_gradients()
        for copies in list(self._live):
            copies.drop_gradients()
        self._close()

    def begin_backward(self, copies: Copies, last: bool) -> None:
        """Called as a backward pass begins; its end is `end_backward`."""
        with self._lock:
            if not self.in_backward:
                self.in_backward = True
                self._check_marks(in_backward=True)
        _queue_callback(partial(self.end_backward, copies, last))

    def end_backward(self, _copies: Copies, last: bool) -> None:
        """Called once a backward pass has ended, for each of its outputs. If it raises, the pass counts as failed."""
        with torch.no_grad():
            self._hide_partial_gradients()
            if last:
                self._bring_home()
                self._close()
            else:
                self._show_partial_gradients()
        self.in_backward = False

    def _close(self) -> None:
        self._kept, self._marks, self.in_backward = [], [], False

    def _bring_home(self) -> None:
        totals: dict[int, tuple[Tensor, Tensor | None]] = {}
        for copies in list(self._live):
            so_far = [totals.get(id(original), (original, None))[1] for original in copies.originals]
            for index, grad in enumerate(copies.take_gradients_at_home()):
                if grad is not None:
                    so_far[index] = plus(so_far[index], grad)
            add_to_home(copies.take_gradients_elsewhere(), copies.link, copies.home, so_far)
            totals.update((id(o), (o, total)) for o, total in zip(copies.originals, so_far, strict=True))
        for original, total in totals.values():
            if total is not None:
                _deliver(original, total.detach() if total.requires_grad else total)

    def _show_partial_gradients(self) -> None:
        """Let the module's parameters show what the first device holds, so that ``zero_grad()`` can be noticed."""
        marks: dict[int, _Mark] = {}
        for copies in list(self._live):
            for index, original in enumerate(copies.originals):
                if id(original) in marks or not copies.has_gradient(index):
                    continue
                leaf, before = copies.leaves[0][index] if 0 in copies.leaves else None, original.grad
                own = None if leaf is None else leaf.grad
                # A sparse gradient is not added to in place, and hooks want the window's own gradient by itself.
                grows = before is None or (before.layout == torch.strided and not _has_hooks(original))
                is_own = own is not None and own.layout == torch.strided and grows
                if is_own and leaf is not None and own is not None:
                    original.grad = leaf.grad = own if before is None else before.add_(own)
                elif before is None:
                    original.grad = torch.zeros_like(original if own is None else own)
                assert original.grad is not None
                marks[id(original)] = _Mark(
                    parameter=original,
                    parameter_version=_version_of(original),
                    grad=original.grad,
                    grad_version=original.grad._version,
                    is_own=is_own,
                    is_placeholder=before is None and not is_own,
                )
        self._marks = list(marks.values())

    def _hide_partial_gradients(self) -> None:
        """Undo `_show_partial_gradients`. What else was added meanwhile, a penalty on the parameters say, remains."""
        for mark in self._marks:
            if mark.is_standing and (mark.is_own or (mark.is_placeholder and not mark.is_changed)):
                mark.parameter.grad = None

    def _check_window(self) -> None:
        """Before a forward: has the window been misused, or given up?"""
        if not self.in_backward:
            self._check_marks(in_backward=False)
            return
        # the last backward raised: it never came to its end
        given_up = not any(mark.is_standing and (not mark.is_changed or _any(mark.grad)) for mark in self._marks)
        self.discard()
        if not given_up:
            raise WindowError(
                "a backward pass failed inside an accumulation window, so its gradients are incomplete. "
                "Call optimizer.zero_grad() and begin the batch again."
            )

    def _check_marks(self, *, in_backward: bool) -> None:
        """Are the gradients shown still there? In a backward other parts of the loss may have been added to them."""
        standing = []
        for mark in self._marks:
            grad = mark.parameter.grad
            if _version_of(mark.parameter) != mark.parameter_version:
                self.discard()
                raise WindowError(
                    "parameters changed inside an accumulation window, before its last backward: the gradients they "
                    "were changed by were those of the first device alone. Run the last micro-batch outside no_sync() "
                    "(as config.micro_batches(batch, model) does), then optimizer.step(). The window was discarded."
                )
            # something dense that is added to a sparse gradient replaces it
            is_replaced = in_backward and grad is not None and mark.grad.layout != torch.strided
            is_fine = not mark.is_changed or (in_backward and (not mark.is_own or _any(mark.grad)))
            if is_replaced or (mark.is_standing and is_fine):
                standing.append(mark)
            elif grad is None or (in_backward and not mark.is_standing) or (mark.is_own and not _any(grad)):
                for copies in list(self._live):  # zero_grad(), whichever way: what the other devices hold goes as well
                    copies.drop_gradients(mark.parameter)
            else:
                self.discard()
                raise WindowError(
                    "gradients were changed inside an accumulation window, when most of them were still with the "
                    "replicas. Clip or scale them after the window's last backward, then optimizer.step(). The window "
                    "was discarded: call zero_grad(), not zero_grad(set_to_none=False), and begin the batch again."
                )
        self._marks = standing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """A gradient that the module's parameter showed when a backward inside a window had ended."""

    parameter: Tensor
    parameter_version: tuple[Any, ...]
    grad: Tensor
    grad_version: int
    is_own: bool
    """The first replica's own gradient, the very tensor."""
    is_placeholder: bool
    """Zeros in place of a gradient that other devices hold."""

    @property
    def is_standing(self) -> bool:
        """False once ``zero_grad()`` has taken it away."""
        return self.parameter.grad is self.grad

    @property
    def is_changed(self) -> bool:
        return self.grad._version != self.grad_version


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _any(grad: Tensor) -> bool:
    return bool((grad if grad.layout == torch.strided else grad._values()).any())


@dataclass(frozen=True, slots=True)
class _State:
    """What copies were made of: two equal states need no new copies."""

    fixed: tuple[Any, ...]
    """All but the buffers, which a forward pass may change and which are few: they are renewed by themselves."""
    buffers: tuple[Any, ...]
    held: tuple[Any, ...] = field(compare=False)
    """All that is told by its id: as long as it is held, no other object gets that."""


def _state_of(module: nn.Module) -> _State:
    """Versions and storages of tensors, and the identity of everything that hangs on the modules."""
    parts: list[Any] = []
    for child in module.modules():
        parts += [child, *child.__dict__.values(), *child._modules.values()]
    parameters, buffers = tuple(module.parameters()), tuple(module.buffers())
    learning = tuple((id(p), *_version_of(p), p.requires_grad) for p in parameters)
    return _State(
        fixed=(learning, *map(id, parts)),
        buffers=tuple((id(b), *_version_of(b), b.requires_grad) for b in buffers),
        held=(*parts, *parameters, *buffers),
    )


def _version_of(tensor: Tensor) -> tuple[Any, ...]:
    """Storage and version. Inference tensors have none of the latter, and no gradient."""
    pointer = tensor.data_ptr() if tensor.layout == torch.strided else 0
    return pointer, None if tensor.is_inference() else tensor._version


class Copies:
    """The module's parameters and buffers as they were copied out once, and the module trees around them.

    Position 0 is where the module lives: its parameters there are leaves of their own on the module's storage.
    """

    def __init__(self, module: nn.Module, engine: WindowEngine, link: Link, positions: Iterable[int]) -> None:
        self.link, self.home = link, link.place(0)
        self.is_last, self.home_was_idle = True, False
        self.positions = frozenset(positions)
        parameters, buffers = unique_tensors(module.parameters()), unique_tensors(module.buffers())
        self.originals = [*parameters, *(buffer for buffer in buffers if buffer.requires_grad)]
        self._elsewhere = [position for position in sorted(self.positions) if position != 0]
        with torch.no_grad():
            moved = copy_to_each(self.originals, link, self._elsewhere)
            leaves = dict(zip(self._elsewhere, moved, strict=True))
            if 0 in self.positions:
                leaves[0] = [original.detach() for original in self.originals]
        self.leaves = {position: [_leaf(c, o) for c, o in zip(copied, self.originals, strict=True)]
                        for position, copied in leaves.items()}  # fmt: skip
        # A backward that does not pass through the output, a gradient penalty's say, is noticed where it arrives.
        arrived = partial(_on_arrival, weakref.ref(engine), weakref.ref(self))  # weak: the engine holds these leaves
        for leaf in (leaf for own in self.leaves.values() for leaf in own):
            if leaf.requires_grad and torch.is_grad_enabled():
                leaf.register_hook(arrived)
        self.trees: dict[int, nn.Module] = {}
        self.renew_buffers(module, link)

    def renew_buffers(self, module: nn.Module, link: Link) -> None:
        """Copy the buffers out again, and build the trees around them. At home they are the module's own."""
        buffers = [buffer for buffer in unique_tensors(module.buffers()) if not buffer.requires_grad]
        copies = dict(zip(self._elsewhere, copy_to_each(buffers, link, self._elsewhere), strict=True))
        copies[0] = buffers
        for position, leaves in self.leaves.items():
            pairs = zip([*self.originals, *buffers], [*leaves, *copies[position]], strict=True)
            self.trees[position] = rebuild(module, {id(original): copy for original, copy in pairs})
        self.state = _state_of(module)

    def has_gradient(self, index: int) -> bool:
        return any(leaves[index].grad is not None for leaves in self.leaves.values())

    def take_gradients_at_home(self) -> list[Tensor | None]:
        """The first device's gradients, or as many None, taken off its leaves."""
        return _take(self.leaves[0]) if 0 in self.leaves else [None] * len(self.originals)

    def take_gradients_elsewhere(self) -> list[tuple[int, list[Tensor | None]]]:
        return [(position, _take(self.leaves[position])) for position in self._elsewhere]

    def drop_gradients(self, of: Tensor | None = None) -> None:
        """The replicas' gradients of that original, or of all."""
        for leaves in self.leaves.values():
            _take([leaf for leaf, o in zip(leaves, self.originals, strict=True) if of is None or o is of])


def _leaf(copied: Tensor, original: Tensor) -> Tensor:
    if isinstance(original, nn.Parameter):
        return nn.Parameter(copied, requires_grad=original.requires_grad)
    return copied.requires_grad_(original.requires_grad)


def _take(leaves: Sequence[Tensor]) -> list[Tensor | None]:
    taken = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return taken


def _on_backward(engine: WindowEngine, copies: Copies, last: bool, _grad: Tensor) -> None:
    engine.begin_backward(copies, last)


def _on_arrival(engine_ref: weakref.ref[WindowEngine], copies_ref: weakref.ref[Copies], _grad: Tensor) -> None:
    engine, copies = engine_ref(), copies_ref()
    if engine is not None and copies is not None and not engine.in_backward:
        engine.begin_backward(copies, copies.is_last)


def _deliver(original: Tensor, total: Tensor) -> None:
    """Add the window's gradient to the parameter's own, as autograd would: with its hooks, in place where it can be."""
    if original.requires_grad and (_has_hooks(original) or not original.is_leaf):
        with torch.enable_grad():
            torch.autograd.backward([original], [total])
    else:
        original.grad = plus(original.grad, total)
