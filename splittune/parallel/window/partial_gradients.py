"""What parameters show while their gradients are with the replicas, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from splittune.parallel.window.replica_copies import version_of
from splittune.parallel.window.replica_gradients import ReplicaGradients


class Shown(Enum):
    """Which tensor a parameter's ``.grad`` shows inside a window."""

    REPLICA_0 = auto()
    """The first replica's own gradient, the very tensor."""
    ZEROS = auto()
    """Zeros in place of a gradient that other devices hold."""
    USERS = auto()
    """The gradient that was there before the window, which cannot be added to in place."""


class Found(Enum):
    """What a parameter's ``.grad`` is when it is looked at again."""

    UNTOUCHED = auto()
    """The tensor that was shown, as it was shown."""
    CHANGED = auto()
    """The tensor that was shown, written to since."""
    NONE = auto()
    OTHER = auto()
    """Another tensor."""


class Verdict(Enum):
    """What was done to a parameter and to the gradient it shows."""

    KEPT = auto()
    """Nothing that matters: the replicas' gradients stand."""
    DROPPED = auto()
    """``zero_grad()``, whichever way: the replicas' gradients of this parameter go as well."""
    STEPPED = auto()
    """Misuse: the parameter was changed, by the first device's part of its gradient."""
    RESCALED = auto()
    """Misuse: the gradient was clipped or scaled, when most of it was still with the replicas."""


def judge(
    *,
    parameter_changed: bool,
    found: Found,
    shown: Shown,
    is_sparse: bool,
    in_backward: bool,
    is_zero: Callable[[], bool],
) -> Verdict:
    """What was done since a partial gradient was shown.

    The first row that fits decides:

    ======================  =========  ==========  ===========  ========
    parameter               found      shown       looked at    verdict
    ======================  =========  ==========  ===========  ========
    changed                 any        any         any time     STEPPED
    as it was               NONE       any         any time     DROPPED
    as it was               UNTOUCHED  any         any time     KEPT
    as it was, grad zero    CHANGED    REPLICA_0   any time     DROPPED
    as it was               CHANGED    any         in backward  KEPT
    as it was               OTHER      any sparse  in backward  KEPT
    as it was               OTHER      any         in backward  DROPPED
    as it was, grad zero    OTHER      REPLICA_0   outside      DROPPED
    as it was               any        any         outside      RESCALED
    ======================  =========  ==========  ===========  ========

    In a backward pass other parts of the loss, a penalty on the parameters say, may have been added
    already: in place to what is dense, by another tensor to what is sparse.

    Args:
        parameter_changed: its storage or version is another one.
        found: what its ``.grad`` is now.
        shown: what was shown there.
        is_sparse: whether that was sparse. A replica's own gradient is shown only if it is dense.
        in_backward: whether a backward pass has begun.
        is_zero: whether what is found is all zeros; waits for the device, so it is asked only where
            it decides.
    """
    if parameter_changed:
        return Verdict.STEPPED
    if found is Found.NONE:
        return Verdict.DROPPED
    if found is Found.UNTOUCHED:
        return Verdict.KEPT
    if found is Found.OTHER and in_backward:
        return Verdict.KEPT if is_sparse else Verdict.DROPPED
    if shown is Shown.REPLICA_0 and is_zero():
        return Verdict.DROPPED
    return Verdict.KEPT if in_backward else Verdict.RESCALED


@dataclass(slots=True, kw_only=True)  # frozen ones take three times as long to make
class PartialGradient:
    """What one parameter shows once a backward inside a window has ended."""

    parameter: Tensor
    parameter_version: tuple[Any, ...]
    grad: Tensor
    grad_version: int
    shown: Shown

    @property
    def found(self) -> Found:
        """What the parameter's gradient is now."""
        if self.parameter.grad is None:
            return Found.NONE
        if self.parameter.grad is not self.grad:
            return Found.OTHER
        return Found.UNTOUCHED if self.grad._version == self.grad_version else Found.CHANGED

    @property
    def is_as_shown(self) -> bool:
        """Whether nothing at all was done, so that `verdict` is KEPT: it nearly always is, and there are many."""
        grad, parameter = self.grad, self.parameter
        is_untouched = parameter.grad is grad and grad._version == self.grad_version
        return is_untouched and version_of(parameter) == self.parameter_version

    @property
    def is_given_up(self) -> bool:
        """Whether ``zero_grad()``, whichever way, was called: for after a backward that failed."""
        return self.found in (Found.NONE, Found.OTHER) or (self.found is Found.CHANGED and _is_zero(self.grad))

    def verdict(self, *, in_backward: bool) -> Verdict:
        """`judge`, of what is there now."""
        return judge(
            parameter_changed=version_of(self.parameter) != self.parameter_version,
            found=self.found,
            shown=self.shown,
            is_sparse=self.grad.layout != torch.strided,
            in_backward=in_backward,
            is_zero=lambda: self.parameter.grad is not None and _is_zero(self.parameter.grad),
        )

    def hide(self) -> None:
        """Undo `show`. What else was added meanwhile, a penalty on the parameters say, remains."""
        found = self.found
        is_there = found in (Found.UNTOUCHED, Found.CHANGED)
        if (self.shown is Shown.REPLICA_0 and is_there) or (self.shown is Shown.ZEROS and found is Found.UNTOUCHED):
            self.parameter.grad = None

    def renew(self) -> None:
        """Take what is there now for what was shown."""
        self.parameter_version, self.grad_version = version_of(self.parameter), self.grad._version


def show(every_gradients: Iterable[ReplicaGradients], before: Iterable[PartialGradient] = ()) -> list[PartialGradient]:
    """Let each parameter that a replica holds a gradient of show the first device's part of it.

    What was shown `before` is hidden; a replica's own gradient is the same tensor all through a window and goes on
    being shown. A parameter that is no leaf, as a buffer that learned before it was moved, has no gradient to show: its
    own backward brings that to the leaf once the window ends.
    """
    earlier = {id(each.parameter): each for each in before}
    partials: dict[int, PartialGradient] = {}
    for gradients in every_gradients:
        for index, original in enumerate(gradients.originals):
            key = id(original)
            shown = earlier.pop(key, None)
            if shown is not None and original.grad is shown.grad is gradients.at_home(index):
                shown.renew()
                partials[key] = shown
                continue
            if shown is not None:
                shown.hide()
            if original.is_leaf and key not in partials and gradients.has_gradient(index):
                partials[key] = _show_one(gradients, index)
    for shown in earlier.values():
        shown.hide()
    return list(partials.values())


def _show_one(gradients: ReplicaGradients, index: int) -> PartialGradient:
    original, own = gradients.originals[index], gradients.at_home(index)
    before = original.grad
    # A sparse gradient is not added to in place, and hooks want the window's own gradient by
    # itself.
    grows = before is None or (before.layout == torch.strided and not has_hooks(original))
    shown = Shown.USERS
    if own is not None and own.layout == torch.strided and grows:
        shown = Shown.REPLICA_0
        if before is None:
            original.grad = gradients.own_at_home(index)
        else:
            gradients.put_at_home(index, before.add_(own))
    elif before is None:
        original.grad = torch.zeros_like(original if own is None else own)
        shown = Shown.ZEROS
    assert original.grad is not None
    return PartialGradient(
        parameter=original,
        parameter_version=version_of(original),
        grad=original.grad,
        grad_version=original.grad._version,
        shown=shown,
    )


def has_hooks(parameter: Tensor) -> bool:
    """Whether anybody asked to see the parameter's gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _is_zero(grad: Tensor) -> bool:
    return not (grad if grad.layout == torch.strided else grad._values()).any()
