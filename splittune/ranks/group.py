"""This process among the ranks: whether there is a process group, and which device is this rank's."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from splittune.cards import card, count_cards, is_card, kind_of_cards
from splittune.errors import ConfigError, DeviceError

_HOW_TO_START = (
    "Start one process a device, as with torchrun --nproc-per-node {num_ranks} train.py, and call "
    "torch.distributed.init_process_group() in it before this."
)


def is_grouped() -> bool:
    """Whether this process has joined a torch.distributed process group."""
    return dist.is_available() and dist.is_initialized()


def check_launched_alone(strategy: str) -> None:
    """That this process was not started as one of several which have no group.

    Raises:
        ConfigError: WORLD_SIZE says otherwise.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if not is_grouped() and world_size.strip() not in ("", "0", "1"):
        raise ConfigError(
            f"WORLD_SIZE is {world_size} and there is no process group: this process was started as one of "
            f"{world_size}, which would each train by itself ({strategy=}). Call "
            "torch.distributed.init_process_group() first; it takes everything from the environment."
        )


def check_grouped(num_ranks: int) -> None:
    """That there is a process group for what needs one.

    Raises:
        ConfigError: there is none.
    """
    check_launched_alone("ddp")
    if not is_grouped():
        raise ConfigError(
            f"this config says strategy='ddp', for {num_ranks} ranks, and this process is in no process group. "
            + _HOW_TO_START.format(num_ranks=num_ranks)
        )


def check_world_size(num_shares: int, group: dist.ProcessGroup | None) -> None:
    """That there is a share for each rank.

    Raises:
        ConfigError: more ranks than shares, or fewer.
    """
    num_ranks = dist.get_world_size(group)
    if num_ranks != num_shares:
        raise ConfigError(
            f"world size: got {num_ranks} ranks, expected {num_shares}, one for each device of the config. Start "
            f"{num_shares} processes, or tune for {num_ranks}."
        )


def device_of_rank(
    tuned: Sequence[str], devices: str | Sequence[str | int | torch.device] | None, rank: int
) -> torch.device:
    """The device of `rank`, whose config was tuned on the `tuned` ones, one a rank.

    - None: the tuned one where this machine has it, else the card of that local rank; the CPU for a virtual one.
    - ``"cuda"``: the card of this local rank, on whatever machine.
    - one device, ``"cuda:1"`` or ``["cuda:1"]``: that; as many as ranks: that of this rank.

    Raises:
        ConfigError: another number of devices.
        DeviceError: a card that is not there.
    """
    if devices is None:
        own = torch.device(tuned[rank])
        if not is_card(own):
            return own
        return _present(own) if (own.index or 0) < count_cards() else _local_card(rank)
    given = devices.split(",") if isinstance(devices, str) else list(devices)
    if len(given) not in (1, len(tuned)):
        raise ConfigError(
            f"devices names {len(given)}: expected one, this rank's, or {len(tuned)}, one for each rank. Where every "
            f'rank has a card of its own, devices="{kind_of_cards()}" takes it.'
        )
    return _named(given[0] if len(given) == 1 else given[rank], rank)


def check_backend(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """That the group's backend is the one for tensors on `device`: NCCL for CUDA's cards, gloo for the CPU.

    Raises:
        ConfigError: another one, or none.
    """
    needed = dist.get_default_backend_for_device(device)
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    backends = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    backend = backends.get(device.type)
    if backend == needed:
        return
    hint = f'init_process_group("{needed}")'
    if device.type == "cpu" and count_cards():
        hint += f', or train on this machine\'s cards: config.wrap(model, devices="{kind_of_cards()}")'
    raise ConfigError(
        f"the process group's backend for {device} is {backend}: expected {needed}. Use {hint}. Without a name, "
        "init_process_group() takes the right one for each device."
    )


def _named(device: object, rank: int) -> torch.device:
    if isinstance(device, int):
        return _present(card(device))
    try:
        known = torch.device(device.strip() if isinstance(device, str) else device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            f"devices names {device!r}: expected a device of torch's for this rank, such as 'cuda', 'cuda:1' or 'cpu'."
        ) from error
    if not is_card(known):
        return torch.device(known)
    return _local_card(rank) if known.index is None else _present(known)


def _local_card(rank: int) -> torch.device:
    """The card of this process among those that were started on its machine; the only one where it sees one.

    torchrun and accelerate say which process of its machine it is in LOCAL_RANK, srun in SLURM_LOCALID. Where neither
    does, machines are taken to be filled one after the other.
    """
    num_cards = count_cards()
    said = os.environ.get("SLURM_LOCALID", "") if os.environ.get("SLURM_PROCID") == str(rank) else ""
    fallback_rank = int(said) if said.isdecimal() else rank % max(num_cards, 1)
    local_rank = dist.get_node_local_rank(fallback_rank=fallback_rank)
    return _present(card(0 if num_cards == 1 else local_rank))


def _present(device: torch.device) -> torch.device:
    if (device.index or 0) >= count_cards():
        raise DeviceError(
            f"{device} is not there: this process sees {count_cards()} cards. Expected one for each rank of this "
            "machine. Start as many processes a machine as it has cards."
        )
    return device
