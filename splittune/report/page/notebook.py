"""Results in notebooks: pictures as SVG, and a short page for an output cell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splittune.config.files import write_atomically
from splittune.report.page.markup import Markup, join, tag
from splittune.report.page.memory import CardMemory, memory_picture
from splittune.report.page.picture import DEFS, Picture, svg_of
from splittune.report.page.planned import PlanRow, plan_answer, plan_pictures, plan_table
from splittune.report.page.source import SearchFiles
from splittune.report.page.style import fragment_style
from splittune.report.page.tuned import search_answer, search_pictures

_SCOPE = "splittune-output"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Drawing:
    """Pictures below one another; a notebook shows them, and `save` writes them as an SVG file."""

    pictures: tuple[Picture, ...]

    def __repr__(self) -> str:
        return f"Drawing: {'; '.join(picture.title for picture in self.pictures)}"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the pictures as SVG, which stands alone: the same result gives the same bytes.

        Raises:
            ConfigError: it cannot be written there.
        """
        return write_atomically(path, self._repr_svg_() + "\n")

    def _repr_svg_(self) -> str:
        return svg_of(self.pictures)


def search_drawing(files: SearchFiles) -> Drawing:
    """All pictures of a search."""
    return Drawing(pictures=tuple(search_pictures(files).values()))


def search_output(files: SearchFiles) -> str:
    """A search in a notebook's output cell: the answer, where memory goes, how it went."""
    pictures = search_pictures(files)
    title, lead = search_answer(files)
    return _output(title, lead, [pictures[name] for name in ("memory", "history") if name in pictures])


def plan_output(rows: Sequence[PlanRow]) -> str:
    """A plan in a notebook's output cell: the answer, the curves, and a row for each machine and batch size."""
    title, lead = plan_answer(rows)
    return _output(title, lead, list(plan_pictures(rows).values()), plan_table(rows))


def memory_output(title: str, lead: str, cards: Sequence[CardMemory], table: Markup, *, is_modelled: bool) -> str:
    """Cards at their peak in a notebook's output cell, with a table beneath."""
    pictures = [memory_picture(cards, (), is_modelled=is_modelled)] if cards else []
    return _output(title, lead, pictures, table)


def _output(title: str, lead: str, pictures: Sequence[Picture], table: Markup | None = None) -> str:
    shown = [join((tag("h4", each.title), tag("p", each.sentence), each.figure())) for each in pictures]
    style = tag("style", Markup(fragment_style(_SCOPE)))
    return tag("div", style, DEFS, tag("h3", title), tag("p", lead), *shown, table, class_=_SCOPE)
