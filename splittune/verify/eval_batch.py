"""The largest batch that can be evaluated at once between training steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from splittune.config import SplitConfig
from splittune.hardware import Hardware
from splittune.split.largest import find_largest
from splittune.training import TrainingTask
from splittune.verify.batches import resized
from splittune.verify.result import Verification
from splittune.verify.run_state import RunState, run_metered
from splittune.verify.training_loop import TrainingLoop

# An evaluation batch of this many training micro-batches keeps any card busy, and one larger still
# gains nothing. A choice: twice as many would be two more trials.
MAX_EVAL_GROWTH = 64
# Training and evaluation take turns this often: what each leaves in the allocator's cache is in the
# way of the other. A choice: the second turn is the first that finds the other's leftovers.
NUM_ROUNDS = 2


def with_eval_batch_size(
    result: Verification,
    task: TrainingTask,
    hardware: Hardware,
    *,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    on_activity: Callable[[str], None],
) -> Verification:
    """`result`, its config with the largest evaluation batch that keeps the headroom, within 5 %.

    `batch` is the one to train and evaluate, cut or repeated to size. Batches of up to
    `MAX_EVAL_GROWTH` micro-batches are tried, and the global batch at least. Where the run was not
    verified, or nothing could be evaluated, the config stays without one and a note says so.
    """
    if not (result.is_verified and result.num_evaluations):
        reason = "nothing could be evaluated" if result.is_verified else "the run is not verified"
        return replace(result, notes=(*result.notes, f"No evaluation batch size was measured: {reason}."))

    def keeps_headroom(size: int) -> tuple[bool, tuple[int, ...]]:
        on_activity(f"evaluating {size} samples at once")
        return _try_evaluating(size, result.config, task, hardware, batch, loss_fn)

    split = result.config.split
    limit = max(MAX_EVAL_GROWTH * split.micro_batch_size, split.global_batch_size)
    capacities = [memory.total_bytes - memory.outside_bytes for memory in result.memory]
    found = find_largest(keeps_headroom, start=split.micro_batch_size, limit=limit, capacities=capacities)
    notes = list(result.notes)
    if found == 0:
        notes.append("No evaluation batch size was found: not even one sample at a time keeps the headroom.")
    elif found == limit:
        notes.append(f"Evaluation batches of more than {limit} samples were not tried.")
    return replace(result, config=replace(result.config, eval_batch_size=found or None), notes=tuple(notes))


def _try_evaluating(
    size: int,
    config: SplitConfig,
    task: TrainingTask,
    hardware: Hardware,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
) -> tuple[bool, tuple[int, ...]]:
    """Whether batches of `size` keep the headroom, and the evaluation's peak allocated bytes."""
    state = RunState()
    allocated: list[tuple[int, ...]] = []
    taking = replace(config, eval_batch_size=max(size, config.split.micro_batch_size))

    def act() -> None:
        training = TrainingLoop(taking, task, hardware, loss_fn)
        for _ in range(NUM_ROUNDS):
            training.step(batch)
            state.read(hardware.memory())
            hardware.reset_peaks()
            training.evaluate([resized(batch, size, expected=config.split.global_batch_size)] * 2)
            memory = hardware.memory()
            allocated.append(tuple(each.peak_allocated_bytes for each in memory))
            state.read(memory)

    lack = run_metered(hardware, act, state)
    demands = zip(config.min_headroom_bytes, state.fullest, strict=True)
    keeps = lack is None and all(memory.headroom_bytes >= demanded for demanded, memory in demands)
    return keeps, allocated[-1] if lack is None else ()
