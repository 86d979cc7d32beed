"""The search by kinds: it reaches what the cards can do together, keeps their memory, and asks few of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from splittune.errors import NoFeasibleSplitError
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.by_kind.study import FoundByKind, SharesByKind, find_by_kind
from splittune.split import BatchSplit
from tests.search.by_kind.cards import Line, LinedRanks, least_time_s

# Seconds a sample of GPT-2's kind: 20 ms that launches take, and what a card's peak makes of the rest.
GPT_LIKE = [
    Line(256, 0.020, 0.0400, most=12),
    Line(256, 0.020, 0.0200, most=20),
    Line(256, 0.020, 0.0060, most=72),
    Line(256, 0.020, 0.0030, most=72),
]


def found_on(ranks: LinedRanks, global_batch_size: int, *, max_trials: int = 12, least_share: int = 1) -> FoundByKind:
    problem = SharesByKind(
        global_batch_size=global_batch_size,
        kinds=ranks.devices,
        min_headroom_bytes=(0,) * len(ranks.kinds),
        least_share=least_share,
    )
    return find_by_kind(problem, ranks, max_trials=max_trials, on_measure=lambda *_: None, on_trial=lambda _trial: None)


def test_1024_cards_of_four_kinds_reach_95_percent_of_what_they_can_do_together() -> None:
    """Memory leaves room: the step is at most 1/0.95 of that of shares that could be cut, far from the even split's."""
    kinds = [replace(kind, most=10**6) for kind in GPT_LIKE]
    ranks = LinedRanks(kinds)
    result = found_on(ranks, 2**17).result
    assert result.best.step_time_s is not None
    assert result.best.step_time_s <= least_time_s(2**17, kinds) / 0.95
    assert result.speedup is not None
    assert result.speedup > 4
    assert sum(result.best.split.shard_sizes) == 2**17


def test_where_memory_binds_more_steps_let_the_full_cards_keep_up() -> None:
    """No card has more than it holds, and no number of steps up to 16 more than the fewest would be faster."""
    ranks = LinedRanks(GPT_LIKE, once_s=0.05)
    result = found_on(ranks, 2**17).result
    split = result.best.split
    assert result.best.outcome is Outcome.OK
    assert result.baseline is not None
    assert result.baseline.split.accumulation_steps >= split.accumulation_steps
    for kind, devices in zip(GPT_LIKE, ranks.devices, strict=True):
        assert max(split.shard_sizes[device] for device in devices) <= kind.most
    ideal_s = least_time_s(2**17 // split.accumulation_steps, GPT_LIKE) * split.accumulation_steps
    assert (result.best.step_time_s or 1e9) <= 1.25 * ideal_s  # shares of 10 samples are whole ones


def test_a_kind_is_asked_a_few_times_however_many_cards_it_has() -> None:
    """A thousand cards ask no more of a card than four do, and no share of a kind twice."""
    few, many = LinedRanks([replace(kind, count=1) for kind in GPT_LIKE]), LinedRanks(GPT_LIKE)
    found_on(few, 2**9)
    found_on(many, 2**17)
    assert len(many.card_runs) <= len(few.card_runs) + 8
    assert len(set(many.card_runs)) == len(many.card_runs)


def test_the_largest_share_of_each_kind_is_found_to_1_percent() -> None:
    """Whether or not the batch comes near it."""
    ranks = LinedRanks([Line(2, 0.01, 0.001, most=1234), Line(1, 0.01, 0.001, most=37)])
    found = found_on(ranks, 64)
    assert found.are_bracketed
    assert 1234 * 0.99 - 1 <= found.most[0] <= 1234
    assert found.most[1] in (36, 37)


def test_every_card_has_its_least_share() -> None:
    """With BatchNorm 4 samples, though the slow card would have fewer; less where the batch has no more."""
    ranks = LinedRanks([Line(1, 0.0, 1.0), Line(3, 0.0, 0.001)])
    assert min(found_on(ranks, 64, least_share=4).result.best.split.shard_sizes) == 4
    assert min(found_on(LinedRanks(ranks.kinds), 10, least_share=4).result.best.split.shard_sizes) == 2


def test_more_cards_than_samples_leave_some_idle() -> None:
    """They run a sample that stands in; every sample has its card."""
    result = found_on(LinedRanks([Line(6, 0.01, 0.001)]), 4).result
    assert sorted(result.best.split.shard_sizes) == [0, 0, 1, 1, 1, 1]


def test_one_card_is_a_machine_too() -> None:
    """Its best is what fits in the fewest steps."""
    result = found_on(LinedRanks([Line(1, 0.01, 0.001, most=10)]), 25).result
    assert result.best.split.accumulation_steps == 3


def test_a_card_that_holds_nothing_leaves_no_split() -> None:
    """The smallest shares were tried, and the message has what it lacked."""
    with pytest.raises(NoFeasibleSplitError, match="out of memory: device 1"):
        found_on(LinedRanks([Line(1, 0.01, 0.001), Line(1, 0.01, 0.001, most=0.5)]), 8)  # type: ignore[arg-type]


def test_as_many_trials_as_asked_for_at_most() -> None:
    """Of all cards; one is always made beside the even split."""
    for max_trials in (1, 2, 3):
        result = found_on(LinedRanks(GPT_LIKE), 2**17, max_trials=max_trials).result
        assert sum(trial.kind == "search" for trial in result.trials) <= max(2, max_trials)
        assert result.best.outcome is Outcome.OK


def test_shares_that_do_not_fit_are_no_rival_of_more_steps() -> None:
    """What ran beyond the demanded headroom was faster than all that fits: more steps are measured nevertheless."""

    class Tight(LinedRanks):
        """A card of the first kind keeps no headroom with 40 samples and more, though it runs and is timed."""

        def _measured(self, split: BatchSplit, cards: Sequence[Line]) -> Measurement:
            run = super()._measured(split, cards)
            pairs = zip(cards, split.shard_sizes, strict=True)
            if run.outcome is Outcome.OK and any(card is self.kinds[0] and 40 <= share < 45 for card, share in pairs):
                return replace(run, outcome=Outcome.NO_HEADROOM)
            return run

    kinds = (Line(1, 0.001, 0.001, most=45), Line(1, 0.001, 0.01, most=1000))
    result = found_on(Tight(kinds), 48).result
    assert result.best.outcome is Outcome.OK
    assert result.best.split.accumulation_steps > 1


def test_steps_are_tried_until_no_card_is_full() -> None:
    """The slow cards hold most: 50 steps would do, and only with 167 the fast one is busy for as long as they are."""
    ranks = LinedRanks([Line(1, 0.0, 0.001, most=10), Line(1, 0.0, 0.002, most=40)])
    result = found_on(ranks, 2500).result
    assert (result.best.step_time_s or 1e9) <= 1.02 * least_time_s(2500, ranks.kinds)
