"""The batch-size finders people use, run as they are on virtual or real GPUs: Accelerate's, Lightning's, none.

Each looks for the largest micro-batch under the even split. Where it finds m samples, training
keeps its global batch B with ``k = ceil(B / m)`` accumulation steps, and that split is measured by
splittune's own `Profiler`, as every split is.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim
from torch.utils.data import DataLoader

from benchmarks.jobs.workloads import Workload
from splittune.hardware import Hardware, is_out_of_memory
from splittune.parallel import BalancedDataParallel, accumulate
from splittune.profiling.measurement import Measurement
from splittune.profiling.profiler import Profiler
from splittune.split import BatchSplit
from splittune.training import SampleBatch, Snapshot, TrainingTask, read_batches

# Lightning's default, for Accelerate as well: the first step makes the optimizer's state, which the second finds there.
STEPS_PER_TRIAL = 3
LIGHTNING_FIRST_SIZE = 2  # Lightning's default, too

Job = Workload | TrainingTask


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """What a peer ran to find its micro-batch, counted around the steps themselves, and how fast its answer trains."""

    peer: str
    global_batch_size: int
    batch_sizes: tuple[int, ...]
    """The micro-batch of each trial, in order."""
    num_micro_steps: int
    """Forward passes that were begun, with their backward passes; those that ran out of memory count."""
    num_ooms: int
    """Trials that ended because a GPU ran out of memory."""
    elapsed_s: float
    """Of the wall clock, for the finding alone; on virtual GPUs the CPU's own."""
    micro_batch_size: int | None
    """The answer, at most the global batch; None where the peer found nothing that fits."""
    measurement: Measurement | None
    """The `Profiler`'s trial of `split_for` that answer: its outcome says whether training under it fits."""

    @property
    def num_trials(self) -> int:
        return len(self.batch_sizes)

    @property
    def throughput(self) -> float | None:
        """Samples per second under the answer; None where there is none, or it does not fit."""
        return None if self.measurement is None else self.measurement.throughput


def even_untuned(job: Job, hardware: Hardware, *, min_headroom_bytes: int | Sequence[int] = 0) -> PeerResult:
    """No search: the whole batch at once, evenly. The measurement's outcome says if that runs out of memory."""
    return _run(job, hardware, "even, untuned", lambda trials: trials.global_batch_size, min_headroom_bytes)


def accelerate_executable(job: Job, hardware: Hardware, *, min_headroom_bytes: int | Sequence[int] = 0) -> PeerResult:
    """Accelerate's `find_executable_batch_size`, from the global batch down: x 0.9 for every OOM.

    It runs the whole training function again for each size. That function accumulates ``ceil(B / m)`` micro-batches of
    at most m samples, evenly split, and stops after three optimizer steps.

    Raises:
        ModuleNotFoundError: accelerate is not installed; the message says how to install it.
    """
    find_executable_batch_size = _import("accelerate.utils", "accelerate").find_executable_batch_size

    def find(trials: _Trials) -> int | None:
        @find_executable_batch_size(starting_batch_size=trials.global_batch_size)  # type: ignore[untyped-decorator]
        def train(batch_size: int) -> int:
            trials.train_from_scratch(batch_size)
            return batch_size

        try:
            found: int = train()
        except RuntimeError as error:
            if "reached zero" not in str(error):
                raise
            return None
        return found

    return _run(job, hardware, "Accelerate", find, min_headroom_bytes)


def lightning_power(job: Job, hardware: Hardware, *, min_headroom_bytes: int | Sequence[int] = 0) -> PeerResult:
    """Lightning's batch size finder in its default mode: x 2 from 2 until an OOM, then back by half.

    A trial is three optimizer steps of one micro-batch each, evenly split: Lightning does not know of the accumulation
    that follows, nor of the global batch B. Neither of its own limits does for B: ``max_val`` is returned without being
    run, and a size that fails although it reaches the data set's length is returned (power) or run again for ever
    (binsearch). So the data set has 2 B samples, no micro-batch more than B, and once B fits the search is ended.

    Raises:
        ModuleNotFoundError: pytorch-lightning is not installed; the message says how to install it.
    """
    return _lightning(job, hardware, "power", min_headroom_bytes)


def lightning_binsearch(job: Job, hardware: Hardware, *, min_headroom_bytes: int | Sequence[int] = 0) -> PeerResult:
    """As `lightning_power`, then bisection up to the OOM, less 5 % of the size found: Lightning's default."""
    return _lightning(job, hardware, "binsearch", min_headroom_bytes)


PEERS: tuple[Callable[..., PeerResult], ...] = (
    even_untuned,
    accelerate_executable,
    lightning_power,
    lightning_binsearch,
)


def split_for(global_batch_size: int, micro_batch_size: int, num_devices: int) -> BatchSplit:
    """The even split that keeps the global batch B with micro-batches of at most m: ``k = ceil(B / m)``.

    Example: B = 64 and m = 24 on two devices give ``64 = 3 x (11 + 11)``.
    """
    accumulation_steps = -(-global_batch_size // micro_batch_size)
    return BatchSplit.even(
        global_batch_size=global_batch_size, accumulation_steps=accumulation_steps, num_devices=num_devices
    )


class _Trials:
    """What a peer's trials are made of, and the count of what they run."""

    def __init__(
        self, task: TrainingTask, hardware: Hardware, samples: SampleBatch, snapshot: Snapshot, global_batch_size: int
    ) -> None:
        self.task, self.samples, self.global_batch_size = task, samples, global_batch_size
        self._hardware, self._snapshot = hardware, snapshot
        self.batch_sizes: list[int] = []
        self.num_micro_steps = 0
        self.num_ooms = 0

    def start(self, batch_size: int) -> BalancedDataParallel:
        """Count a trial of this size; the model, evenly split for it."""
        self.batch_sizes.append(batch_size)
        # Peers collect garbage and empty CUDA's cache after an OOM: on virtual GPUs this does. It also drops what a
        # backward pass that failed leaves with the CPU's autograd, which on CUDA's threads goes by itself.
        self._hardware.recover()
        with self.counting_ooms():
            model = self._hardware.wrap(self.task.model, split_for(batch_size, batch_size, len(self._hardware.devices)))
        if not self.task.model.training:
            model.train()
        return model

    def make_optimizer(self) -> optim.Optimizer:
        optimizer = self.task.make_optimizer()
        self._hardware.prepare_optimizer(optimizer)
        return optimizer

    def loss_of(self, model: BalancedDataParallel, batch: Any) -> tuple[Tensor, Any]:
        """Count a micro-step; its loss, and what a loop has in its variables besides."""
        self.num_micro_steps += 1
        return self.task.loss_of(model, batch)

    @contextmanager
    def counting_ooms(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.num_ooms += is_out_of_memory(error, self._hardware.free_bytes)
            raise

    def train_from_scratch(self, batch_size: int) -> None:
        """A training function: fresh weights and optimizer, steps in micro-batches of this size."""
        self._snapshot.restore()
        model, optimizer = self.start(batch_size), self.make_optimizer()
        num_whole, rest = divmod(self.global_batch_size, batch_size)
        sizes = [batch_size] * num_whole + [rest] * (rest > 0)
        for _ in range(STEPS_PER_TRIAL):
            with self.counting_ooms():
                for size in accumulate(model, sizes):
                    # loops keep the last loss, output and targets in their variables while the next forward runs
                    latest = self.loss_of(model, self.samples.micro_batch(size))
                    (latest[0] * (size / self.global_batch_size)).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)


def _run(
    job: Job,
    hardware: Hardware,
    peer: str,
    find: Callable[[_Trials], int | None],
    min_headroom_bytes: int | Sequence[int],
) -> PeerResult:
    """Have `find` look for a micro-batch and measure its answer; the job is left as it was found."""
    task = job if isinstance(job, TrainingTask) else TrainingTask(**job._asdict())
    snapshot = task.snapshot()
    try:
        samples = read_batches(task.loader)
        global_batch_size = task.global_batch_size or samples.loader_batch_size
        trials = _Trials(task, hardware, samples, snapshot, global_batch_size)
        started_s = time.perf_counter()
        with hardware.metered() if hardware.is_modelled else nullcontext():  # peers do not count how long cards work
            found = find(trials)
        elapsed_s = time.perf_counter() - started_s
        answer = None if found is None else min(found, global_batch_size)
        hardware.recover()
        snapshot.restore()
        measurement = None
        if answer is not None:
            profiler = Profiler(task, hardware, samples, snapshot, min_headroom_bytes=min_headroom_bytes)
            measurement = profiler.measure(split_for(global_batch_size, answer, len(hardware.devices)))
    finally:
        try:
            hardware.recover()
        finally:
            snapshot.restore()
            snapshot.restore_gradients()
    return PeerResult(
        peer=peer,
        global_batch_size=global_batch_size,
        batch_sizes=tuple(trials.batch_sizes),
        num_micro_steps=trials.num_micro_steps,
        num_ooms=trials.num_ooms,
        elapsed_s=elapsed_s,
        micro_batch_size=answer,
        measurement=measurement,
    )


class _SearchIsOverError(Exception):
    """Lightning asks for batches of 0 samples, having halved one, or of 2 B and more, for B fits: the answer."""

    def __init__(self, micro_batch_size: int | None) -> None:
        super().__init__(micro_batch_size)
        self.micro_batch_size = micro_batch_size


def _lightning(job: Job, hardware: Hardware, mode: str, min_headroom_bytes: int | Sequence[int]) -> PeerResult:
    lightning = _import("pytorch_lightning", "pytorch-lightning")
    tuning = _import("pytorch_lightning.tuner", "pytorch-lightning")

    def find(trials: _Trials) -> int | None:
        with _quiet_lightning(), tempfile.TemporaryDirectory() as folder:
            trainer = lightning.Trainer(
                **_place_of(hardware),
                max_epochs=-1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            module = _lightning_module(lightning.LightningModule, trials)
            try:
                found: int | None = tuning.Tuner(trainer).scale_batch_size(
                    module, mode=mode, steps_per_trial=STEPS_PER_TRIAL, init_val=module.batch_size
                )
            except _SearchIsOverError as end:
                return end.micro_batch_size
            return found

    return _run(job, hardware, f"Lightning, {mode}", find, min_headroom_bytes)


def _place_of(hardware: Hardware) -> dict[str, Any]:
    """Where Lightning puts the module and its batches: on 'GPU 0', as the wrapper does; on the CPU for virtual GPUs."""
    device = torch.device(hardware.devices[0].torch_device)
    return {"accelerator": device.type, "devices": [device.index] if device.type == "cuda" else 1}


def _lightning_module(base: Any, trials: _Trials) -> Any:
    """The job as Lightning takes it, with a `batch_size` for it to change; every run of its loop is one trial."""
    most = trials.global_batch_size

    class EvenlySplit(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = trials.task.model
            self.batch_size = min(LIGHTNING_FIRST_SIZE, most)
            # in a list, for the wrapper is no submodule: it changes with the batch size and has no state of its own
            self.wrapped: list[BalancedDataParallel] = []

        def train_dataloader(self) -> DataLoader[Any]:
            if self.batch_size < 1:
                raise _SearchIsOverError(None)
            if self.batch_size >= 2 * most:  # sizes double from below B, so one from B up has fitted
                raise _SearchIsOverError(most)
            return DataLoader(
                range(2 * most),  # type: ignore[arg-type]
                batch_size=min(self.batch_size, most),
                collate_fn=lambda indices: trials.samples.micro_batch(len(indices)),
            )

        def configure_optimizers(self) -> optim.Optimizer:
            return trials.make_optimizer()

        def on_train_start(self) -> None:
            self.wrapped.clear()
            self.wrapped.append(trials.start(min(self.batch_size, most)))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return trials.loss_of(self.wrapped[0], batch)[0]

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            with trials.counting_ooms():  # Lightning runs forward, backward and the update in here
                super().optimizer_step(*args, **kwargs)

    return EvenlySplit()


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Lightning's advice on loaders, loggers and products is not shown inside, and DataLoader is afterwards as it was.

    It patches torch's DataLoader while it looks for loaders, and leaves it so where an exception passes through.
    """
    loggers = {name: logging.getLogger(name).level for name in ("pytorch_lightning", "lightning_fabric")}
    own = dict(vars(DataLoader))
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric")
            yield
    finally:
        for name, level in loggers.items():
            logging.getLogger(name).setLevel(level)
        for name, value in list(vars(DataLoader).items()):
            if name not in own:
                delattr(DataLoader, name)
            elif value is not own[name]:
                setattr(DataLoader, name, own[name])


def _import(module: str, distribution: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this peer comes with {distribution}, which is not installed: pip install {distribution}", name=error.name
        ) from error
