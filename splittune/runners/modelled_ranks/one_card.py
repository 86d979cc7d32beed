"""What one card does with a share, as a rank of its own does it: the job's step, run on shapes or played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.catalog import GpuModel
from splittune.hardware.virtual.ring import bucket_sizes
from splittune.profiling.measurement import KINDS_OF_MICRO_STEP, Measurement
from splittune.runners.base import DeviceSnapshot, JobFacts
from splittune.runners.modelled_ranks.kinds import CardKind
from splittune.runners.modelled_ranks.zero import OptimizerState
from splittune.runners.replay import Scripts
from splittune.runners.shapes import ShapeRunner
from splittune.split import BatchSplit
from splittune.training import TrainingTask


class CardTrials(Protocol):
    """What single cards do with a share: run here, `OneCardTrials`, or by ranks that have one card each."""

    buckets: tuple[int, ...]
    """Bytes of each bucket that the ranks add up."""
    buffer_bytes: int
    """Bytes that rank 0 gives the others before a step: BatchNorm's running statistics."""
    optimizer_state: OptimizerState

    def open(self, hardware: VirtualHardware) -> JobFacts: ...

    def close(self) -> None: ...

    @property
    def needs_values(self) -> str | None: ...

    @property
    def scripts_hold(self) -> bool: ...

    def measure(self, kind: CardKind, share: int, *, accumulation_steps: int, in_full: bool = False) -> Measurement: ...

    def measure_ranks(
        self, ranks: Sequence[tuple[CardKind, int]], *, accumulation_steps: int, in_full: bool
    ) -> list[Measurement]: ...


class OneCardTrials:
    """Trials of a job on single cards, any kind of them; each is run once. `open` it, and `close` it in any case.

    Beside parameters, gradients and optimizer state a card holds DistributedDataParallel's buckets, which are as large
    as the gradients: torch's default, ``gradient_as_bucket_view=False``.

    Worked: 4 samples on a T4, without accumulation, are the one-card plan of ``BatchSplit(global_batch_size=4,
    accumulation_steps=1, shard_sizes=(4,))`` and its buckets.
    """

    def __init__(self, task: TrainingTask, hardware: VirtualHardware, *, are_played: bool = True) -> None:
        self._scripts = Scripts() if are_played else None
        wanting = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
        self.buckets = bucket_sizes((one.dtype, one.nbytes) for one in wanting)
        self.buffer_bytes = sum(buffer.nbytes for buffer in task.model.buffers())
        self.optimizer_state = OptimizerState(task)
        self._first = ShapeRunner(task, self._hardware_of(hardware.gpus[0], hardware.occupied_bytes[0]))
        self._runners: dict[tuple[GpuModel, int], ShapeRunner] = {}
        self._known: dict[tuple[GpuModel, int, BatchSplit], Measurement] = {}

    def open(self, hardware: VirtualHardware) -> JobFacts:
        """Have the job ready, and say what is known of it on these cards."""
        facts = self._first.open(["output"])
        self._runners.clear()
        return replace(facts, cards=DeviceSnapshot.of(hardware))

    def close(self) -> None:
        """Leave the job as it was found."""
        self._first.close()

    @property
    def needs_values(self) -> str | None:
        """Why trials run on real tensors; None as long as they do not."""
        return self._first.needs_values

    @property
    def scripts_hold(self) -> bool:
        """False once a trial in full gave another result than a played one; what was played is then forgotten."""
        return self._scripts is None or self._scripts.hold

    def small_step(self, share: int) -> Measurement:
        """A step of one card with so many samples, in full and in no time: it tells this job from others."""
        split = BatchSplit(global_batch_size=share, accumulation_steps=1, shard_sizes=(share,))
        return self._first.measure(split, (0,), "output", in_full=False)

    def measure(self, kind: CardKind, share: int, *, accumulation_steps: int, in_full: bool = False) -> Measurement:
        """A card of this kind with so many samples in each micro-step, judged by the headroom demanded of it.

        Three micro-steps tell the time of any larger number, so no more are run. A rank without samples runs one that
        stands in. `in_full` runs it whole where no trial has been yet, which shows whether what is played holds.
        """
        steps, share = min(accumulation_steps, KINDS_OF_MICRO_STEP), max(1, share)
        split = BatchSplit(global_batch_size=steps * share, accumulation_steps=steps, shard_sizes=(share,))
        key = kind.gpu, kind.occupied_bytes, split
        if in_full or key not in self._known:
            self._known[key] = self._run(kind, split, in_full=in_full)
        return self._known[key].judged((kind.min_headroom_bytes,))

    def measure_ranks(
        self, ranks: Sequence[tuple[CardKind, int]], *, accumulation_steps: int, in_full: bool
    ) -> list[Measurement]:
        """Every rank's, given as its kind of card and its share: the largest shares first, and cards alike once.

        `in_full` has the first of them run whole, as for `measure`.
        """
        runs: dict[tuple[CardKind, int], Measurement] = {}
        for kind, share in sorted(dict.fromkeys(ranks), key=lambda rank: -rank[1]):
            runs[kind, share] = self.measure(
                kind, share, accumulation_steps=accumulation_steps, in_full=in_full and not runs
            )
        return [runs[rank] for rank in ranks]

    def forget_scripts(self) -> None:
        """Another rank has seen that what is played does not hold: from now on trials are run in full here, too."""
        if self._scripts is not None and self._scripts.hold:
            self._scripts.give_up()
            self._forget()

    def _forget(self) -> None:
        self._runners.clear()
        self._known.clear()

    def _run(self, kind: CardKind, split: BatchSplit, *, in_full: bool) -> Measurement:
        held, card = self.scripts_hold, (kind.gpu, kind.occupied_bytes)
        if card not in self._runners:
            self._runners[card] = self._first.beside(self._hardware_of(*card), self._scripts)
        runner = self._runners[card]
        measured = runner.measure(split, (0,), "output", in_full=in_full)
        self._first.needs_values = self._first.needs_values or runner.needs_values
        if held and not self.scripts_hold:
            self._forget()
        return measured

    def _hardware_of(self, gpu: GpuModel, occupied_bytes: int) -> VirtualHardware:
        return VirtualHardware([gpu], occupied_bytes=[occupied_bytes], wrapper_bytes=self.buckets)
