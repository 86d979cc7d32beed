"""The page around everything: head, style, sections; nothing is fetched and nothing can run."""

from __future__ import annotations

from collections.abc import Sequence

from splittune.report.page.markup import Markup, join, tag
from splittune.report.page.picture import DEFS, Picture
from splittune.report.page.style import page_style

# Whatever a name in a table tries, the browser neither runs nor fetches it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, body: Sequence[Markup | None], footer: Sequence[str]) -> str:
    """A whole page."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(page_style())),
    )
    foot = tag("footer", *(tag("p", each) for each in footer if each))
    page = tag("html", head, tag("body", DEFS, tag("main", *body, foot)), lang="en")
    return f"<!DOCTYPE html>\n{page.replace('<section', chr(10) + '<section').replace('<tr', chr(10) + '<tr')}\n"


def section(title: str, *parts: Markup | None, sentence: str = "", class_: str | None = None) -> Markup:
    """A titled part of the page, with its sentence below the title."""
    return tag("section", tag("h2", title), tag("p", sentence) if sentence else None, *parts, class_=class_)


def pictured(picture: Picture, *tables: Markup | None, class_: str | None = None) -> Markup:
    """A picture with its sentence above and its numbers beneath."""
    numbers = [each for each in tables if each]
    below = tag("details", tag("summary", "The numbers"), *numbers, open="") if numbers else None
    return section(picture.title, picture.figure(), below, sentence=picture.sentence, class_=class_)


def tile(name: str, big: str, small: str) -> Markup:
    """One figure of the answer."""
    return tag("div", tag("h2", name), tag("div", big, class_="big"), tag("p", small), class_="tile")


def tiles(each: Sequence[Markup]) -> Markup:
    """The figures of the answer, side by side where there is room."""
    return tag("div", *each, class_="tiles")


def headline(kicker: str, title: str, lead: str, mark: str) -> Markup:
    """The answer in large words; `mark` says whether it is measured or modelled."""
    return join(
        (
            tag("p", kicker, class_="kicker"),
            tag("h1", title),
            tag("p", lead, " ", tag("span", mark, class_="mark"), class_="lead"),
        )
    )
