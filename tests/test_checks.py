"""Checks of single values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splittune.checks import as_int, check_str, checked_int, positive_or_none
from splittune.errors import ConfigError
from splittune.options import SearchOptions

KINDS = [int, np.int8, np.uint16, np.int64, np.array, torch.tensor]


@given(value=st.integers(0, 127), kind=st.sampled_from(KINDS))
def test_an_integer_of_any_kind_is_an_integer(value: int, kind: Any) -> None:
    """Python's, NumPy's and a tensor's give the same plain int."""
    assert as_int(kind(value)) == value
    assert type(as_int(kind(value))) is int
    assert checked_int("it", kind(value), at_least=0) == value


@pytest.mark.parametrize(
    "value",
    [True, np.True_, torch.tensor(True), 8.0, np.float32(8), torch.tensor(8.0), "8", None, [8], np.array([8, 8]), 8j],
    ids=repr,
)
def test_what_is_no_integer_is_none(value: Any) -> None:
    """Neither what is true nor a float without a fraction is taken for a number of samples."""
    assert as_int(value) is None
    with pytest.raises(ConfigError, match=r"^it is .*: expected an integer of at least 0"):
        checked_int("it", value, at_least=0)


@pytest.mark.parametrize("value", [-1, np.int64(-1)])
def test_an_integer_out_of_range_is_refused(value: Any) -> None:
    """What, got, expected."""
    with pytest.raises(ConfigError, match=r"^size is .*-1.*: expected an integer of at least 0\.$"):
        checked_int("size", value, at_least=0)


@pytest.mark.parametrize("value", ["", 8, None])
def test_a_string_is_not_empty(value: Any) -> None:
    """Anything else is refused."""
    check_str("name", "x")
    with pytest.raises(ConfigError, match=r"^name is .*: expected a string that is not empty"):
        check_str("name", value)


@pytest.mark.parametrize("value", [2, 2.0, np.int64(2), np.float64(2)])
def test_a_number_above_0_is_a_float(value: Any) -> None:
    """Of whatever kind it was; None is what was not measured."""
    assert positive_or_none("rate", value) == 2.0
    assert type(positive_or_none("rate", value)) is float
    assert positive_or_none("rate", None) is None


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "2", 10**400])
def test_a_number_that_is_not_finite_and_above_0_is_refused(value: Any) -> None:
    """A rate or a time that cannot be."""
    with pytest.raises(ConfigError, match=r"^rate is .*: expected a finite number above 0"):
        positive_or_none("rate", value)


def test_an_integer_that_no_float_equals_is_refused() -> None:
    """As a float it would be another number: 2^53 + 1 lies between two of them."""
    with pytest.raises(ConfigError, match=r"^rate is 9007199254740993: no float .* nearest one is 9007199254740992\.0"):
        positive_or_none("rate", 2**53 + 1)
    assert positive_or_none("rate", 2**53 + 2) == 2**53 + 2


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_trials": 0}, "max_trials is 0: expected an integer of at least 1"),
        ({"timeout_s": 0}, "timeout_s is 0: expected seconds above 0, or None"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"timeout_s": "60"}, "timeout_s is '60'"),
    ],
)
def test_limits_of_a_search_are_refused_with_its_options(limits: dict[str, Any], said: str) -> None:
    """Before a job is made or a trial is run."""
    SearchOptions(max_trials=1, timeout_s=0.5)
    with pytest.raises(ConfigError, match=said):
        SearchOptions(**limits)
