"""The picture of one optimizer step on a time line, card by card."""

from __future__ import annotations

from dataclasses import dataclass

from splittune.report.page.markup import Markup, join
from splittune.report.page.memory import named
from splittune.report.page.picture import Picture, box, down, ticks, words
from splittune.report.page.tables import table
from splittune.report.words import count_of, gpus
from splittune.units import format_time

# Steps of more micro-steps show one of them. A choice: on a phone each has 10 pixels then.
_MOST_SHOWN = 24
_ONCE = ("optimizer", "once a step: update, parameters and gradients copied")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What one step is made of, in seconds; `busy_s` and `copied_s` of each card within a micro-step."""

    accumulation_steps: int
    micro_step_s: float
    update_s: float
    busy_s: tuple[float, ...]
    device_names: tuple[str, ...]
    is_in_ranks: bool
    copied_s: tuple[float, ...] | None = None
    """None where copies cannot be told from waiting, as on real cards."""

    @property
    def groups(self) -> list[list[int]]:
        """Cards of one name that work as long, to 1 % of the micro-step."""
        groups: dict[tuple[str, int, int], list[int]] = {}
        for index, (name, busy) in enumerate(zip(self.device_names, self.busy_s, strict=True)):
            figures = [round(100 * each / self.micro_step_s) for each in (busy, self.copies_s(index))]
            groups.setdefault((name, figures[0], figures[1]), []).append(index)
        return list(groups.values())

    def copies_s(self, device: int) -> float:
        """Of a micro-step; 0 where that is not known."""
        return 0.0 if self.copied_s is None else self.copied_s[device]


def step_picture(times: StepTimes, *, is_modelled: bool) -> Picture:
    """Busy and waiting of every card in each micro-step, then what comes once a step."""
    is_short = times.accumulation_steps > _MOST_SHOWN
    shown = 1 if is_short else times.accumulation_steps
    whole = shown * times.micro_step_s + times.update_s
    waits = "waits, or copies" if times.copied_s is None else "waits"
    drawn, y = [], 0.0
    for group in times.groups:
        first = group[0]
        busy = min(times.busy_s[first], times.micro_step_s)
        drawn.append(words(named(group), 0, y + 13, "b"))
        copies = min(times.copies_s(first), times.micro_step_s - busy)
        copying = f", copies {copies / times.micro_step_s:.0%}," if copies else ""
        drawn.append(words(f"busy {busy / times.micro_step_s:.0%}{copying} of a micro-step", 1, y + 13, "s e"))
        y += 20
        for turn in range(shown):
            start = turn * times.micro_step_s
            drawn.append(box(start / whole, times.micro_step_s / whole, y, 22, "wait cut", waits))
            drawn.append(box(start / whole, busy / whole, y, 22, "share cut", f"computes: {format_time(busy)}"))
            if copies:
                told = f"copies: {format_time(copies)}"
                drawn.append(box((start + busy) / whole, copies / whole, y, 22, "copy cut", told))
        once = "optimizer" if times.is_in_ranks or 0 in group else "wait"
        drawn.append(box(1 - times.update_s / whole, times.update_s / whole, y, 22, f"{once} cut",
                         f"once a step: {format_time(times.update_s)}"))  # fmt: skip
        y += 36
    bottom = y - 8
    marks = [mark for mark in ticks(whole, 4) if mark <= whole * 1.0001]
    drawn += [join((down(mark / whole, bottom, bottom + 5, "axis"),
                    words(format_time(mark) if mark else "0", mark / whole, bottom + 19, _anchor(mark / whole))))
              for mark in marks]  # fmt: skip
    micro_steps = count_of(times.accumulation_steps, "micro-step")
    told = f"One of {micro_steps}, and" if is_short else f"{micro_steps[0].upper()}{micro_steps[1:]}, then"
    key = [("share", "computes"), ("wait", waits), _ONCE]
    order = ""
    if times.copied_s is not None:
        key.insert(1, ("copy", "copies"))
        order = " What a card computes, copies and waits is drawn one after the other."
    pace = " The slowest card sets the pace, and the others wait." if len(times.busy_s) > 1 else ""
    return Picture(
        title="One step, card by card",
        sentence=(
            f"{told} what comes once a step: each micro-step takes {format_time(times.micro_step_s)}, the update and "
            f"its copies {format_time(times.update_s)}{' (modelled)' if is_modelled else ''}.{pace}{order}"
        ),
        content=join(drawn),
        height=bottom + 26,
        key=tuple(key),
    )


def step_table(times: StepTimes) -> Markup:
    """A row for every group of cards that work as long: what fills its micro-step."""
    knows_copies = times.copied_s is not None
    parts = ("computes", "copies", "waits") if knows_copies else ("computes", "waits, or copies")
    heads = [("GPU", "w"), *((name, "n") for name in (*parts, "micro-step", "once a step"))]
    rows = []
    for group in times.groups:
        busy, copies = times.busy_s[group[0]], times.copies_s(group[0])
        rest = max(times.micro_step_s - busy - copies, 0.0)
        each = (busy, copies, rest) if knows_copies else (busy, rest)
        cells = [format_time(seconds) for seconds in (*each, times.micro_step_s, times.update_s)]
        rows.append(([gpus(group).removeprefix("GPU "), *cells], False))
    return table("Of a micro-step, and what comes once a step.", heads, rows)


def _anchor(part: float) -> str:
    return "s" if part < 0.02 else "s e" if part > 0.93 else "s m"
