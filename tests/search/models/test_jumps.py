from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from splittune.profiling.measurement import Outcome
from splittune.search import MemoryModel
from splittune.search.judged_trials import JudgedTrial
from tests.search.models.predictions import interval
from tests.search.models.readings import memory, ran
from tests.search.problem import MIB, split

B = 128


def alone(share: int, peak: float, reserved: float) -> JudgedTrial:
    """GPU 1 has a share, and reserves so much for what is alive, of 1000 MiB; GPU 0 has plenty."""
    held = memory(1, peak, resting_bytes=50, peak_reserved_bytes=reserved)
    first = memory(0, 100, resting_bytes=50, total_bytes=9000)
    return JudgedTrial.of(ran(split(B, B // (share + 1), 1, share), first, held), (0, 0))


@pytest.mark.parametrize(("reserved", "jumps"), [(400, True), (620, False)])
def test_what_more_trials_foretell_to_run_out_did_not_jump(reserved: int, jumps: bool) -> None:
    """50 MiB and 50 more with each sample: 15 take 800 of 1000, and ran out, so they jumped.

    Then 7 hold 400, and the allocator reserves 620: half as much on top is 1200 for 15, more than there is, and no jump
    is left. Where it reserves as little as before the jump stays.
    """
    before = [alone(1, 100, 100), alone(3, 200, 200)]
    measurement = alone(15, 800, 800).measurement
    failed = JudgedTrial(
        measurement=replace(measurement, outcome=Outcome.OUT_OF_MEMORY, whole_step_times_s=()),
        oom_devices=frozenset({1}),
    )
    model = MemoryModel([*before, failed], 2)
    wanted = split(B, 8, 1, 15)
    assert interval(model, wanted).jump[0, 1] > 0
    model.observe([alone(7, 400, reserved)])
    told = interval(model, wanted)
    assert (told.jump[0, 1] > 0) == jumps
    assert (told.foretold[0, 1] > 1000 * MIB) != jumps
    # either way what ran out does so again
    assert told.chance_below(np.array([9000.0, 1000.0]) * MIB)[0] < 0.01
