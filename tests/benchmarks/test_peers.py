"""The batch-size finders that people use run as they are on virtual GPUs, and what they ran is counted."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch

from benchmarks.peers.finders import (
    PEERS,
    PeerResult,
    accelerate_executable,
    even_untuned,
    lightning_binsearch,
    lightning_power,
    split_for,
)
from splittune.demo import byte_gpt
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import VirtualHardware
from splittune.profiling.measurement import Outcome
from splittune.training import TrainingTask

B = 8
STEPS = 3
LIGHTNING, ACCELERATE = "pytorch_lightning", "accelerate"
PACKAGES = {lightning_power: LIGHTNING, lightning_binsearch: LIGHTNING, accelerate_executable: ACCELERATE}


def job(batch_size: int = B) -> TrainingTask:
    return byte_gpt(batch_size, context=192, width=32, num_layers=1)


def cards(free_mib: float) -> VirtualHardware:
    """Two cards, each with so much beside the CUDA context, which takes 273.75 MiB of 4 GiB."""
    hardware = resolve_hardware(f"2xT400-4GB:occupied={4096 - 273.75 - free_mib}MiB")
    assert isinstance(hardware, VirtualHardware)
    return hardware


class Run(NamedTuple):
    found: PeerResult
    was_left_as_found: bool
    left_bytes: tuple[int, ...]


@functools.cache
def run_of(peer: Callable[..., PeerResult]) -> Run:
    """What it does where about two thirds of the global batch fit at once."""
    if peer in PACKAGES:
        pytest.importorskip(PACKAGES[peer])
    task, hardware = job(), cards(free_mib=10)
    before = state_of(task)
    found = peer(task, hardware)
    with hardware.metered():
        return Run(found, all(map(torch.equal, state_of(task), before)), hardware.allocated_bytes())


def found_by(peer: Callable[..., PeerResult]) -> PeerResult:
    return run_of(peer).found


def state_of(task: TrainingTask) -> list[torch.Tensor]:
    """Weights, gradients (there are none), each module's mode, and torch's random numbers."""
    gradients = [p.grad for p in task.model.parameters() if p.grad is not None]
    modes = torch.tensor([len(gradients), *(module.training for module in task.model.modules())])
    return [*(tensor.clone() for tensor in task.model.state_dict().values()), modes, torch.get_rng_state()]


@pytest.mark.parametrize("peer", PACKAGES)
def test_the_answer_of_a_peer_fits_where_the_whole_batch_does_not(peer):
    """Every peer finds a micro-batch below the global batch, and the split that follows from it really trains."""
    found = found_by(peer)
    assert found.micro_batch_size is not None
    assert found.measurement is not None
    assert 1 <= found.micro_batch_size < B == found.global_batch_size
    assert found.measurement.split == split_for(B, found.micro_batch_size, 2)
    assert found.measurement.outcome is Outcome.OK
    assert found.throughput == found.measurement.throughput > 0


@pytest.mark.parametrize("peer", PACKAGES)
def test_what_a_peer_ran_is_counted_step_by_step(peer):
    """A trial that fits runs all its micro-steps, one that does not at least the one that fails."""
    found = found_by(peer)
    assert 1 <= found.num_ooms < found.num_trials == len(found.batch_sizes)
    assert max(found.batch_sizes) <= B
    per_trial = [STEPS * -(-B // size) if peer is accelerate_executable else STEPS for size in found.batch_sizes]
    fewest = STEPS * (found.num_trials - found.num_ooms) + found.num_ooms
    assert fewest <= found.num_micro_steps < sum(per_trial)


def test_accelerate_takes_nine_tenths_after_every_oom():
    """Accelerate begins with the global batch, and its first size that fits is its answer."""
    found = found_by(accelerate_executable)
    assert found.batch_sizes[0] == B
    assert all(after == int(before * 0.9) for before, after in pairwise(found.batch_sizes))
    assert found.num_ooms == found.num_trials - 1
    assert found.micro_batch_size == found.batch_sizes[-1]


def test_lightning_power_doubles_until_the_first_oom():
    """Lightning's power mode doubles from 2 until an OOM and answers with half of what failed."""
    found = found_by(lightning_power)
    assert found.batch_sizes == tuple(2**i for i in range(1, found.num_trials + 1))
    assert found.num_ooms == 1
    assert found.micro_batch_size == found.batch_sizes[-1] // 2


def test_lightning_binsearch_goes_on_where_power_ends():
    """Lightning's bisection begins with the sizes of power mode and stays between the last two of them."""
    power, found = found_by(lightning_power), found_by(lightning_binsearch)
    assert found.batch_sizes[: power.num_trials] == power.batch_sizes
    bisected = found.batch_sizes[power.num_trials :]
    assert bisected
    assert all(power.batch_sizes[-2] < size < power.batch_sizes[-1] for size in bisected)
    assert int(0.95 * power.batch_sizes[-2]) <= found.micro_batch_size < power.batch_sizes[-1]


@pytest.mark.parametrize(("peer", "batch_size"), [(lightning_power, 6), (lightning_binsearch, 1)])
def test_lightning_ends_once_the_whole_batch_fits(peer, batch_size):
    """Lightning tries no micro-batch above the global batch and none again, also where no power of two meets it."""
    pytest.importorskip(LIGHTNING)
    found = peer(job(batch_size), cards(free_mib=100))
    assert found.batch_sizes == {1: (1,), 6: (2, 4, 6)}[batch_size]
    assert (found.micro_batch_size, found.num_ooms) == (batch_size, 0)
    assert found.num_micro_steps == STEPS * found.num_trials


@pytest.mark.parametrize("peer", PACKAGES)
def test_a_peer_that_finds_nothing_has_no_answer_that_trains(peer):
    """Where not even the model fits every trial is an OOM, and no throughput is claimed."""
    pytest.importorskip(PACKAGES[peer])
    found = peer(job(2), cards(free_mib=1))
    assert found.num_ooms == found.num_trials > 0
    assert found.num_micro_steps == 0
    assert found.throughput is None
    # Lightning's bisection answers with the one size below the smallest it tried, untried
    assert found.micro_batch_size == (1 if peer is lightning_binsearch else None)


def test_the_even_split_untuned_is_measured_as_it_is():
    """Without a search the whole batch is trained at once, and its OOM is the result."""
    tight, wide = found_by(even_untuned), even_untuned(job(), cards(free_mib=100))
    assert tight.measurement is not None
    assert wide.measurement is not None
    assert tight.measurement.split == wide.measurement.split == split_for(B, B, 2)
    assert (tight.measurement.outcome, wide.measurement.outcome) == (Outcome.OUT_OF_MEMORY, Outcome.OK)
    assert (tight.num_trials, tight.num_micro_steps, tight.num_ooms) == (0, 0, 0)


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_leaves_job_and_cards_as_they_were(peer):
    """After OOMs, too, the virtual GPUs hold nothing, and weights, modes and random numbers are those of before."""
    run = run_of(peer)
    assert run.left_bytes == (0, 0)
    assert run.was_left_as_found


@pytest.mark.parametrize(
    ("peer", "module", "command"),
    [
        (accelerate_executable, "accelerate.utils", "pip install accelerate"),
        (lightning_power, "pytorch_lightning", "pip install pytorch-lightning"),
    ],
)
def test_a_peer_that_is_not_installed_names_the_command(monkeypatch, peer, module, command):
    """A missing package is an error that says how to install it."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=command):
        peer(job(4), cards(free_mib=5))


@pytest.mark.parametrize("m", [1, 5, 8])
def test_the_split_of_an_answer_keeps_the_global_batch_and_the_answer(m):
    """Accumulation is the least that keeps micro-batches at or below the answer."""
    split = split_for(B, m, 3)
    assert split.global_batch_size == B
    assert split.micro_batch_size <= m
    if split.accumulation_steps > 1:
        assert -(-B // (split.accumulation_steps - 1)) > m
