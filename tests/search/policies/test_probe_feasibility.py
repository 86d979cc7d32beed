from __future__ import annotations

from splittune.search.policies.probe_feasibility import ProbeFeasibility
from tests.search.jobs import AFFINE
from tests.search.policies.story import best_of, of_kind, search, state_after
from tests.search.problem import CardTime, card_memory, job

promising = AFFINE["one sample fills a card"]


def test_a_promising_split_that_may_not_fit_is_approached() -> None:
    """What would gain much and is not sure to fit is preceded by splits that show whether it does: nothing runs out."""
    problem = promising()
    proposals, trials = search(problem)
    assert of_kind("probe feasibility", proposals)
    assert of_kind("improve", proposals)
    assert problem.num_oom == 0
    assert best_of(problem, trials) >= 0.98


def test_no_promising_split_runs_out_of_memory() -> None:
    """Costly launches make few and large micro-batches fast, and outputs fill GPU 0: the best is
    reached, nothing runs out."""
    memories = [card_memory(is_first=True, sample=40, output=10, total=6000), *[card_memory(sample=40, total=4000)] * 3]
    problem = job(memories, B=400, times=[CardTime(launch_s=0.080, sample_s=0.001)] * 4)
    proposals, trials = search(problem)
    assert problem.num_oom == 0
    assert best_of(problem, trials) >= 0.98
    assert any(one.kind not in ("start", "baseline") for one in proposals)


def test_no_probe_is_made_where_it_could_gain_too_little() -> None:
    """The gain that is worth one is a field: a state in which a probe is wanted wants none where
    ten times as much is asked."""
    problem = promising()
    proposals, trials = search(problem)
    place = next(place for place, one in enumerate(proposals) if one.kind == "probe feasibility")
    state = state_after(promising(), trials[:place])
    assert ProbeFeasibility().propose(state) == proposals[place]
    assert ProbeFeasibility(min_gain=10.0).propose(state) is None
    assert ProbeFeasibility(max_targets=0).propose(state) is None


def test_a_probe_cannot_run_out_of_memory() -> None:
    """What is not known to run is never a probe, however much it would show."""
    proposals, trials = search(promising())
    probes = [one for one, proposal in zip(trials, proposals, strict=True) if proposal.kind == "probe feasibility"]
    assert probes
    assert all(one.ran for one in probes)
