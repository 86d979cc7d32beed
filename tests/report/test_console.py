"""What people see of a result: the answer, both splits side by side, why, and what to see to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splittune.profiling.measurement import Outcome
from splittune.report.console import describe_memory_kept, show_notes, show_result
from splittune.split import BatchSplit
from tests.report.results import BASELINE, BEST, EVEN, Screen, memory, ran, result, trial


def shown(*, verbose: bool = False, width: int = 100, is_terminal: bool = False, **fields) -> Screen:
    screen = Screen(width=width, is_terminal=is_terminal)
    show_result(result(**fields), screen.console, verbose=verbose)
    return screen


def row(screen: Screen, label: str) -> str:
    return next(line for line in screen.lines if label in line)


def test_the_answer_stands_first_between_empty_lines() -> None:
    """How much faster, and both speeds, before anything else."""
    blank, answer, after, *_ = shown().lines
    assert answer == "1.60x faster at the same batch size: 128 instead of 80.0 samples/s (modelled)"
    assert (blank, after) == ("", "")


def test_an_even_split_that_beats_the_baseline_is_named() -> None:
    """The baseline is the one of fewest steps; where one of more steps was faster, the gain over that is smaller."""
    split = replace(EVEN, accumulation_steps=8, shard_sizes=(4, 4))
    faster, slower, uneven = trial(ran(split, 0.6)), trial(ran(split, 0.9)), trial(BEST)
    failed = trial(ran(split, 0.1, Outcome.NO_HEADROOM))
    said = "The fastest even split that was tried is 8 x (4+4): 107 samples/s."
    assert said in shown(trials=(slower, faster, uneven, failed)).text
    for trials in ((), (slower, uneven, failed)):
        assert "fastest even split" not in shown(trials=trials).text


def test_both_splits_stand_side_by_side() -> None:
    """Steps and shares in words, and the memory of each card as a part of what others leave there."""
    screen = shown()
    assert row(screen, "even split").split() == ["even", "split", "tuned", "split"]
    assert row(screen, "accumulation steps").split()[-2:] == ["4", "2"]
    assert row(screen, "samples per GPU").split()[-2:] == ["8+8", "8+24"]
    assert row(screen, "peak memory, GPU 0").endswith("##############..  3.50 GiB   of 4.00 GiB")
    assert row(screen, "peak memory, GPU 1").endswith("#####...........  2.00 GiB   of 7.00 GiB")
    starts = {
        row(screen, label).index(cell) for label, cell in [("even split", "even"), ("steps", "4"), ("per", "8+8")]
    }
    assert len(starts) == 1, "the columns are straight"


def test_like_cards_share_a_line() -> None:
    """Cards 1 to 3 in one, with the fullest of them; GPU 0 has its own."""
    split = BatchSplit(global_batch_size=64, accumulation_steps=1, shard_sizes=(4, 20, 20, 20))
    held = tuple(memory(device, reserved_gib=2 + 0.1 * (device == 2)) for device in range(4))
    best = ran(split, 0.5, memory=held)
    screen = shown(best=best, baseline=replace(best, whole_step_times_s=(0.8,)))
    assert [line.split("   ")[0].strip() for line in screen.lines if "peak memory" in line] == [
        "peak memory, GPU 0",
        "peak memory, GPU 1-3",
    ]
    assert "2.10 GiB" in row(screen, "GPU 1-3")


def test_a_bar_is_never_empty_where_something_was_taken() -> None:
    """A hundredth of the room is one character, and more than the room fills the bar."""
    little = ran(BEST.split, 0.5, memory=(memory(0, reserved_gib=0.07), memory(1, reserved_gib=9)))
    screen = shown(best=little)
    assert "#...............  71.7 MiB" in row(screen, "GPU 0")
    assert "################  9.00 GiB" in row(screen, "GPU 1")


@pytest.mark.parametrize("is_modelled", [True, False])
def test_only_what_is_modelled_is_called_so(is_modelled: bool) -> None:
    """What real cards did is not."""
    assert ("modelled" in shown(is_modelled=is_modelled).text) == is_modelled


def test_a_missing_baseline_is_said() -> None:
    """Where no even split fits, the answer says so, and there is one column and no factor."""
    screen = shown(baseline=None)
    assert screen.lines[1] == ("128 samples/s (modelled), where no even split fits at any number of accumulation steps")
    assert "faster" not in screen.text
    assert row(screen, "samples per GPU").split()[-1] == "8+24"
    assert "even split" not in row(screen, "tuned split")


def test_no_gain_is_not_called_faster() -> None:
    """The even split itself may win, and another may only be as fast."""
    even = shown(best=BASELINE)
    assert "The even split is the fastest that was found: 80.0 samples/s" in even.text
    assert "tuned split" not in even.text
    as_fast = shown(best=ran(BEST.split, 0.799)).text
    assert "As fast as the even split: 80.1 instead of 80.0 samples/s" in as_fast
    assert "faster" not in as_fast


def test_where_the_loss_is_computed_is_told_where_it_moved() -> None:
    """A loss in the replicas is a difference between the splits; gathered outputs are what everybody expects."""
    moved = ran(BEST.split, 0.5, loss_placement="replica")
    assert row(shown(best=moved), "loss computed").split("  ")[-1].strip() == "in each replica"
    assert "loss computed" not in shown().text
    same_split = ran(EVEN, 0.7, loss_placement="replica")
    assert "1.14x faster" in shown(best=same_split).text


def test_memory_that_was_not_recorded_has_no_bars() -> None:
    """The splits are compared all the same."""
    screen = shown(best=replace(BEST, memory=()))
    assert "peak memory" not in screen.text
    assert "not recorded" in screen.text


def test_two_facts_and_a_remedy() -> None:
    """Why it is so and what would help, in a few lines; the whole explanation only if verbose."""
    short, whole = shown().text, shown(verbose=True, stopped="converged").text
    assert "Why: 4.00 GiB of GPU 0's 8.00 GiB are held outside this job. GPU 0 now takes 8 of 32" in short
    assert "For more: " in short
    assert len(short.splitlines()) <= 14
    assert result().explanation in " ".join(whole.split())
    assert "no other split is expected to be faster" in whole
    assert "Why:" not in whole


@pytest.mark.parametrize("width", [60, 200])
def test_prose_is_broken_at_words(width: int) -> None:
    """On a terminal to its width, and to 100 columns at most anywhere; the table is never broken."""
    on_terminal = shown(width=width, is_terminal=True, verbose=True)
    prose = on_terminal.text.rpartition("\n\n")[2]
    assert max(map(len, prose.splitlines())) <= min(width, 100)
    piped = shown(width=width, verbose=True)
    assert max(map(len, piped.text.rpartition("\n\n")[2].splitlines())) > 80
    assert any(line.endswith("of 4.00 GiB") for line in piped.lines)


def noted(**fields) -> list[str]:
    screen = Screen()
    show_notes(result(**fields), screen.console)
    return screen.lines


def test_models_that_did_not_fit_are_no_note() -> None:
    """The emitted split was measured: there is nothing to do about it, and the explanation has it."""
    odd = "The memory model did not fit."
    assert noted(warnings=(odd,)) == []
    assert result(warnings=(odd,)).explanation.endswith(odd)


def test_notes_are_what_to_see_to() -> None:
    """A loader that is too slow, a search that was cut short, and memory that cannot be relied on."""
    assert noted(stopped="converged") == []
    assert noted(notes=("The loader is slow.",)) == ["note: The loader is slow."]
    (limit,) = noted(stopped="max_trials")
    assert limit.startswith("note: the search ended at its limit of trials (--max-trials)")
    retried = replace(BEST, num_alloc_retries=2)
    assert "2 times under this split" in " ".join(noted(best=retried))


@pytest.mark.parametrize("reserved_gib", [2.5, 3.5])
def test_training_as_planned_is_one_clause(reserved_gib: float) -> None:
    """Where no card took more than planned, however many there are."""
    peaks = (memory(0, reserved_gib=reserved_gib), memory(1))
    assert describe_memory_kept(result().config, peaks) == "memory as planned on all 2 GPUs"
    alone = ran(BatchSplit(global_batch_size=64, accumulation_steps=2, shard_sizes=(32,)), 0.5, memory=(memory(0),))
    assert describe_memory_kept(result(best=alone).config, (memory(0),)) == "memory as planned"


def test_a_card_that_exceeds_its_plan_is_called_out() -> None:
    """With what it took and what was planned."""
    peaks = (memory(0, reserved_gib=3.6), memory(1))
    said = describe_memory_kept(result().config, peaks)
    assert said == "MORE MEMORY THAN PLANNED: 3.60 GiB on GPU 0 where 3.50 GiB were"
