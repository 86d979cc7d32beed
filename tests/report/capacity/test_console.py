"""A plan on a console: the answer first, then a line for each row, and 'modelled' on all of it."""

from __future__ import annotations

from pathlib import Path

from splittune.report.capacity.console import answer_of, files_line, show_capacity, table_of
from tests.report.capacity.rows import ONE_STEP, TUNED, lacking_row, ran, row
from tests.report.results import Screen


def test_the_answer_is_three_lines() -> None:
    """The best machine and batch size, what that gains over the even split, and what limits."""
    first, second, third = answer_of([row(best=ran(TUNED, 1.0)), lacking_row(), row()])
    assert first == "Best: 128 samples/s (modelled) on 2xCARD at batch 64, as 2 x (8+24)."
    assert second == "That is 1.60x the even split that people use: 80.0 samples/s as 4 x (8+8) (modelled)."
    assert third.startswith("GPU 0 is the fullest, with 2.75 GiB left")


def test_the_even_split_may_be_as_fast_or_not_fit() -> None:
    """Neither is called a gain."""
    even = answer_of([row(best=ran(ONE_STEP), baseline=ran(ONE_STEP))])[1]
    assert even == "The even split that people use is as fast: 128 samples/s as 1 x (32+32) (modelled)."
    assert answer_of([row(baseline=None)])[1].startswith("No even split fits there")


def test_where_nothing_fits_that_is_the_answer() -> None:
    """It names the machines, each once."""
    assert answer_of([lacking_row(), lacking_row(devices="1xCARD"), lacking_row()]) == [
        "No split fits on 2xCARD, 1xCARD (modelled)."
    ]


def test_the_table_has_a_line_for_each_row() -> None:
    """In columns, under a header; what does not fit says so, and a lower bound is one."""
    largest = row().largest
    assert largest is not None
    lower_bound = type(largest)(split=largest.split, is_measured=False)
    title, header, *lines = table_of([row(), lacking_row(), row(largest=lower_bound)])
    assert "Modelled" in title
    assert len(lines) == 3
    assert lines[0].split() == [
        *("2xCARD", "64", "2", "x", "(8+24)", "128", "500.0", "ms"),
        *("GPU", "0:", "5.25", "GiB", "of", "8.00", "GiB", "80.0,", "4", "steps", "1.60x", "40"),
    ]
    assert lines[1].split() == ["2xCARD", "128", "does", "not", "fit", *"------"]
    assert lines[2].endswith(">= 40")
    assert header.index("samples/s") + len("samples/s") == lines[0].index("128") + len("128")


def test_everything_is_called_modelled() -> None:
    """Every paragraph that shows a figure says so; what was lacking follows the table."""
    screen = Screen(width=60)
    show_capacity([row(), lacking_row()], screen.console)
    answer, table = screen.text.strip().split("\n\n")
    assert "modelled" in answer
    assert table.startswith("Modelled")
    *_, lack, error = table.splitlines()
    assert lack == "2xCARD, batch 128: no split fits: device 1 lacked 2.00 GiB."
    assert "modelled" in error


def test_files_are_named_once() -> None:
    """Tables by name, configs by their number and the first."""
    folder = Path("out")
    written = [folder / name for name in ("capacity.csv", "split-a-1.json", "split-a-2.json", "capacity.png")]
    assert files_line(folder, written) == "Saved in out: capacity.csv, capacity.png, 2 configs (split-a-1.json, ...)"
    assert files_line(folder, written[:1]) == "Saved in out: capacity.csv"
