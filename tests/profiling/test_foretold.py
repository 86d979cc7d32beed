"""What was foretold is found by the split it is about, and survives being written."""

from __future__ import annotations

import json

from splittune.profiling.foretold import Foretold
from splittune.profiling.measurement import Measurement, Outcome
from splittune.split import BatchSplit

SPLIT = BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(3, 5))


def ran(split: BatchSplit, placement: str = "output") -> Measurement:
    return Measurement(split=split, outcome=Outcome.OK, whole_step_times_s=(0.5,), loss_placement=placement)


def test_it_is_found_by_split_and_loss_placement() -> None:
    """Another placement of the loss is another trial."""
    planned = ran(SPLIT, "replica")
    foretold = Foretold(planned=(planned,))
    assert foretold.of(ran(SPLIT, "replica")) is planned
    assert foretold.of(ran(SPLIT)) is None


def test_json_gives_it_back() -> None:
    """A worker sends it so."""
    foretold = Foretold(planned=(ran(SPLIT),), why="that took longer than 30 s")
    assert Foretold.from_dict(json.loads(json.dumps(foretold.to_dict()))) == foretold
