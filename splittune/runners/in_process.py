"""Trials in the tuner's own process, on a task and hardware at hand."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from splittune.errors import ConfigError
from splittune.hardware import Device, DeviceMemory, Hardware
from splittune.hardware.oom import is_sticky
from splittune.profiling.foretold import Foretold
from splittune.profiling.measurement import LossPlacement
from splittune.profiling.profiler import Profiler
from splittune.runners.base import JobFacts
from splittune.signals import deferred
from splittune.split import BatchSplit
from splittune.training import SampleBatch, Snapshot, TrainingTask, read_batches


class InProcessRunner:
    """Runs the trials of a task at hand in this process, on hardware at hand.

    With `at_once` False the job's values are copied when its first profiler is asked for, or before the loader takes
    them: for who may do without trials on the job itself.
    """

    def __init__(self, task: TrainingTask, hardware: Hardware, *, at_once: bool = True) -> None:
        self._task, self._hardware, self._at_once = task, hardware, at_once
        self._snapshot: Snapshot | None = None
        self._samples: SampleBatch | None = None
        self._is_grad_enabled = True

    def snapshot(self) -> None:
        """Keep the job as it is now, for `close` to put back."""
        self._is_grad_enabled = torch.is_grad_enabled()
        with deferred():  # it takes the gradients off the model
            self._snapshot = self._task.snapshot(at_once=self._at_once)

    def open(self, placements: Sequence[LossPlacement]) -> JobFacts:
        self.snapshot()
        with self.kept.watching():
            self._samples = read_batches(self._task.loader)
        no_replica_loss = None
        if "replica" in placements:
            try:
                self._task.loss_in_replica(self._samples.batch)  # says so now if it cannot be
            except ConfigError as error:
                if len(placements) == 1:
                    raise
                no_replica_loss = str(error)
        return replace(JobFacts.of(self._task, self._samples, self._hardware), no_replica_loss=no_replica_loss)

    def beside(self, hardware: Hardware) -> InProcessRunner:
        """A runner of the same job on other hardware, open as long as this one is, which also closes for both."""
        other = copy.copy(self)
        other._hardware = hardware
        return other

    @property
    def samples(self) -> SampleBatch:
        """What micro-batches are made of, once it is open."""
        assert self._samples is not None, "open() did not fail"
        return self._samples

    @property
    def kept(self) -> Snapshot:
        """The job as it was found, once it is open."""
        assert self._snapshot is not None, "open() comes first"
        return self._snapshot

    def profiler(self, *, min_headroom_bytes: Sequence[int], loss_placement: LossPlacement) -> Profiler:
        self.kept.keep_values()
        return Profiler(
            self._task,
            self._hardware,
            self.samples,
            self.kept,
            min_headroom_bytes=min_headroom_bytes,
            loss_placement=loss_placement,
        )

    def foretell(
        self,
        devices: Sequence[Device],
        memory: Sequence[DeviceMemory],
        asked: Sequence[tuple[BatchSplit, LossPlacement]],
        *,
        budget_s: float,
    ) -> Foretold:
        """What virtual cards of the kinds of `devices`, with their memory, say of each split, loss placement included.

        Raises:
            DeviceError: a card is not in the catalog.
        """
        # imported late: shapes without values are a machinery of their own, which trials do without
        from splittune.hardware.virtual.twins import twins_of
        from splittune.runners.foretell import foretell

        return foretell(self._task, self.samples, twins_of(devices, memory), asked, budget_s=budget_s)

    def close(self) -> None:
        """Leave job and devices as they were found; Ctrl-C waits until that is done.

        After a CUDA error that spoils the devices for this process nothing is asked of them: what
        lives there is lost, and asking would raise anew and hide that error. What lives on the host
        is put back all the same.
        """
        if self._snapshot is None:
            return
        on_its_way = sys.exc_info()[1]  # where this is called in a `finally`
        is_usable = on_its_way is None or not is_sticky(on_its_way)
        with deferred():
            try:
                if is_usable:
                    self._hardware.recover()
            except RuntimeError as error:  # a kernel's own error may show only now
                is_usable = not is_sticky(error)
                raise
            finally:
                # Ctrl-C between torch.no_grad()'s own lines leaves gradients off for the whole thread
                torch.set_grad_enabled(self._is_grad_enabled)
                self._snapshot.restore(on_host_only=not is_usable)
                self._snapshot.restore_gradients(on_host_only=not is_usable)
