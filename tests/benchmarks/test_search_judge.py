from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks.search import ablation, judge
from benchmarks.search.ablation import Variant, compared, policies_of, searched, variants
from benchmarks.search.judge import GENERATORS, judged, seeds, summarised
from benchmarks.search.problem import Problem
from splittune.search.models import memory
from splittune.search.policies.proposer import POLICIES


def test_a_judgement_writes_its_table_its_problems_and_its_picture(tmp_path: Path) -> None:
    """One problem of a generator by every way of searching: a row each, with regrets between 0 and 1."""
    judge.main(["--problems", "1", "--peers", "1", "--first-seed", "3", "--only", "layered", "--out", str(tmp_path)])
    rows = pd.read_csv(tmp_path / "search_judged_problems.csv.gz")
    assert set(rows.search) == set(judge.SEARCHES) | set(judge.PEERS)
    assert rows.regret.between(0, 1).all()
    assert rows.num_duplicates[rows.search.str.startswith("guided")].eq(0).all()
    table = pd.read_csv(tmp_path / "search_judged.csv")
    assert set(table.search) == set(rows.search)
    assert table.first_seed.eq(3).all()
    assert (tmp_path / "search_judged.png").stat().st_size > 1000


def test_a_search_that_crashes_is_judged_as_one_that_found_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Its traceback is printed; the other searches of a judgement are kept."""

    def crash(problem: Problem) -> None:
        problem.measure(next(iter(problem.space().even_splits())))
        raise RuntimeError("no convergence")

    row = judged("layered", next(seeds("layered", 1, 3)), "crashes", crash)
    assert (row["regret"], row["num_trials"]) == (1, 1)
    assert "RuntimeError: no convergence" in capfd.readouterr().err


def test_what_finds_nothing_has_lost_all() -> None:
    """A search that gives up has a regret of 1, and one that finds the best of 0."""
    (seed,) = seeds("lines", 1, 0)
    assert judged("lines", seed, "nothing", lambda problem: None)["regret"] == 1
    found = judged("lines", seed, "guided", judge.SEARCHES["guided"])
    assert found["regret"] < 0.01
    told = summarised(pd.DataFrame([found, found | {"regret": 0.5}]))
    assert told.loc[("lines", "guided"), "within 1 %"] == 0.5
    assert told.loc[("lines", "guided"), "worst"] == 0.5


@pytest.mark.parametrize("peer", judge.PEERS)
def test_what_other_tools_would_run_is_legal(peer: str) -> None:
    """Where every card must have a share, none is imitated with fewer samples than cards."""
    seed = next(seed for seed in seeds("physics", 50, 0) if GENERATORS["physics"](seed).space().min_shard_size)
    assert 0 <= judged("physics", seed, peer, judge.PEERS[peer])["regret"] <= 1


@pytest.mark.parametrize("generator", GENERATORS)
def test_every_generator_names_problems_in_which_something_fits(generator: str) -> None:
    """Two of each, from any first seed on."""
    for seed in seeds(generator, 2, 11):
        assert GENERATORS[generator](seed).best_throughput


def test_every_policy_and_every_number_is_a_variant() -> None:
    """Each policy is left out once, and each number of the models is changed under its own name."""
    found = list(variants())
    assert [one.change for one in found].count("none") == 1
    left_out = [policies_of([one]) for one in found if one.change == "left out" and one.place is not None]
    assert [set(POLICIES) - set(own) for own in left_out] == [{policy} for policy in POLICIES]
    assert {one.change for one in found if one.name == "memory.FADING"} == {"nothing", "halved", "doubled"}
    names = [(one.name, one.change) for one in found]
    assert len(set(names)) == len(names)


def test_a_number_is_changed_for_a_search_alone() -> None:
    """Inside it holds, wherever it was imported; afterwards all is as before."""
    before = memory.FADING
    (doubled,) = [one for one in variants() if (one.name, one.change) == ("memory.FADING", "doubled")]
    with doubled.patched():
        assert 2 * before == memory.FADING
    assert before == memory.FADING


def test_a_part_of_a_model_is_left_out_for_a_search_alone() -> None:
    """Each part that can be left out is another thing inside, and the same as before afterwards."""
    parts = {name: (holder, attribute) for name, holder, attribute, _ in ablation.PARTS}
    found = [one for one in variants() if one.change == "left out" and one.place is None]
    assert [one.name for one in found] == list(parts)
    for one in found:
        holder, attribute = parts[one.name]
        before = vars(holder)[attribute]
        with one.patched():
            assert vars(holder)[attribute] is not before
        assert vars(holder)[attribute] is before


def test_the_search_is_no_better_than_itself() -> None:
    """Compared with itself there is no difference; a search that may not improve is behind."""
    drawn = list(seeds("lines", 3, 0))

    def rows(*made: Variant) -> pd.DataFrame:
        return pd.DataFrame([judged("lines", seed, "", searched(*made, tells_all=True)) for seed in drawn])

    itself = rows(next(variants()))
    assert compared(itself, itself)["regret more"] == compared(itself, itself)["trials more"] == 0
    start_alone = rows(*[Variant(name="", change="left out", place=place) for place in range(2, len(POLICIES))])
    assert compared(start_alone, itself)["regret more"] > 0.1


def test_an_ablation_is_written_row_by_row(tmp_path: Path) -> None:
    """The search itself first, then what was asked for."""

    def ablated(*more: str) -> pd.DataFrame:
        asked = ["--problems", "1", "--generators", "lines", "--only", "UpperConfidenceBound", "--out", str(tmp_path)]
        ablation.main([*asked, *more])
        return pd.read_csv(tmp_path / "search_ablation.csv")

    table = ablated("--first-seed", "3", "--change", "doubled")
    assert table.what[0] == "the search"
    assert "UpperConfidenceBound.min_gain" in set(table.what[1:])
    assert table.what[1:].str.startswith("UpperConfidenceBound").all()
    assert table.problems.eq(2).all()
    assert list(ablated("--change", "left out").what) == ["the search", "UpperConfidenceBound"]


@pytest.mark.parametrize("asked", ["--problems", "--processes"])
def test_no_problems_are_no_judgement(asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which number, what it was, and what it may be; nothing is searched or written."""
    with pytest.raises(SystemExit):
        judge.main([asked, "0", "--out", str(tmp_path)])
    assert f"argument {asked}: got 0, expected a whole number, 1 or more" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["--only", "NoSuchRule"], "no variant's name begins with NoSuchRule, expected such as UpperConfidenceBound"),
        (["--only", "tiles", "--change", "doubled"], "begins with tiles, doubled, expected"),
        (["--problems", "0"], "argument --problems: got 0, expected a whole number, 1 or more"),
    ],
)
def test_what_cannot_be_ablated_is_said_and_overwrites_nothing(
    asked: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier table stays as it is."""
    earlier = tmp_path / "search_ablation.csv"
    earlier.write_text("earlier")
    with pytest.raises(SystemExit):
        ablation.main([*asked, "--out", str(tmp_path)])
    assert says in capsys.readouterr().err
    assert earlier.read_text() == "earlier"
