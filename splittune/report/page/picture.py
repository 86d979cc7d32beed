"""A picture: SVG whose text keeps its size at every width, with what it shows in words and a key.

Across, places are parts of the width (percent), so that a phone and a wide screen show the same drawing; downwards
they are pixels. Nothing is scaled, so no text grows too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from splittune.report.page.markup import Markup, join, percent, tag
from splittune.report.page.style import picture_style

# Width of a picture by itself, in pixels, and what its key takes. Choices.
ALONE_WIDTH = 820
# Width of a letter of 12 pixels in the widest of the common fonts, DejaVu Sans, on average.
_WIDEST = 7.2
_KEY_ROW = 20
_MARGIN = 20
# Shades of speed, from the slowest trial that ran to the fastest: the classes "h0" to "h4" of the style.
SHADES = 5

# Stripes, for whoever prints in one colour or sees none: others' memory, headroom demanded, what did not fit.
_PATTERNS = tuple(
    tag(
        "pattern",
        tag("rect", width=7, height=7, style=f"fill:var(--{ground})"),
        tag("path", d="M0 0V7", style=f"stroke:var(--{stripe});stroke-width:{width}"),
        id=name,
        width=7,
        height=7,
        patternUnits="userSpaceOnUse",
        patternTransform=f"rotate({angle})",
    )
    for name, ground, stripe, width, angle in (
        ("others", "others", "card", 2, 45),
        ("need", "card", "warn", 1.6, -45),
        ("lack", "card", "warn", 3, 45),
    )
)
DEFS = tag("svg", tag("defs", *_PATTERNS), width=0, height=0, style="position:absolute", aria_hidden="true")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawing of `height` pixels; `content` reaches from 0 to 100 % of what the margins leave."""

    title: str
    sentence: str
    """What it shows, for those who read it and those to whom it is read."""
    content: Markup
    height: float
    left: float = 0
    right: float = 0
    key: tuple[tuple[str, str], ...] = ()
    """Class of a swatch, and what it stands for."""

    def figure(self) -> Markup:
        """As part of a page."""
        width = f"width:calc(100% - {self.left + self.right:.5g}px);margin-left:{self.left:.5g}px"
        drawing = tag("svg", *self._named(), self.content, class_="pic", height=self.height, style=width, role="img",
                      aria_labelledby=self._id)  # fmt: skip
        return tag("figure", self._key(), drawing)

    def _named(self) -> tuple[Markup, Markup]:
        return tag("title", self.title, id=self._id), tag("desc", self.sentence)

    @property
    def _id(self) -> str:
        return "p" + blake2b(f"{self.title}{self.content}".encode(errors="backslashreplace"), digest_size=4).hexdigest()

    def _key(self) -> Markup | None:
        if not self.key:
            return None
        items = []
        for kind, meaning in self.key:
            swatch = tag("svg", _swatch(kind), class_="pic", width=_swatch_width(kind), height=14, aria_hidden="true")
            items.append(tag("li", swatch, meaning))
        return tag("ul", *items, class_="key")

    def alone(self, top: float) -> tuple[Markup, float]:
        """As part of a drawing of `ALONE_WIDTH` whose next free line is `top`; with the next free line after it."""
        heading = tag("text", self.title, x=_MARGIN, y=top + 16, class_="b")
        top += 34
        swatches, x = [], float(_MARGIN)
        for kind, meaning in self.key:
            swatch = _swatch_width(kind)
            needs = swatch + 6 + _WIDEST * len(meaning)
            if x > _MARGIN and x + needs > ALONE_WIDTH - _MARGIN:
                x, top = float(_MARGIN), top + _KEY_ROW
            swatches.append(tag("svg", _swatch(kind), x=x, y=top, width=swatch, height=14, overflow="visible"))
            swatches.append(tag("text", meaning, x=x + swatch + 6, y=top + 11, class_="s"))
            x += needs + 14
        top += _KEY_ROW + 10
        width = ALONE_WIDTH - 2 * _MARGIN - self.left - self.right
        drawing = tag("svg", self.content, x=_MARGIN + self.left, y=top, width=width, height=self.height,
                      overflow="visible")  # fmt: skip
        return join([heading, *swatches, drawing]), top + self.height + 30


def svg_of(pictures: Sequence[Picture]) -> Markup:
    """Pictures below one another, as an SVG file that stands alone, on white."""
    top, drawn = 14.0, []
    for picture in pictures:
        drawing, top = picture.alone(top)
        drawn.append(drawing)
    return tag(
        "svg",
        tag("title", "; ".join(picture.title for picture in pictures)),
        tag("style", Markup(picture_style())),
        tag("defs", *_PATTERNS),
        tag("rect", width="100%", height="100%", style="fill:#fff"),
        *drawn,
        xmlns="http://www.w3.org/2000/svg",
        width=ALONE_WIDTH,
        height=top,
        viewBox=f"0 0 {ALONE_WIDTH} {top:.5g}",
        class_="pic",
    )


def box(left: float, width: float, y: float, height: float, class_: str, title: str | None = None) -> Markup:
    """A rectangle from `left` over `width`, both parts of the picture's width; `title` is told when pointed at."""
    return tag(
        "rect",
        None if title is None else tag("title", title),
        x=percent(left),
        width=percent(max(width, 0)),
        y=y,
        height=height,
        class_=class_,
    )


def across(y: float, class_: str) -> Markup:
    """A line from left to right."""
    return tag("line", x1=percent(0), x2=percent(1), y1=y, y2=y, class_=class_)


def down(x: float, top: float, bottom: float, class_: str) -> Markup:
    """A line from top to bottom."""
    return tag("line", x1=percent(x), x2=percent(x), y1=top, y2=bottom, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Any line."""
    return tag("line", x1=percent(x1), x2=percent(x2), y1=y1, y2=y2, class_=class_)


def dot(x: float, y: float, radius: float, class_: str, title: str | None = None) -> Markup:
    """A circle around a place."""
    return tag("circle", None if title is None else tag("title", title), cx=percent(x), cy=y, r=radius, class_=class_)


def square(x: float, y: float, side: float, class_: str, title: str | None = None) -> Markup:
    """A square around a place."""
    return tag(
        "rect",
        None if title is None else tag("title", title),
        x=percent(x),
        y=y - side / 2,
        width=side,
        height=side,
        transform=f"translate({-side / 2:.5g} 0)",
        class_=class_,
    )


def words(text: str, x: float, y: float, class_: str | None = None, dx: float | None = None) -> Markup:
    """Text whose baseline is at `y`; the classes "m" and "e" put its middle or its end at `x`."""
    return tag("text", text, x=percent(x), y=y, dx=dx, class_=class_)


def ticks(top: float, most: int = 5) -> list[float]:
    """Round figures from 0 to at least `top`, of which there are at most `most` above 0: 141 gives 0, 50, 100, 150."""
    if not 0 < top < float("inf"):
        return [0.0, 1.0]
    magnitude = 10.0 ** math.floor(math.log10(top / most))
    step = next(magnitude * round_one for round_one in (1, 2, 2.5, 5, 10, 20) if magnitude * round_one * most >= top)
    return [step * count for count in range(math.ceil(top / step - 1e-9) + 1)]


def cut(text: str, most: int) -> str:
    """The first characters of a long text, and an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def _swatch_width(kind: str) -> int:
    return 14 * SHADES if kind == "ramp" else 14


def _swatch(kind: str) -> Markup:
    if kind == "ramp":
        return join(
            tag("rect", x=14 * place, y=0.5, width=14, height=13, class_=f"h{place}") for place in range(SHADES)
        )
    if kind in ("tuned", "even"):
        return tag("line", x1=0, x2=14, y1=7, y2=7, class_=kind)
    if kind in ("dot", "again", "edot", "best", "base"):
        return tag("circle", cx=7, cy=7, r=5, class_=kind)
    return tag("rect", x=0.5, y=0.5, width=13, height=13, rx=2, class_=kind)
