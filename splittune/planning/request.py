"""What is to be planned, every entry checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any

from splittune.checks import checked_int
from splittune.errors import ConfigError
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.catalog import MAX_DEVICES, MAX_RANKS
from splittune.options import SearchOptions, StrategyChoice, strategies_of
from splittune.planning.result import Machine
from splittune.search.headroom import headroom_demands
from splittune.split import BatchSplit, SplitSpace
from splittune.training import TrainingTask


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Machines, each with a strategy, and for each the batch sizes to search or the splits to foretell."""

    task: TrainingTask
    machines: tuple[Machine, ...]
    """Once for each strategy."""
    hardware: tuple[VirtualHardware, ...]
    """One for each machine."""
    global_batch_sizes: tuple[int | None, ...]
    """None for the loader's own."""
    splits: tuple[BatchSplit, ...] | None
    options: SearchOptions

    @property
    def num_searches(self) -> int:
        return len(self.machines) * len(self.global_batch_sizes)


def checked_request(
    task: TrainingTask,
    devices: str | Sequence[str],
    *,
    global_batch_sizes: Sequence[int] | None,
    splits: Sequence[BatchSplit] | None,
    min_headroom_bytes: int | Sequence[int] | None,
    max_trials: int,
    strategy: StrategyChoice = "dp",
) -> PlanRequest:
    """The request, with every machine, batch size, split and strategy known to be one that can be planned.

    Raises:
        ConfigError: an argument cannot be used; the message names the entry.
        DeviceError: an unknown card; the message names the nearest.
    """
    if not isinstance(task, TrainingTask):
        raise ConfigError(
            f"task is a {type(task).__name__}: expected a TrainingTask, as in plan(TrainingTask(model, loader), ...)."
        )
    if splits is not None and global_batch_sizes is not None:
        raise ConfigError("got splits and global_batch_sizes: expected one of them. A split has its own batch size.")
    strategies = strategies_of(strategy)
    hardware = checked_machines(devices, strategy)
    names = [devices] if isinstance(devices, str) else devices
    for cards in hardware:
        if min_headroom_bytes is not None:
            headroom_demands(min_headroom_bytes, len(cards.devices))
    each = [
        (Machine(devices=name, cards=cards.devices, strategy=one), cards)
        for name, cards in zip(names, hardware, strict=True)
        for one in strategies
    ]
    return PlanRequest(
        task=task,
        machines=tuple(machine for machine, _ in each),
        hardware=tuple(cards for _, cards in each),
        global_batch_sizes=checked_sizes(global_batch_sizes, hardware),
        splits=None if splits is None else _splits(splits, hardware),
        options=SearchOptions(min_headroom_bytes=min_headroom_bytes, max_trials=max_trials),
    )


def checked_machines(devices: str | Sequence[str], strategy: StrategyChoice = "dp") -> tuple[VirtualHardware, ...]:
    """The machines that are named, each once; ranks, which "ddp" has, may be on many machines at once.

    Raises:
        ConfigError: none is named, one is named twice, or real cards are.
        DeviceError: an unknown card; the message names the nearest.
    """
    names = [devices] if isinstance(devices, str) else _entries("devices", devices, '["4xRTX3090"]')
    max_devices = MAX_RANKS if strategies_of(strategy) == ("ddp",) else MAX_DEVICES
    hardware = tuple(_virtual(name, max_devices) for name in names)
    _check_once("devices", [cards.spec or "" for cards in hardware])
    return hardware


def checked_sizes(given: Sequence[int] | None, machines: Sequence[VirtualHardware]) -> tuple[int | None, ...]:
    """The batch sizes, each of which every machine can share out; None for the loader's own.

    Raises:
        ConfigError: none is given, one is no integer of at least 1, or is given twice.
    """
    if given is None:
        return (None,)
    entries = _entries("global_batch_sizes", given, "[64, 128]")
    sizes = [checked_int(f"global_batch_sizes[{place}]", size, at_least=1) for place, size in enumerate(entries)]
    _check_once("global_batch_sizes", sizes)
    for cards in machines:
        for size in sizes:
            SplitSpace(global_batch_size=size, num_devices=len(cards.devices))  # refuses what cannot be split
    return tuple(sizes)


def _splits(given: Sequence[BatchSplit], machines: Sequence[VirtualHardware]) -> tuple[BatchSplit, ...]:
    splits = _entries("splits", given, "[BatchSplit.even(...)]")
    for split in splits:
        if not isinstance(split, BatchSplit):
            raise ConfigError(f"splits holds {short_repr(split)}: expected BatchSplits alone.")
        for cards in machines:
            if split.num_devices != len(cards.devices):
                raise ConfigError(
                    f"the split {split} is for {split.num_devices} cards, and {cards.spec} has {len(cards.devices)}: "
                    "expected one share for each card. Plan machines of other sizes apart."
                )
    return tuple(splits)


def _entries(name: str, given: object, example: str) -> list[Any]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ConfigError(f"{name} is {short_repr(given)}: expected a list of at least one entry, such as {example}.")
    return list(given)


def _check_once(name: str, entries: Sequence[object]) -> None:
    twice = [entry for place, entry in enumerate(entries) if entry in entries[:place]]
    if twice:
        raise ConfigError(f"{name} names {twice[0]} twice: expected each once. Leave one of them out.")


def _virtual(machine: object, max_devices: int) -> VirtualHardware:
    if not isinstance(machine, str):
        raise ConfigError(
            f'devices holds {short_repr(machine)}: expected machines as text, such as ["4xRTX3090", "2xA100-80GB"].'
        )
    hardware = resolve_hardware(machine, max_devices=max_devices)
    if not isinstance(hardware, VirtualHardware):
        raise ConfigError(
            f'{machine!r} names cards of this machine: a plan is for virtual ones, such as "4xRTX3090". '
            "Use autotune() on real cards."
        )
    return hardware
