"""The table of faults that the suite tries: gathered from its tests, printed at its end, held against the one kept."""

from __future__ import annotations

import ast
import csv
import io
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "results" / "faults.csv"
PROPERTY = "fault"
"""The name under which a test's report carries its rows: reports travel from xdist's workers, fixtures do not."""


@dataclass(frozen=True, order=True)
class Fault:
    """One fault that was tried."""

    test: str
    fault: str
    where: str
    outcome: str
    checked: str


COLUMNS = tuple(field.name for field in fields(Fault))


class Gathered:
    """What the tests of this run recorded; those that did not pass record nothing."""

    def __init__(self) -> None:
        self.tests: set[str] = set()
        self.faults: set[Fault] = set()

    def add(self, nodeid: str, properties: Iterable[tuple[str, object]]) -> None:
        self.tests.add(nodeid)
        for name, row in properties:
            if name == PROPERTY:
                assert isinstance(row, list | tuple)
                self.faults.add(Fault(nodeid, *row))


def differences(gathered: Gathered, kept: Iterable[Fault]) -> list[str]:
    """How the kept table differs from the run, for the tests that were run and passed; no line where it does not."""
    kept_here = {fault for fault in kept if fault.test in gathered.tests}
    return [
        *(f"not kept: {', '.join(astuple(fault))}" for fault in sorted(gathered.faults - kept_here)),
        *(f"kept, but not tried: {', '.join(astuple(fault))}" for fault in sorted(kept_here - gathered.faults)),
    ]


def updated(gathered: Gathered, kept: Iterable[Fault]) -> list[Fault]:
    """The kept table with the rows of the tests that were run in the place of theirs, and without
    those of tests gone."""
    stay = {fault for fault in kept if fault.test not in gathered.tests and exists(fault.test)}
    return sorted(stay | gathered.faults)


def exists(nodeid: str) -> bool:
    """Whether there is such a test function, whatever its parameters."""
    file, _, name = nodeid.partition("::")
    path = ROOT / file
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == name.partition("[")[0] for node in tree.body)


def read(path: Path = KEPT) -> list[Fault]:
    with path.open(encoding="utf-8", newline="") as file:
        return [Fault(**row) for row in csv.DictReader(file)]


def as_csv(faults: Iterable[Fault]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(astuple(fault) for fault in faults)
    return text.getvalue()


def as_lines(faults: Iterable[Fault]) -> list[str]:
    """For people: one line a fault, tests left out, columns under one another."""
    rows = [COLUMNS[1:], *sorted({astuple(fault)[1:] for fault in faults})]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
