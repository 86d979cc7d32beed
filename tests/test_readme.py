"""What the README says of files, columns, links and the API is so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from splittune import autotune
from splittune.search.policies.proposer import POLICIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_links_lead_somewhere():
    """Every relative link names a file of the repository."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_arguments_it_names_exist():
    """What the README writes as an argument, `name=`, is one of `autotune`'s or of a method it shows."""
    named = set(re.findall(r"`(\w+)=`", README))
    assert named
    assert named <= set(inspect.signature(autotune).parameters)


def test_it_is_short():
    """It is read in one go: 130 to 170 lines; tables and stories stand elsewhere."""
    assert 130 <= len(README.splitlines()) <= 170


def test_it_names_every_policy():
    """How it searches is told in the order in which the policies are asked."""
    told = (ROOT / "CONTRIBUTING.md").read_text().split("## How it searches")[1].split("## ")[0]
    numbered = re.findall(r"^\d+\. \*\*([\w ]+)\*\*", told, flags=re.MULTILINE)
    names = [re.sub(r"(?<!^)([A-Z])", r" \1", type(policy).__name__) for policy in POLICIES]
    assert [name.lower() for name in numbered] == [name.removeprefix("Find ").lower() for name in names]


def test_the_commands_it_names_are_targets():
    """`make X` in the README is a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^ {4}|`)make (\w+)", README, flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
