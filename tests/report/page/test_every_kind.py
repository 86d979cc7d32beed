"""Every kind of report without a browser: whole pages, in which nothing can run and nothing is fetched."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from splittune.report.capacity.files import save_capacity
from splittune.report.page import save_report
from tests.report.capacity.rows import lacking_row, row
from tests.report.page import folders

LARGEST = 300_000
# Tags without an end.
VOID = {"meta", "br", "hr", "col"}
RUNS = {"script", "iframe", "object", "embed", "img", "link", "base", "form", "video", "audio", "a", "image", "use"}
FETCHES = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "background"}


class Page(HTMLParser):
    """What a browser makes of a page; tags have to end in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "tags end in another order than they begin"


def saved(cards: folders.Cards, **options: int | str) -> Callable[[Path], Path]:
    return lambda folder: folders.search(cards, **options).save(folder)  # type: ignore[arg-type]  as they are there


def planned(folder: Path) -> Path:
    save_capacity([row(devices=folders.SCRIPT), row(strategy="ddp"), lacking_row(message=folders.SCRIPT)], folder)
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "normal": saved(folders.NORMAL),
    "measured": saved(folders.MEASURED),
    "failures": folders.failed,
    "failures of hostile names": lambda folder: folders.failed(folder, folders.HOSTILE),
    "one card": saved(folders.ONE),
    "eight cards": saved(folders.EIGHT),
    "64 ranks": saved(folders.RANKS, batch=512, num_trials=30),
    "200 trials": saved(folders.NORMAL, num_trials=200),
    "hostile names": saved(folders.HOSTILE, job=folders.SCRIPT),
    "unfinished": lambda folder: folders.unfinished(folder, folders.HOSTILE),
    "unfinished ranks": lambda folder: folders.unfinished(folder, folders.RANKS),
    "plan": planned,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_is_whole_and_nothing_in_it_runs(kind: str, tmp_path: Path) -> None:
    """Every tag ends, no two have one id, no script, no handler, no address; and the same files give the same bytes."""
    path = save_report(KINDS[kind](tmp_path))
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert not RUNS & set(page.names)
    assert not FETCHES & {name for name, _ in page.attributes}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert not [value for _, value in page.attributes if "://" in value]
    assert len(text.encode()) < LARGEST
    assert save_report(tmp_path).read_text(encoding="utf-8") == text
