"""What the README says of files, columns, links and the API is so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from splittune import autotune
from splittune.report import devices_table, trials_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("heading", "columns"),
    [("`trials.csv` has", list(trials_table([]).columns)), ("`devices.csv` has", list(devices_table([]).columns))],
    ids=["trials", "devices"],
)
def test_every_column_is_documented_in_order(heading, columns):
    """The README's table and the file's header are the same list."""
    section = README.split(heading)[1].split("\n\n")[1]
    assert re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE) == columns


def test_links_lead_somewhere():
    """Every relative link names a file of the repository."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_arguments_it_names_exist():
    """Each argument in the table of `autotune` is one of its parameters."""
    table = README.split("| argument | meaning |")[1].split("\n\n")[0]
    named = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")
    }
    assert named
    assert named <= set(inspect.signature(autotune).parameters)


def test_the_commands_it_names_are_targets():
    """`make X` in the README is a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^ {4}|`)make (\w+)", README, flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
