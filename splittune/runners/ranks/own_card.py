"""One rank's real card: its share measured by itself, and its part of synchronised steps."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Sequence
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from splittune.hardware import Hardware
from splittune.hardware.oom import is_out_of_memory, is_sticky
from splittune.hardware.virtual.ring import bucket_sizes
from splittune.profiling.measurement import Measurement
from splittune.profiling.pacing import Step
from splittune.profiling.profiler import Profiler
from splittune.ranks.module import DistributedSplit
from splittune.runners.base import JobFacts
from splittune.runners.in_process import InProcessRunner
from splittune.runners.ranks.control import first_line
from splittune.runners.ranks.orders import Answer, Connect, Order, Probe
from splittune.runners.ranks.step import RankStep, run_whole_steps
from splittune.split import BatchSplit
from splittune.training import TrainingTask

# How often the all-reduce is timed, of which the median counts. A choice: the first one connects the ranks.
NUM_ALL_REDUCES = 5


class ShareProfiler(Profiler):
    """Measures shares of one card, beside buffers as large as DistributedDataParallel's buckets."""

    buckets: Sequence[int] = ()
    _held: Sequence[torch.Tensor] = ()

    def start(self, split: BatchSplit) -> Step:
        device = self.hardware.devices[0].torch_device
        self._held = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for num_bytes in self.buckets]
        return super().start(split)

    def clean_up(self, is_usable: bool) -> None:
        self._held = ()
        super().clean_up(is_usable)


class OwnRealCard:
    """What this rank does of an order with its own card. Open after `open`; `close` leaves the job as it was found.

    Args:
        task: the job.
        hardware: this rank's one card.
        wait_s: seconds for which a synchronised step waits for other ranks at most.
    """

    def __init__(self, task: TrainingTask, hardware: Hardware, *, wait_s: float) -> None:
        self.rank, self.hardware = dist.get_rank(), hardware
        self.task, self._wait_s = task, wait_s
        self._runner = InProcessRunner(task, hardware)
        self._device = torch.device(hardware.devices[0].torch_device)
        wanting = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
        self.buckets = bucket_sizes((one.dtype, one.nbytes) for one in wanting)
        self._group: dist.ProcessGroup | None = None
        self._profiler: ShareProfiler | None = None
        self._is_open = False

    def open(self) -> JobFacts:
        """What is known of the job, on this card."""
        self._is_open = True
        return self._runner.open(["output"])

    def close(self) -> None:
        """Leave the job as it was found; once is enough."""
        if self._is_open:
            self._is_open = False
            try:
                self._leave_group()
            finally:
                self._runner.close()

    def _connect(self) -> float:
        """Make the group of synchronised steps; gives the median seconds of an all-reduce of all gradients.

        What the group itself holds of the card is held from now on, and so counts in every trial.
        """
        self._group = dist.new_group(timeout=timedelta(seconds=self._wait_s))
        largest = torch.zeros(max(self.buckets, default=1), dtype=torch.uint8, device=self._device)
        times_s = []
        for _ in range(NUM_ALL_REDUCES):
            start_s = self.hardware.clock()
            for num_bytes in self.buckets:
                dist.all_reduce(largest[:num_bytes], group=self._group)
            times_s.append(self.hardware.clock() - start_s)
        return median(times_s)

    def obey(self, order: Order) -> Answer:
        if isinstance(order, Probe):
            share = order.shares[self.rank]
            return Answer() if share is None else Answer(measurement=self._probe(share, order.accumulation_steps))
        if isinstance(order, Connect):
            return Answer(all_reduce_s=self._connect())
        return self._whole_steps(order.split)

    def _probe(self, share: int, accumulation_steps: int) -> Measurement:
        """Micro-steps and updates of the share, without any other rank; one sample stands in for none."""
        size = max(1, share)
        if self._profiler is None:
            self._profiler = ShareProfiler(
                self.task, self.hardware, self._runner.samples, self._runner.kept, min_headroom_bytes=0
            )
            self._profiler.buckets = self.buckets
        split = BatchSplit(
            global_batch_size=accumulation_steps * size, accumulation_steps=accumulation_steps, shard_sizes=(size,)
        )
        return self._profiler.measure_by_itself(split)

    def _whole_steps(self, split: BatchSplit) -> Answer:
        answer, is_usable = Answer(), True
        try:
            with self.hardware.metered():
                answer = Answer(measurement=self._run_whole_steps(split))
        except RuntimeError as error:
            is_usable = not is_sticky(error)
            if is_out_of_memory(error, self.hardware.free_bytes):
                answer = Answer(lost=f"out of memory, though it fitted by itself: {first_line(error)}")
            elif is_of_a_group(error):
                answer = Answer(lost=first_line(error))
            else:
                traceback.clear_frames(error.__traceback__)
                raise
        except BaseException as error:
            # SIGTERM and Ctrl-C too: the frames of the step hold the group, in which the others wait for this rank
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            if is_usable:
                self.hardware.recover()
            if answer.measurement is None:
                self._leave_group()
            self._runner.kept.restore()
        return answer

    def _run_whole_steps(self, split: BatchSplit) -> Measurement:
        task = self.task
        model = DistributedSplit(task.model, device=self._device, process_group=self._group)
        if not task.model.training:
            task.model.train()
        optimizer = task.make_optimizer()
        self.hardware.prepare_optimizer(optimizer)
        task.place_others(self.hardware)
        step = RankStep(task, model, optimizer, split, self._runner.samples, rank=self.rank)
        recorder = run_whole_steps(step, self.hardware)
        share = max(1, split.shard_sizes[self.rank])
        steps = split.accumulation_steps
        own = BatchSplit(global_batch_size=steps * share, accumulation_steps=steps, shard_sizes=(share,))
        return recorder.measurement(own)

    def _leave_group(self) -> None:
        """The other ranks' collectives then end at once, where the group is gloo's."""
        if self._group is not None:
            gc.collect()
            group, self._group = self._group, None
            dist.destroy_process_group(group)


def is_of_a_group(error: RuntimeError) -> bool:
    """Whether a collective could not be finished; gloo raises a plain RuntimeError that names a file of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
