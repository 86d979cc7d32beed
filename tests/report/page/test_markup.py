"""Markup: whatever is text stays text."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from splittune.report.page.markup import Markup, join, percent, tag


class Read(HTMLParser):
    """What a browser makes of it: tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(st.characters(exclude_categories=("Cs", "Cc"))))
def test_any_text_comes_back_as_it_was(text: str) -> None:
    """As a child and as an attribute, whatever stands in it: no further tag comes of it."""
    read = Read(tag("p", text, title=text))
    assert read.tags == [("p", [("title", text)])]
    assert read.text == text


def test_markup_is_not_escaped_twice() -> None:
    """Tags within tags stay tags; what is None is left out; control characters are replaced."""
    assert tag("p", tag("b", "1 < 2"), None, class_="x", id=None) == '<p class="x"><b>1 &lt; 2</b></p>'
    assert join(["a\x00b", Markup("<i></i>")]) == "a\ufffdb<i></i>"
    assert tag("meta", name="x") == '<meta name="x">'
    assert tag("rect", x=percent(0.123456), stroke_width=1.0) == '<rect x="12.346%" stroke-width="1"></rect>'
