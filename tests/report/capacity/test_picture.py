"""capacity.png: a column for each machine, bars that sum to the peak, and what does not fit crossed out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splittune import ConfigError
from splittune.report.capacity.picture import PARTS, draw, save_picture
from tests.report.capacity.rows import lacking_row, row


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_each_machine_has_a_column() -> None:
    """Throughput above, memory below, with units, and 'modelled' in the title."""
    figure = draw([row(), lacking_row(), row(devices="other")])
    assert figure.get_suptitle() == "Throughput and memory by batch size (modelled)"
    above, beside, below, _ = figure.axes
    assert [above.get_title(), beside.get_title()] == ["2xCARD", "other"]
    assert above.get_ylabel() == "samples/s (modelled)"
    assert below.get_ylabel() == "fullest card at its peak (GiB)"
    assert below.get_xlabel() == "global batch size (samples)"
    assert [label.get_text() for label in below.get_xticklabels()] == ["64", "128"]
    assert above.get_ylim() == beside.get_ylim()


def test_the_lines_are_the_best_and_the_even_split() -> None:
    """At 64 samples 128 samples/s, and 80 for the even split; the gain stands at the point."""
    above, _ = draw([row()]).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in above.get_lines()}
    assert drawn == {"best split": [128.0], "even split, halved until it fits": [80.0]}
    assert texts(above) == ["128\n1.60x"]


def test_the_bar_sums_to_what_is_held() -> None:
    """Others' memory and the parts of the job's peak, up to outside + reserved of the fullest card."""
    _, below = draw([row()]).axes
    heights = {patch.get_label(): patch for patch in below.containers}
    amounts = [container.patches[0].get_height() for container in below.containers]
    assert sum(amounts) == pytest.approx(5.25)
    assert {name for name, _, _ in PARTS} <= set(heights)
    assert texts(below) == ["GPU 0\n5.25"]


def test_what_does_not_fit_is_crossed_out_in_both() -> None:
    """Its place is there, without a point and without a bar."""
    for axes in draw([lacking_row()]).axes:
        assert texts(axes) == ["does not fit"]
        assert not axes.containers


def test_given_splits_are_named() -> None:
    """Below each stands the split itself."""
    _, below = draw([row(baseline=None, is_given=True)]).axes
    assert [label.get_text() for label in below.get_xticklabels()] == ["2 x (8+24)"]


def test_an_empty_plan_is_refused() -> None:
    """There is nothing to draw."""
    with pytest.raises(ConfigError, match="no row"):
        draw([])


def test_it_is_a_png_or_says_why_not(tmp_path: Path) -> None:
    """Written where that can be; otherwise the reason is given."""
    figure = draw([row(trials=())])
    assert save_picture(figure, tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"cannot write .*capacity\.png"):
        save_picture(figure, tmp_path / "missing" / "capacity.png")
