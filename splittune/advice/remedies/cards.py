"""Other cards: another one as GPU 0, fewer of them, all of their memory."""

from __future__ import annotations

from splittune.advice.case import Case, Finding, Remedy, not_tried, rule, tried
from splittune.advice.job import Change
from splittune.advice.trials import BudgetSpentError
from splittune.hardware.virtual.hardware import CUDA_CONTEXT_BYTES
from splittune.profiling.measurement import Measurement
from splittune.report.diagnosis import LEVEL_FRACTION
from splittune.split import BatchSplit
from splittune.units import format_bytes


def _room(case: Case, device: int) -> int:
    """Bytes that others leave to this job."""
    return case.memory[device].total_bytes - case.memory[device].outside_bytes


def _other_gpu0(case: Case) -> Finding | None:
    if len(case.devices) == 1 or not case.memory:
        return None
    tolerance = LEVEL_FRACTION * min(memory.total_bytes for memory in case.memory)
    other = [
        device.index
        for device in case.devices[1:]
        if device.name != case.devices[0].name or _room(case, device.index) > _room(case, 0) + tolerance
    ]
    if not other:
        return not_tried("GPU 0 is of the others' kind, and none has more room: another one would do the same.")
    first = max(other, key=lambda index: (_room(case, index), -index))
    order = (first, *(device.index for device in case.devices if device.index != first))
    moved = BatchSplit(
        global_batch_size=case.split.global_batch_size,
        accumulation_steps=case.split.accumulation_steps,
        shard_sizes=tuple(case.split.shard_sizes[index] for index in order),
    )
    steps = 2 * case.split.accumulation_steps
    measurement = case.trials.around([moved], case.best.loss_placement, Change(order=order), most_steps=steps)
    named = f"GPU {first}, the {case.devices[first].name} with {format_bytes(_room(case, first))} of room, was first"
    return tried(case, measurement, f"{named}; the others followed in their order.")


def _fewer(case: Case) -> Finding | None:
    if len(case.devices) == 1:
        return None
    left = kept = tuple(range(len(case.devices)))
    fastest: Measurement | None = None
    while len(left) > 1:
        left = _without_one(case, left)
        try:
            measurement = _on(case, left)
        except BudgetSpentError:
            if fastest is None:
                raise
            break
        is_faster = fastest is None or (measurement.throughput or 0.0) > (fastest.throughput or 0.0)
        if is_faster:
            fastest, kept = measurement, left
        if not is_faster or (measurement.throughput or 0.0) <= (case.best.throughput or 0.0):
            break
    assert fastest is not None, "there was a card to leave out"
    gone = [index for index in range(len(case.devices)) if index not in kept]
    return tried(case, fastest, f"Without GPU {', '.join(map(str, gone))}.")


def _without_one(case: Case, left: tuple[int, ...]) -> tuple[int, ...]:
    """`left` without the card that takes fewest samples, of several such without the last."""
    gone = min(left, key=lambda index: (case.split.shard_sizes[index], -index))
    return tuple(index for index in left if index != gone)


def _on(case: Case, left: tuple[int, ...]) -> Measurement:
    """On these cards alone: from the even split at as many steps as keep their shares from growing."""
    size = case.split.global_batch_size
    of_these = sum(case.split.shard_sizes[index] for index in left)
    steps = min(size, -(-size // max(1, of_these)))
    even = BatchSplit.even(global_batch_size=size, accumulation_steps=steps, num_devices=len(left))
    return case.trials.around([even], case.best.loss_placement, Change(order=left), most_steps=min(size, 2 * steps))


def _closed(case: Case) -> Finding | None:
    if not case.memory:
        return None
    if case.is_modelled:
        held = [memory.outside_bytes - CUDA_CONTEXT_BYTES for memory in case.memory]
        if max(held) <= 0:
            return None
        steps, change = case.split.accumulation_steps, Change(is_unoccupied=True)
        measurement = case.trials.around([case.split], case.best.loss_placement, change, most_steps=steps)
        return tried(case, measurement, f"Nothing else runs; now up to {format_bytes(max(held))} of a card are taken.")
    least = min(memory.outside_bytes for memory in case.memory)
    most = max(case.memory, key=lambda memory: memory.outside_bytes)
    if most.outside_bytes - least <= LEVEL_FRACTION * most.total_bytes:
        return None
    return rule(
        f"On GPU {most.device} {format_bytes(most.outside_bytes - least)} more are held outside this job than on the "
        "least occupied card; memory that is free again can take a larger share, or fewer accumulation steps. Other "
        "programs are not this one's to end: close them and tune again."
    )


OTHER_GPU0 = Remedy(
    name="another card as GPU 0",
    cost="Name the cards in another order; outputs, loss and optimizer then live on that one.",
    look=_other_gpu0,
)
FEWER_CARDS = Remedy(name="fewer cards", cost="None: the cards left out are free for others.", look=_fewer)
CLOSED_PROGRAMS = Remedy(name="other programs closed", cost="They run elsewhere, or later.", look=_closed)
