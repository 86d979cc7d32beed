"""A search under DistributedDataParallel, a rank for each card, on cards that are not here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from splittune.config.data import Strategy
from splittune.errors import ConfigError, NoFeasibleSplitError
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.catalog import MAX_DEVICES, MAX_RANKS
from splittune.options import MIN_BATCH_NORM_SHARD, SearchOptions, StrategyChoice, headroom_for, strategies_of
from splittune.report import TuneResult
from splittune.report.capacity.row import LargestMicroBatch
from splittune.report.capacity.strategies import Use, compare, use_of
from splittune.report.words import rate_of, shape_of
from splittune.runners.in_process import InProcessRunner
from splittune.runners.modelled_ranks.kinds import CardKind, kinds_of
from splittune.runners.modelled_ranks.one_card import CardTrials, OneCardTrials
from splittune.runners.modelled_ranks.step import RankTrials
from splittune.search.by_kind.study import FoundByKind, SharesByKind, find_by_kind
from splittune.split import BatchSplit, SplitSpace
from splittune.training import TrainingTask
from splittune.training.said import each_said_once
from splittune.tuner import Devices, TuneCallback, result_of, tune


def virtual_cards(devices: Devices, strategy: StrategyChoice) -> VirtualHardware:
    """The cards for a search by this strategy, which has ranks: virtual ones.

    Raises:
        ConfigError: real cards are named.
        DeviceError: an unknown card, or more of them than the strategy has.
    """
    hardware = resolve_hardware(devices, max_devices=MAX_RANKS if strategy == "ddp" else MAX_DEVICES)
    if not isinstance(hardware, VirtualHardware):
        raise ConfigError(
            f'strategy is "{strategy}" on real cards, in one process: expected a process for each card. Start them, as '
            'with torchrun, and call autotune(..., strategy="ddp") on every rank of their process group. To foretell '
            f'it without cards, plan(task, "4xRTX3090", strategy="{strategy}").'
        )
    return hardware


def tune_by_strategy(
    task: TrainingTask,
    hardware: VirtualHardware,
    options: SearchOptions,
    callback: TuneCallback,
    *,
    strategy: StrategyChoice,
) -> TuneResult:
    """`tune` on virtual cards by one strategy, or by both: then the faster one's result, with a note on the other.

    Raises:
        ConfigError: options that a search over ranks does not have.
        NoFeasibleSplitError: nothing fits by any of the strategies.
    """
    for name in ("storage", "timeout_s"):
        if getattr(options, name) is not None and strategy != "dp":
            raise ConfigError(
                f'{name} is {getattr(options, name)!r} with strategy="{strategy}": expected None, for a search over '
                "ranks takes seconds, and none of it is kept. Leave it out."
            )
    found: dict[Strategy, TuneResult] = {}
    lacking: list[NoFeasibleSplitError] = []
    for one in strategies_of(strategy):
        try:
            found[one] = _tune(task, hardware, options, callback, one)
        except NoFeasibleSplitError as error:  # noqa: PERF203  two turns at most
            lacking.append(error)
    if not found:
        raise lacking[0]
    best = max(found, key=lambda one: found[one].best.throughput or 0.0)
    notes = tuple(
        f'"{other}" gives {rate_of(result.best)} samples/s (modelled) here, as {shape_of(result.best.split)}: this is '
        f'"{best}".'
        for other, result in found.items()
        if other != best
    )
    if strategy == "either":
        why = compare(*(_use_of(one, found.get(one)) for one in strategies_of(strategy)))
        notes = (*notes, f"{why[0].upper()}{why[1:]}")
    return replace(found[best], notes=(*found[best].notes, *notes))


def _use_of(strategy: Strategy, result: TuneResult | None) -> Use:
    if result is None:
        return use_of(None, devices="", strategy=strategy, fits=False, needs_splitting=True, is_given=False)
    even = result.baseline
    return use_of(
        result.best,
        devices="",
        strategy=strategy,
        fits=True,
        needs_splitting=even is None or even.split.accumulation_steps > 1,
        is_given=False,
    )


def _tune(
    task: TrainingTask, hardware: VirtualHardware, options: SearchOptions, callback: TuneCallback, strategy: Strategy
) -> TuneResult:
    if strategy == "dp":
        return tune(InProcessRunner(task, hardware), options, callback)
    return tune_ranks(OneCardTrials(task, hardware), hardware, options, callback).result


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRanks:
    """The best shares for ranks, and the most that their cards could take at once."""

    result: TuneResult
    largest: LargestMicroBatch


def tune_ranks(
    cards: CardTrials,
    hardware: VirtualHardware,
    options: SearchOptions,
    callback: TuneCallback,
    *,
    global_batch_size: int | None = None,
) -> TunedRanks:
    """The fastest split of the job over ranks on these cards; the job is left as it was found.

    `global_batch_size` is the job's own where it is None. Where the loss is placed, and how shares are searched, is no
    question here: a rank has its own loss, and its own share.

    Raises:
        NoFeasibleSplitError: the message says which card lacks how much.
    """
    with each_said_once():
        try:
            job = cards.open(hardware)
            size = global_batch_size or job.global_batch_size or job.loader_batch_size
            headroom = headroom_for(job.cards, options.min_headroom_bytes)
            kinds = kinds_of(hardware, headroom)
            space = SplitSpace(global_batch_size=size, num_devices=len(hardware.devices), shares="each")
            callback.on_start(job.cards, space, options.max_trials)
            held = cards.scripts_hold
            found = _search(cards, hardware, kinds, size, options, callback)
            if held and not cards.scripts_hold:  # what was played does not hold: all over again, in full
                found = _search(cards, hardware, kinds, size, options, callback)
        finally:
            try:
                cards.close()
            finally:
                callback.on_end()
    return TunedRanks(
        result=result_of(found.result, job, headroom, seed=options.seed, strategy="ddp"),
        largest=_largest(found, kinds, len(hardware.devices)),
    )


def _search(
    cards: CardTrials,
    hardware: VirtualHardware,
    kinds: tuple[CardKind, ...],
    global_batch_size: int,
    options: SearchOptions,
    callback: TuneCallback,
) -> FoundByKind:
    least_share = MIN_BATCH_NORM_SHARD if cards.normalises_alone else 1
    small = max(1, min(least_share, global_batch_size // len(hardware.devices)))
    cards.measure(kinds[0], small, accumulation_steps=1)  # which tells whether trials need values, and so memory here
    problem = SharesByKind(
        global_batch_size=global_batch_size,
        kinds=tuple(kind.devices for kind in kinds),
        min_headroom_bytes=tuple(kind.min_headroom_bytes for kind in kinds),
        least_share=least_share,
        may_try_more=cards.needs_values is None,
    )
    return find_by_kind(
        problem,
        RankTrials.of(cards, hardware, kinds),
        max_trials=options.max_trials,
        on_measure=lambda split, in_whole_steps: callback.on_measure(split, in_whole_steps=in_whole_steps),
        on_trial=callback.on_trial,
    )


def _largest(found: FoundByKind, kinds: tuple[CardKind, ...], num_devices: int) -> LargestMicroBatch:
    """Every card full, in a step by itself."""
    shards = [0] * num_devices
    for kind, most in zip(kinds, found.most, strict=True):
        for device in kind.devices:
            shards[device] = most
    split = BatchSplit(global_batch_size=sum(shards), accumulation_steps=1, shard_sizes=tuple(shards))
    return LargestMicroBatch(split=split, is_measured=found.are_bracketed)
