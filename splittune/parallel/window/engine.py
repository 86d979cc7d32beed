"""The wrapper's own engine: one copy out and one sum of gradients for each window."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splittune.errors import WindowError
from splittune.parallel.collectives import Part, add_from_afar
from splittune.parallel.link import Link
from splittune.parallel.nesting import tensors_of
from splittune.parallel.sums import Sums, plus
from splittune.parallel.window.partial_gradients import PartialGradient, Verdict, has_hooks, show
from splittune.parallel.window.replica_copies import ReplicaCopies
from splittune.parallel.window.replica_gradients import ReplicaGradients

# Private, and what DistributedDataParallel and FSDP end their backward with. A test in
# tests/parallel/window/test_engine.py says so should it change.
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback

_MISUSES = {
    Verdict.STEPPED: (
        "parameters changed inside an accumulation window, before its last backward: the gradients they "
        "were changed by were those of the first device alone. Run the last micro-batch outside no_sync() "
        "(as config.micro_batches(batch, model) does), then optimizer.step(). The window was discarded."
    ),
    Verdict.RESCALED: (
        "gradients were changed inside an accumulation window, when most of them were still with the "
        "replicas. Clip or scale them after the window's last backward, then optimizer.step(). The window "
        "was discarded: call zero_grad(), not zero_grad(set_to_none=False), and begin the batch again."
    ),
}


class WindowState(Enum):
    """Where an accumulation window stands, told by what the engine holds."""

    CLOSED = auto()
    """No window. What a graph needs of its forward's copies it holds itself."""
    COPIED = auto()
    """A forward under `no_sync` has run. Its copies are kept; no replica holds a gradient."""
    PARTIAL = auto()
    """A backward under `no_sync` has ended. The replicas hold gradients; the module's parameters
    show the first device's part."""
    BACKWARD = auto()
    """A backward pass runs, or has raised: such a one never comes to its end."""


class _Pass:
    """A backward pass that has begun and not ended.

    Nothing but the pass itself holds this object, by what it calls at its end: of one that raised it is gone.
    """

    def __init__(self, gradients: ReplicaGradients, *, is_last: bool) -> None:
        # The graph that held them is freed as the pass goes on: here they live until their gradients have been taken.
        self.gradients, self.is_last = gradients, is_last


class Replicas(NamedTuple):
    """What a forward runs on."""

    trees: dict[int, nn.Module]
    """The module to run, by position."""
    gradients: ReplicaGradients
    """Where their gradients will arrive."""


class WindowEngine:
    """Replicas whose gradients wait on their own devices.

    A window is the forwards and backwards that make one optimizer step. Its first forward copies
    the parameters out. Each backward leaves the gradients with the replicas. The last one, the one
    outside `no_sync`, adds them up where the module lives. They appear in the module's own
    parameters as one device would have made them, hooks included: a hook sees the whole window's
    gradient, once. Without `no_sync` every backward is the last of its window. ::

              forward under             backward                 it ends,
                 no_sync                 begins               under no_sync
        CLOSED ───────────► COPIED ────────────────► BACKWARD ─────────────► PARTIAL
         ▲  │                                         ▲ │ ▲                     │
         │  └── backward begins, forward was the last ┘ │ └── backward begins ──┘
         └────── it ends, its forward was the last ─────┘

        any ─── discard(), misuse, or a forward after a backward that raised ──► CLOSED
        PARTIAL ─── zero_grad() of every parameter, once it is judged ──► COPIED

    What each call does in each state (a dash: it cannot happen):

    =====================  ==============  ==============  ================  ====================
    call                   CLOSED          COPIED          PARTIAL           BACKWARD
    =====================  ==============  ==============  ================  ====================
    forward, no_sync       copies;         same copies,    as COPIED, once   it failed: discard,
                           to COPIED       or new ones     the gradients     WindowError unless
                                           if the module   shown are judged  zero_grad() was
                                           has changed                       called; as CLOSED
    forward, last          copies for its  as above; its backward will       as above
                           graph; stays    close the window
    forward in a backward  -               -               -                 as CLOSED or COPIED,
    (a checkpoint's)                                                         nothing is judged
    forward, no_grad       copies of the last such call, or new ones if the module has changed since;
                           nothing is judged, no state changes
    backward begins, at    to BACKWARD     to BACKWARD     judged; then to   nothing: another
    an output or with a                                    BACKWARD          device's thread
    gradient that arrives
    backward ends,         -               -               -                 parts are shown; to
    no_sync                                                                  PARTIAL
    backward ends, last    -               -               -                 sum delivered; to
                                                                             CLOSED
    zero_grad()            nothing         nothing         seen when judged  seen by the next
                                                           next: parts are   forward
                                                           dropped
    discard()              nothing         to CLOSED       parts dropped     parts dropped
                                                           and hidden; to    and hidden; to
                                                           CLOSED            CLOSED
    =====================  ==============  ==============  ================  ====================

    A pass within a pass, a checkpoint's in a replica, ends in silence: the outer one's end counts.

    How what is shown is judged stands with `partial_gradients.judge`; misuse discards the window
    and raises WindowError.

    A device holds one copy of the parameters at most: the window's, or the last evaluation's, until
    the next forward that records gradients.

    Nothing is ever reused in silence after it may have changed: copies serve one window only, and
    within it they are made anew when a parameter, a buffer, a mode or the module tree has changed.
    All calls of a window are made on one set of the cards' streams, as torch's own accumulation wants.
    What is written through ``.data`` moves no version counter: within a window that is not seen,
    the next window has it. Limits are DistributedDataParallel's: ``torch.autograd.grad`` or
    ``backward(inputs=...)`` with respect to the module's parameters, and gradients that carry a
    graph themselves, need ``engine="torch"``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: list[ReplicaCopies] = []  # the open window's: their gradients outlive their graphs
        self._evaluated: ReplicaCopies | None = None  # by the latest forward, if it recorded no gradients
        self._live: weakref.WeakSet[ReplicaGradients] = weakref.WeakSet()
        self._in_backward = False
        self._passes: weakref.WeakSet[_Pass] = weakref.WeakSet()  # nested ones too: each of a checkpoint's is its own
        self._was_last = False
        self._partials: list[PartialGradient] = []
        self._lock = threading.Lock()  # backward has a thread for each device

    @property
    def state(self) -> WindowState:
        """Where the window stands."""
        if self._in_backward:
            return WindowState.BACKWARD
        if self._partials:
            return WindowState.PARTIAL
        return WindowState.COPIED if self._kept else WindowState.CLOSED

    def copy_out(self, positions: Sequence[int], link: Link, *, last: bool) -> Replicas:
        """Replicas for these positions, their parameters as the module's are now.

        `last` says that the backward of this forward ends the window.

        Raises:
            WindowError: the open window was misused; it is discarded, and the next call begins
                anew.
        """
        if not torch.is_grad_enabled():
            return self._copy_out_to_evaluate(positions, link)
        # within a graph task a checkpoint around the wrapper recomputes it
        if torch._C._current_graph_task_id() == -1:
            self._check_window()
        self._evaluated = None
        copies = self._kept[-1] if self._kept else None
        if copies is None or not copies.serve(positions, link):
            before = () if copies is None else copies.positions
            copies = ReplicaCopies(self._module, link, {*positions, *before}, partial(_on_arrival, weakref.ref(self)))
            self._live.add(copies.gradients)
        else:
            copies.renew_buffers(self._module, link)
        # Then a replica's buffers are written back to the module's, through .data, and no other
        # replica has them.
        copies.home_was_idle = 0 not in positions
        copies.gradients.is_last = last
        # Kept for the window alone. Otherwise the forward's graph has what it needs, and the next
        # forward copies again.
        if (self._kept or not last) and copies not in self._kept:
            self._kept.append(copies)
        return Replicas(copies.trees, copies.gradients)

    def _copy_out_to_evaluate(self, positions: Sequence[int], link: Link) -> Replicas:
        """New trees around the copies of the forward before, while nothing has changed and nothing is trained."""
        copies = self._evaluated
        if copies is None or not copies.serve(positions, link):
            # not beside the old ones
            self._evaluated = copies = None
            self._evaluated = copies = ReplicaCopies(self._module, link, positions)
        else:
            copies.renew_buffers(self._module, link)
        copies.home_was_idle = 0 not in positions
        return Replicas(copies.take_trees(self._module), copies.gradients)

    def watch(self, output: Any, gradients: ReplicaGradients) -> None:
        """Have the backward through `output` end with the gradients home, or kept for later."""
        for _, tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(_on_backward, self, gradients, gradients.is_last))

    def discard(self) -> None:
        """Drop the open window: copies, the gradients with the replicas, what is shown of them."""
        self._hide_partial_gradients()
        for gradients in list(self._live):
            gradients.drop()
        self._close()

    def begin_backward(self, gradients: ReplicaGradients, last: bool) -> None:
        """Called as a backward pass begins; its end is `_end_backward`.

        At an output that was watched or, where it did not come through one, that of a gradient penalty say, before its
        first gradients are taken.
        """
        backward = _Pass(gradients, is_last=last)
        with self._lock:
            if self.state is not WindowState.BACKWARD:
                self._in_backward = True
                self._judge_partial_gradients(in_backward=True)
            if not self._passes:
                self._was_last = False
            gradients.graph_tasks.add(torch._C._current_graph_task_id())
            self._passes.add(backward)
        _queue_callback(partial(self._end_backward, backward))

    def _end_backward(self, backward: _Pass) -> None:
        """Called once a pass has ended, as often as it has begun; if it raises, the pass counts as failed.

        Within a replica a checkpoint runs passes of its own, in the thread of each device. What they leave is looked at
        with the pass around them, when every device has come to its end.
        """
        with self._lock:
            self._passes.discard(backward)
            self._was_last = self._was_last or backward.is_last
            if self._passes:
                return
        with torch.no_grad():
            if self._was_last:
                self._hide_partial_gradients()
                self._bring_home()
                self._close()
            else:
                self._partials = show(list(self._live), self._partials)
        self._in_backward = False
        for gradients in list(self._live):
            gradients.graph_tasks.clear()

    def _close(self) -> None:
        self._kept, self._partials, self._in_backward, self._was_last = [], [], False, False

    def _bring_home(self) -> None:
        every_gradients = list(self._live)
        originals = list({id(o): o for gradients in every_gradients for o in gradients.originals}.values())
        index_of = {id(original): index for index, original in enumerate(originals)}
        totals = Sums(len(originals))
        for gradients in every_gradients:
            indices = [index_of[id(original)] for original in gradients.originals]
            link, home = gradients.link, gradients.home
            afar: list[Part] = []
            for position, sums in gradients.hand_over():
                if link.place(position) == home:
                    with link.on(home):
                        totals.add_sums(indices, sums)
                else:
                    afar.append(Part(link.place(position), sums.values))
            add_from_afar(afar, link, home, totals, indices)
        for gradients in every_gradients[:1]:
            with gradients.link.on(gradients.home):
                for index, original in enumerate(originals):
                    total = totals.own(index)
                    if total is not None:
                        _deliver(original, total)

    def _hide_partial_gradients(self) -> None:
        for each in self._partials:
            each.hide()

    def _check_window(self) -> None:
        """Before a forward: has the window been misused, or given up?"""
        if self.state is not WindowState.BACKWARD:
            self._judge_partial_gradients(in_backward=False)
            return
        # the last backward raised: it never came to its end
        is_given_up = all(each.is_given_up for each in self._partials)
        self.discard()
        if not is_given_up:
            raise WindowError(
                "a backward pass failed inside an accumulation window, so its gradients are incomplete. "
                "Call optimizer.zero_grad() and begin the batch again."
            )

    def _judge_partial_gradients(self, *, in_backward: bool) -> None:
        """Keep those that still stand, drop what ``zero_grad()`` gave up, and refuse misuse."""
        if all(each.is_as_shown for each in self._partials):
            return
        kept = []
        for each in self._partials:
            verdict = each.verdict(in_backward=in_backward)
            if verdict is Verdict.KEPT:
                kept.append(each)
            elif verdict is Verdict.DROPPED:
                for gradients in list(self._live):  # what the other devices hold goes as well
                    gradients.drop(each.parameter)
            else:
                self.discard()
                raise WindowError(_MISUSES[verdict])
        if self._partials and not kept:
            for gradients in list(self._live):  # and what nothing is shown of
                gradients.drop()
        self._partials = kept


def _on_backward(engine: WindowEngine, gradients: ReplicaGradients, last: bool, _grad: Tensor) -> None:
    engine.begin_backward(gradients, last)


def _on_arrival(engine_ref: weakref.ref[WindowEngine], gradients: ReplicaGradients) -> None:
    engine = engine_ref()
    if engine is not None:
        engine.begin_backward(gradients, gradients.is_last)


def _deliver(original: Tensor, total: Tensor) -> None:
    """Add `total` to the parameter's gradient as autograd would: with hooks, in place if it can."""
    if original.requires_grad and (has_hooks(original) or not original.is_leaf):
        with torch.enable_grad():
            torch.autograd.backward([original], [total])
    else:
        original.grad = plus(original.grad, total)
