"""The kept table of faults names what the tests try, and no test that is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.table import KEPT, PROPERTY, Fault, Gathered, as_csv, as_lines, differences, exists, read, updated

HERE = "tests/faults/test_table.py::test_a_run_that_differs_is_told_apart"
ROW = ("disk full", "trials.csv", "ConfigError", "the old file is whole")


def gathered(nodeid: str, *rows: tuple[str, ...]) -> Gathered:
    run = Gathered()
    run.add(nodeid, [(PROPERTY, row) for row in rows])
    return run


def test_every_kept_fault_has_its_test() -> None:
    """No row outlives the test that tried it; the file is sorted, and as the writer writes it."""
    kept = read()
    assert [fault.test for fault in kept if not exists(fault.test)] == []
    assert KEPT.read_text(encoding="utf-8") == as_csv(sorted(kept))


def test_the_kept_faults_cover_what_was_promised() -> None:
    """Every kind of fault that the table is there for stands in it."""
    told = "\n".join(as_lines(read())).lower()
    for kind in (
        "out of memory",
        "forward",
        "loss_fn",
        "backward",
        "optimizer",
        "loader",
        "ctrl-c",
        "sigterm",
        "sigkill of the worker",
        "sigkill of the tuner",
        "nvml",
        "locked",
        "read-only",
        "disk full",
        "two tuners",
        "cut",
        "fuzz",
        "cuda error",
    ):
        assert kind in told, kind


def test_a_run_that_differs_is_told_apart() -> None:
    """A row more, a row less or another outcome is said; rows of tests that were not run are not judged."""
    kept = [Fault(HERE, *ROW), Fault("tests/other.py::test_it", *ROW)]
    assert differences(gathered(HERE, ROW), kept) == []
    (more, less) = differences(gathered(HERE, (*ROW[:2], "nothing", ROW[3])), kept)
    assert more.startswith("not kept: ")
    assert less.startswith("kept, but not tried: ")
    assert len(differences(gathered(HERE), kept)) == 1
    assert len(differences(gathered(HERE, ROW), [])) == 1


def test_an_update_replaces_the_rows_of_the_tests_that_were_run() -> None:
    """Rows of tests that were not run stay, and those of tests that are gone go."""
    elsewhere = HERE.replace("a_run_that_differs_is_told_apart", "every_kept_fault_has_its_test[some-parameter]")
    old = [Fault(HERE, "old", *ROW[1:]), Fault(elsewhere, *ROW), Fault("tests/test_gone.py::test_it", *ROW)]
    assert updated(gathered(HERE, ROW), old) == sorted([Fault(HERE, *ROW), Fault(elsewhere, *ROW)])


@pytest.mark.parametrize("row", [ROW, ("a, b", 'c "d"', "e", "f")])
def test_the_table_reads_back_equal(tmp_path: Path, row: tuple[str, ...]) -> None:
    """Whatever a row holds, the file says it."""
    path = tmp_path / "faults.csv"
    path.write_text(as_csv([Fault(HERE, *row)]), encoding="utf-8")
    assert read(path) == [Fault(HERE, *row)]
