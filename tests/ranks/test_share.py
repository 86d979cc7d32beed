"""One rank's part of a global batch: what it says, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from splittune.errors import ConfigError
from splittune.ranks import RankShare


def share(**changes: Any) -> RankShare:
    return RankShare(**{"batch": [7, 9], "sizes": (1, 0), "micro_batch_sizes": (3, 2), "num_samples": 5, **changes})


def test_a_share_says_whether_its_last_sample_stands_in() -> None:
    """Where the rank has no sample in a micro-batch, the batch ends with one that counts nothing."""
    assert share().has_stand_in
    assert not share(sizes=(1, 1)).has_stand_in


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sizes": (1,)}, "1 sizes for 2 micro-batches"),
        ({"sizes": (4, 0)}, r"sizes\[0\] is 4: expected at most the micro-batch's 3"),
        ({"sizes": (1, -1)}, r"sizes\[1\] is -1: expected an integer of at least 0"),
        ({"micro_batch_sizes": (3, 0)}, r"micro_batch_sizes\[1\] is 0"),
        ({"num_samples": 6}, r"3 \+ 2 = 5, but num_samples is 6"),
        ({"sizes": (), "micro_batch_sizes": ()}, "sum to nothing = 0"),
    ],
)
def test_a_share_whose_arithmetic_does_not_hold_is_refused(changes: dict[str, Any], complaint: str) -> None:
    """With the sum that fails."""
    with pytest.raises(ConfigError, match=complaint):
        share(**changes)


@pytest.mark.parametrize(
    "use", [list, lambda batch: batch[0], lambda batch: batch["inputs"]], ids=["unpacked", "by place", "by name"]
)
def test_a_share_taken_for_a_batch_says_what_it_is(use: Callable[[Any], Any]) -> None:
    """A loop that was written for the plain loader is told what cuts a share."""
    with pytest.raises(TypeError, match=r"a RankShare was .* of 5 samples.* config.micro_batches\(share, model\)"):
        use(share())
