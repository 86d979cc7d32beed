"""Reports in a real browser: on a phone, a screen and paper nothing is cut, lies on text, is fetched or runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splittune.report.capacity.files import save_capacity
from splittune.report.files import REPORT_FILE
from splittune.report.page import save_report
from tests.report.capacity.rows import lacking_row, row
from tests.report.page import folders
from tests.report.page.browser import CHROMIUM, DARK, WHY_NOT, look_at, run_chromium

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)

PHONE, SCREEN = 390, 1280


def pages(folder: Path) -> dict[str, str]:
    """Every kind of report."""
    saved = {
        "normal": folders.search(folders.NORMAL),
        "advised": replace(folders.search(folders.NORMAL), advice=folders.ADVICE),
        "measured": folders.search(folders.MEASURED),
        "one-card": folders.search(folders.ONE),
        "eight-cards": folders.search(folders.EIGHT),
        "ranks": folders.search(folders.RANKS, batch=512, num_trials=30),
        "trials": folders.search(folders.NORMAL, num_trials=200),
        "hostile": folders.search(folders.HOSTILE, job=folders.SCRIPT),
    }
    for name, result in saved.items():
        result.save(folder / name)
    save_report(folders.failed(folder / "failed"))
    save_report(folders.unfinished(folder / "unfinished"))
    normal = saved["normal"]
    searched = row(
        devices="4xRTX3090",
        cards=normal.config.devices,
        best=normal.best,
        baseline=normal.baseline,
        trials=normal.trials,
        config=normal.config,
        model=normal.model,
        modules=normal.modules,
    )
    rows = [searched, row(), lacking_row(), row(devices=folders.SCRIPT), *[row(strategy="ddp")] * 3]
    save_capacity(rows, folder / "plan")
    names = (*saved, "failed", "unfinished", "plan")
    return {name: (folder / name / REPORT_FILE).read_text(encoding="utf-8") for name in names}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return pages(tmp_path_factory.mktemp("reports"))


def check(found: list[dict[str, Any]], num_pages: int) -> None:
    assert len(found) == num_pages
    for seen in found:
        assert seen["wrong"] == [], (seen["name"], seen["width"])
        assert seen["fetched"] == [], seen["name"]
        assert seen["runs"] == [], seen["name"]
        assert seen["title"].startswith("splittune: "), seen["name"]
        assert seen["tables"] >= 1


def test_every_report_can_be_read_on_a_phone_and_on_a_screen(reports: dict[str, str], tmp_path: Path) -> None:
    """No page is wider than the window, no text lies on another or is pale, nothing is fetched, nothing runs."""
    found = look_at(tmp_path, reports, (PHONE, SCREEN))
    check(found, 2 * len(reports))
    assert {seen["width"] for seen in found} == {PHONE, SCREEN}
    assert all(sum(seen["ground"]) > 600 for seen in found)


def test_every_report_can_be_read_in_the_dark(reports: dict[str, str], tmp_path: Path) -> None:
    """The ground is dark, and every text on it still light enough."""
    found = look_at(tmp_path, reports, (PHONE,), DARK)
    check(found, len(reports))
    assert all(sum(seen["ground"]) < 150 for seen in found)


def test_every_report_can_be_read_on_paper(reports: dict[str, str], tmp_path: Path) -> None:
    """With the rules for paper at a page's width nothing is cut; printed, it is a PDF, on white also in the dark."""
    as_paper = {name: page.replace("@media print{", "@media all{") for name, page in reports.items()}
    assert all(as_paper[name] != page for name, page in reports.items())
    check(look_at(tmp_path, as_paper, (720,)), len(reports))
    page, printed = tmp_path / "page.html", tmp_path / "page.pdf"
    page.write_text(reports["normal"], encoding="utf-8")
    run_chromium(DARK, f"--print-to-pdf={printed}", "--no-pdf-header-footer", page.as_uri())
    data = printed.read_bytes()
    assert data.startswith(b"%PDF")
    assert data.count(b"/Type /Page\n") >= 2


def test_pictures_that_stand_alone_can_be_read(tmp_path: Path) -> None:
    """As a notebook has them: no text on another, also in their keys."""
    policy = '<meta http-equiv="Content-Security-Policy" content="">'
    shown = {name: folders.search(getattr(folders, name)).plot()._repr_svg_() for name in ("NORMAL", "ONE", "EIGHT")}
    pages = {name: f'{policy}<body style="margin:0;background:#fff">{svg}</body>' for name, svg in shown.items()}
    for seen in look_at(tmp_path, pages, (840,)):
        assert seen["wrong"] == [], seen["name"]


def test_the_audit_finds_what_is_wrong(tmp_path: Path, reports: dict[str, str]) -> None:
    """A page that is too wide, texts that lie on one another, a pale text, a script and a picture from elsewhere."""
    bad = reports["normal"].replace(
        "</main>",
        '<div style="width:3000px">wide</div><svg class="pic" width="100" height="50"><text y="20">one text</text>'
        '<text y="20">another</text></svg><p style="color:#ddd">pale</p>'
        '<img src="x.png"><p style="background:url(y.png)"></main>',
    )
    (seen,) = look_at(tmp_path, {"bad": bad}, (PHONE,))
    said = " | ".join(seen["wrong"])
    for fault in ("the page is", "beyond the edge", "one text lies on another", "hard to read: pale"):
        assert fault in said
    assert seen["runs"]
    assert seen["fetched"] == ["IMG", "url(y.png"]
