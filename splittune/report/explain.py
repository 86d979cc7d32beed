"""Why the cards are filled as they are at the best split, in plain words: what GPU 0's peak is made of, what would help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from splittune.profiling.measurement import Outcome
from splittune.search.models.growth import growth_of
from splittune.units import format_bytes

if TYPE_CHECKING:
    from splittune.hardware.base import Device, DeviceMemory
    from splittune.profiling.measurement import Measurement
    from splittune.search import Trial

# Of a peak: a part from a quarter up is worth a remedy of its own, one below a twentieth is not worth any.
LARGE_PART, SMALL_PART = 0.25, 0.05
# Of a card's memory: cards that differ by less are called alike, and evenly filled.
LEVEL_FRACTION = 0.05
MAX_REMEDIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """What the peak of one device is made of at the best split, in bytes; a part is None where the trials do not tell.

    ``peak_bytes == per_share_bytes + whole_batch_bytes + fixed_bytes``, and `outside_bytes` come on top. See
    `memory_parts` for how they are worked out.
    """

    device: int
    """Index within the job: 0 is 'GPU 0'."""
    outside_bytes: int
    """Held by others than this process's allocator."""
    peak_bytes: int
    """Most that live tensors took in forward and backward."""
    per_share_bytes: int | None
    """Grows with the device's own share of the micro-batch: activations."""
    whole_batch_bytes: int | None
    """Grows with the whole micro-batch: outputs gathered on GPU 0, and the loss. 0 on other devices."""
    fixed_bytes: int | None
    """Neither: parameters, gradients, optimizer state."""
    update_peak_bytes: int | None = None
    """Peak of the optimizer's update where that is the higher one; no split changes it."""


class Remedy(str, Enum):
    """What makes room on the fullest card."""

    OTHER_GPU0 = "another card as GPU 0"
    CLOSE_PROGRAM = "close the other program"
    LOSS_IN_REPLICAS = "the loss in the replicas"
    SMALLER_SHARE = "a smaller share"
    MORE_STEPS = "more accumulation steps"
    NO_SPLIT = "no split helps"


def memory_parts(trials: Iterable[Trial], best: Measurement) -> tuple[MemoryParts, ...]:
    """The parts of every device's peak at the split of `best`; empty where its memory was not recorded.

    `growth_of` the trials that ran with the loss where `best` has it tells what a sample costs, of a card's own share and
    of the whole micro-batch. `fixed_bytes` is what remains of the peak; parts are clipped so that none is negative. Worked,
    in MiB: 2 a sample and 0.5 for each of the micro-batch make of a peak of 40 with 3 of 48 samples 6 for the share, 24 for
    the whole micro-batch, and 10 that are fixed.

    Limits: replicas are taken to cost the same per sample. Peaks are those of forward and backward where known (the
    update's do not grow with the batch); a trial without them counts only when no trial has them. With a single device its
    share is the micro-batch: `per_share_bytes` is both, and `whole_batch_bytes` 0.
    """
    runs = [trial.measurement for trial in trials if trial.measurement.outcome in (Outcome.OK, Outcome.NO_HEADROOM)]
    runs = [run for run in (*runs, best) if run.memory and run.loss_placement == best.loss_placement]
    split_runs = [run for run in runs if all(memory.micro_step_peak_bytes is not None for memory in run.memory)]
    grown = growth_of(split_runs or runs)
    per_sample, per_whole_sample = grown.per_sample_bytes, grown.per_micro_batch_sample_bytes
    alike = next((run for run in split_runs if run.split == best.split), best)
    return tuple(
        _parts_of(
            memory,
            alike.memory[device],
            None if per_sample is None else per_sample * best.split.shard_sizes[device],
            0.0 if device else None if per_whole_sample is None else per_whole_sample * best.split.micro_batch_size,
        )
        for device, memory in enumerate(best.memory)
    )


def _peak_of(memory: DeviceMemory) -> int:
    return memory.peak_allocated_bytes if memory.micro_step_peak_bytes is None else memory.micro_step_peak_bytes


def _parts_of(memory: DeviceMemory, searched: DeviceMemory, share: float | None, whole: float | None) -> MemoryParts:
    """`searched` is the same split's reading that tells forward and backward from the update, where there is one."""
    update = searched.update_peak_bytes
    is_update_bound = update is not None and update >= _peak_of(searched)
    peak = _peak_of(searched) if is_update_bound else _peak_of(memory)
    share_bytes = None if share is None else min(round(share), peak)
    whole_bytes = None if whole is None or share_bytes is None else min(round(whole), peak - share_bytes)
    known = share_bytes is not None and whole_bytes is not None
    return MemoryParts(
        device=memory.device,
        outside_bytes=memory.outside_bytes,
        peak_bytes=peak,
        per_share_bytes=share_bytes,
        whole_batch_bytes=whole_bytes,
        fixed_bytes=peak - (share_bytes or 0) - (whole_bytes or 0) if known else None,
        update_peak_bytes=update if is_update_bound else None,
    )


def explain(
    trials: Iterable[Trial],
    best: Measurement,
    baseline: Measurement | None,
    devices: Sequence[Device],
    *,
    is_modelled: bool,
) -> str:
    """One paragraph: how far apart the cards are at the best split, what fills the fullest, and what would help.

    `is_modelled` is the hardware's: True for virtual cards, whose times are modelled and whose memory is accounted.
    """
    if not best.memory:
        return "The memory of the best split was not recorded, so what fills the cards cannot be told."
    fullest = min(best.memory, key=lambda memory: memory.headroom_bytes)
    emptiest = max(best.memory, key=lambda memory: memory.headroom_bytes)
    free, most_free = format_bytes(fullest.headroom_bytes), format_bytes(emptiest.headroom_bytes)
    is_single = len(best.memory) == 1
    if not is_single and _are_level(best.memory):
        text = f"The cards are evenly filled at the best split: {free} to {most_free} are left free on each"
        held = f", and most of what fills them is held outside this job: {format_bytes(fullest.outside_bytes)} on each"
        return f"{text}{held if _is_mostly_others(fullest) else ''}."
    lead = f"At the best split GPU {fullest.device} is the fullest card, with {free} left free; "
    lead += f"GPU {emptiest.device} has the most room, {most_free}."
    lead = f"At the best split GPU 0 has {free} left free." if is_single else lead
    scene = _Scene(memory_parts(trials, best)[fullest.device], best, baseline, devices, is_modelled)
    last = "The cards are virtual: memory is accounted, not measured." if is_modelled else ""
    sentences = (lead, scene.why(), scene.bought(), scene.limit_of_gpu0(), scene.advice(), last)
    return " ".join(sentence for sentence in sentences if sentence)


def remedies(parts: MemoryParts, best: Measurement, devices: Sequence[Device]) -> tuple[Remedy, ...]:
    """What fits the fullest card, whose parts these are, best first; empty where the trials are too few to tell."""
    memory, found = best.memory[parts.device], []
    share, whole = parts.per_share_bytes or 0, parts.whole_batch_bytes or 0
    is_explained = parts.fixed_bytes is not None
    if other_gpu0(parts, best, devices) is not None:
        found.append(Remedy.OTHER_GPU0)
    if _is_mostly_others(memory):
        found.append(Remedy.CLOSE_PROGRAM)
    if is_explained and parts.update_peak_bytes is None:
        if best.loss_placement == "output" and whole >= LARGE_PART * parts.peak_bytes:
            found.append(Remedy.LOSS_IN_REPLICAS)
        if len(best.memory) > 1 and share >= LARGE_PART * parts.peak_bytes:
            found.append(Remedy.SMALLER_SHARE)
        if not found and best.split.micro_batch_size > 1 and share + whole >= SMALL_PART * parts.peak_bytes:
            found.append(Remedy.MORE_STEPS)
    return tuple(found) if found or not is_explained else (Remedy.NO_SPLIT,)


def other_gpu0(parts: MemoryParts, best: Measurement, devices: Sequence[Device]) -> int | None:
    """The device with the most memory free of other programs, where it beats a full GPU 0 by more than the fixed part.

    The fixed part is what moves with the role of GPU 0; where it is unknown, the whole peak stands in for it.
    """
    if parts.device != 0:
        return None
    room = [memory.total_bytes - memory.outside_bytes for memory in best.memory]
    roomiest = max(range(len(room)), key=lambda device: room[device])
    moves = max(parts.peak_bytes if parts.fixed_bytes is None else parts.fixed_bytes, parts.update_peak_bytes or 0)
    return roomiest if roomiest < len(devices) and room[roomiest] - room[0] > moves else None


def _is_mostly_others(memory: DeviceMemory) -> bool:
    return memory.outside_bytes > max(memory.peak_reserved_bytes, LARGE_PART * memory.total_bytes)


def _are_level(memories: Sequence[DeviceMemory]) -> bool:
    tolerance = LEVEL_FRACTION * min(memory.total_bytes for memory in memories)
    rows = zip(*((m.total_bytes, m.outside_bytes, m.headroom_bytes) for m in memories), strict=True)
    return all(max(row) - min(row) <= tolerance for row in rows)


@dataclass(frozen=True, slots=True)
class _Scene:
    """The fullest card at the best split, and the sentences about it; a sentence that does not apply is empty."""

    parts: MemoryParts
    best: Measurement
    baseline: Measurement | None
    devices: Sequence[Device]
    is_modelled: bool

    def why(self) -> str:
        parts, split, memory = self.parts, self.best.split, self.best.memory[self.parts.device]
        held, room = parts.outside_bytes, memory.total_bytes - parts.outside_bytes
        outside = f"Of GPU {parts.device}'s {format_bytes(memory.total_bytes)}, {format_bytes(held)} are held outside "
        outside += f"this job (other programs, the CUDA context), which leaves it {format_bytes(room)}"
        peak, update = format_bytes(parts.peak_bytes), parts.update_peak_bytes
        if parts.fixed_bytes is None:
            text = f"{outside}. The job's tensors peak at {format_bytes(max(parts.peak_bytes, update or 0))}; "
            return f"{text}too few trials ran at different sizes to tell what that peak is made of."
        share = _samples(split.shard_sizes[parts.device])
        text = f"{outside}. The job's tensors {'' if update is None else 'in forward and backward '}peak at {peak}: "
        text += f"about {format_bytes(parts.per_share_bytes or 0)} for a share of {share}, "
        state = "parameters, gradients"
        if parts.device == 0:
            state += ", optimizer state"
            if split.num_devices > 1:
                text += f"{format_bytes(parts.whole_batch_bytes or 0)} for the outputs and the loss of the whole "
                text += f"micro-batch of {_samples(split.micro_batch_size)}, "
        text += f"and {format_bytes(parts.fixed_bytes)} that no batch size changes ({state})."
        if update is not None:
            text += f" The optimizer's update peaks higher, at {format_bytes(update)}."
        spare = memory.peak_reserved_bytes - max(parts.peak_bytes, update or 0)
        return f"{text} Torch's allocator holds {format_bytes(spare)} more in reserve." if spare > 0 else text

    def bought(self) -> str:
        """What the tuned split's smaller share of GPU 0 has already bought."""
        split, best, baseline = self.best.split, self.best, self.baseline
        share = f"{split.gpu0_bsz} of {_samples(split.micro_batch_size)}"
        if split.num_devices == 1:
            return ""
        if baseline is None:
            is_smaller = split.gpu0_bsz < min(split.shard_sizes[1:])
            return f"No even split fits; this one does, with GPU 0 taking only {share}." if is_smaller else ""
        before = baseline.split
        if split.gpu0_bsz * before.micro_batch_size >= before.gpu0_bsz * split.micro_batch_size:
            return ""
        gains = []
        if split.accumulation_steps < before.accumulation_steps:
            steps = "step" if split.accumulation_steps == 1 else "steps"
            gains.append(f"{split.accumulation_steps} accumulation {steps} instead of {before.accumulation_steps}")
        if baseline.memory and best.memory[0].headroom_bytes > baseline.memory[0].headroom_bytes:
            left = [format_bytes(run.memory[0].headroom_bytes) for run in (best, baseline)]
            gains.append(f"{left[0]} left on GPU 0 instead of {left[1]}")
        if best.throughput is not None and baseline.throughput is not None:
            modelled = " (modelled)" if self.is_modelled else ""
            gains.append(f"{best.throughput / baseline.throughput:.2f} times the samples per second{modelled}")
        even = f"{before.gpu0_bsz} of {before.micro_batch_size}"
        text = f"The tuned split already gives GPU 0 a smaller share, {share} where the even split gives it {even}"
        *first, last = gains or [""]
        return f"{text}; that buys {', '.join(first)}{' and ' if first else ''}{last}." if gains else f"{text}."

    def limit_of_gpu0(self) -> str:
        """Said where no ``gpu0_bsz``, not even 0, makes one accumulation step less fit."""
        parts, split, memory = self.parts, self.best.split, self.best.memory[self.parts.device]
        steps = split.accumulation_steps - 1
        if parts.device != 0 or parts.fixed_bytes is None or steps < 1 or split.num_devices == 1:
            return ""
        size = -(-split.global_batch_size // steps)
        needed = parts.fixed_bytes + round((parts.whole_batch_bytes or 0) * size / split.micro_batch_size)
        available = memory.total_bytes - parts.outside_bytes
        if needed <= available:
            return ""
        text = f"No gpu0_bsz can bring fewer than {split.accumulation_steps} accumulation steps: with micro-batches of "
        text += f"{_samples(size)} GPU 0 would need about {format_bytes(needed)} even without a share of its own"
        return f"{text}, and has {format_bytes(available)} for this job."

    def advice(self) -> str:
        words: dict[Remedy, Callable[[], str]] = {
            Remedy.OTHER_GPU0: self._other_gpu0,
            Remedy.CLOSE_PROGRAM: self._close_program,
            Remedy.LOSS_IN_REPLICAS: self._loss_in_replicas,
            Remedy.SMALLER_SHARE: self._smaller_share,
            Remedy.MORE_STEPS: self._more_steps,
            Remedy.NO_SPLIT: self._no_split,
        }
        fitting = remedies(self.parts, self.best, self.devices)[:MAX_REMEDIES]
        if not fitting:
            return "A search with more trials would tell which remedy fits."
        return f"If more room is needed on GPU {self.parts.device}: " + " Or: ".join(
            words[remedy]() for remedy in fitting
        )

    def _other_gpu0(self) -> str:
        other = other_gpu0(self.parts, self.best, self.devices) or 0
        room = [format_bytes(memory.total_bytes - memory.outside_bytes) for memory in self.best.memory]
        text = f"make another card GPU 0, as GPU {other} has {room[other]} for this job and GPU 0 only {room[0]}; "
        if self.is_modelled:
            return f"{text}name that card, a {self.devices[other].name}, first in the `devices` string, and tune again."
        order = [self.devices[other], *(device for device in self.devices if device.index != other)]
        names = ", ".join(f'"{device.torch_device}"' for device in order)
        return f"{text}tune again with `devices=[{names}]`."

    def _close_program(self) -> str:
        # what every card has outside is no program that could be closed: the CUDA context, libraries
        others = [memory.outside_bytes for memory in self.best.memory if memory.device != self.parts.device]
        held = self.parts.outside_bytes - min(others, default=0)
        is_told = 0 < held < self.parts.outside_bytes
        amount = f"about {format_bytes(held)}" if is_told else "most of what is held outside"
        return f"close what else runs on GPU {self.parts.device}, which holds {amount}."

    def _loss_in_replicas(self) -> str:
        split = self.best.split
        elsewhere = (self.parts.whole_batch_bytes or 0) * (1 - split.gpu0_bsz / split.micro_batch_size)
        text = "compute the loss on the card where each share already is, instead of all of it on GPU 0: about "
        text += f"{format_bytes(elsewhere)} less there. "
        return text + 'Tune with `loss_placement="either"`, or let the model return its loss.'

    def _smaller_share(self) -> str:
        device, share = self.parts.device, self.best.split.shard_sizes[self.parts.device]
        move = "lower gpu0_bsz" if device == 0 else "raise gpu0_bsz, so that GPU 0 takes over samples"
        each = format_bytes((self.parts.per_share_bytes or 0) / max(share, 1))
        return f"{move}; each sample fewer on GPU {device} frees about {each}, at the price of speed."

    def _more_steps(self) -> str:
        freed = format_bytes(((self.parts.per_share_bytes or 0) + (self.parts.whole_batch_bytes or 0)) / 2)
        return f"take more accumulation steps; micro-batches of half the size free about {freed}, and are slower."

    def _no_split(self) -> str:
        what = "what no batch size changes" if self.parts.update_peak_bytes is None else "the optimizer's update"
        text = "take a smaller model, an optimizer with less state, or a card with more memory; neither gpu0_bsz nor "
        return f"{text}more accumulation steps can help, as the peak is {what}."


def _samples(count: int) -> str:
    return f"{count} sample" if count == 1 else f"{count} samples"
