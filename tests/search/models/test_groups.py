from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splittune.search.models.groups import grouped


def test_a_device_joins_a_group_if_it_is_like_all_of_its_members() -> None:
    """4 is like 3 and joins it; 2 is like 3, but not like 4, and stays apart."""
    assert grouped([3, 4, 2], lambda one, other: abs(one - other) <= 1) == [(3, 4), (2,)]


def test_those_that_agree_more_join_first() -> None:
    """0 is a little like 1 and 2, and not like 3, which these are much like."""
    told = {(0, 1): 1, (0, 2): 1, (0, 3): 0, (1, 2): 36, (1, 3): 36, (2, 3): 36}
    assert grouped(range(4), lambda *pair: told[pair]) == [(0,), (1, 2, 3)]


@given(devices=st.lists(st.integers(0, 20), unique=True), modulus=st.integers(1, 5))
def test_groups_are_the_classes_of_an_equivalence(devices: list[int], modulus: int) -> None:
    """Every device is in one group, with all that it is like and no other, in the order given."""
    groups = grouped(devices, lambda one, other: (one - other) % modulus == 0)
    assert sorted(device for group in groups for device in group) == sorted(devices)
    assert len({device % modulus for device in devices}) == len(groups)
    for group in groups:
        assert len({device % modulus for device in group}) == 1
        assert list(group) == [device for device in devices if device in group]
