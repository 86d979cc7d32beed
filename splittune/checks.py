"""Checks of single values: each refuses with a `ConfigError` that says what it is, got and expected."""

from __future__ import annotations

import math
import operator
from numbers import Integral, Real
from reprlib import repr as short_repr
from typing import Any

from splittune.errors import ConfigError


def as_int(value: Any) -> int | None:
    """`value` as a plain int where it is an integer of any kind, ``np.int64(8)`` too; None for True, 8.0 and "8"."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None  # torch.tensor(True) has an index
    try:
        return operator.index(value)
    except TypeError:
        return None


def checked_int(what: str, value: object, *, at_least: int) -> int:
    """`value` as a plain int; anything but an integer (True is none) of at least `at_least` is refused."""
    number = as_int(value)
    if number is None or number < at_least:
        raise ConfigError(f"{what} is {short_repr(value)}: expected an integer of at least {at_least}.")
    return number


def check_limits(max_trials: object, timeout_s: object) -> None:
    """Refuse limits of a search other than an integer of at least 1, and seconds above 0 or None."""
    checked_int("max_trials", max_trials, at_least=1)
    if timeout_s is not None and not (isinstance(timeout_s, Real) and float(timeout_s) > 0):
        raise ConfigError(f"timeout_s is {short_repr(timeout_s)}: expected seconds above 0, or None for no limit.")


def check_str(what: str, value: object) -> None:
    """Refuse anything but a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{what} is {short_repr(value)}: expected a string that is not empty.")


def positive_or_none(what: str, value: object) -> float | None:
    """`value` as a float, or None where it is None; anything but a finite number above 0 is refused.

    So is an integer that no float equals, ``2**53 + 1``: it would be another number without a word.
    """
    if value is None:
        return None
    message = f"{what} is {short_repr(value)}: expected a finite number above 0, or None where it was not measured."
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(message)
    try:
        number = float(value)
    except OverflowError:
        raise ConfigError(message) from None
    if not 0 < number < math.inf:
        raise ConfigError(message)
    if isinstance(value, Integral) and int(number) != int(value):
        raise ConfigError(f"{what} is {short_repr(value)}: no float is this integer. The nearest one is {number!r}.")
    return number
