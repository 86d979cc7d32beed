"""The picture of where memory goes: every card at its peak, in its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splittune.hardware.base import Device, DeviceMemory
from splittune.profiling.measurement import Measurement
from splittune.report.memory_parts import MemoryParts
from splittune.report.page.markup import Markup, join
from splittune.report.page.picture import Picture, box, cut, words
from splittune.report.words import count_of, gpus
from splittune.units import format_bytes

# Parts of a bar from the left: class, and what it is.
NAMES = {
    "others": "other programs, CUDA context",
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "rest": "the rest that no batch changes",
    "fixed": "parameters, gradients, optimizer",
    "whole": "outputs and loss of the whole micro-batch",
    "share": "activations of its share",
    "job": "this job",
    "reserve": "allocator's reserve, update",
}
FREE = ("track", "free")
NEED = ("need", "must stay free")
# Ink on a part, where it is not white in light and dark in the dark.
_INK = {"whole": "dark", "gradients": "dark", "reserve": "dark"}
# A card of which others leave less than this part has theirs left out of its bar: else nothing could be seen. A choice.
_CROWDED = 0.1
# A part that takes less of a phone's width has no figure in it. A choice: "12.34 GiB" and some air.
_LABELLED = 0.2
# Characters of a list of cards. A choice: half of a phone's width.
_LINE = 20
# Above so many groups of cards bars are thin, and the even split has none. A choice.
_MANY = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMemory:
    """One card at its peak, in parts that sum to what is held."""

    device: Device
    memory: DeviceMemory
    samples: int
    demanded_bytes: int
    parts: tuple[tuple[str, int], ...]
    """Class and bytes, from the left."""

    @property
    def held_bytes(self) -> int:
        return self.memory.outside_bytes + self.memory.peak_reserved_bytes

    @property
    def room_bytes(self) -> int:
        """What others leave to this job."""
        return max(self.memory.total_bytes - self.memory.outside_bytes, 1)

    @property
    def is_crowded(self) -> bool:
        return self.room_bytes < _CROWDED * self.memory.total_bytes


def card_memories(
    run: Measurement, parts: Sequence[MemoryParts], devices: Sequence[Device], demanded: Sequence[int]
) -> tuple[CardMemory, ...]:
    """A measurement's cards, each in its parts; empty where memory was not read."""
    if not run.memory:
        return ()
    return tuple(
        CardMemory(
            device=device,
            memory=memory,
            samples=samples,
            demanded_bytes=demand,
            parts=pieces_of(memory, part),
        )
        for device, memory, samples, demand, part in zip(
            devices, run.memory, run.split.shard_sizes, demanded, parts or (None,) * len(devices), strict=True
        )
    )


def pieces_of(memory: DeviceMemory, parts: MemoryParts | None) -> tuple[tuple[str, int], ...]:
    """What a card holds at its peak, by class; what is 0 is left out."""
    pieces = [("others", memory.outside_bytes)]
    if parts is None or parts.fixed_bytes is None:
        pieces.append(("job", memory.peak_reserved_bytes))
    else:
        if parts.parameter_bytes is None or parts.optimizer_bytes is None:
            pieces.append(("fixed", parts.fixed_bytes))
        else:
            state = {
                "parameters": parts.parameter_bytes,
                "optimizer": parts.optimizer_bytes,
                "gradients": parts.gradient_bytes or 0,
            }
            pieces += [*state.items(), ("rest", parts.fixed_bytes - sum(state.values()))]
        pieces += [("whole", parts.whole_batch_bytes or 0), ("share", parts.per_share_bytes or 0)]
        held = sum(size for kind, size in pieces if kind != "others")
        pieces.append(("reserve", memory.peak_reserved_bytes - held))
    return tuple((kind, size) for kind, size in pieces if size > 0)


def alike(cards: Sequence[CardMemory]) -> list[list[int]]:
    """Cards that look the same, together: of one name, with the same figures to 1 % of the card."""
    groups: dict[object, list[int]] = {}
    for index, card in enumerate(cards):
        unit = max(card.memory.total_bytes // 100, 1)
        figures = tuple((kind, round(size / unit)) for kind, size in card.parts)
        groups.setdefault((card.device.name, card.memory.total_bytes, card.samples, figures), []).append(index)
    return list(groups.values())


def named(group: Sequence[int]) -> str:
    """``"GPU 0, 2-3"``; of a list too long for a line its beginning and its length, ``"21 GPUs: 1, 4, 7, …"``."""
    listed = gpus(group)
    if len(listed) <= _LINE:
        return listed
    return f"{len(group)} GPUs: {', '.join(map(str, group[:3]))}, …"


def memory_picture(tuned: Sequence[CardMemory], even: Sequence[CardMemory], *, is_modelled: bool) -> Picture:
    """A bar for every group of like cards under the tuned split, and a thin one below under the even split."""
    groups = alike([*tuned])
    is_many = len(groups) > _MANY
    even = () if is_many else even
    scale = max(card.memory.total_bytes for card in tuned)
    height, drawn, y = 16 if is_many else 28, [], 0.0
    for group in groups:
        card = tuned[group[0]]
        drawn += [
            words(named(group), 0, y + 13, "b"),
            words(_held_of(card), 1, y + 13, "e"),
            words(cut(f"{card.device.name}, {_samples_of(card)}", 44), 0, y + 29, "s"),
        ]
        y += 36
        drawn.append(_bar(card, y, height, scale, labelled=not is_many))
        y += height
        if even:
            drawn.append(_bar(max((even[index] for index in group), key=lambda each: each.held_bytes), y + 3, 9, scale))
            y += 12
        y += 22
    return Picture(
        title="Memory of every card at its peak",
        sentence=_sentence(tuned, bool(even), is_modelled=is_modelled),
        content=join(drawn),
        height=y - 10,
        key=_key([*tuned, *even]),
    )


def limits_picture(cards: Sequence[tuple[str, CardMemory]]) -> Picture:
    """A bar for each row of a plan: the card that limits it, at its peak."""
    scale, drawn, y = max(card.memory.total_bytes for _, card in cards), [], 0.0
    is_many = len(cards) > _MANY
    height = 14 if is_many else 22
    for name, card in cards:
        drawn += [
            words(cut(name, 42), 0, y + 13, "b"),
            words(cut(f"GPU {card.device.index}, {card.device.name}", 30), 0, y + 29, "s"),
            words(_held_of(card), 1, y + 29, "e"),
            _bar(card, y + 35, height, scale, labelled=not is_many),
        ]
        y += 35 + height + 16
    return Picture(
        title="Memory of the fullest card",
        sentence="What the card with the least room left holds at its peak (accounted), row by row.",
        content=join(drawn),
        height=y - 10,
        key=_key([card for _, card in cards]),
    )


def _bar(card: CardMemory, y: float, height: float, scale: int, *, labelled: bool = False) -> Markup:
    """The card's parts from the left; of a card that is nearly full of others' memory only what they leave."""
    is_crowded = card.is_crowded
    scale, total = (card.room_bytes, card.room_bytes) if is_crowded else (scale, card.memory.total_bytes)
    left, free = 0, max(card.memory.headroom_bytes, 0)
    drawn = [box(0, total / scale, y, height, "track", f"{format_bytes(free)} free")]
    if card.demanded_bytes:
        need = min(card.demanded_bytes, total)
        told = f"{format_bytes(card.demanded_bytes)} must stay free"
        drawn.append(box((total - need) / scale, need / scale, y, height, "need", told))
    for kind, size in card.parts:
        if is_crowded and kind == "others":
            continue
        shown = min(size, max(total - left, 0))  # what would not have fitted ends at the card's edge
        drawn.append(box(left / scale, shown / scale, y, height, kind, f"{NAMES[kind]}: {format_bytes(size)}"))
        if labelled and shown / scale >= _LABELLED and kind != "others":
            middle = (left + shown / 2) / scale
            drawn.append(words(format_bytes(size), middle, y + height / 2 + 4, f"{_INK.get(kind, 'on')} m"))
        left += shown
    return join(drawn)


def _held_of(card: CardMemory) -> str:
    if card.is_crowded:
        used, room = format_bytes(card.memory.peak_reserved_bytes), format_bytes(card.room_bytes)
        return f"{used} of {room} that others leave"
    return f"{format_bytes(card.held_bytes)} of {format_bytes(card.memory.total_bytes)}"


def _sentence(tuned: Sequence[CardMemory], has_even: bool, *, is_modelled: bool) -> str:
    fullest = min(tuned, key=lambda card: card.memory.headroom_bytes)
    left, demanded = format_bytes(fullest.memory.headroom_bytes), format_bytes(fullest.demanded_bytes)
    thin = " The thin bar below each is the even split." if has_even else ""
    source = "accounted operation by operation" if is_modelled else "measured"
    return (
        f"What every card holds at its fullest moment, {source}: GPU {fullest.device.index} has the least left, "
        f"{left}, where {demanded} must stay free.{thin}"
    )


def _key(cards: Sequence[CardMemory]) -> tuple[tuple[str, str], ...]:
    there = {kind for card in cards for kind, _ in card.parts}
    need = (NEED,) if any(card.demanded_bytes for card in cards) else ()
    return (*((kind, name) for kind, name in NAMES.items() if kind in there), FREE, *need)


def _samples_of(card: CardMemory) -> str:
    return count_of(card.samples, "sample")
