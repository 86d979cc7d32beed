"""Results in notebooks: outputs that need nothing around them, and pictures that stand alone."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

from IPython.lib.pretty import pretty

from splittune.planning import Plan
from splittune.verify.result import Lack, Verification
from tests.report.page import folders


def test_a_result_plots_what_its_report_shows(tmp_path: Path) -> None:
    """Four pictures as one SVG, which is well-formed and the same each time."""
    result = folders.search(folders.NORMAL)
    drawing = result.plot()
    titles = ["Memory of every card at its peak", "One step, card by card", "What was tried", "How the search went"]
    assert [picture.title for picture in drawing.pictures] == titles
    path = drawing.save(tmp_path / "split.svg")
    assert path.read_text() == result.plot()._repr_svg_() + "\n"
    root = ET.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert set(titles) <= set(texts)


def test_a_result_shows_its_answer_in_a_notebook() -> None:
    """The answer and pictures, with a style of its own that touches nothing else on the page."""
    result = folders.search(folders.HOSTILE, job=folders.SCRIPT)
    output = result._repr_html_()
    assert "samples a second" in output
    assert output.count("<figure>") == 2
    assert "<script" not in output
    style = output[output.index("<style>") + 7 : output.index("</style>")]
    selectors = [one.strip() for rule in style.split("}") for one in rule.partition("{")[0].split(",") if one.strip()]
    assert all(one.startswith(".splittune-output") for one in selectors)


def test_as_text_a_result_is_one_line() -> None:
    """IPython asks for text, too, and keeps it in the notebook: no trials by the page."""
    result = folders.search(folders.NORMAL)
    for shown in (result, result.plot(), Plan()):
        text = pretty(shown)
        assert "\n" not in text
        assert text.startswith(type(shown).__name__)


def test_a_plan_shows_its_rows_in_a_notebook() -> None:
    """One that is empty says so."""
    assert Plan()._repr_html_() == "An empty plan."


def test_a_verification_shows_every_card_in_a_notebook() -> None:
    """Verified or not, with the verdict on each card."""
    result = folders.search(folders.NORMAL)
    verification = Verification(
        config=result.config,
        devices=result.config.devices,
        memory=result.best.memory,
        training_peak_reserved_bytes=result.config.planned_peak_reserved_bytes,
        evaluation_peak_reserved_bytes=(None,) * 4,
        losses=(1.0, 0.5),
        num_evaluations=0,
        is_modelled=True,
    )
    output = verification._repr_html_()
    assert "<h3>Verified</h3>" in output
    assert output.count("as planned") == 4
    lack = Lack(where="step 3", device=1, message="CUDA out of memory")
    assert "out of memory at step 3" in replace(verification, lack=lack)._repr_html_()
