"""A verification says how each device kept to the plan, and what to tune again with."""

from __future__ import annotations

from splittune.units import MIB
from splittune.verify.result import Lack
from tests.verify.jobs import verification


def test_what_to_tune_again_with() -> None:
    """The worked example of the docstring; and of a card that ran out, more than all that the plan left free."""
    lacking = verification()
    assert lacking.suggested_min_headroom_bytes == 7 * MIB
    assert lacking.verdicts[0] == "too little headroom: 4.0 MiB left, 5.0 MiB demanded"
    assert lacking.summary == (
        "Not verified: GPU 0 lacks 1.0 MiB of the 5.0 MiB that must stay free. "
        f"Tune again with 7.0 MiB or more kept free (--min-headroom-bytes {7 * MIB})."
    )
    out = verification(lack=Lack(where="step 3", device=0, message="CUDA out of memory."))
    assert out.suggested_min_headroom_bytes == 8 * MIB  # 46 - 40 were left free by the plan
    assert out.summary.startswith("Not verified: out of memory at step 3, on GPU 0. Tune again")
    somewhere = verification(lack=Lack(where="step 3", device=None, message="CUDA out of memory."))
    assert somewhere.summary.startswith("Not verified: out of memory at step 3. Tune again")
