"""Checks of single values: each refuses with a `ConfigError` that says what it is, got and expected."""

from __future__ import annotations

import math
from reprlib import repr as short_repr

from splittune.errors import ConfigError


def check_int(what: str, value: object, *, at_least: int) -> None:
    """Refuse anything but an integer (True is none) of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{what} is {short_repr(value)}: expected an integer of at least {at_least}.")


def check_str(what: str, value: object) -> None:
    """Refuse anything but a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{what} is {short_repr(value)}: expected a string that is not empty.")


def positive_or_none(what: str, value: object) -> float | None:
    """`value` as a float, or None where it is None; anything but a finite number above 0 is refused."""
    if value is None:
        return None
    message = f"{what} is {short_repr(value)}: expected a finite number above 0, or None where it was not measured."
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(message)
    try:
        number = float(value)
    except OverflowError:
        raise ConfigError(message) from None
    if not 0 < number < math.inf:
        raise ConfigError(message)
    return number
