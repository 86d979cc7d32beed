"""A diagnosis in plain words: a paragraph for a file, or two facts and a remedy for a console."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from splittune.report.diagnosis import Advice, Diagnosis, Remedy, diagnose
from splittune.report.memory_parts import MemoryParts
from splittune.report.words import count_of, describe_model_error, gpus
from splittune.units import format_bytes

if TYPE_CHECKING:
    from splittune.hardware.base import Device, DeviceMemory
    from splittune.profiling.measurement import Measurement
    from splittune.search import Trial

# Remedies in the paragraph: a third would be the least fitting. A choice.
MAX_REMEDIES = 2


def explain(
    trials: Iterable[Trial],
    best: Measurement,
    baseline: Measurement | None,
    devices: Sequence[Device],
    *,
    is_modelled: bool,
) -> str:
    """The paragraph of `diagnose` with these arguments."""
    return paragraph_of(diagnose(trials, best, baseline, devices, is_modelled=is_modelled))


def paragraph_of(diagnosis: Diagnosis) -> str:
    """How far apart the devices are at the best split, what fills the fullest, what would help."""
    if diagnosis.parts is None or diagnosis.fullest is None or diagnosis.emptiest is None:
        return "The memory of the best split was not recorded, so what fills the cards cannot be told."
    if diagnosis.are_level:
        return _level(diagnosis)
    sentences = (
        _lead(diagnosis),
        _make_up(diagnosis, diagnosis.parts),
        _bought(diagnosis),
        _steps_limit(diagnosis),
        _advice(diagnosis),
        f"The cards are virtual. {describe_model_error()}" if diagnosis.is_modelled else "",
    )
    return " ".join(sentence for sentence in sentences if sentence)


def facts_of(diagnosis: Diagnosis) -> tuple[str, ...]:
    """The two facts that matter most, a sentence each: what fills the fullest, what was bought."""
    if diagnosis.is_ample:
        fullest = _ample(diagnosis)
    elif diagnosis.parts is None or diagnosis.are_level:
        fullest = paragraph_of(diagnosis)
    else:
        fullest = _in_short(diagnosis, diagnosis.parts)
    facts = (fullest, _gain_in_short(diagnosis) or _steps_limit(diagnosis) or _unused(diagnosis))
    return tuple(fact for fact in facts if fact)


def remedy_of(diagnosis: Diagnosis) -> str:
    """The remedy that fits best, as a clause in the imperative; empty where none is known, or memory is ample."""
    return _remedy(diagnosis, diagnosis.advice[0]) if diagnosis.advice and not diagnosis.is_ample else ""


def risks_of(diagnosis: Diagnosis) -> tuple[str, ...]:
    """What to see to before the best split is trained, a sentence each; mostly empty."""
    risks = []
    unsteady, best = diagnosis.unsteady, diagnosis.best
    if unsteady is not None:
        risks.append(
            f"the free memory of GPU {unsteady.device} changed by {format_bytes(unsteady.changed_bytes)} between two "
            f"runs of this split, and {format_bytes(unsteady.least_headroom_bytes)} are left: tune again with more "
            "than that kept free (--min-headroom-bytes), or close what else runs there."
        )
    if best.is_on_the_edge:
        risks.append(
            f"the allocator had to free its cache and try again {count_of(best.num_alloc_retries, 'time')} under this "
            "split: it fits, barely. Tune again with more kept free (--min-headroom-bytes)."
        )
    return tuple(risks)


# the paragraph


def _lead(diagnosis: Diagnosis) -> str:
    memory = diagnosis.best.memory
    fullest, emptiest = memory[diagnosis.fullest or 0], memory[diagnosis.emptiest or 0]
    free, most_free = format_bytes(fullest.headroom_bytes), format_bytes(emptiest.headroom_bytes)
    if len(memory) == 1:
        return f"At the best split GPU 0 has {free} left free."
    return (
        f"At the best split GPU {fullest.device} is the fullest card, with {free} left free; GPU {emptiest.device} has "
        f"the most room, {most_free}."
    )


def _level(diagnosis: Diagnosis) -> str:
    memory = diagnosis.best.memory
    fullest = memory[diagnosis.fullest or 0]
    least, most = (format_bytes(memory[index or 0].headroom_bytes) for index in (diagnosis.fullest, diagnosis.emptiest))
    left = least if least == most else f"{least} to {most}"
    text = f"The cards are evenly filled at the best split: {left} are left free on each"
    held = f", and most of what fills them is held outside this job: {format_bytes(fullest.outside_bytes)} on each"
    return f"{text}{held if diagnosis.is_mostly_others else ''}."


def _make_up(diagnosis: Diagnosis, parts: MemoryParts) -> str:
    """What the fullest device's memory is made of, others' and this job's."""
    split, memory = diagnosis.best.split, diagnosis.best.memory[parts.device]
    held, room = format_bytes(parts.outside_bytes), format_bytes(_room_of(memory))
    outside = f"Of GPU {parts.device}'s {format_bytes(memory.total_bytes)}, {held} are held outside this job "
    outside += f"(other programs, the CUDA context), which leaves it {room}"
    peak, update = format_bytes(parts.peak_bytes), parts.update_peak_bytes
    if parts.fixed_bytes is None:
        text = f"{outside}. The job's tensors peak at {format_bytes(max(parts.peak_bytes, update or 0))}; "
        return f"{text}too few trials ran at different sizes to tell what that peak is made of."
    share = count_of(split.shard_sizes[parts.device], "sample")
    text = f"{outside}. The job's tensors {'' if update is None else 'in forward and backward '}peak at {peak}: "
    text += f"about {format_bytes(parts.per_share_bytes or 0)} for a share of {share}, "
    state = "parameters, gradients"
    if parts.device == 0:
        state += ", optimizer state"
        if split.num_devices > 1:
            text += f"{format_bytes(parts.whole_batch_bytes or 0)} for the outputs and the loss of the whole "
            text += f"micro-batch of {count_of(split.micro_batch_size, 'sample')}, "
    text += f"and {format_bytes(parts.fixed_bytes)} that no batch size changes ({state})."
    if update is not None:
        text += f" The optimizer's update peaks higher, at {format_bytes(update)}."
    spare = memory.peak_reserved_bytes - max(parts.peak_bytes, update or 0)
    return f"{text} Torch's allocator holds {format_bytes(spare)} more in reserve." if spare > 0 else text


def _bought(diagnosis: Diagnosis) -> str:
    """What the tuned split's smaller share of GPU 0 has already bought."""
    gain, split = diagnosis.gain, diagnosis.best.split
    if gain is None:
        return ""
    share = f"{split.gpu0_bsz} of {count_of(split.micro_batch_size, 'sample')}"
    if gain.even_split is None:
        return f"No even split fits; this one does, with GPU 0 taking only {share}."
    even, gains = gain.even_split, []
    if gain.saves_steps:
        steps = count_of(split.accumulation_steps, "accumulation step")
        gains.append(f"{steps} instead of {even.accumulation_steps}")
    if gain.gpu0_headroom_bytes is not None:
        left = [format_bytes(left or 0) for left in (gain.gpu0_headroom_bytes, gain.even_gpu0_headroom_bytes)]
        gains.append(f"{left[0]} left on GPU 0 instead of {left[1]}")
    if gain.speedup is not None:
        modelled = " (modelled)" if diagnosis.is_modelled else ""
        gains.append(f"{gain.speedup:.2f} times the samples per second{modelled}")
    text = f"The tuned split already gives GPU 0 a smaller share, {share} where the even split gives it "
    text += f"{even.gpu0_bsz} of {even.micro_batch_size}"
    *first, last = gains or [""]
    return f"{text}; that buys {', '.join(first)}{' and ' if first else ''}{last}." if gains else f"{text}."


def _steps_limit(diagnosis: Diagnosis) -> str:
    limit, steps = diagnosis.steps_limit, diagnosis.best.split.accumulation_steps
    if limit is None:
        return ""
    return (
        f"No gpu0_bsz can bring fewer than {steps} accumulation steps: with micro-batches of "
        f"{count_of(limit.micro_batch_size, 'sample')} GPU 0 would need about {format_bytes(limit.needed_bytes)} even "
        f"without a share of its own, and has {format_bytes(limit.available_bytes)} for this job."
    )


def _advice(diagnosis: Diagnosis) -> str:
    fitting = diagnosis.advice[:MAX_REMEDIES]
    if not fitting:
        return "A search with more trials would tell which remedy fits."
    clauses = " Or: ".join(f"{_remedy(diagnosis, advice)}." for advice in fitting)
    return f"If more room is needed on GPU {diagnosis.fullest}: {clauses}"


# in short


def _ample(diagnosis: Diagnosis) -> str:
    """That memory is not what decides, and what the fullest device has left."""
    memory = diagnosis.best.memory[diagnosis.fullest or 0]
    left, total = format_bytes(memory.headroom_bytes), format_bytes(memory.total_bytes)
    evenly = ", evenly spread" if len(diagnosis.best.memory) > 1 else ""
    return (
        f"Memory does not limit it: the batch fits in one step{evenly}, and the fullest card, GPU {memory.device}, has "
        f"{left} of {total} left."
    )


def _in_short(diagnosis: Diagnosis, parts: MemoryParts) -> str:
    """What fills the fullest device: other programs, or what of this job."""
    memory = diagnosis.best.memory[parts.device]
    name, total = f"GPU {parts.device}", format_bytes(memory.total_bytes)
    if diagnosis.is_mostly_others:
        return f"{format_bytes(parts.outside_bytes)} of {name}'s {total} are held outside this job."
    left = format_bytes(memory.headroom_bytes)
    if parts.fixed_bytes is None:
        return f"{name} is the fullest, with {left} left; too few trials ran to tell what fills it."
    update = parts.update_peak_bytes
    if update is not None:
        return f"{name} is the fullest, with {left} left; the optimizer's update fills it, {format_bytes(update)}."
    fills = {
        f"its share of the batch ({format_bytes(parts.per_share_bytes or 0)})": parts.per_share_bytes or 0,
        f"the outputs and the loss of all shares ({format_bytes(parts.whole_batch_bytes or 0)})": (
            parts.whole_batch_bytes or 0
        ),
        f"what no batch size changes ({format_bytes(parts.fixed_bytes)})": parts.fixed_bytes,
    }
    largest = max(fills, key=lambda what: fills[what])
    return f"{name} is the fullest, with {left} left; most of it is {largest}."


def _gain_in_short(diagnosis: Diagnosis) -> str:
    gain, split = diagnosis.gain, diagnosis.best.split
    if gain is None:
        return ""
    share = f"{split.gpu0_bsz} of {count_of(split.micro_batch_size, 'sample')}"
    if gain.even_split is None:
        return f"No even split fits; this one does, with GPU 0 taking only {share}."
    even = gain.even_split
    text = f"GPU 0 now takes {share}, not {even.gpu0_bsz} of {even.micro_batch_size}"
    if gain.saves_steps:
        steps = count_of(split.accumulation_steps, "accumulation step")
        return f"{text}: {steps} instead of {even.accumulation_steps}."
    return f"{text}."


def _unused(diagnosis: Diagnosis) -> str:
    unused = [device for device, shard in enumerate(diagnosis.best.split.shard_sizes) if shard == 0]
    if not unused:
        return ""
    takes, it = ("takes", "it") if len(unused) == 1 else ("take", "them")
    return f"{gpus(unused)} {takes} no samples: no split that uses {it} was found to be faster."


# the remedies


def _remedy(diagnosis: Diagnosis, advice: Advice) -> str:
    words: dict[Remedy, Callable[[Diagnosis, Advice], str]] = {
        Remedy.OTHER_GPU0: _other_gpu0,
        Remedy.CLOSE_PROGRAM: _close_program,
        Remedy.LOSS_IN_REPLICAS: _loss_in_replicas,
        Remedy.SMALLER_SHARE: _smaller_share,
        Remedy.MORE_STEPS: _more_steps,
        Remedy.NO_SPLIT: _no_split,
    }
    return words[advice.remedy](diagnosis, advice)


def _other_gpu0(diagnosis: Diagnosis, advice: Advice) -> str:
    memory, devices, other = diagnosis.best.memory, diagnosis.devices, advice.device or 0
    room = [format_bytes(_room_of(each)) for each in memory]
    text = f"make GPU {other} the first device, as it has {room[other]} for this job and GPU 0 only {room[0]}; "
    if diagnosis.is_modelled:
        return f"{text}name it, a {devices[other].name}, first in `devices`, and tune again"
    order = [devices[other], *(device for device in devices if device.index != other)]
    names = ", ".join(f'"{device.torch_device}"' for device in order)
    return f"{text}tune again with `devices=[{names}]`"


def _close_program(diagnosis: Diagnosis, advice: Advice) -> str:
    held = "most of what is held outside" if advice.frees_bytes is None else f"about {format_bytes(advice.frees_bytes)}"
    return f"close what else runs on GPU {diagnosis.fullest}, which holds {held}"


def _loss_in_replicas(_: Diagnosis, advice: Advice) -> str:
    text = "compute the loss on the card where each share already is, instead of all of it on GPU 0: about "
    text += f"{format_bytes(advice.frees_bytes or 0)} less there. "
    return f'{text}Tune with `loss_placement="either"`, or let the model return its loss'


def _smaller_share(diagnosis: Diagnosis, advice: Advice) -> str:
    device = diagnosis.fullest
    move = "lower gpu0_bsz" if device == 0 else "raise gpu0_bsz, so that GPU 0 takes over samples"
    each = format_bytes(advice.frees_bytes or 0)
    return f"{move}; each sample fewer on GPU {device} frees about {each}, at the price of speed"


def _more_steps(_: Diagnosis, advice: Advice) -> str:
    freed = format_bytes(advice.frees_bytes or 0)
    return f"take more accumulation steps; micro-batches of half the size free about {freed}, and are slower"


def _no_split(diagnosis: Diagnosis, _: Advice) -> str:
    is_update = diagnosis.parts is not None and diagnosis.parts.update_peak_bytes is not None
    what = "the optimizer's update" if is_update else "what no batch size changes"
    text = "take a smaller model, an optimizer with less state, or a card with more memory; neither gpu0_bsz nor "
    return f"{text}more accumulation steps can help, as the peak is {what}"


def _room_of(memory: DeviceMemory) -> int:
    """Bytes that others leave to this job."""
    return memory.total_bytes - memory.outside_bytes
