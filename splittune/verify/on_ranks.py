"""verify() on ranks: every rank trains its part of each batch by DistributedDataParallel, its card beside the plan."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from splittune.checks import checked_int
from splittune.config import SplitConfig
from splittune.config.in_ranks import signature_of
from splittune.errors import ConfigError, RanksError
from splittune.hardware import Device, DeviceMemory, Hardware, resolve_hardware
from splittune.hardware.resolve import names_virtual_gpus
from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.ring import bucket_sizes
from splittune.parallel.samples import batch_size_of, select_batch
from splittune.ranks.agreement import ARRIVAL_TIMEOUT_S, Fact, agree
from splittune.ranks.group import check_world_size, device_of_rank
from splittune.ranks.module import DistributedSplit
from splittune.ranks.share import RankShare
from splittune.report.progress import SilentCallback
from splittune.runners.in_process import InProcessRunner
from splittune.runners.ranks.control import DEFAULT_WAIT_S, ControlGroup
from splittune.runners.ranks.own_card import is_of_a_group
from splittune.runners.worker.errors import describe_error, rebuild_error
from splittune.split.rank_part import rank_part
from splittune.training import TrainingTask
from splittune.verify.result import Lack, Verification
from splittune.verify.run import DEFAULT_NUM_STEPS, Rehearsal, VerifyCallback
from splittune.verify.run_state import RunState, run_metered
from splittune.verify.training_loop import TrainingLoop


def verify_on_ranks(
    config: SplitConfig,
    make_task: Callable[[], TrainingTask],
    *,
    devices: str | Sequence[str | int | torch.device] | None = None,
    num_steps: int = DEFAULT_NUM_STEPS,
    callback: VerifyCallback | None = None,
    arrival_timeout_s: float = ARRIVAL_TIMEOUT_S,
    wait_s: float = DEFAULT_WAIT_S,
) -> Verification:
    """`verify` on the ranks of the process group that this process is in; a collective, with the same result on all.

    Every rank iterates the loader and keeps its own samples of each batch, the longest batches first; evaluations are
    each rank's own. Where one runs out of memory, it leaves the group of the steps, and the others end with it: at once
    on gloo, after `wait_s` at most on NCCL.

    Args:
        config: for "ddp", with a share for each rank.
        make_task: makes this rank's job, the same on all.
        devices: as in `SplitConfig.wrap`; virtual ones, of which rank r takes card r.
        num_steps: optimizer steps to train.
        callback: this rank's.
        arrival_timeout_s: seconds for ranks to arrive here.
        wait_s: seconds for which a rank waits for the others afterwards at most.

    Raises:
        ConfigError: config and job do not fit together, or ranks differ; on every rank.
        RanksError: a rank was lost; on those that are left.
    """
    num_steps = checked_int("num_steps", num_steps, at_least=1)
    rank = dist.get_rank()

    def prepare() -> tuple[tuple[TrainingTask, Hardware], list[Fact]]:
        check_world_size(config.split.num_devices, None)
        task = make_task()
        return (task, _card_of(config, task, devices, rank)), [
            Fact(name="the model", value=signature_of(task.model), advice="Build the same job on every rank."),
            Fact(name="num_steps", value=f"{num_steps}", advice="Call verify alike on every rank."),
        ]

    task, hardware = agree("verify", prepare, timeout_s=arrival_timeout_s)
    control = ControlGroup(wait_s=wait_s)
    runner = InProcessRunner(task, hardware)
    try:
        runner.snapshot()
        torch.manual_seed(config.seed)  # what a loader draws of it is then the same on all
        rehearsal = RankRehearsal(config, task, hardware, callback or SilentCallback())
        said = rehearsal.run_on_rank(num_steps, devices, wait_s)
        found = control.gather(said)
    finally:
        runner.close()
        control.close()
    return _together(config, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """How it went on one rank: plain data."""

    device: Device
    state: RunState
    notes: tuple[str, ...]
    is_modelled: bool
    lack: Lack | None
    error: dict[str, Any] | None
    """What it raised itself, and not because another rank had gone."""
    was_left: bool
    """Whether another rank had gone."""


class RankRehearsal(Rehearsal):
    """One rank's part of a rehearsal."""

    def run_on_rank(self, num_steps: int, devices: Any, wait_s: float) -> Said:
        """Train and evaluate, with the meter running; leave the group where that ended early."""
        self._group: dist.ProcessGroup | None = dist.new_group(timeout=timedelta(seconds=wait_s))
        self._devices = None if isinstance(self._hardware, VirtualHardware) else devices
        state, lack, error = RunState(), None, None
        try:
            self.longest = self._batches.find_longest(num_steps)
            lack = run_metered(self._hardware, lambda: self._train_until_left(num_steps, state), state)
        except BaseException as raised:  # noqa: BLE001  the others must not wait for this rank
            error = raised
        was_left = isinstance(error, RuntimeError) and is_of_a_group(error)
        said = Said(
            device=self._hardware.devices[0],
            state=state,
            notes=tuple(self._notes),
            is_modelled=self._hardware.is_modelled,
            lack=lack,
            error=None if error is None or was_left else describe_error(error),
            was_left=was_left,
        )
        del error  # its frames hold the group, which ends with its last reference: the other ranks then know
        gc.collect()
        group, self._group = self._group, None
        dist.destroy_process_group(group)
        return said

    def _train_until_left(self, num_steps: int, state: RunState) -> None:
        try:
            self._train(num_steps, state)
        except RuntimeError as error:
            if is_of_a_group(error):  # another rank's end; this one's card is as it is all the same
                state.read(self._hardware.memory())
            raise

    def _loop(self) -> TrainingLoop:
        return RankLoop(
            self._config, self._task, self._hardware, self.loss_fn, group=self._group, devices=self._devices
        )

    def _share_of(self, batch: Any) -> RankShare:
        split, rank = self._config.split, dist.get_rank()
        size = batch_size_of(batch, expected=split.global_batch_size)
        part = rank_part(size, split, rank)
        own = select_batch(batch, part.positions_to_load, batch_size=size)
        return RankShare(batch=own, sizes=part.sizes, micro_batch_sizes=part.micro_batch_sizes, num_samples=size)


class RankLoop(TrainingLoop):
    """The training loop of a rank."""

    def __init__(self, *args: Any, group: dist.ProcessGroup | None, devices: Any) -> None:
        self._group, self._devices = group, devices
        super().__init__(*args)

    def _wrapped(self, hardware: Hardware, loss_fn: Callable[..., Any] | None) -> Any:
        model = self._config.wrap(
            self._task.model, loss_fn, devices=self._devices, ddp_options={"process_group": self._group}
        )
        if isinstance(hardware, VirtualHardware):
            hardware.track(model)
            for num_bytes in hardware.wrapper_bytes:
                hardware.ledger.allocate(0, num_bytes)
        return model

    def step(self, batch: Any) -> float:
        """Take one optimizer step, and return the loss over the whole batch, of all ranks."""
        # a rank's own counts its share of the batch as often as there are ranks
        model = self._model
        assert isinstance(model, DistributedSplit), "a config for ranks wraps so"
        return model.sum_over_ranks(super().step(batch)) / model.num_ranks


def _card_of(config: SplitConfig, task: TrainingTask, devices: Any, rank: int) -> Hardware:
    """This rank's card, a virtual one beside DistributedDataParallel's buckets."""
    spec = devices if names_virtual_gpus(devices) else config.virtual_spec if devices is None else None
    if spec is None:
        return resolve_hardware([device_of_rank([each.torch_device for each in config.devices], devices, rank)])
    cards = resolve_hardware(spec)
    assert isinstance(cards, VirtualHardware), "no device of torch's is named"
    config.resolve(None, cards)  # as many as shares
    wanting = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
    return VirtualHardware(
        [cards.gpus[rank]],
        occupied_bytes=[cards.occupied_bytes[rank]],
        wrapper_bytes=bucket_sizes((one.dtype, one.nbytes) for one in wanting),
    )


def _together(config: SplitConfig, found: Sequence[Said]) -> Verification:
    """What all ranks said, as one result; the error of a rank on all of them."""
    for said in found:
        if said.error is not None:
            raise rebuild_error(said.error)
    lacks = [(rank, said.lack) for rank, said in enumerate(found) if said.lack is not None]
    if not lacks and any(said.was_left for said in found):
        raise RanksError("a rank was lost in a training step, and none says why. Look for an earlier error.")
    if not all(said.state.fullest for said in found):
        raise ConfigError(f"memory ran out before the first step: {lacks[0][1].message}" if lacks else "nothing ran.")
    memory: list[DeviceMemory] = [replace(said.state.fullest[0], device=rank) for rank, said in enumerate(found)]
    num_steps = min(len(said.state.losses) for said in found)
    return Verification(
        config=config,
        devices=tuple(replace(said.device, index=rank) for rank, said in enumerate(found)),
        memory=tuple(memory),
        training_peak_reserved_bytes=tuple(said.state.reserved_in["training"][0] or 0 for said in found),
        evaluation_peak_reserved_bytes=tuple(said.state.reserved_in["evaluation"][0] for said in found),
        losses=tuple(found[0].state.losses[:num_steps]),
        num_evaluations=min(said.state.num_evaluations for said in found),
        is_modelled=found[0].is_modelled,
        lack=replace(lacks[0][1], device=lacks[0][0]) if lacks else None,
        notes=tuple(dict.fromkeys(note for said in found for note in said.notes)),
    )
