"""Tables of a page: every number that its pictures show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from splittune.report.page.markup import Markup, tag
from splittune.report.page.memory import NAMES, CardMemory, alike, named
from splittune.report.page.picture import cut
from splittune.report.page.search import WHAT_FAILED, listed, rate_text
from splittune.report.page.source import TrialRow
from splittune.report.words import gpus
from splittune.units import format_bytes, format_time

# Characters of a trial's reason and message; the whole stands in trials.csv. A choice.
_MOST_WORDS = 150
# Columns of a table of cards. A choice: names of 32 characters beside one another on a screen.
_COLUMNS = 4


def table(
    caption: str,
    heads: Sequence[tuple[str, str]],
    rows: Iterable[tuple[Sequence[str], bool]],
    *,
    is_wide: bool = True,
) -> Markup:
    """`heads` are names and classes: "n" for numbers, "w" for long text. A row is its cells, and whether to mark it.

    On a phone each row of one that is wide becomes a block, its cells named.
    """
    return tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *(tag("th", name, class_=kind or None, scope="col") for name, kind in heads))),
        tag(
            "tbody",
            *(
                tag("tr", *(tag("td", cell, class_=kind or None, data_l=name)
                            for cell, (name, kind) in zip(cells, heads, strict=True)),
                    class_="best" if marked else None)
                for cells, marked in rows
            ),
        ),
        class_="stack" if is_wide else None,
    )  # fmt: skip


def memory_tables(caption: str, cards: Sequence[CardMemory]) -> list[Markup]:
    """A column for every group of like cards, with the figures of the first of them; a few columns to a table."""
    kinds = [kind for kind in NAMES if any(kind == each for card in cards for each, _ in card.parts)]
    groups, tables = alike([*cards]), []
    for start in range(0, len(groups), _COLUMNS):
        shown = groups[start : start + _COLUMNS]
        firsts = [cards[group[0]] for group in shown]
        heads = [("", ""), *((named(group), "c") for group in shown)]
        rows = [
            *([("GPU", [gpus(group).removeprefix("GPU ") for group in shown])] if any(map(_is_cut, shown)) else []),
            ("card", [cut(card.device.name, 32) for card in firsts]),
            ("samples", [str(card.samples) for card in firsts]),
            *((NAMES[kind], [_size(dict(card.parts).get(kind)) for card in firsts]) for kind in kinds),
            ("left free", [format_bytes(card.memory.headroom_bytes) for card in firsts]),
            ("must stay free", [format_bytes(card.demanded_bytes) for card in firsts]),
            ("in all", [format_bytes(card.memory.total_bytes) for card in firsts]),
        ]
        tables.append(
            table(
                "" if start else caption,
                heads,
                [([name, *cells], False) for name, cells in rows],
                is_wide=len(heads) > 3,
            )
        )
    return tables


def limits_tables(cards: Sequence[tuple[str, CardMemory]]) -> list[Markup]:
    """A column for each row of a plan, with what the card that limits it holds; a few columns to a table."""
    kinds = [kind for kind in NAMES if any(kind == each for _, card in cards for each, _ in card.parts)]
    tables = []
    for start in range(0, len(cards), _COLUMNS):
        shown = [card for _, card in cards[start : start + _COLUMNS]]
        heads = [("", ""), *((cut(name, 40), "c") for name, _ in cards[start : start + _COLUMNS])]
        rows = [
            ("card", [f"GPU {card.device.index}, {cut(card.device.name, 32)}" for card in shown]),
            *((NAMES[kind], [_size(dict(card.parts).get(kind)) for card in shown]) for kind in kinds),
            ("left free", [format_bytes(card.memory.headroom_bytes) for card in shown]),
            ("must stay free", [_size(card.demanded_bytes or None) for card in shown]),
            ("in all", [format_bytes(card.memory.total_bytes) for card in shown]),
        ]
        caption = "" if start else "Of the card with the least room left, row by row of the plan."
        lines = [([name, *cells], False) for name, cells in rows]
        tables.append(table(caption, heads, lines, is_wide=len(heads) > 3))
    return tables


def _is_cut(group: Sequence[int]) -> bool:
    return named(group) != gpus(group)


def _size(size: int | None) -> str:
    return "" if size is None else format_bytes(size)


def trials_table(trials: Sequence[TrialRow], best: TrialRow | None) -> Markup:
    """A row for every trial, in the order of the search."""
    heads = [("trial", "n"), ("steps", "n"), ("samples per GPU", "t"), ("samples/s", "n"), ("step", "n"),
             ("± (95 %)", "n"), ("least left", "n"), ("result", ""), ("why it was tried", "w")]  # fmt: skip
    has_error = any(row.relative_error for row in trials)
    has_replicas = any(row.loss_placement == "replica" for row in trials)
    rows = []
    for row in trials:
        where = ", loss in the replicas" if has_replicas and row.loss_placement == "replica" else ""
        said = f"{row.reason}. {row.message}" if row.message and row.reason else row.reason or row.message
        cells = [
            str(row.number),
            str(row.accumulation_steps),
            f"{listed(row)}{where}",
            rate_text(row.throughput),
            "" if row.step_time_s is None else format_time(row.step_time_s),
            f"{row.relative_error:.1%}" if row.relative_error else "",
            "" if row.least_headroom_bytes is None else format_bytes(row.least_headroom_bytes),
            WHAT_FAILED[row.outcome],
            cut(said, _MOST_WORDS),
        ]
        rows.append((cells if has_error else [*cells[:5], *cells[6:]], best is not None and row.shape == best.shape))
    shown = heads if has_error else [*heads[:5], *heads[6:]]
    return table("Every trial; more of each, and of every card, in trials.csv and devices.csv.", shown, rows)
