"""HTML and SVG as text that is escaped unless it is markup already."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

# Characters that XML 1.0 cannot hold, and browsers show as boxes: control characters but for white space.
_NO_TEXT = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127), "�")
_VOID = frozenset({"br", "hr", "meta", "col"})


class Markup(str):
    """Text that is HTML already; every other string is escaped where it becomes a child or an attribute."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """``tag("td", "a < b", class_="wide")`` is ``<td class="wide">a &lt; b</td>``; what is None is left out.

    An underscore at the end of an attribute's name goes, others become hyphens. Numbers have up to five digits.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = join(children)
    return Markup(f"<{name}{given}>" if name in _VOID else f"<{name}{given}>{inner}</{name}>")


def join(children: Iterable[str | None]) -> Markup:
    """One after the other, each escaped unless it is markup."""
    return Markup("".join(child if isinstance(child, Markup) else _text(child) for child in children if child))


def percent(part: float) -> str:
    """``0.12345678`` as ``"12.346%"``."""
    return f"{100 * part:.5g}%"


def _text(value: str | float) -> str:
    text = value if isinstance(value, str) else f"{value:.5g}"
    return escape(text.translate(_NO_TEXT))
