"""torch's fake tensors, which have shapes and no values: the one place that names where torch keeps them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

# Private: torch.compile and torch.export trace with them. tests/test_fakes.py and tests/hardware/virtual/test_shapes.py
# fail loudly should they change.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

__all__ = ["NEEDS_VALUES", "FakeTensor", "FakeTensorMode", "ShapeMode"]

# An operation wants to read a value, gives as many elements as values say, or has no form without values.
NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

_CPU = torch.device("cpu")
_STRIDED = torch.strided
_LITERALS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
# What these give is not told by the sizes of what they take, or they change its size.
_UNTOLD_BY_SIZES = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}


class _Form(NamedTuple):
    """What a tensor that an operation gave is made of."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    views: int | None
    """The argument whose storage it shares; None for one of its own."""


class _Given(NamedTuple):
    """What an operation gave: tensors of these forms, one of its arguments, or nothing."""

    kind: Callable[[Iterable[Any]], Any] | None
    """tuple or list; None for a single one."""
    forms: tuple[_Form | int | None, ...]
    """A number is the argument that it gave back."""


class ShapeMode(FakeTensorMode):
    """Fake tensors on the CPU for less time: what an operation gave for arguments of these sizes it gives again.

    torch keeps such a cache, too, and spends 0.2 ms on its keys, which also tell symbolic sizes, sparse tensors and
    devices. Here sizes are plain numbers, and tensors are dense and on the CPU; calls with any others go to torch's.
    Worked: trials of GPT-2 take half the time.
    """

    before_others: Callable[[Iterable[Any]], None] | None = None
    """Told of the arguments of a call before it is made, if one of them is a tensor with values."""
    _known: ClassVar[dict[tuple[Any, ...], _Given | None]] = {}
    _attributes: dict[str, Any] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: no compiled code comes here, and torch's guard against it costs each call 10 us."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        key = self._key(func, args, kwargs) if _is_told_by_sizes(func) else None
        if key is None:
            if self.before_others is not None:
                self.before_others((*args, *(kwargs or {}).values()))
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        given = self._known.get(key)
        if given is not None:
            return self._give(given, args)
        out = super().__torch_dispatch__(func, types, args, kwargs or {})
        if key not in self._known:
            is_as_before = self._key(func, args, kwargs) == key  # an argument may have another size now
            self._known[key] = _given(func, args, kwargs, out) if is_as_before else None
        return out

    def _key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
        parts: list[Any] = [func, torch.get_default_dtype()]
        if not self._add(parts, args):
            return None
        if kwargs:
            for name, value in kwargs.items():
                parts.append(name)
                if not self._add(parts, (value,)):
                    return None
        return tuple(parts)

    def _add(self, parts: list[Any], values: Sequence[Any]) -> bool:
        """Whether all is such that it can be part of a key, which it then is."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or not _is_plain(value):
                    return False
                parts += (value.shape, value.stride(), value.storage_offset(), value.dtype)
            elif kind in _LITERALS:
                parts += (kind, value)  # 1, 1.0 and True are equal
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                if not self._add(parts, value):
                    return False
            else:
                return False
        return True

    def _give(self, given: _Given, args: Sequence[Any]) -> Any:
        if given.kind is None:
            return self._made(given.forms[0], args)
        return given.kind(self._made(form, args) for form in given.forms)

    def _made(self, form: _Form | int | None, args: Sequence[Any]) -> Any:
        if form is None:
            return None
        if isinstance(form, int):
            return args[form]
        made = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device="meta")
        if form.views is not None:
            made.set_(args[form.views].untyped_storage(), form.offset, form.size, form.stride)
        return self._faked(made)

    def _faked(self, made: Tensor) -> FakeTensor:
        """``FakeTensor(self, made, "cpu")``, which sets the same dozen attributes one by one each time."""
        if self._attributes is None:
            first = FakeTensor(self, made, _CPU)
            self._attributes = dict(vars(first))
            return first
        fake = Tensor._make_subclass(FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=_CPU)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(self._attributes)
        return fake


def _is_plain(tensor: FakeTensor) -> bool:
    """Whether size, strides, offset and dtype say all that there is to say."""
    return (
        tensor.constant is None
        and tensor.fake_device == _CPU
        and tensor.layout is _STRIDED
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not tensor.is_inference()
    )


@functools.cache
def _is_told_by_sizes(func: Any) -> bool:
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace == "aten"
        and _UNTOLD_BY_SIZES.isdisjoint(func.tags)
        and not func._schema.name.startswith(("aten::lift", "aten::set_", "aten::resize"))
        and not any(argument.is_out for argument in func._schema.arguments)
    )


def _given(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, out: Any) -> _Given | None:
    """How to give the same again; None where that is not known."""
    # torch's rules for shapes may give a tuple with names for its entries, as its kernels never do
    kind = list if isinstance(out, list) else tuple if isinstance(out, tuple) else None
    outputs = [out] if kind is None else list(out)
    taken = [tensor.untyped_storage()._cdata for tensor in _tensors_in((*args, *(kwargs or {}).values()))]
    seen = list(taken)
    forms: list[_Form | int | None] = []
    for one in outputs:
        if one is None:
            forms.append(None)
            continue
        if type(one) is not FakeTensor or not _is_plain(one):
            return None
        given_back = next((index for index, value in enumerate(args) if value is one), None)
        if given_back is not None:
            forms.append(given_back)
            continue
        storage = one.untyped_storage()
        if func.is_view:
            if not isinstance(args[0], FakeTensor) or storage._cdata != args[0].untyped_storage()._cdata:
                return None
            forms.append(_form(one, views=0))
            continue
        alone = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
        if storage._cdata in seen or one.storage_offset() or storage.nbytes() != alone.untyped_storage().nbytes():
            return None
        seen.append(storage._cdata)
        forms.append(_form(one, views=None))
    return _Given(kind, tuple(forms))


def _form(tensor: Tensor, views: int | None) -> _Form:
    return _Form(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, views)


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors_in(value)
    return found
