"""Ranks put together from single cards: memory by arithmetic, time by the ring, kinds by what they have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from splittune import BatchSplit, Measurement, Outcome, TrainingTask, plan
from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.catalog import find_gpu, parse_gpus
from splittune.hardware.virtual.ring import BACKWARD_PART, Ring
from splittune.runners.modelled_ranks.kinds import kinds_of
from splittune.runners.modelled_ranks.one_card import OneCardTrials
from splittune.runners.modelled_ranks.step import RankTrials
from splittune.runners.modelled_ranks.zero import OptimizerState
from splittune.units import MIB, format_time
from tests.runners.modelled_ranks.jobs import PARAMETER_BYTES, products, square

# Adam counts its steps in 4 bytes for each parameter.
COUNTERS_BYTES = 16


@contextmanager
def ranks_on(task: TrainingTask, spec: str) -> Iterator[RankTrials]:
    gpus = parse_gpus(spec)
    hardware = VirtualHardware([gpu for gpu, _ in gpus], occupied_bytes=[occupied for _, occupied in gpus])
    cards = OneCardTrials(task, hardware)
    try:
        cards.open(hardware)
        yield RankTrials.of(cards, hardware, kinds_of(hardware, (0,) * len(gpus)))
    finally:
        cards.close()


def split_of(*shards: int, steps: int = 1) -> BatchSplit:
    return BatchSplit(global_batch_size=steps * sum(shards), accumulation_steps=steps, shard_sizes=shards)


def in_one_process(task: TrainingTask, spec: str, split: BatchSplit) -> Measurement:
    (found,) = plan(task, spec, splits=[split], progress=False, min_headroom_bytes=0).measurements
    return found


@pytest.mark.parametrize("steps", [1, 3])
def test_a_rank_does_what_a_card_alone_does_and_holds_its_buckets(steps: int) -> None:
    """One rank has nobody to wait for: the times of a one-card plan, and its peak and one bucket of 4 MiB."""
    with ranks_on(square(), "1xT4") as ranks:
        found = ranks.measure_whole_steps(split_of(8, steps=steps))
    alone = in_one_process(square(), "1xT4", split_of(8, steps=steps))
    assert found.step_time_s == pytest.approx(alone.step_time_s, rel=1e-9)
    assert found.memory[0].peak_allocated_bytes == alone.memory[0].peak_allocated_bytes + PARAMETER_BYTES
    assert found.memory[0].outside_bytes == alone.memory[0].outside_bytes


def test_every_card_holds_parameters_gradients_buckets_and_optimizer_state() -> None:
    """Of a matrix of 4 MiB under AdamW, before a forward that accumulates: 1 + 1 + 1 + 2 times that, on each card.

    In one process GPU 0 holds four times that, and the others the matrix and its gradient.
    """
    with ranks_on(square(), "3xT4") as ranks:
        found = ranks.measure(split_of(2, 2, 2, steps=3))
    resting = [memory.resting_bytes for memory in found.memory]
    assert resting == pytest.approx([5 * PARAMETER_BYTES] * 3, abs=MIB / 16)
    process = in_one_process(square(), "3xT4", split_of(2, 2, 2, steps=3))
    assert process.memory[0].resting_bytes == pytest.approx(4 * PARAMETER_BYTES, abs=MIB / 16)
    assert process.memory[1].resting_bytes == pytest.approx(2 * PARAMETER_BYTES, abs=MIB / 16)


def test_a_frozen_parameter_has_no_bucket() -> None:
    """Half of the parameters frozen, half of the buckets."""
    task = products(256)
    for parameter in list(task.model.parameters())[:2]:
        parameter.requires_grad_(False)
    hardware = VirtualHardware([find_gpu("T4")])
    assert sum(OneCardTrials(task, hardware).buckets) == 2 * 256 * 256 * 4


def test_a_step_is_the_slowest_rank_and_the_bucket_that_is_left_over() -> None:
    """A T4 and an A10 with a single bucket: no backward hides it, and the slower update comes last."""
    with ranks_on(square(), "1xT4,1xA10") as ranks:
        found = ranks.measure(split_of(64, 64))
        each = [ranks.card(kind, 64, accumulates=False) for kind in (0, 1)]
    ring = Ring(num_ranks=2, bandwidth_bytes_per_s=find_gpu("T4").link_bandwidth_bytes_per_s)
    slowest_s = max(run.micro_step_time_s or 0.0 for run in each)
    update_s = max(run.update_time_s or 0.0 for run in each)
    assert found.micro_step_time_s == slowest_s
    assert found.step_time_s == pytest.approx(slowest_s + ring.all_reduce_s(PARAMETER_BYTES) + update_s)
    assert found.notes[0].startswith("The slowest rank is 0, T4: its micro-steps take ")
    assert "The all-reduce of 4.0 MiB over links of 15.8 GB/s" in found.notes[1]
    assert "gradient_as_bucket_view=True frees 4.0 MiB on each" in found.notes[2]


def test_the_slowest_rank_is_named_with_the_median_of_the_others() -> None:
    """By its card's name, wherever it stands; ranks that take the same have none, and a rank by itself says nothing."""
    with ranks_on(square(), "3xA10,1xT4") as ranks:
        found = ranks.measure(split_of(8, 512, 8, 4096))
        slow, others = (ranks.card(kind, share, accumulates=False) for kind, share in ((1, 4096), (0, 8)))
        times = [format_time(run.micro_step_time_s or 0.0) for run in (slow, others)]
    assert found.notes[0] == (
        f"The slowest rank is 3, T4: its micro-steps take {times[0]} (modelled), those of the others {times[1]} in the "
        "median."
    )
    with ranks_on(square(), "2xT4") as ranks:
        assert ranks.measure(split_of(64, 64)).notes[0].startswith("No rank waits for another: all take ")
    with ranks_on(square(), "1xT4") as ranks:
        assert ranks.measure(split_of(64)).notes == ()


def test_accumulation_waits_for_one_all_reduce_a_step() -> None:
    """Four micro-steps and one all-reduce, which the last backward hides in part: four buckets of 16 MiB."""
    with ranks_on(products(), "2xT4") as ranks:
        one, four = ranks.measure(split_of(64, 64)), ranks.measure(split_of(64, 64, steps=4))
        alone = ranks.card(0, 64, accumulates=True)
    micro_step_s, update_s = alone.micro_step_time_s or 0.0, alone.update_time_s or 0.0
    left_s = (four.step_time_s or 0.0) - 4 * micro_step_s - update_s
    whole_s = ranks.ring.all_reduce_s(4 * PARAMETER_BYTES * 4)
    assert 0 < left_s < whole_s
    assert whole_s - left_s <= BACKWARD_PART * micro_step_s + 1e-3
    assert (one.update_time_s or 0.0) == pytest.approx(left_s + update_s, rel=0.2)


def test_running_statistics_are_given_out_once_a_step() -> None:
    """BatchNorm's buffers of rank 0 go to the others before the first forward."""
    task = TrainingTask(nn.Sequential(nn.Linear(8, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 1)), square().loader)
    hardware = VirtualHardware([find_gpu("T4")])
    cards = OneCardTrials(task, hardware)
    assert cards.buffer_bytes == 2 * 4096 * 4 + 8
    ring = Ring(num_ranks=4, bandwidth_bytes_per_s=1e9)
    assert ring.broadcast_s(cards.buffer_bytes) > 0


def test_a_rank_without_samples_runs_one_that_stands_in() -> None:
    """It takes what one sample takes."""
    with ranks_on(square(), "2xT4") as ranks:
        assert ranks.measure(split_of(0, 8)).memory[0] == ranks.measure(split_of(1, 8)).memory[0]


def test_a_card_that_lacks_memory_is_named() -> None:
    """The one of its kind that has the share, not the single card on which it was run."""
    with ranks_on(square(), "2xA10,1xT4:occupied=15900MiB") as ranks:
        found = ranks.measure(split_of(2, 2, 2**17))
    assert found.outcome is Outcome.OUT_OF_MEMORY
    assert found.message.startswith("device 2: ")
    assert "Virtual GPU 2 (T4)" in found.message


def test_cards_are_of_a_kind_by_model_occupied_memory_and_demand() -> None:
    """T4 at 0, 1 and 3; another one with a program on it is a kind of its own, and so is one that must keep more."""
    gpus = parse_gpus("2xT4,1xA10,1xT4,1xT4:occupied=1GiB")
    hardware = VirtualHardware([gpu for gpu, _ in gpus], occupied_bytes=[occupied for _, occupied in gpus])
    assert [kind.devices for kind in kinds_of(hardware, (0,) * 5)] == [(0, 1, 3), (2,), (4,)]
    assert [kind.devices for kind in kinds_of(hardware, (0, 5, 0, 0, 0))] == [(0, 3), (1,), (2,), (4,)]


def test_a_thousand_cards_run_what_one_of_each_kind_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 ranks of two kinds with two shares each: four runs."""
    shares: list[int] = []
    measure = OneCardTrials._run

    def counted(self: OneCardTrials, kind: object, split: BatchSplit, *, in_full: bool) -> Measurement:
        shares.append(split.shard_sizes[0])
        return measure(self, kind, split, in_full=in_full)  # type: ignore[arg-type]

    monkeypatch.setattr(OneCardTrials, "_run", counted)
    gpus = [find_gpu("T4")] * 512 + [find_gpu("A10")] * 512
    hardware = VirtualHardware(gpus)
    cards = OneCardTrials(square(), hardware)
    cards.open(hardware)
    ranks = RankTrials.of(cards, hardware, kinds_of(hardware, (0,) * 1024))
    found = ranks.measure(split_of(*[2] * 256, *[3] * 256, *[4] * 256, *[5] * 256))
    cards.close()
    assert sorted(shares) == [2, 3, 4, 5]
    assert len(found.memory) == 1024
    assert found.memory[1023].device == 1023


def test_what_dealing_out_the_optimizers_state_would_free_is_said_where_it_is_much() -> None:
    """Of four matrices under AdamW two ranks keep the state of two each; with many samples nothing is said of it."""
    state = 4 * 2 * 2048 * 2048 * 4
    with ranks_on(products(), "2xT4") as ranks:
        small, large = ranks.measure(split_of(8, 8)), ranks.measure(split_of(60_000, 60_000))
    assert ranks.cards.optimizer_state.total_bytes == pytest.approx(state, abs=COUNTERS_BYTES)
    assert small.notes[-1].startswith("ZeroRedundancyOptimizer would keep 64.0 MiB of the 128.0 MiB of optimizer state")
    assert not any("ZeroRedundancyOptimizer" in note for note in large.notes)
    with ranks_on(products(), "1xT4:occupied=14GiB,1xT4") as ranks:
        uneven = ranks.measure(split_of(8, 60_000))
    assert "ZeroRedundancyOptimizer" in uneven.notes[-1]  # the first card has least left


def test_of_state_without_values_is_what_a_real_step_leaves() -> None:
    """SGD has none, with momentum one copy, AdamW two; the user's own instance stays as it is."""
    for make, copies in ((torch.optim.SGD, 0), (partial(torch.optim.SGD, momentum=0.9), 1), (torch.optim.AdamW, 2)):
        task = square(optimizer=lambda parameters, make=make: make(parameters, lr=0.1))
        assert OptimizerState(task).total_bytes == pytest.approx(copies * PARAMETER_BYTES, abs=COUNTERS_BYTES)
    own = torch.optim.AdamW((task := square()).model.parameters())
    found = OptimizerState(replace(task, optimizer=own)).total_bytes
    assert found == pytest.approx(2 * PARAMETER_BYTES, abs=COUNTERS_BYTES)
    assert not own.state
    assert all(parameter.grad is None for parameter in task.model.parameters())
