"""Copies of a module on other devices, and running them all at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# Private, and how torch itself finds the modes that a thread runs in; tests/parallel/test_replica_norms.py fails loudly
# should it change.
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from splittune.cards import kind_of_cards
from splittune.parallel.collectives import copy_to_each
from splittune.parallel.compiled import (
    compile_call,
    compiled_as,
    holds_compiled,
    is_compiled,
    original_of,
    refuse_unknown,
    room_for,
)
from splittune.parallel.link import Link, buckets_of, flatten, is_joinable, unflatten
from splittune.parallel.meeting import Meeting, PartedError, Seat
from splittune.parallel.modules import modules_of
from splittune.parallel.threads import ReplicaThreads
from splittune.parallel.transfer import broadcast

# Of a single value per channel there is no variance: torch's BatchNorm raises.
_MIN_BATCH_NORM_SHARD = 2

# Private, but nn.Module's __setstate__ knows them by these names too; tests/parallel/test_replicas.py checks the list.
HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


_TORCHS_HOOK = nn.Module._replicate_for_data_parallel


class ReplicaGauge(Protocol):
    """Is told of every replica's forward, on its device and in its thread: for measuring."""

    def begin(self, position: int, module: nn.Module) -> None: ...

    def end(self, position: int, output: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCall:
    """One replica's part of a forward pass."""

    position: int
    """Which of the wrapper's devices it runs on."""
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weight: float
    """How much its 0-dim outputs count: its samples, unless the user says otherwise."""
    loss_fn: Callable[[Any, Any], Tensor] | None
    """Applied to the output and the last of `args`, the targets, which the module then does not
    get."""
    where: str
    """For messages: ``"replica 1 on device cuda:1, a shard of 3 samples"``."""


def replicate(module: nn.Module, link: Link, positions: Sequence[int]) -> list[nn.Module]:
    """One replica of `module` on each of `positions`, parameters and buffers copied there.

    The module trees are rebuilt as torch's own replication does, through the hook that modules may
    override (``nn.RNN`` does). Two differences: a replica's parameters are in its ``parameters()``
    as well, which torch's leave empty, and gradients are added up by `transfer.broadcast`. A
    replica's parameters are not leaves.
    """
    if not positions:
        return []
    parameters = unique_tensors(module.parameters())
    buffers = unique_tensors(module.buffers())
    learning = [buffer for buffer in buffers if buffer.requires_grad]
    fixed = [buffer for buffer in buffers if not buffer.requires_grad]
    moved = broadcast([*parameters, *learning], link, positions)
    fixed_copies = copy_to_each(fixed, link, positions)
    return rebuild(
        module, [*parameters, *learning, *fixed], [[*a, *b] for a, b in zip(moved, fixed_copies, strict=True)]
    )


def min_shard_size_of(module: nn.Module) -> int:
    """The fewest samples that a replica can train on: 2 where BatchNorm computes statistics of its shard, else 1."""
    norms = (child for child in modules_of(module) if isinstance(child, _BatchNorm))
    return _MIN_BATCH_NORM_SHARD if any(norm.training for norm in norms) else 1


def unique_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor once, in order: parameters that modules share are one."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def rebuild(root: nn.Module, originals: Sequence[Tensor], copies: Iterable[Sequence[Tensor]]) -> list[nn.Module]:
    """The module tree anew, around each of several copies of the original tensors. What is shared in it stays shared.

    Compiled modules are made anew around the replicas of their originals.

    Raises:
        TypeError: a module that cannot be replicated; nothing has been touched.
    """
    modules = modules_of(root)
    refuse_unknown(modules)
    compiled = [module for module in modules if is_compiled(module)]
    plain = [module for module in modules if not is_compiled(module)]
    keys = [id(original) for original in originals]
    return [_rebuild(plain, compiled, dict(zip(keys, each, strict=True)))[id(root)] for each in copies]


def _rebuild(
    plain: Sequence[nn.Module], compiled: Sequence[nn.Module], copies: dict[int, Tensor]
) -> dict[int, nn.Module]:
    """A replica of each module, around the copies of its tensors; both by the ids of the originals."""
    replicas = {id(module): _bare_replica(module) for module in plain}
    for module in reversed(compiled):  # they may be around one another
        replicas[id(module)] = compiled_as(module, replicas[id(original_of(module))])
    for module in plain:
        replica = replicas[id(module)]
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else replicas[id(child)]
        for name, parameter in module._parameters.items():
            replica._parameters.pop(name, None)  # what torch's hook leaves here would refuse a plain tensor
            copy = None if parameter is None else copies[id(parameter)]
            if copy is not None and type(replica).__setattr__ is not nn.Module.__setattr__:
                setattr(replica, name, copy)  # as torch does: nn.RNN keeps its list of weights up to date so
                replica.__dict__.pop(name, None)  # an attribute would hide what functional_call() puts in its place
            replica._parameters[name] = copy  # type: ignore[assignment]  # so that parameters() is not empty
        for name, buffer in module._buffers.items():
            replica._buffers[name] = None if buffer is None else copies[id(buffer)]
    return replicas


def _bare_replica(module: nn.Module) -> nn.Module:
    # Private, and the very hook that torch's replicate() calls: subclasses override it.
    # tests/parallel checks it.
    if getattr(module._replicate_for_data_parallel, "__func__", None) is _TORCHS_HOOK:
        replica = _as_torchs_hook_does(module)
    else:
        replica = module._replicate_for_data_parallel()
    # torch's share the module's own tables: what a replica's forward installs would pile up there, once a replica
    for name, table in hook_tables_of(module).items():
        replica.__dict__[name] = table.copy() if table else OrderedDict()  # of an empty one a new one is made sooner
    compile_call(replica)
    return replica


def _as_torchs_hook_does(module: nn.Module) -> nn.Module:
    """The same replica in a third of the time: past nn.Module's ``__setattr__``, for there is nothing to look for."""
    replica: nn.Module = module.__new__(type(module))
    attributes = replica.__dict__
    attributes.update(module.__dict__)
    attributes["_parameters"], attributes["_is_replica"] = {}, True
    for table in ("_buffers", "_modules"):
        attributes[table] = attributes[table].copy()
    return replica


def hook_tables_of(module: nn.Module) -> dict[str, OrderedDict[int, Any]]:
    """The tables of hooks that a forward or backward pass runs, by the attribute that holds each."""
    attributes = module.__dict__
    return {name: attributes[name] for name in HOOK_TABLES if name in attributes}


def keep_buffer_updates(module: nn.Module, replica: nn.Module, link: Link) -> None:
    """Copy what a replica's forward did to its buffers into the module's own.

    They are BatchNorm's running statistics, say. Needed when no replica runs on the module's own
    device; otherwise those on the module's device count, as in nn.DataParallel. A buffer that was
    made, resized or set to None in forward is so in the module afterwards.
    """
    if not any(each._buffers for each in modules_of(module)):
        return
    written: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for original, copied in _pairs_of(module, replica):
            for name, buffer in original._buffers.items():
                updated = copied._buffers.get(name)
                if updated is buffer:
                    continue
                if buffer is None or updated is None or updated.shape != buffer.shape:
                    original._buffers[name] = None if updated is None else link.copy(updated, link.place(0))
                elif not _is_expanded(buffer):  # such a buffer refuses to be written to, in forward as well
                    written.append((buffer, updated))
        for bucket in buckets_of([updated for _, updated in written]):
            members = [written[index][1] for index in bucket]
            if is_joinable(members[0]):
                with link.on(link.place_of(members[0])):
                    flat = flatten(members)
                parts = unflatten(link.copy(flat, link.place(0)), members)
            else:
                parts = [link.copy(members[0], link.place(0))]
            for index, arrived in zip(bucket, parts, strict=True):
                # .data: BatchNorm's own update is not seen by autograd either, and a buffer that is
                # written back unchanged may be saved for somebody's backward pass
                written[index][0].data.copy_(arrived)


def _pairs_of(module: nn.Module, replica: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Every module with its replica, but for those that a forward has taken out of the replica."""
    pairs: dict[nn.Module, nn.Module] = {}
    waiting: list[tuple[nn.Module | None, nn.Module | None]] = [(module, replica)]
    while waiting:
        original, copied = waiting.pop()
        if original is None or copied is None or original in pairs:
            continue
        pairs[original] = copied
        children = reversed(original._modules.items())
        waiting.extend((child, copied._modules.get(name)) for name, child in children)
    return list(pairs.items())


def _is_expanded(tensor: Tensor) -> bool:
    strides = tensor.stride() if tensor.layout == torch.strided else tensor.shape
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, strides, strict=True))


def run_replicas(
    calls: Sequence[ReplicaCall],
    link: Link,
    threads: ReplicaThreads | None = None,
    gauge: ReplicaGauge | None = None,
    meeting: Meeting | None = None,
) -> list[Any]:
    """Every replica's output, each from its position's thread.

    Without `threads`, or where the link wants none, they run one after another. With a `meeting` they have threads all
    the same, where the link wants none in turn, and what torch asks before each operation, a ledger or fake tensors,
    is the caller's there too.

    Compiled modules run one after another as well: their launches are few, and devices work on
    while the next one's are launched. Grad mode, inference mode and autocast (its dtype as well)
    are the caller's in every thread. If replicas fail, the first one's exception is raised: the
    object itself, with the replica named in its message or its notes.
    """
    if holds_compiled(calls[0].module):
        # The compiler has one state for all threads while it works, and CUDA graphs belong to
        # theirs.
        with room_for(len(calls)):
            return [_run(call, link, len(calls), gauge) for call in calls]
    if threads is None or not (link.threaded or meeting):
        return [_run(call, link, len(calls), gauge) for call in calls]
    outputs: list[Any] = [None] * len(calls)
    errors: list[BaseException | None] = [None] * len(calls)
    enter_caller_state = _caller_state(takes_modes=not link.threaded)

    def work(index: int) -> None:
        try:
            with enter_caller_state():
                outputs[index] = _run(
                    calls[index], link, len(calls), gauge, seat=None if meeting is None else meeting.seats[index]
                )
        except BaseException as error:  # noqa: BLE001  it belongs to the calling thread, which raises it
            errors[index] = error

    first = None
    try:
        tasks = {call.position: partial(work, index) for index, call in enumerate(calls)}
        threads.run(tasks, if_cut_short=None if meeting is None else meeting.break_up)
        # Those who only waited for the one that failed come last.
        raised = sorted((error for error in errors if error is not None), key=lambda each: type(each) is PartedError)
        first = next(iter(raised), None)
        raised.clear()
        if first is not None:
            raise first
        return outputs
    finally:
        # a frame that keeps its own exception keeps every tensor of the failed replicas
        first = None
        errors.clear()


def _run(call: ReplicaCall, link: Link, num_replicas: int, gauge: ReplicaGauge | None, seat: Seat | None = None) -> Any:
    inside = partial(link.replica, call.position, num_replicas)
    try:
        with inside() if seat is None else seat.taken(inside):
            if gauge is None:
                return _output_of(call)
            gauge.begin(call.position, call.module)
            output = _output_of(call)
            gauge.end(call.position, output)
            return output
    except Exception as error:
        _say_where(error, call.where)
        raise


def _output_of(call: ReplicaCall) -> Any:
    if call.loss_fn is None:
        return call.module(*call.args, **call.kwargs)
    *inputs, targets = call.args
    return call.loss_fn(call.module(*inputs, **call.kwargs), targets)


def _say_where(error: Exception, where: str) -> None:
    """Name the replica in the exception's message where that is plain text, else in its notes.

    Python 3.10 has no notes: there it is named by the exception's cause, unless that is taken.
    """
    with suppress(AttributeError, TypeError):  # what refuses both, a frozen dataclass say, is raised as it is
        if len(error.args) == 1 and isinstance(error.args[0], str) and not isinstance(error, KeyError):
            before = error.args
            error.args = (f"{before[0]} (in {where})",)
            if where in str(error):
                return
            error.args = before  # the class words its message itself
        if hasattr(error, "add_note"):
            error.add_note(f"in {where}")
        elif error.__cause__ is None and error.__context__ is None:
            error.__cause__ = RuntimeError(f"raised in {where}")


def _caller_state(*, takes_modes: bool) -> Callable[[], ExitStack]:
    """What a new thread must switch on to compute as the calling thread does, its dispatch modes too if so wished."""
    modes = _get_current_dispatch_mode_stack() if takes_modes else []
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    cache = torch.is_autocast_cache_enabled()
    autocasts = [
        (kind, torch.get_autocast_dtype(kind)) for kind in (kind_of_cards(), "cpu") if torch.is_autocast_enabled(kind)
    ]

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in autocasts:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
        for mode in modes:
            stack.enter_context(mode)
        return stack

    return enter
