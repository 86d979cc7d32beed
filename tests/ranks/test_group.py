"""What a process is told that is in no group, or whose device is not there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from splittune.errors import ConfigError, DeviceError
from splittune.parallel import BalancedDataParallel
from splittune.ranks import group as group_module
from splittune.ranks.group import check_backend, device_of_rank
from splittune.ranks.share import RankShare
from tests.ranks.cases import config_of

LOADER = DataLoader(range(24), batch_size=24)
SHARE = RankShare(batch=torch.arange(4), sizes=(2, 2), micro_batch_sizes=(4, 2), num_samples=6)


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
@pytest.mark.parametrize("call", [lambda config: config.wrap(nn.Linear(1, 1)), lambda config: config.shard(LOADER)])
def test_one_of_several_processes_needs_a_group(monkeypatch: pytest.MonkeyPatch, strategy: str, call: Any) -> None:
    """Started by torchrun without a process group, each process would train by itself: it is told what to call."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2 .*torch\.distributed\.init_process_group\(\) first"):
        call(config_of(2, strategy))


def test_a_config_for_ranks_needs_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by itself, the script is told how to start the ranks."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for call in (lambda: config_of(2).wrap(nn.Linear(1, 1)), lambda: config_of(2).shard(LOADER)):
        with pytest.raises(ConfigError, match=r"torchrun --nproc-per-node 2 train\.py"):
            call()


def test_one_process_keeps_its_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """One script serves both strategies: `shard` gives the loader itself where one process trains."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert config_of(2, "dp").shard(LOADER) is LOADER


def test_options_of_ranks_are_refused_in_one_process() -> None:
    """What would be ignored is not taken in silence."""
    with pytest.raises(ConfigError, match=r"got ddp_options=.*strategy='dp'.*expected none\. Leave them out"):
        config_of(2, "dp").wrap(nn.Linear(1, 1), ddp_options={"static_graph": True})


def test_a_plain_batch_is_refused_with_ranks() -> None:
    """A loader that nobody sharded would be trained on whole by every rank."""
    with pytest.raises(ConfigError, match=re.escape("expected what config.shard(loader) gives")):
        config_of(2).micro_batches(torch.arange(24))


def test_a_share_is_not_for_the_wrapper_of_one_process() -> None:
    """A share is a part already: the wrapper of one process would split it again, and weigh it wrongly."""
    model = BalancedDataParallel(1, nn.Linear(1, 1), ["cpu", "cpu"])
    with pytest.raises(ConfigError, match="is a rank's share and the model a BalancedDataParallel"):
        config_of(2).micro_batches(SHARE, model)


def test_a_share_without_a_model_is_cut_and_weighed() -> None:
    """For a DistributedDataParallel of the user's own: 2 of 6 samples on one of 2 ranks weigh 2 * 2 / 6."""
    parts = list(config_of(2).micro_batches(SHARE))
    assert [micro.batch.tolist() for micro in parts] == [[0, 1], [2, 3]]
    assert [micro.weight for micro in parts] == [pytest.approx(2 / 3)] * 2


def test_a_share_of_other_than_its_samples_is_refused() -> None:
    """A collate_fn that drops or packs samples makes the weights wrong."""
    share = RankShare(batch=torch.arange(3), sizes=(2, 2), micro_batch_sizes=(4, 2), num_samples=6)
    with pytest.raises(ConfigError, match="holds 3 samples: expected 4"):
        config_of(2).micro_batches(share)


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "count_cards", lambda: 2)
    monkeypatch.setattr(dist, "get_node_local_rank", lambda fallback_rank=None: 1)


@pytest.mark.usefixtures("two_cards")
@pytest.mark.parametrize(
    ("devices", "rank", "expected"),
    [
        (None, 0, "cuda:0"),
        (None, 3, "cuda:1"),  # the tuned cuda:3 is on another machine: the second rank of this one takes its second
        ("cuda", 0, "cuda:1"),
        ("cuda:0", 3, "cuda:0"),
        (["cuda:1"], 2, "cuda:1"),
        ([0], 2, "cuda:0"),
        (["cuda:1", "cuda:0", "cuda:1", "cuda:0"], 1, "cuda:0"),
        ("cpu", 1, "cpu"),
    ],
)
def test_a_ranks_device(devices: Any, rank: int, expected: str) -> None:
    """The tuned card where it is there, else that of the local rank; what the user names goes first."""
    tuned = [f"cuda:{index}" for index in range(4)]
    assert str(device_of_rank(tuned, devices, rank)) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, "cuda:0"),  # dealt round the machines
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "LOCAL_RANK": "1"}, "cuda:1"),  # torchrun's, started by srun
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "cuda:1"),  # of the shell that started the ranks
        ({}, "cuda:1"),
    ],
)
def test_the_local_rank_is_what_the_launcher_says(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    """LOCAL_RANK, then srun's own where it speaks of this rank, else machines filled one after the other."""
    monkeypatch.setattr(group_module, "count_cards", lambda: 2)
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(device_of_rank(["cuda:0"] * 4, "cuda", 1)) == expected


@pytest.mark.usefixtures("two_cards")
def test_a_device_that_is_not_there_is_refused() -> None:
    """A third card of two, whether it is named or the local rank's."""
    with pytest.raises(DeviceError, match="cuda:2 is not there: this process sees 2 cards"):
        device_of_rank(["cuda:0"], "cuda:2", 0)
    with pytest.raises(ConfigError, match="devices names 3: expected one, this rank's, or 4"):
        device_of_rank(["cuda:0"] * 4, ["cuda:0"] * 3, 0)


@pytest.mark.parametrize(
    ("device", "backends", "is_right"),
    [
        ("cuda:1", "cpu:gloo,cuda:nccl", True),
        ("cpu", "cpu:gloo,cuda:nccl", True),
        ("cpu", "cpu:gloo,cuda:gloo", True),
        ("cuda:0", "cpu:gloo,cuda:gloo", False),
        ("cpu", "cuda:nccl", False),
    ],
)
def test_the_backend_is_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, backends: str, is_right: bool
) -> None:
    """NCCL for cards and gloo for the CPU; with another one the user is told what to call."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    if is_right:
        check_backend(torch.device(device), None)
    else:
        with pytest.raises(ConfigError, match=rf"backend for {device} is \w+: expected (nccl|gloo)"):
            check_backend(torch.device(device), None)
