"""Scripts: what taped trials have in common, and how amounts follow from the shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.hardware.virtual.catalog import find_gpu
from splittune.hardware.virtual.ledger import Ledger
from splittune.hardware.virtual.roofline import Work, kernel_time_s
from splittune.hardware.virtual.script import Lines, NotAffineError, Player, Script, shards_to_tape
from splittune.hardware.virtual.tape import Tape
from splittune.units import GIB


def tape_of(*amounts: int) -> Tape:
    """A tape of one allocation after another on device 0."""
    tape = Tape()
    for amount in amounts:
        tape.note("allocate", (0,), (amount,))
    tape.cut()
    return tape


def script_of(tapes: Sequence[Tape], shard_sizes: Sequence[Sequence[int]]) -> Script:
    return Script(tapes[-1], shard_sizes[-1], Lines(tapes, shard_sizes))


def played(script: Script, shard_sizes: tuple[int, ...]) -> Ledger:
    """The devices after the script's only part."""
    ledger = Ledger([find_gpu("A100-80GB")] * len(shard_sizes), [80 * GIB] * len(shard_sizes))
    Player(script, ledger, shard_sizes).play(0, lambda: None)
    return ledger


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 7, 8, 64])
def test_taped_shards_move_by_numbers_that_tell_them_apart(num_devices: int) -> None:
    """No two shards' moves have a factor in common, nor has one with the sum's beyond what is small."""
    before, after = shards_to_tape(num_devices)
    moves = [late - early for early, late in zip(before, after, strict=True)]
    assert all(move > 100 for move in moves)
    assert all(gcd(one, other) == 1 for one, other in combinations(moves, 2))
    if num_devices > 1:
        assert all(gcd(sum(moves), move) == 1 for move in moves)


@given(
    constant=st.integers(0, 10**9).map(lambda number: 512 * number),
    each=st.integers(1, 100).flatmap(lambda number: st.sampled_from([number, 768 * number, 50_257 * number])),
    variable=st.integers(0, 4),
    shards=st.tuples(*[st.integers(1, 500)] * 4),
)
def test_amounts_follow_the_shard_or_the_sum_that_made_them(
    constant: int, each: int, variable: int, shards: tuple[int, ...]
) -> None:
    """Whatever its line, an amount is found again for other shards."""
    taped = shards_to_tape(4)
    values = [(*sizes, sum(sizes))[variable] for sizes in taped]
    script = script_of([tape_of(constant + each * value) for value in values], taped)
    (cue,) = script.parts[0]
    amount = cue.amounts[0]
    assert amount.constant + amount.each * (*shards, sum(shards))[amount.variable] == (
        constant + each * (*shards, sum(shards))[variable]
    )


def test_a_script_allocates_frees_and_launches_what_the_shards_ask_for() -> None:
    """Worked: 1 KiB a sample and 2 MiB besides; under 5 samples 5 KiB stay, and a kernel of 5 KiB ran."""
    taped = shards_to_tape(1)
    tapes = []
    for (size,) in taped:
        tape = Tape()
        tape.note("allocate", (0,), (1024 * size,))
        tape.note("allocate", (0,), (2**21,))
        tape.note("launch", (0,), Work(kind="copy", num_flops=0, num_bytes=1024 * size))
        tape.note("free", (0, 1))
        tape.cut()
        tapes.append(tape)
    ledger = played(script_of(tapes, taped), (5,))
    assert ledger.allocators[0].allocated_bytes == 5 * 1024
    assert ledger.allocators[0].peak_allocated_bytes == 5 * 1024 + 2**21
    work = Work(kind="copy", num_flops=0, num_bytes=5 * 1024)
    assert ledger.timeline.busy_s[0] == kernel_time_s(work, find_gpu("A100-80GB"))


@pytest.mark.parametrize(
    ("amounts", "words"),
    [
        ([(3 * 3,), (104 * 104,)], "which is no line"),
        ([(7,), (8,)], "amounts of allocate are 7 and 8"),
        ([(8,), (8, 8)], "1 or 2 events"),
    ],
)
def test_what_follows_no_line_is_refused(amounts: list[tuple[int, ...]], words: str) -> None:
    """A square of the shard, an amount that grows by no whole number, and one event more."""
    with pytest.raises(NotAffineError, match=words):
        Lines([tape_of(*each) for each in amounts], shards_to_tape(1))


def test_other_events_at_the_same_place_are_refused() -> None:
    """A kernel where the other trial waits is another sequence."""
    one, other = Tape(), Tape()
    one.note("wait_for", (0,))
    other.note("wait_for", (1,))
    one.cut()
    other.cut()
    with pytest.raises(NotAffineError, match=r"wait_for at \(0,\) or wait_for at \(1,\)"):
        Lines([one, other], shards_to_tape(2))


def test_an_amount_that_no_line_knows_stays_as_it_is() -> None:
    """What a tape has behind the end of the shorter one is looked up there, and else taken for a constant."""
    small, large = shards_to_tape(1)
    short, whole = (tape_of(1024 * size) for (size,) in (small, large))
    for amount in (1024 * large[0], 4097):
        whole.note("allocate", (0,), (amount,))
    whole.cut()
    script = Script(whole, large, Lines([short, whole], [small, large]))
    assert [cue.amounts[0].at((5, 5)) for cue in script.parts[1]] == [5 * 1024, 4097]
