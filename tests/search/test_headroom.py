from __future__ import annotations

import pytest

from splittune.errors import ConfigError
from splittune.search.headroom import headroom_demands


def test_one_number_is_for_every_device() -> None:
    """A single number is demanded of all; one for each stays as it is."""
    assert headroom_demands(5, 3) == (5, 5, 5)
    assert headroom_demands([1, 2, 3], 3) == (1, 2, 3)


@pytest.mark.parametrize(
    ("demands", "message"),
    [
        (-1, "min_headroom_bytes is -1: expected an integer of at least 0"),
        (True, "min_headroom_bytes is True: expected an integer"),
        (0.5, "min_headroom_bytes is 0.5: expected an integer"),
        ([1, -2], r"min_headroom_bytes\[1\] is -2: expected an integer of at least 0"),
        ([1], "has 1 numbers for 2 devices: give one for each device, or a single number for all"),
        ("12", r"min_headroom_bytes\[0\] is '1'"),
    ],
)
def test_what_is_no_number_of_bytes_is_refused(demands: object, message: str) -> None:
    """The error names the device's own number."""
    with pytest.raises(ConfigError, match=message):
        headroom_demands(demands, 2)  # type: ignore[arg-type]
