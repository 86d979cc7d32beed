"""Trials in a worker process: one that is killed, aborts or hangs ends that trial, and a fresh worker goes on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from splittune.checks import as_int, checked_int
from splittune.errors import ConfigError, WorkerError
from splittune.hardware import Device, DeviceMemory
from splittune.profiling.foretold import Foretold
from splittune.profiling.measurement import LossPlacement, Measurement, Outcome
from splittune.runners.base import JobFacts
from splittune.runners.worker.errors import rebuild_error
from splittune.runners.worker.link import WorkerEndedError, WorkerLink
from splittune.runners.worker.main import is_worker
from splittune.split import BatchSplit
from splittune.training import TrainingTask

logger = logging.getLogger(__name__)

DEFAULT_TRIAL_TIMEOUT_S = 300.0
# Building a job may mean reading a large model from a slow disk: the limit is there for what would never end.
START_TIMEOUT_S = 1800.0
MAX_ENDS_IN_A_ROW = 3
# A worker looks at the time itself, whenever its job calls torch; what hangs elsewhere, a backward pass say, is waited
# for so long beyond. A choice.
FORETELL_GRACE_S = 15.0
_EXPECTED = 'one without arguments that returns splittune.TrainingTask(model, loader, ...), or "FILE.py:FUNCTION"'

JobSource = str | Callable[[], TrainingTask]


class WorkerRunner:
    """Runs trials in a process of its own, which builds the job anew; this one touches no device, and needs none.

    A worker that ends or falls silent in a trial makes that trial `CRASHED`, and so does a CUDA error after which its
    process can use the devices no more. The next trial gets a fresh worker. An exception of the user's own is raised
    here, with the worker's traceback as its cause. The worker ends when it is closed, and with this process, however
    that ends.

    Args:
        job: ``"FILE.py:FUNCTION"``, or a module-level function without arguments; it returns a `TrainingTask`.
        devices: as `resolve_hardware` takes them.
        global_batch_size: in place of the task's own.
        autocast_dtype: for a task that has none.
        trial_timeout_s: how long a trial may take. Those in whole steps may take as many times that as they accumulate.

    Raises:
        ConfigError: the job cannot be built in another process, or the limit is not above 0.
    """

    def __init__(
        self,
        job: JobSource,
        devices: str | Sequence[str | int | torch.device] | None = None,
        *,
        global_batch_size: int | None = None,
        autocast_dtype: torch.dtype | None = None,
        trial_timeout_s: float = DEFAULT_TRIAL_TIMEOUT_S,
    ) -> None:
        if is_worker():
            raise ConfigError(
                'isolation="process" was asked for within a worker: the file that makes the job also tunes it when it '
                'is imported. Put that part under if __name__ == "__main__".'
            )
        given: object = trial_timeout_s
        if not (isinstance(given, Real) and float(given) > 0):
            raise ConfigError(f"trial_timeout_s is {given!r}: expected seconds above 0.")
        self._order: dict[str, Any] = {
            "job": _recipe_of(job),
            "devices": devices if devices is None or isinstance(devices, str) else [_plain(one) for one in devices],
            "autocast_dtype": None if autocast_dtype is None else str(autocast_dtype),
            "global_batch_size": global_batch_size
            if global_batch_size is None
            else checked_int("global_batch_size", global_batch_size, at_least=1),
        }
        self._trial_timeout_s = trial_timeout_s
        # a fresh worker starts where the first one did
        self._folder, self._path = str(Path.cwd()), [str(place) for place in sys.path]
        self._link: WorkerLink | None = None
        self._ends_in_a_row, self._last_end = 0, ""
        self._said_before: set[tuple[str, int, str]] = set()
        self._said: set[tuple[str, int, str]] = set()

    def open(self, placements: Sequence[LossPlacement]) -> JobFacts:
        """Start the first worker and have it build the job.

        Raises:
            WorkerError: it ended while doing so.
        """
        self._order["placements"] = list(placements)
        try:
            return self._start()
        except WorkerEndedError as end:
            self._bury(end)
            raise WorkerError(
                f"the worker could not make the job: {end}. Expected a TrainingTask. Make it by hand to see what is "
                "wrong, or with isolation none."
            ) from None

    def profiler(self, *, min_headroom_bytes: Sequence[int], loss_placement: LossPlacement) -> WorkerProfiler:
        return WorkerProfiler(self, min_headroom_bytes=min_headroom_bytes, loss_placement=loss_placement)

    def foretell(
        self,
        devices: Sequence[Device],
        memory: Sequence[DeviceMemory],
        asked: Sequence[tuple[BatchSplit, LossPlacement]],
        *,
        budget_s: float,
    ) -> Foretold:
        """What virtual cards say of these splits, told by the worker that is there; none is started for it.

        A worker that ends or falls silent meanwhile leaves them untold: the trials are over.
        """
        if self._link is None:
            return Foretold(why="the worker process had ended with a trial")
        try:
            self._link.send(
                {
                    "devices": [asdict(each) for each in devices],
                    "memory": [asdict(each) for each in memory],
                    "asked": [(asdict(split), placement) for split, placement in asked],
                    "budget_s": budget_s,
                }
            )
            self._receive(self._link, budget_s + FORETELL_GRACE_S, "to foretell")
            answer = self._receive(self._link, budget_s + FORETELL_GRACE_S, "to foretell")
        except WorkerEndedError as end:
            self._bury(end)
            return Foretold(why=str(end))
        if answer["kind"] == "raised":
            raise rebuild_error(answer["error"])
        return Foretold.from_dict(answer["foretold"])

    def close(self) -> None:
        """End the worker: one that waits for a trial may finish its own affairs, one in a trial is killed."""
        if self._link is not None:
            try:
                self._link.hang_up()
            finally:
                self._link = None

    def run_trial(self, split: BatchSplit, *, in_whole_steps: bool, **demands: Any) -> Measurement | str:
        """The worker's measurement of `split`; or, where it ended in the trial, how.

        Raises:
            WorkerError: it has ended three times in a row, and no trial was finished between.
        """
        link = self._begin({"split": asdict(split), "in_whole_steps": in_whole_steps, **demands})
        try:
            answer = self._receive(
                link, self._trial_timeout_s * (split.accumulation_steps if in_whole_steps else 1), "trial_timeout_s"
            )
        except WorkerEndedError as end:
            self._bury(end)
            logger.warning("%s crashed: %s.", split, end)
            return str(end)
        self._ends_in_a_row = 0
        if answer["kind"] == "raised":
            raise rebuild_error(answer["error"])
        return Measurement.from_dict(answer["measurement"])

    def _begin(self, request: dict[str, Any]) -> WorkerLink:
        """A worker that has begun with the request. One that ends before that is no fault of the split's."""
        while True:
            if self._ends_in_a_row == MAX_ENDS_IN_A_ROW:
                raise WorkerError(
                    f"the worker ended {MAX_ENDS_IN_A_ROW} times in a row without finishing a trial, at last so: "
                    f"{self._last_end}. The trials before that are kept. Run one training step by hand, or tune with "
                    "isolation none, to see what is wrong."
                )
            try:
                if self._link is None:
                    self._start()
                assert self._link is not None, "a worker that starts is linked"
                self._link.send(request)
                self._receive(self._link, self._trial_timeout_s, "trial_timeout_s")
            except WorkerEndedError as end:
                self._bury(end)
                logger.warning("between two trials %s. A fresh one goes on.", end)
            else:
                return self._link

    def _start(self) -> JobFacts:
        self._said_before |= self._said
        self._link = WorkerLink(self._folder, self._path)
        self._link.send(self._order | {"log_level": logging.getLogger().getEffectiveLevel()})
        answer = self._receive(self._link, START_TIMEOUT_S, "what building a job may take")
        if answer["kind"] == "raised":
            raise rebuild_error(answer["error"])
        return JobFacts.from_dict(answer["job"])

    def _receive(self, link: WorkerLink, limit_s: float, limit_name: str) -> dict[str, Any]:
        """The next answer of a worker that can go on."""
        message = link.receive(limit_s, limit_name, self._log)
        if message["kind"] == "spoilt":
            raise WorkerEndedError(f"the worker was ended after an error that spoils its devices: {message['text']}")
        return message

    def _log(self, name: str, level: int, text: str) -> None:
        """Log here what the worker logs; what an earlier one said, as it built the same job, is not said again."""
        if (name, level, text) not in self._said_before:
            logging.getLogger(name).log(level, "%s", text)
        self._said.add((name, level, text))

    def _bury(self, end: WorkerEndedError) -> None:
        self._ends_in_a_row, self._last_end = self._ends_in_a_row + 1, str(end)
        if self._link is not None:
            self._link.kill()
            self._link = None


def _recipe_of(job: JobSource) -> dict[str, str]:
    """How the worker finds the job: a file as the command line names it, or a module and a function."""
    if isinstance(job, str):
        return {"target": job}
    given: object = job
    if isinstance(given, nn.Module) or not callable(given):
        raise ConfigError(
            f"a worker process cannot be given {_described(given)}: a model that is here cannot be built there. Pass a "
            f"function instead, {_EXPECTED}."
        )
    module_name, name = getattr(given, "__module__", None), getattr(given, "__qualname__", "")
    module = sys.modules.get(module_name or "")
    if module_name is None or getattr(module, name, None) is not given:
        raise ConfigError(
            f"a worker process cannot find {given!r} by its name: expected a function at the top level of a module. A "
            f"lambda, a method or a function within another cannot be used; write one, {_EXPECTED}."
        )
    if module_name != "__main__":
        return {"module": module_name, "function": name}
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        raise ConfigError(
            f"{name} was written in an interactive session, where a worker process cannot find it: put it into a file, "
            'and pass "FILE.py:FUNCTION", or the function once it is imported from there.'
        )
    return {"target": f"{Path(file).resolve()}:{name}"}


def _described(given: object) -> str:
    return f"a {type(given).__name__}" if isinstance(given, nn.Module | TrainingTask) else repr(given)


def _plain(device: str | int | torch.device) -> str | int:
    index = as_int(device)
    return index if index is not None else str(device)


class WorkerProfiler:
    """Measures splits as `Profiler` does, in the worker."""

    def __init__(
        self, runner: WorkerRunner, *, min_headroom_bytes: Sequence[int], loss_placement: LossPlacement
    ) -> None:
        self._runner = runner
        self._min_headroom_bytes, self._loss_placement = list(min_headroom_bytes), loss_placement

    def measure(self, split: BatchSplit) -> Measurement:
        """Micro-steps and updates of `split`, timed apart."""
        return self._measure(split, in_whole_steps=False)

    def measure_whole_steps(self, split: BatchSplit) -> Measurement:
        """Complete optimizer steps of `split`."""
        return self._measure(split, in_whole_steps=True)

    def _measure(self, split: BatchSplit, *, in_whole_steps: bool) -> Measurement:
        measured = self._runner.run_trial(
            split,
            in_whole_steps=in_whole_steps,
            min_headroom_bytes=self._min_headroom_bytes,
            loss_placement=self._loss_placement,
        )
        if isinstance(measured, Measurement):
            return measured
        return Measurement(split=split, outcome=Outcome.CRASHED, loss_placement=self._loss_placement, message=measured)
