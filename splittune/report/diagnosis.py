"""What fills the devices at the best split, what that bought, and what would help: the facts.

The words are elsewhere: a console, a text file and a page each say the same facts in their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from splittune.profiling.measurement import Outcome
from splittune.report.memory_parts import MemoryParts, memory_parts

if TYPE_CHECKING:
    from splittune.hardware.base import Device, DeviceMemory
    from splittune.profiling.measurement import Measurement
    from splittune.search import Trial
    from splittune.split import BatchSplit

# Of a peak or of a card: a part from here up is worth a remedy of its own. A choice; halved, it
# would name remedies that free an eighth.
LARGE_PART = 0.25
# Of a peak: what grows with the batch by less than this is not worth more steps. A choice.
SMALL_PART = 0.05
# Of a card's memory: cards that differ by less are called alike, and evenly filled. A choice.
LEVEL_FRACTION = 0.05
# Of what others leave of each card: where so much stays free, memory was in no split's way. A choice.
AMPLE_PART = 0.5


class Remedy(str, Enum):
    """What makes room on the fullest device."""

    OTHER_GPU0 = "another card as GPU 0"
    CLOSE_PROGRAM = "close the other program"
    LOSS_IN_REPLICAS = "the loss in the replicas"
    SMALLER_SHARE = "a smaller share"
    MORE_STEPS = "more accumulation steps"
    NO_SPLIT = "no split helps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A remedy, and what it brings."""

    remedy: Remedy
    frees_bytes: int | None = None
    """On the fullest device; None where the trials do not tell.

    OTHER_GPU0: by how much the other card has more room. CLOSE_PROGRAM: what programs hold that
    other cards do not have as well (the CUDA context is on each). SMALLER_SHARE: for each sample
    fewer. MORE_STEPS: with micro-batches of half the size.
    """
    device: int | None = None
    """OTHER_GPU0: the card that should be GPU 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What GPU 0's smaller share bought; there is none where its share is not the smaller."""

    even_split: BatchSplit | None
    """The baseline's; None where no even split fits: then that one fits at all is the gain."""
    saves_steps: bool = False
    """Whether the best split accumulates in fewer steps."""
    gpu0_headroom_bytes: int | None = None
    """Left on GPU 0 at the best split; None where unknown or no more than at the even one."""
    even_gpu0_headroom_bytes: int | None = None
    """Left on GPU 0 at the even split, where `gpu0_headroom_bytes` is known."""
    speedup: float | None = None
    """Best over baseline in samples/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsLimit:
    """Why no share of GPU 0, not even 0, makes one accumulation step less fit."""

    micro_batch_size: int
    """Samples of a micro-batch with one step less."""
    needed_bytes: int
    """What GPU 0 would need for it without a share of its own."""
    available_bytes: int
    """What GPU 0 has for this job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsteadyMemory:
    """A device whose free memory changed between two runs of the best split, and has less left.

    One more such change would run out of memory.
    """

    device: int
    changed_bytes: int
    least_headroom_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What fills the devices at the best split, what that bought, and what would help.

    Worked, in MiB: GPU 0 takes 43 of its 60, GPU 1 and GPU 2 take 52 of 200 and of 300. GPU 0 is
    the fullest. Of its peak 10 are fixed and move with the role of GPU 0; GPU 2 has 240 more room,
    so the first advice is to make that one GPU 0.
    """

    best: Measurement
    baseline: Measurement | None
    devices: tuple[Device, ...]
    is_modelled: bool
    """True for virtual devices: times are modelled, memory is accounted."""
    fullest: int | None
    """The device with the least headroom; None where memory was not recorded."""
    emptiest: int | None
    """The device with the most headroom."""
    are_level: bool
    """Whether several devices are alike and filled alike, so that none stands out."""
    is_ample: bool
    """Whether memory was in no split's way: the batch fits in one step, evenly spread, no trial lacked memory, and
    at the best split at least half of what others leave of every card stays free."""
    is_mostly_others: bool
    """Whether others hold more of the fullest device than this job does."""
    parts: MemoryParts | None
    """What the peak of the fullest device is made of."""
    gain: Gain | None
    """None where GPU 0's share is not smaller than the even one."""
    steps_limit: StepsLimit | None
    """None where GPU 0 is not what keeps the steps up, or it is not known."""
    advice: tuple[Advice, ...]
    """The remedies that fit, best first; empty for level devices, and where too few trials ran."""
    unsteady: UnsteadyMemory | None
    """The device whose memory cannot be relied on."""


def diagnose(
    trials: Iterable[Trial],
    best: Measurement,
    baseline: Measurement | None,
    devices: Sequence[Device],
    *,
    is_modelled: bool,
) -> Diagnosis:
    """The facts about `best`, which was measured in whole steps, and about `baseline` beside it.

    `is_modelled` is the hardware's: True for virtual cards.
    """
    trials = tuple(trials)
    headrooms = [memory.headroom_bytes for memory in best.memory]
    fullest = headrooms.index(min(headrooms)) if headrooms else None
    are_level = len(headrooms) > 1 and _are_level(best.memory)
    parts = None if fullest is None else memory_parts(trials, best)[fullest]
    return Diagnosis(
        best=best,
        baseline=baseline,
        devices=tuple(devices),
        is_modelled=is_modelled,
        fullest=fullest,
        emptiest=headrooms.index(max(headrooms)) if headrooms else None,
        are_level=are_level,
        is_ample=_is_ample(trials, best, baseline),
        is_mostly_others=fullest is not None and _is_mostly_others(best.memory[fullest]),
        parts=parts,
        gain=_gain(best, baseline),
        steps_limit=None if parts is None else _steps_limit(parts, best),
        advice=() if parts is None or are_level else _advice(parts, best, devices),
        unsteady=_unsteady(trials, best),
    )


def _advice(parts: MemoryParts, best: Measurement, devices: Sequence[Device]) -> tuple[Advice, ...]:
    """What fits the device whose parts these are, best first; empty where too few trials tell."""
    memory, found = best.memory[parts.device], []
    share, whole = parts.per_share_bytes or 0, parts.whole_batch_bytes or 0
    is_explained = parts.fixed_bytes is not None
    other = _other_gpu0(parts, best, devices)
    if other is not None:
        found.append(other)
    if _is_mostly_others(memory):
        found.append(Advice(remedy=Remedy.CLOSE_PROGRAM, frees_bytes=_held_by_programs(parts, best)))
    if is_explained and parts.update_peak_bytes is None:
        if best.loss_placement == "output" and whole >= LARGE_PART * parts.peak_bytes:
            elsewhere = 1 - best.split.gpu0_bsz / best.split.micro_batch_size
            found.append(Advice(remedy=Remedy.LOSS_IN_REPLICAS, frees_bytes=round(whole * elsewhere)))
        if len(best.memory) > 1 and share >= LARGE_PART * parts.peak_bytes:
            each = round(share / max(best.split.shard_sizes[parts.device], 1))
            found.append(Advice(remedy=Remedy.SMALLER_SHARE, frees_bytes=each))
        if not found and best.split.micro_batch_size > 1 and share + whole >= SMALL_PART * parts.peak_bytes:
            found.append(Advice(remedy=Remedy.MORE_STEPS, frees_bytes=(share + whole) // 2))
    return tuple(found) if found or not is_explained else (Advice(remedy=Remedy.NO_SPLIT),)


def _other_gpu0(parts: MemoryParts, best: Measurement, devices: Sequence[Device]) -> Advice | None:
    """The device with most room for this job, where it beats a full GPU 0 by more than moves there.

    The fixed part is what moves with the role of GPU 0. Where it is unknown, the whole peak stands
    in for it.
    """
    if parts.device != 0:
        return None
    room = [memory.total_bytes - memory.outside_bytes for memory in best.memory]
    roomiest = max(range(len(room)), key=lambda device: room[device])
    moves = max(parts.peak_bytes if parts.fixed_bytes is None else parts.fixed_bytes, parts.update_peak_bytes or 0)
    more = room[roomiest] - room[0]
    if roomiest >= len(devices) or more <= moves:
        return None
    return Advice(remedy=Remedy.OTHER_GPU0, device=roomiest, frees_bytes=more)


def _held_by_programs(parts: MemoryParts, best: Measurement) -> int | None:
    """What others hold of the device, less what others hold of every one; None if that is no less.

    What every card has outside is no program that could be closed: the CUDA context, libraries.
    """
    others = [memory.outside_bytes for memory in best.memory if memory.device != parts.device]
    held = parts.outside_bytes - min(others, default=0)
    return held if 0 < held < parts.outside_bytes else None


def _gain(best: Measurement, baseline: Measurement | None) -> Gain | None:
    split = best.split
    if split.num_devices == 1:
        return None
    if baseline is None:
        return Gain(even_split=None) if split.gpu0_bsz < min(split.shard_sizes[1:]) else None
    even = baseline.split
    if split.gpu0_bsz * even.micro_batch_size >= even.gpu0_bsz * split.micro_batch_size:
        return None
    left = [run.memory[0].headroom_bytes for run in (best, baseline) if run.memory]
    is_more_left = len(left) == 2 and left[0] > left[1]
    is_timed = best.throughput is not None and baseline.throughput is not None
    return Gain(
        even_split=even,
        saves_steps=split.accumulation_steps < even.accumulation_steps,
        gpu0_headroom_bytes=left[0] if is_more_left else None,
        even_gpu0_headroom_bytes=left[1] if is_more_left else None,
        speedup=(best.throughput or 0.0) / (baseline.throughput or 1.0) if is_timed else None,
    )


def _steps_limit(parts: MemoryParts, best: Measurement) -> StepsLimit | None:
    split, memory = best.split, best.memory[parts.device]
    steps = split.accumulation_steps - 1
    if parts.device != 0 or parts.fixed_bytes is None or steps < 1 or split.num_devices == 1:
        return None
    size = -(-split.global_batch_size // steps)
    needed = parts.fixed_bytes + round((parts.whole_batch_bytes or 0) * size / split.micro_batch_size)
    available = memory.total_bytes - parts.outside_bytes
    if needed <= available:
        return None
    return StepsLimit(micro_batch_size=size, needed_bytes=needed, available_bytes=available)


def _unsteady(trials: Sequence[Trial], best: Measurement) -> UnsteadyMemory | None:
    """Over all runs of the best split, the device that another change would leave with least."""
    runs = [trial.measurement for trial in trials]
    runs = [run for run in runs if run.split == best.split and run.loss_placement == best.loss_placement]
    rows = zip(*([memory.headroom_bytes for memory in run.memory] for run in (*runs, best) if run.memory), strict=True)
    found = [
        UnsteadyMemory(device=device, changed_bytes=max(row) - min(row), least_headroom_bytes=min(row))
        for device, row in enumerate(rows)
    ]
    risky = [each for each in found if each.changed_bytes > each.least_headroom_bytes]
    return max(risky, key=lambda each: each.changed_bytes - each.least_headroom_bytes, default=None)


def _is_ample(trials: Sequence[Trial], best: Measurement, baseline: Measurement | None) -> bool:
    if baseline is None or baseline.split.accumulation_steps > 1 or not best.memory:
        return False
    lacking = (Outcome.OUT_OF_MEMORY, Outcome.NO_HEADROOM)
    return all(trial.measurement.outcome not in lacking for trial in trials) and all(
        memory.headroom_bytes >= AMPLE_PART * (memory.total_bytes - memory.outside_bytes) for memory in best.memory
    )


def _is_mostly_others(memory: DeviceMemory) -> bool:
    return memory.outside_bytes > max(memory.peak_reserved_bytes, LARGE_PART * memory.total_bytes)


def _are_level(memories: Sequence[DeviceMemory]) -> bool:
    tolerance = LEVEL_FRACTION * min(memory.total_bytes for memory in memories)
    rows = zip(*((m.total_bytes, m.outside_bytes, m.headroom_bytes) for m in memories), strict=True)
    return all(max(row) - min(row) <= tolerance for row in rows)
