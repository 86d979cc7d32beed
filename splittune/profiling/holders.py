"""What holds a device's memory: its largest tensors, and who refers to them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import CellType, FrameType, ModuleType

import torch
from torch import Tensor

from splittune.units import format_bytes

# Tensors, and referrers of each, that a message names. A choice.
NUM_NAMED = 3
# How many referrers are followed from a tensor: enough for one in a list in an attribute.
MAX_DEPTH = 3
# Said of a tensor to which no object refers.
NOTHING_KNOWN = "a variable of a running function, or nothing in Python"


class Holders:
    """Names the tensors that have come since it was made.

    It sees what Python's garbage collector tracks: tensors that only an autograd graph holds have
    no Python object.
    """

    def __init__(self) -> None:
        # weak, and by id: a set would compare tensors, and hold them
        self._known = {id(tensor): weakref.ref(tensor) for tensor in _tensors()}

    def describe(self, device: torch.device) -> str:
        """The largest tensors on `device` and what holds them, for messages.

        ``"(1024, 256) of torch.float32, 1.0 MiB, held by a list in ..."``
        """
        found: dict[int, tuple[int, Tensor]] = {}
        for tensor in _tensors():
            known = self._known.get(id(tensor))
            if tensor.device == device and (known is None or known() is not tensor):
                key, num_bytes = _storage_of(tensor)
                found.setdefault(key, (num_bytes, tensor))  # views share their storage: one of them is named
        if not found:
            return "no tensor that Python knows of: an autograd graph may hold it, or a library"
        largest = sorted(found.values(), key=lambda pair: pair[0], reverse=True)[:NUM_NAMED]
        ours = {id(found), id(largest), *map(id, largest), *map(id, found.values())}
        named = [
            f"{tuple(tensor.shape)} of {tensor.dtype}, {format_bytes(num_bytes)}, held by {_referrers_of(tensor, ours)}"
            for num_bytes, tensor in largest
        ]
        others = f"; and {len(found) - len(named)} more" if len(found) > len(named) else ""
        return "; ".join(named) + others


def _tensors() -> Iterator[Tensor]:
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Tensor):  # isinstance would ask lazy proxies for their class, and so load them
            yield candidate


def _storage_of(tensor: Tensor) -> tuple[int, int]:
    """What tells its storage from others, and that storage's bytes."""
    if tensor.layout != torch.strided:
        return id(tensor), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    return (storage.data_ptr() or id(tensor)), storage.nbytes()


def _referrers_of(thing: object, ours: set[int], depth: int = 1) -> str:
    """The kinds of objects that refer to `thing`; `ours` are the ids of those this search made."""
    kinds: list[str] = []
    referrers = gc.get_referrers(thing)
    ours = ours | {id(referrers)}
    for referrer in referrers:
        is_own_frame = isinstance(referrer, FrameType) and referrer.f_code.co_filename == __file__
        if id(referrer) not in ours and not is_own_frame:
            kind = _kind_of(referrer, thing, ours, depth)
            if kind not in kinds:
                kinds.append(kind)
    return " and ".join(kinds[:NUM_NAMED]) or NOTHING_KNOWN


def _kind_of(referrer: object, thing: object, ours: set[int], depth: int) -> str:
    if isinstance(referrer, FrameType):
        return f"a variable of {referrer.f_code.co_name}()"
    if isinstance(referrer, CellType):
        return "a closure"
    if isinstance(referrer, dict):
        for owner in gc.get_referrers(referrer):
            if getattr(owner, "__dict__", None) is referrer:
                return _attribute_of(owner, thing)
    if depth < MAX_DEPTH and isinstance(referrer, dict | list | tuple | set):
        return f"a {type(referrer).__name__} in {_referrers_of(referrer, ours, depth + 1)}"
    return _attribute_of(referrer, thing)  # Python 3.11 has objects refer to their attributes themselves


def _attribute_of(owner: object, thing: object) -> str:
    """``"Model.history"``, or ``"job.latest"`` for a module's variable; ``"a list"`` for others."""
    name = next((str(key) for key, value in getattr(owner, "__dict__", {}).items() if value is thing), None)
    if name is None:
        return f"a {type(owner).__name__}"
    return f"{owner.__name__ if isinstance(owner, ModuleType) else type(owner).__name__}.{name}"
