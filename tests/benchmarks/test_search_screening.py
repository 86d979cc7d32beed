from __future__ import annotations

import re
from pathlib import Path
from shutil import rmtree

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.search import screening
from benchmarks.search.ablation import Variant, all_variants, policies_of
from benchmarks.search.judge import GENERATORS
from benchmarks.search.screening import dealt, effects, fingerprint, parted, table_of, told
from splittune import search
from splittune.search.policies.confidence import UpperConfidenceBound
from splittune.search.policies.proposer import POLICIES


@given(seed=st.integers(0, 100), at_once=st.integers(1, 40))
def test_every_change_is_in_one_group_without_what_it_excludes(seed: int, at_once: int) -> None:
    """Whatever is drawn: no group changes a number twice, or one of a policy that it leaves out."""
    known, changes = all_variants(), range(1, len(all_variants()))
    groups = dealt(changes, at_once, np.random.default_rng(seed))
    assert sorted(place for group in groups for place in group) == list(changes)
    assert all(len(group) <= 2 * at_once for group in groups)
    for group in groups:
        names = [known[place].name for place in group]
        assert len(set(names)) == len(names)
        gone = {known[place].place for place in group if known[place].replaced is None} - {None}
        assert not any(known[place].place in gone for place in group if known[place].replaced is not None)


def test_the_same_groups_are_dealt_again() -> None:
    """What was broken off goes on with them, and another problem has others."""
    changes = range(1, 60)
    one, same, other = (dealt(changes, 8, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert one == same != other


def test_what_moves_a_search_has_less_company_than_what_does_not() -> None:
    """Of four changes on two problems one ruins, on average, one costs a trial in one of them, and two do nothing."""
    lost = {"regret more": 0.0, "trials more": 0.0, "later OOMs more": 0.0}
    rows = [lost | {"changes": str(place), "seed": seed} for seed in (1, 2) for place in (1, 2, 3, 4)]
    alone = pd.DataFrame(rows)
    alone.loc[(alone.changes == "2") & (alone.seed == 1), "regret more"] = 0.05
    alone.loc[(alone.changes == "4") & (alone.seed == 2), "trials more"] = 1.0
    assert parted(alone, 32) == ([2], [([1, 3], 32), ([4], 8)])
    assert parted(alone, 2)[1][1] == ([4], 1)


def test_policies_are_changed_and_left_out_together() -> None:
    """Two numbers of one policy, and another policy that is gone."""
    made = [
        Variant(name="gone", change="left out", place=0),
        Variant(name="price", change="", place=3, replaced={"oom_price": 9.0}),
        Variant(name="gain", change="", place=3, replaced={"min_gain": 0.5}),
    ]
    changed = policies_of(made)
    assert changed[:2] == POLICIES[1:3]
    assert isinstance(changed[2], UpperConfidenceBound)
    assert (changed[2].oom_price, changed[2].min_gain) == (9.0, 0.5)
    assert changed[3:] == POLICIES[4:]
    assert policies_of([]) == POLICIES


def test_what_changes_add_is_told_apart() -> None:
    """2,000 searches had a third of twelve changes each; of two losses one is added to by the first change, 1.0, and
    taken from by the second, 0.5, beside noise of 1; the other is noise alone."""
    rng = np.random.default_rng(0)
    made = (rng.random((2000, 12)) < 1 / 3).astype(float)
    lost = rng.normal(size=(2000, 2))
    lost[:, 0] += made[:, 0] - 0.5 * made[:, 1]
    added, errors = effects(made, lost)
    truth = np.zeros((12, 2))
    truth[:2, 0] = 1.0, -0.5
    assert np.sqrt((((added - truth) / errors) ** 2).mean()) == pytest.approx(1, abs=0.3)
    assert errors == pytest.approx(np.full((12, 2), 0.047), rel=0.3)


def test_as_many_changes_as_searches_leave_no_error_to_tell() -> None:
    """One search with a change tells what it lost, and not by how much that is off."""
    added, errors = effects(np.eye(2), np.array([[1.0], [3.0]]))
    assert added.ravel() == pytest.approx([1, 3])
    assert np.isnan(errors).all()


def test_what_ruins_searches_is_left_out_of_what_tells_of_the_others() -> None:
    """400 searches had a third of twelve changes each, one of which ruins every other search: that is told of it, and
    of the others with less than a tenth of the error."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(400):
        made = [place for place in range(1, 13) if rng.random() < 1 / 3]
        lost = 1.0 if 5 in made and rng.random() < 0.5 else 0.01 * rng.normal()
        rows.append({"changes": " ".join(map(str, made)), "regret more": lost, "trials more": 0, "later OOMs more": 0})
    rows = pd.DataFrame([row for row in rows if row["changes"]])
    first, *others = told(rows)
    named = all_variants()[5]
    assert (first["what"], first["change"]) == (named.name, named.change)
    assert first["regret more"] == pytest.approx(0.5, abs=0.1)
    together = table_of(rows, alone=False)
    assert len(others) == len(together) - 1 == 11
    assert max(row["regret more, give or take"] for row in others) < 0.002
    assert min(row["regret more, give or take"] for row in together) > 0.01
    assert max(abs(row["regret more"]) for row in others) < 0.005


def test_a_screening_tells_of_every_change_and_goes_on_where_it_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What ruins searches alone gets no company; a second run searches nothing again."""
    asked = ["--problems", "2", "--pilot", "1", "--at-once", "8", "--generators", "lines", "--first-seed", "3"]
    asked += ["--only", "SmallestLeft", "choices.BELIEVED", "UpperConfidenceBound.oom_price"]
    asked += ["--kept", str(tmp_path / "kept"), "--out", str(tmp_path)]
    screening.main(asked)
    assert "2 of 2 problems" in capfd.readouterr().out
    table = pd.read_csv(tmp_path / "search_screening.csv")
    assert {"SmallestLeft", "choices.BELIEVED", "UpperConfidenceBound.oom_price"} <= set(table.what)
    assert table.alone.any()
    assert table.problems[~table.alone].eq(2).all()
    assert table.problems[table.alone].eq(1).all()
    assert table["at once"][table.alone].eq(1).all()
    assert (table["regret more"][table.alone] > screening.RUINOUS).all()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    assert len(before) == 2 + 1 + 2  # the table and all searches, and each problem of the pilot and after it
    screening.main(asked)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
    assert not re.search(r"of \d problems", capfd.readouterr().out)
    # what was kept is lost, and the results are there
    rmtree(tmp_path / "kept")
    screening.main([*asked, "--problems", "3"])
    assert capfd.readouterr().out.count(" problems\n") == 1
    after = {path: path.read_bytes() for path in tmp_path.rglob("kept/*/*.csv")}
    assert len(after) == 1 + 3
    assert all(after[path] == told for path, told in before.items() if "kept" in path.parts)


def test_problems_of_some_kinds_are_screened_alone(tmp_path: Path) -> None:
    """Those that have the words of `--kind`, and not those of `--leave-out`."""
    asked = ["--problems", "1", "--pilot", "1", "--at-once", "2", "--generators", "physics", "--first-seed", "3"]
    asked += ["--only", "choices.BELIEVED", "--kind", "knee", "--leave-out", "no busy times", "--out", str(tmp_path)]
    screening.main([*asked, "--kept", str(tmp_path)])
    found = {int(path.stem.split("-")[1]) for path in tmp_path.rglob("physics-*.csv")}
    kinds = [GENERATORS["physics"](seed).kind for seed in found]
    assert len(kinds) == 2
    assert all("knee" in kind and "no busy times" not in kind for kind in kinds)


def test_what_another_search_lost_is_not_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a line of the search has changed, or other changes are asked for, their searches are others."""
    asked = [fingerprint([([1, 2], 4)]), fingerprint([([1, 3], 4)]), fingerprint([([1, 2], 5)])]
    assert fingerprint([([1, 2], 4)]) == asked[0]
    (tmp_path / "search.py").write_text("MIN_TRIALS = 7")
    monkeypatch.setattr(search, "__file__", str(tmp_path / "search.py"))
    assert len({*asked, fingerprint([([1, 2], 4)])}) == 4


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["--at-once", "0"], "argument --at-once: got 0, expected a whole number, 1 or more"),
        (["--problems", "0"], "argument --problems: got 0, expected a whole number, 1 or more"),
        (
            ["--generators", "lines", "--kind", "no such"],
            "lines has 0 such problems among 80, expected 4",
        ),
        (["--only", "Nothing"], "no change's name begins with Nothing, expected such as UpperConfidenceBound"),
    ],
)
def test_what_cannot_be_screened_is_said(asked: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is searched."""
    few = ["--problems", "3", "--pilot", "1"]
    with pytest.raises(SystemExit):
        screening.main([*few, *asked])
    assert says in capsys.readouterr().err
