from __future__ import annotations

import optuna
import pytest

from splittune.search import report
from splittune.search.candidates.table import listed_table
from splittune.search.samplers.grid import GridSampler
from splittune.search.samplers.parameters import distributions_of, split_of
from splittune.search.storage.records import demand
from splittune.split import BatchSplit, SplitSpace
from tests.search.problem import Job, linear_job


def asked(problem: Job, num_trials: int) -> list[BatchSplit]:
    """What the sampler asks for, every split measured."""
    space = problem.space()
    study = optuna.create_study(direction="maximize", sampler=GridSampler(space))
    demand(study, (0,) * space.num_devices)
    for _ in range(num_trials):
        trial = study.ask(distributions_of(space))
        study.tell(trial, report(trial, problem.measure(split_of(space, trial.params))))
    return problem.measured


def test_halves_the_gaps_between_the_listed_splits() -> None:
    """Of 8 in a row the order is 0, 4, 2, 6, 1, 5, 3, 7: coarse at first, and ever finer."""
    problem = linear_job(B=8, num_devices=1)
    table = listed_table(problem.space())
    assert len(table) == 5  # micro-batches of 8, 4, 3, 2 and 1
    assert asked(problem, 5) == [table.split(row) for row in (0, 4, 2, 1, 3)]


@pytest.mark.parametrize("shares", ["gpu0", "each"])
def test_covers_the_list_once(shares: str) -> None:
    """Every listed split is asked for, and none twice."""
    problem = linear_job(B=5, num_devices=2, shares=shares)
    table = listed_table(problem.space())
    splits = asked(problem, len(table))
    assert len(set(splits)) == len(table)
    assert set(splits) == {table.split(row) for row in range(len(table))}


def test_beyond_the_list_the_first_is_repeated() -> None:
    """Asked for more than there is, it does not fail."""
    problem = linear_job(B=2, num_devices=1)
    assert asked(problem, 3)[-1] == asked(linear_job(B=2, num_devices=1), 1)[0]


def test_other_parameters_are_refused() -> None:
    """A parameter that is none of a split's is no business of this sampler."""
    study = optuna.create_study(sampler=GridSampler(SplitSpace(global_batch_size=8, num_devices=2)))
    with pytest.raises(ValueError, match="'lr': expected only accumulation_steps, gpu0_share"):
        study.ask().suggest_float("lr", 0, 1)
