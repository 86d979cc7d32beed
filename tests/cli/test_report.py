"""report: a folder's report.html made again, and what is said of a folder that has none."""

from __future__ import annotations

from pathlib import Path

from tests.cli.command_line import CARDS, Run


def test_report_writes_what_tune_wrote(run: Run, tmp_path: Path) -> None:
    """The same bytes, after a search and after another one of the same seed; the command says where."""
    tuned = run("tune", "job.py:make_task", *CARDS, "--max-trials", "3", "--quiet", "--out", "one")
    assert "report.html" in tuned.out
    run("tune", "job.py:make_task", *CARDS, "--max-trials", "3", "--quiet", "--out", "two")
    page = (tmp_path / "one/report.html").read_bytes()
    assert (tmp_path / "two/report.html").read_bytes() == page
    (tmp_path / "one/report.html").unlink()
    ended = run("report", "one")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("Written: one/report.html")
    assert (tmp_path / "one/report.html").read_bytes() == page
    assert b"modelled" in page


def test_two_plans_have_the_same_report(run: Run, tmp_path: Path) -> None:
    """Byte for byte, as have two searches; `report` makes it again from the tables."""
    for out in ("one", "two"):
        ended = run("plan", "job.py:make_task", *CARDS, "--max-trials", "3", "--quiet", "--out", out)
        assert (ended.code, ended.err) == (0, "")
    for name in ("report.html", "capacity.csv", "modules.csv"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    page = (tmp_path / "one/report.html").read_bytes()
    assert b"Which modules hold it" in page
    (tmp_path / "one/report.html").unlink()
    assert run("report", "one").code == 0
    assert (tmp_path / "one/report.html").read_bytes() == page


def test_a_search_in_which_nothing_fits_has_a_report(run: Run, tmp_path: Path) -> None:
    """What was tried, and what lacked; `report` makes it again."""
    full = ("--devices", "2xT400-4GB:occupied=3800MiB")
    ended = run("tune", "job.py:too_large", *full, "--quiet", "--out", "full")
    assert ended.code == 1
    assert "What was tried: full/report.html" in ended.out
    page = (tmp_path / "full/report.html").read_text(encoding="utf-8")
    assert "No split fits" in page
    assert run("report", "full").code == 0
    assert (tmp_path / "full/report.html").read_text(encoding="utf-8") == page


def test_a_folder_without_a_search_exits_with_2(run: Run, tmp_path: Path) -> None:
    """One that is not there, and one whose config is gone: which file, and what to do."""
    ended = run("report", "nowhere")
    assert ended.code == 2
    assert "cannot read nowhere/trials.csv" in ended.err
    run("tune", "job.py:make_task", *CARDS, "--max-trials", "2", "--quiet", "--out", "made")
    (tmp_path / "made/split.json").unlink()
    ended = run("report", "made")
    assert ended.code == 2
    assert "no split.json in made" in ended.err
