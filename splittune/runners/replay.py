"""Trials played from a script: taped at a few shards, then acted out for any other on virtual devices."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from splittune.fakes import NEEDS_VALUES
from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.script import Lines, NotAffineError, Player, Script, shards_to_tape
from splittune.hardware.virtual.tape import Tape, TapedHardware
from splittune.profiling.measurement import KINDS_OF_MICRO_STEP, LossPlacement, Measurement
from splittune.profiling.pacing import Step
from splittune.profiling.profiler import Profiler
from splittune.split import BatchSplit

logger = logging.getLogger(__name__)

TOLERANCE = 0.005
"""By how much a script may err, relative to a run in full, in step time and in peaks. A choice: a tenth of the headroom
that is demanded by default, and less than models of cards err by."""
# Accumulation steps of a tape that has every kind of micro-step.
_MOST_KINDS = KINDS_OF_MICRO_STEP
_NO_SCRIPT = "The step does not do the same at every batch size, so each split is run in full: %s."


class TapingProfiler(Profiler):
    """Runs a trial, and cuts the tape of its hardware after each part."""

    hardware: TapedHardware

    def tape(self, shard_sizes: Sequence[int], accumulation_steps: int) -> Tape:
        """The tape of a trial."""
        with _without_collector():
            self.measure(
                BatchSplit(
                    global_batch_size=accumulation_steps * sum(shard_sizes),
                    accumulation_steps=accumulation_steps,
                    shard_sizes=tuple(shard_sizes),
                )
            )
        return self.hardware.tape

    def start(self, split: BatchSplit) -> Step:
        step = super().start(split)
        self.hardware.cut()
        return _Cut(step, self.hardware)


class PlayingProfiler(Profiler):
    """Runs a trial by playing a script."""

    script: Script

    def start(self, split: BatchSplit) -> Step:
        hardware = self.hardware
        assert isinstance(hardware, VirtualHardware)
        return _Played(split, Player(self.script, hardware.ledger, split.shard_sizes))

    def clean_up(self, is_usable: bool) -> None:
        """Nothing: what is played makes no tensor, and its devices are gone. Looking for garbage would take longer."""


class ScriptKind(NamedTuple):
    """What trials must have in common to be told by one script."""

    placement: LossPlacement
    have_shards: tuple[bool, ...]
    """For each card."""
    num_micro_steps: int
    """2, or 3 for any other number: a trial of 1 accumulation step does what begins one of 3 or more (`Pacer`)."""

    @classmethod
    def of(cls, split: BatchSplit, placement: LossPlacement) -> ScriptKind:
        return cls(placement, tuple(size > 0 for size in split.shard_sizes), 2 if split.accumulation_steps == 2 else 3)


class Scripts:
    """Scripts of one job, each made when the first split that it can tell is asked for.

    There is one for each `ScriptKind`, from a tape of its own. Two more tapes for each placement of the loss and number
    of cards, one short and one that is a script's too, say how amounts follow from the shards.

    Where these differ by more than amounts, because the model takes another way with other batch sizes, or refuses
    those of a tape, there are no scripts, and trials are run in full. The same goes from the moment that a step run in
    full gives another result than the script did: so the first best split of a search is looked at twice (`check`).
    """

    def __init__(self) -> None:
        self.hold = True
        """False once a trial in full gave another result than a script did."""
        self._made: dict[ScriptKind, Script | None] = {}
        self._lines: dict[tuple[LossPlacement, int], Lines | None] = {}
        self._checked: dict[tuple[LossPlacement, int], int] = {}
        self._played: set[tuple[LossPlacement, BatchSplit]] = set()

    def script_for(
        self, split: BatchSplit, placement: LossPlacement, tape: Callable[[Sequence[int], int], Tape]
    ) -> Script | None:
        """The script that tells what `split` does, by way of ``tape(shard_sizes, accumulation_steps)``; or None."""
        kind = ScriptKind.of(split, placement)
        if kind not in self._made:
            try:
                lines = self._lines_for(placement, split.num_devices, tape)
                if kind not in self._made:  # the lines' tape may have been its own
                    self._made[kind] = None if lines is None else _script(kind, lines, tape)
            except NotAffineError as error:
                self._made[kind] = None
                logger.warning(_NO_SCRIPT, error)
        if self._made[kind] is not None:
            self._played.add((placement, split))
        return self._made[kind]

    def _lines_for(
        self, placement: LossPlacement, num_devices: int, tape: Callable[[Sequence[int], int], Tape]
    ) -> Lines | None:
        key = placement, num_devices
        if key not in self._lines:
            self._lines[key] = None
            small, large = shards_to_tape(num_devices)
            short, whole = _taped(tape, small, 1), _taped(tape, large, _MOST_KINDS)
            try:
                lines = Lines([short, whole], [small, large])
            except NotAffineError:  # where torch meets an operation first it does more: once again
                lines = Lines([_taped(tape, small, 1), whole], [small, large])
            self._lines[key] = lines
            self._made[ScriptKind(placement, (True,) * num_devices, _MOST_KINDS)] = Script(whole, large, lines)
        return self._lines[key]

    def was_played(self, split: BatchSplit, placement: LossPlacement) -> bool:
        """Whether a script told what this split does."""
        return (placement, split) in self._played

    def check(
        self,
        split: BatchSplit,
        placement: LossPlacement,
        played: Callable[[BatchSplit], Measurement],
        in_full: Callable[[BatchSplit], Measurement],
    ) -> None:
        """Hold the script of `split` against a run in full: `hold` is False if it was wrong.

        A single one of its micro-batches shows what a step does at that size, so this is done for every larger one.
        Worked: for 8 x (1 + 3 + 4 + 4), 1 x (1 + 3 + 4 + 4) is played and run; then 2 x (2 + 2 + 2 + 2) is not.
        """
        kind = ScriptKind.of(split, placement)
        key = placement, split.num_devices
        if split.micro_batch_size <= self._checked.get(key, 0):
            return
        self._checked[key] = split.micro_batch_size
        alone = replace(split, global_batch_size=split.micro_batch_size, accumulation_steps=1)
        one = split if kind.num_micro_steps == 2 else alone  # of which there is a script
        difference = _difference(played(one), in_full(one))
        if difference is not None:
            self.give_up()
            logger.warning(_NO_SCRIPT, difference)

    def give_up(self) -> None:
        """Have every trial run in full from now on."""
        self.hold = False
        self._lines = dict.fromkeys(self._lines)
        self._made = dict.fromkeys(self._made)


def _script(kind: ScriptKind, lines: Lines, tape: Callable[[Sequence[int], int], Tape]) -> Script:
    _, large = shards_to_tape(len(kind.have_shards))
    shards = [size if has else 0 for size, has in zip(large, kind.have_shards, strict=True)]
    return Script(_taped(tape, shards, kind.num_micro_steps), shards, lines)


def _taped(tape: Callable[[Sequence[int], int], Tape], shard_sizes: Sequence[int], accumulation_steps: int) -> Tape:
    """The tape; a job that fails at these sizes, which nobody asked for, is none of a script's."""
    try:
        return tape(shard_sizes, accumulation_steps)
    except NEEDS_VALUES:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise NotAffineError(
            f"with shards of {tuple(shard_sizes)} it raised {type(error).__name__}: {reason}"
        ) from error


def _difference(played: Measurement, whole: Measurement) -> str | None:
    """What the script got wrong by more than `TOLERANCE`; None where it is right."""
    if played.outcome is not whole.outcome:
        return f"{played.split} was foretold as {played.outcome.value}, and is {whole.outcome.value}"
    figures = [("step time", played.step_time_s, whole.step_time_s)]
    for one, other in zip(played.memory, whole.memory, strict=False):
        figures.append((f"peak on GPU {one.device}", one.peak_reserved_bytes, other.peak_reserved_bytes))
    for name, foretold, found in figures:
        if foretold is not None and found is not None and abs(foretold - found) > TOLERANCE * found:
            return f"the {name} of {played.split} was foretold as {foretold}, and is {found}"
    return None


class _Cut:
    """A step after each part of which the tape is cut."""

    def __init__(self, step: Step, hardware: TapedHardware) -> None:
        self.split, self._step, self._hardware = step.split, step, hardware
        self.before_backward: Callable[[], object] = lambda: None
        self.num_skipped = 0
        step.before_backward = self._forward_ended

    def micro_step(self, num_samples: int | None = None, *, last: bool = True) -> None:
        self._step.micro_step(num_samples, last=last)
        self._hardware.cut()

    def _forward_ended(self) -> None:
        self._hardware.before_backward()
        self.before_backward()

    def update(self) -> None:
        self._step.update()
        self._hardware.cut()

    def whole(self) -> None:
        raise NotImplementedError("rounds are taped, no whole steps")

    def took_effect(self) -> bool:
        return self._step.took_effect()

    def loss_exponent(self) -> int | None:
        return None


class _Played:
    """A step that is acted out, part after part."""

    def __init__(self, split: BatchSplit, player: Player) -> None:
        self.split, self._player = split, player
        self.before_backward: Callable[[], object] = lambda: None
        self.num_skipped = 0
        self._parts = count()
        self._play()

    def micro_step(self, num_samples: int | None = None, *, last: bool = True) -> None:
        self._play()

    def update(self) -> None:
        self._play()

    def whole(self) -> None:
        raise NotImplementedError("rounds are played, no whole steps")

    def took_effect(self) -> bool:
        return True

    def loss_exponent(self) -> int | None:
        return None

    def _play(self) -> None:
        self._player.play(next(self._parts), self.before_backward)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Cyclic garbage dies when Python gets round to it, which would be elsewhere on each tape."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
