"""Spaces of splits as hypothesis draws them, and what of one can be the best."""

from __future__ import annotations

from hypothesis import strategies as st

from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.judged_trials import JudgedTrial
from splittune.split import BatchSplit, SplitSpace


@st.composite
def spaces(draw: st.DrawFn, shares: str | None = None) -> SplitSpace:
    num_devices = draw(st.integers(1, 4))
    smallest = draw(st.integers(0, 2))
    return SplitSpace(
        global_batch_size=draw(st.integers(max(1, num_devices * smallest), 20)),
        num_devices=num_devices,
        shares=shares or draw(st.sampled_from(["gpu0", "each"])),  # type: ignore[arg-type]
        min_shard_size=smallest,
        max_accumulation_steps=draw(st.none() | st.integers(1, 25)),
    )


def undominated(space: SplitSpace) -> list[BatchSplit]:
    """The splits of which none has the same largest micro-batch in fewer steps."""
    fewest: dict[int, int] = {}
    for split in space:
        fewest.setdefault(split.micro_batch_size, split.accumulation_steps)
    return [split for split in space if fewest[split.micro_batch_size] == split.accumulation_steps]


@st.composite
def failures(draw: st.DrawFn, space: SplitSpace) -> JudgedTrial:
    """A split that ran out of memory, on devices that are known or not, or crashed."""
    split = draw(st.sampled_from(list(space)))
    oom_devices = draw(st.sets(st.integers(0, space.num_devices - 1)))
    if draw(st.booleans()):
        return JudgedTrial(
            measurement=Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY), oom_devices=frozenset(oom_devices)
        )
    return JudgedTrial(measurement=Measurement(split=split, outcome=Outcome.CRASHED))
