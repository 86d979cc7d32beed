"""What became of a shown gradient: every row of the table, and what is shown in the first place."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from splittune.parallel import TorchLink
from splittune.parallel.window.partial_gradients import Found, PartialGradient, Shown, Verdict, judge, show
from splittune.parallel.window.replica_gradients import ReplicaGradients
from tests.parallel.models import CPU

ANY = None
ROWS = [
    # changed, found, shown, is_sparse, in_backward, is_zero -> verdict; the first row that fits decides
    (True, ANY, ANY, ANY, ANY, ANY, Verdict.STEPPED),
    (False, Found.NONE, ANY, ANY, ANY, ANY, Verdict.DROPPED),
    (False, Found.UNTOUCHED, ANY, ANY, ANY, ANY, Verdict.KEPT),
    (False, Found.CHANGED, Shown.REPLICA_0, ANY, ANY, True, Verdict.DROPPED),
    (False, Found.CHANGED, ANY, ANY, True, ANY, Verdict.KEPT),
    (False, Found.OTHER, ANY, True, True, ANY, Verdict.KEPT),
    (False, Found.OTHER, ANY, False, True, ANY, Verdict.DROPPED),
    (False, Found.OTHER, Shown.REPLICA_0, ANY, False, True, Verdict.DROPPED),
    (False, Found.CHANGED, ANY, ANY, False, ANY, Verdict.RESCALED),
    (False, Found.OTHER, ANY, ANY, False, ANY, Verdict.RESCALED),
]
CASES = list(product([True, False], Found, Shown, [True, False], [True, False], [True, False]))


def row_of(case: tuple[object, ...]) -> int:
    """The first row of the table that fits."""
    return next(
        index
        for index, row in enumerate(ROWS)
        if all(wanted is ANY or wanted == got for wanted, got in zip(row, case, strict=False))
    )


@pytest.mark.parametrize("row", range(len(ROWS)), ids=lambda row: f"row {row}: {ROWS[row][-1].name}")
def test_every_row_of_the_table(row: int) -> None:
    """Whatever a row leaves open, it gives its verdict; no row is shadowed by those before it."""
    fitting = [case for case in CASES if row_of(case) == row]
    assert fitting
    for changed, found, shown, is_sparse, in_backward, is_zero in fitting:
        verdict = judge(
            parameter_changed=changed,
            found=found,
            shown=shown,
            is_sparse=is_sparse,
            in_backward=in_backward,
            is_zero=lambda is_zero=is_zero: is_zero,
        )
        assert verdict is ROWS[row][-1]


def test_the_device_is_asked_only_where_it_decides() -> None:
    """Reading whether a gradient is zero waits for the device: not done for one that stands as it was."""

    def is_zero() -> bool:
        raise AssertionError("the device was asked")

    for found in (Found.NONE, Found.UNTOUCHED):
        for shown, in_backward in product(Shown, [True, False]):
            judge(
                parameter_changed=False,
                found=found,
                shown=shown,
                is_sparse=False,
                in_backward=in_backward,
                is_zero=is_zero,
            )


def show_with(model: nn.Module, gradients: dict[int, Tensor]) -> list[PartialGradient]:
    """What is shown when replicas on two devices hold these gradients of the model's one parameter."""
    held = ReplicaGradients([model.weight], range(2), TorchLink([CPU, CPU]))
    for position, gradient in gradients.items():
        held.take(position, [0], [gradient])
    return show([held])


def model() -> nn.Module:
    return nn.Linear(2, 1, bias=False)


def only(shown: list[PartialGradient]) -> PartialGradient:
    (one,) = shown
    return one


@pytest.mark.parametrize(
    ("at", "before", "hooked", "expected", "values"),
    [
        ([0, 1], None, False, Shown.REPLICA_0, [1, 1]),
        ([0], [5, 5], False, Shown.REPLICA_0, [6, 6]),
        ([1], None, False, Shown.ZEROS, [0, 0]),
        ([1], [5, 5], False, Shown.USERS, [5, 5]),
        ([0, 1], [5, 5], True, Shown.USERS, [5, 5]),
        ([0, 1], None, True, Shown.REPLICA_0, [1, 1]),
    ],
)
def test_what_a_parameter_shows(
    at: list[int], before: list[float] | None, hooked: bool, expected: Shown, values: list[float]
) -> None:
    """The first device's part, added to what was there; zeros, or what was there, where that has none."""
    net = model()
    if hooked:
        net.weight.register_hook(lambda grad: grad)
    net.weight.grad = None if before is None else torch.tensor([before], dtype=torch.float32)
    partial = only(show_with(net, {position: torch.ones(1, 2) for position in at}))
    assert partial.shown is expected
    assert partial.found is Found.UNTOUCHED
    assert net.weight.grad.tolist() == [values]


def test_what_no_replica_has_is_not_shown() -> None:
    """A parameter that no part of the loss uses shows nothing."""
    net = model()
    assert show_with(net, {}) == []
    assert net.weight.grad is None


def test_a_gradient_is_found_again() -> None:
    """Untouched, written to, taken away and replaced are told apart, and hiding leaves what is not ours."""
    net = model()
    partial = only(show_with(net, {0: torch.ones(1, 2)}))
    assert partial.verdict(in_backward=False) is Verdict.KEPT
    net.weight.grad.mul_(0.5)
    assert partial.found is Found.CHANGED
    assert partial.verdict(in_backward=False) is Verdict.RESCALED
    net.weight.grad.zero_()
    assert partial.verdict(in_backward=False) is Verdict.DROPPED
    net.weight.grad = torch.ones(1, 2)
    assert partial.found is Found.OTHER
    partial.hide()
    assert net.weight.grad.tolist() == [[1, 1]]
    net.weight.grad = None
    assert partial.found is Found.NONE


def test_a_parameter_that_was_stepped_is_noticed() -> None:
    """In place, or by a new storage."""
    net = model()
    partial = only(show_with(net, {0: torch.ones(1, 2)}))
    with torch.no_grad():
        net.weight.add_(1)
    assert partial.verdict(in_backward=False) is Verdict.STEPPED
    net = model()
    partial = only(show_with(net, {0: torch.ones(1, 2)}))
    net.weight.data = torch.ones(1, 2)
    assert partial.verdict(in_backward=True) is Verdict.STEPPED


def test_zeros_that_others_added_to_stay() -> None:
    """A penalty that was added to zeros of ours is the user's; the zeros alone go."""
    net = model()
    partial = only(show_with(net, {1: torch.ones(1, 2)}))
    net.weight.grad.add_(3)
    partial.hide()
    assert net.weight.grad.tolist() == [[3, 3]]
    net = model()
    partial = only(show_with(net, {1: torch.ones(1, 2)}))
    partial.hide()
    assert net.weight.grad is None


def test_what_goes_on_being_shown_is_judged_by_what_it_is_now() -> None:
    """Of the backward before, the first device's gradient stays where it is; only its versions are noted anew."""
    net = model()
    held = ReplicaGradients([net.weight], range(2), TorchLink([CPU, CPU]))
    held.take(0, [0], [torch.ones(1, 2)])
    first = only(show([held]))
    held.take(0, [0], [torch.ones(1, 2)])
    assert net.weight.grad is first.grad
    assert first.found is Found.CHANGED
    again = only(show([held], [first]))
    assert again.found is Found.UNTOUCHED
    assert again.shown is Shown.REPLICA_0
    assert net.weight.grad is again.grad
    assert net.weight.grad.tolist() == [[2, 2]]


def test_what_was_shown_before_is_hidden() -> None:
    """Zeros give way to the first device's gradient, once there is one; what no replica has any more is gone."""
    net = model()
    held = ReplicaGradients([net.weight], range(2), TorchLink([CPU, CPU]))
    held.take(1, [0], [torch.ones(1, 2)])
    zeros = only(show([held]))
    assert zeros.shown is Shown.ZEROS
    held.take(0, [0], [torch.ones(1, 2)])
    shown = only(show([held], [zeros]))
    assert shown.shown is Shown.REPLICA_0
    assert net.weight.grad.tolist() == [[1, 1]]
    held.drop()
    assert show([held], [shown]) == []
    assert net.weight.grad is None
