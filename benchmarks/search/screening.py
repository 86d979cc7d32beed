"""What each rule and each number of the search is worth, with many of them changed at once.

    python -m benchmarks.search.screening [--problems 250] [--at-once 16] [--pilot 2] [--leave-out KIND] [--out DIR]

`benchmarks.search.ablation` makes one change at a time: with hundreds of changes, on a thousand problems each, that
takes days. Here all changes are dealt to random groups anew for each problem, and each group is one search: every
change is tried on every problem, in changing company, for a fraction of the searches. What a search lost beside the
search itself is then laid to the changes that it had: ordinary least squares, with standard errors that hold for
unequal variances (White, "A Heteroskedasticity-Consistent Covariance Matrix Estimator", 1980), on far more searches
than there are changes. What two changes do together beyond what each does is noise here.

A change that ruins searches would drown its company, and one that moves them the many that do nothing. So each is first
made alone on a few problems: what loses more than `RUINOUS` there is told by those alone, what moved a search is made
with few others of its like, and what moved none with many. What turns out to ruin searches only there is told, and then
left out with all searches that had it, the worst first. `search_screening.csv` has all rows. What every search lost
is kept (``--kept``), so that a run that was broken off goes on, and a longer one begins with it; once a line of the
search or of its problems has changed, all is searched anew.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import islice
from multiprocessing import Pool
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pandas as pd

from benchmarks.search.ablation import Variant, all_variants, searched
from benchmarks.search.judge import GENERATORS, RESULTS, at_least, judged, seeds
from splittune import search
from splittune.search.arrays import FloatArray

FIRST_SEED = 580_000
# What loses so much regret more than the search itself on average, alone, gets no company. A choice.
RUINOUS = 0.02
# And what loses so much on average in company, by so many standard errors. A choice: one in 30,000 changes that do
# nothing is that far off.
SURE = 4.0
# Problems of a kind are looked for among so many times as are wanted.
RARE = 20
# What moved a search of the pilot has so many times less company. A choice: with 32 of all together 6 % of 1,623
# searches lost over a fifth, beside which nothing else could be told.
LESS_COMPANY = 4
KEPT = Path("runs/screening")
SEARCHES = "search_screening_searches.csv.gz"
LOST = {"regret more": "regret", "trials more": "num_trials", "later OOMs more": "num_later_oom"}
"""What a change may cost, and where `judged` tells it."""


Company = tuple[Sequence[int], int]
"""The places of changes that are made together, and how many at once."""


def fingerprint(companies: Sequence[Company]) -> str:
    """Of what is asked, and of the code of the search and of its problems: what another lost tells nothing of this.

    Rows say which changes were made, so how they are dealt and told here counts no further.
    """
    rooms = Path(search.__file__).parent, Path(__file__).parent
    paths = [path for room in rooms for path in sorted(room.rglob("*.py"))]
    code = [path.read_bytes() for path in paths if path != Path(__file__)]
    return f"{crc32(repr(([(list(changes), at_once) for changes, at_once in companies], code)).encode()):08x}"


def dealt(changes: Sequence[int], at_once: int, rng: np.random.Generator) -> list[list[int]]:
    """The places of changes in random groups of about `at_once`, none of which exclude one another.

    Worked: of 300 changes, 16 at once, there are 19 groups; one more where some found no place in these.
    """
    groups: list[list[int]] = [[] for _ in range(-(-len(changes) // at_once))]
    known = all_variants()
    for place in rng.permutation(changes).tolist():
        for group in sorted(groups, key=len):
            if not any(known[place].excludes(known[other]) for other in group):
                group.append(place)
                break
        else:
            groups.append([place])
    return groups


def parted(alone: pd.DataFrame, at_once: int) -> tuple[list[int], list[Company]]:
    """The places of what ruins searches, by what searches with a single change lost; and who has company of whom."""
    places, does_move = alone.changes.astype(int), (alone[list(LOST)] != 0).any(axis=1)
    does_ruin = alone.groupby(places)["regret more"].transform("mean") > RUINOUS
    ruinous, moved = set(places[does_ruin]), set(places[does_move & ~does_ruin])
    still = set(places) - ruinous - moved
    return sorted(ruinous), [(sorted(still), at_once), (sorted(moved), max(1, at_once // LESS_COMPANY))]


def effects(made: FloatArray, lost: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(V, L) what each of V changes adds to each of L losses, and the standard errors; NaN without searches to spare.

    Args:
        made: (S, V) 1 where a search had the change, else 0.
        lost: (S, L) what that search lost more than the search itself.

    Worked: a search with one change lost 1, one with another 2, and one with both 3: they add 1 and 2, give or take 0.
    """
    inverse = np.linalg.pinv(made.T @ made)
    added = inverse @ made.T @ lost
    left = lost - made @ added
    searches, changes = made.shape
    # what changes explain by chance is not left
    spare = searches / (searches - changes) if searches > changes else np.nan
    variances = [spare * np.diag(inverse @ (made.T * column**2) @ made @ inverse) for column in left.T]
    return added, np.sqrt(np.maximum(np.column_stack(variances), 0.0))


def _lost(task: tuple[str, int, list[list[int]]]) -> list[dict[str, Any]]:
    """One problem, searched once as it is and once by each group of changes: a row for each group."""
    generator, seed, groups = task
    itself = judged(generator, seed, "the search", searched(tells_all=True))
    rows = []
    for group in groups:
        own = judged(generator, seed, "", searched(*[all_variants()[place] for place in group], tells_all=True))
        losses = {name: round(own[told] - itself[told], 6) for name, told in LOST.items()}
        rows.append({"generator": generator, "seed": seed, "changes": " ".join(map(str, group)), **losses})
    return rows


def _write(rows: pd.DataFrame, path: Path) -> None:
    """As a CSV that is there whole or not at all; the same rows are the same bytes."""
    unfinished = path.with_suffix(".unfinished")
    packing = {"method": "gzip", "mtime": 0} if path.suffix == ".gz" else None
    rows.to_csv(unfinished, index=False, compression=packing)
    unfinished.replace(path)


def _unpacked(searches: Path, kept: Path) -> None:
    """The searches of an earlier run, as if they had been kept, a file for each problem."""
    if not searches.exists():
        return
    every = pd.read_csv(searches, dtype={"code": str, "changes": str})
    for (code, generator, seed), rows in every.groupby(["code", "generator", "seed"]):
        file = kept / str(code) / f"{generator}-{seed}.csv"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(rows.drop(columns="code"), file)


def _searched(
    problems: Sequence[tuple[str, int]], companies: Sequence[Company], processes: int, kept: Path
) -> pd.DataFrame:
    """A row for each search; problems that are kept, a file each, are not searched again."""
    code = fingerprint(companies)
    room = kept / code
    room.mkdir(parents=True, exist_ok=True)
    files = {(generator, seed): room / f"{generator}-{seed}.csv" for generator, seed in problems}
    left = [problem for problem, file in files.items() if not file.exists()]
    tasks = []
    for name, seed in left:
        rng = np.random.default_rng(seed)
        tasks.append((name, seed, [group for company in companies for group in dealt(*company, rng)]))
    with Pool(processes) as pool:
        for number, rows in enumerate(pool.imap_unordered(_lost, tasks), len(problems) - len(left) + 1):
            _write(pd.DataFrame(rows), files[rows[0]["generator"], rows[0]["seed"]])
            print(f"{number} of {len(problems)} problems", flush=True)
    return pd.concat([pd.read_csv(file) for file in files.values()], ignore_index=True).assign(code=code)


def _row(
    variant: Variant, at_once: FloatArray, *, alone: bool, added: FloatArray, errors: FloatArray
) -> dict[str, Any]:
    row = {"what": variant.name, "change": variant.change, "problems": len(at_once), "alone": alone}
    row["at once"] = at_once.mean()
    for name, effect, error in zip(LOST, added, errors, strict=True):
        row |= {name: effect, f"{name}, give or take": error}
    return row


def groups_of(rows: pd.DataFrame) -> list[list[int]]:
    """The places of the changes that each search had."""
    return [list(map(int, str(changes).split())) for changes in rows.changes]


def places_of(rows: pd.DataFrame) -> list[int]:
    """The places of all changes that a search had, in order."""
    return sorted({place for group in groups_of(rows) for place in group})


def table_of(rows: pd.DataFrame, *, alone: bool) -> list[dict[str, Any]]:
    """A row for each change that searches had."""
    groups, places = groups_of(rows), places_of(rows)
    made = np.array([[float(place in group) for place in places] for group in groups])
    added, errors = effects(made, rows[list(LOST)].to_numpy(dtype=float))
    return [
        _row(all_variants()[place], made.sum(axis=1)[column > 0], alone=alone, added=one, errors=error)
        for place, column, one, error in zip(places, made.T, added, errors, strict=True)
    ]


def told(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """A row for each change that searches had, of what ruins them first; the others by the searches without those.

    Worked: of 300 changes one raises an error where a batch has too many splits to list, which is in half of all
    searches with it. It is told by all of them, and the 299 others by those without it.
    """
    ruinous: list[dict[str, Any]] = []
    while True:
        table = table_of(rows, alone=False)
        lost = [row["regret more"] for row in table]
        sure = [row["regret more"] > SURE * row["regret more, give or take"] for row in table]
        worst = int(np.where(sure, lost, -np.inf).argmax())
        if not sure[worst] or lost[worst] <= RUINOUS:
            return [*ruinous, *table]
        ruinous.append(table[worst])
        place = places_of(rows)[worst]
        rows = rows[[place not in made for made in groups_of(rows)]]


def _seeds_of(generator: str, count: int, chosen: argparse.Namespace) -> list[int]:
    """The first `count` seeds of problems of the kinds that are asked for; fewer where those are rare."""
    drawn = ((seed, GENERATORS[generator](seed).kind) for seed in seeds(generator, RARE * count, chosen.first_seed))
    wanted, unwanted = chosen.kind, chosen.leave_out
    found = (seed for seed, kind in drawn if wanted in kind and not (unwanted and unwanted in kind))
    return list(islice(found, count))


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search.screening", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--problems", type=at_least(1), default=250, help="of each generator")
    parser.add_argument("--pilot", type=at_least(1), default=2, help="problems of each generator for each change alone")
    parser.add_argument("--at-once", type=at_least(1), default=16, help="changes in one search")
    parser.add_argument("--first-seed", type=at_least(0), default=FIRST_SEED)
    parser.add_argument("--generators", nargs="+", choices=list(GENERATORS), default=list(GENERATORS))
    parser.add_argument("--kind", default="", help="problems alone whose kind has these words")
    parser.add_argument("--leave-out", help="no problems whose kind has these words, such as 'no busy times'")
    parser.add_argument("--only", nargs="+", default=[""], help="changes whose names begin so")
    parser.add_argument(
        "--kept", type=Path, default=KEPT, help="where the searches of a run that is broken off are kept"
    )
    parser.add_argument("--processes", type=at_least(1), default=os.cpu_count(), help="problems at a time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    changes = [i for i, one in enumerate(all_variants()) if i and one.name.startswith(tuple(chosen.only))]
    if not changes:
        parser.error(f"no change's name begins with {' or '.join(chosen.only)}, expected such as UpperConfidenceBound")
    chosen.out.mkdir(parents=True, exist_ok=True)
    count = chosen.pilot + chosen.problems
    drawn = {name: _seeds_of(name, count, chosen) for name in chosen.generators}
    for name, found in drawn.items():
        if len(found) < count:
            parser.error(f"{name} has {len(found)} such problems among {RARE * count}, expected {count}: leave it out")
    pilot = [(name, seed) for name, found in drawn.items() for seed in found[: chosen.pilot]]
    # of all generators in turn, so that a run that was broken off has seen each
    further = [(name, found[chosen.pilot + i]) for i in range(chosen.problems) for name, found in drawn.items()]
    _unpacked(chosen.out / SEARCHES, chosen.kept)
    alone = _searched(pilot, [(changes, 1)], chosen.processes, chosen.kept)
    ruinous, companies = parted(alone, chosen.at_once)
    rows = _searched(further, companies, chosen.processes, chosen.kept)
    _write(pd.concat([alone, rows]), chosen.out / SEARCHES)
    apart = alone[alone.changes.astype(int).isin(ruinous)]
    table = [*told(rows), *(table_of(apart, alone=True) if len(apart) else [])]
    changed = pd.DataFrame(table).assign(first_seed=chosen.first_seed)
    changed.round(6).to_csv(chosen.out / "search_screening.csv", index=False)
    print(changed.round(4).to_string(index=False))


if __name__ == "__main__":
    main()
