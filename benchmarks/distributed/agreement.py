"""What an agreement of ranks costs a trial: an order given, and every answer brought together, with nothing to do."""

from __future__ import annotations

import time

import torch.distributed as dist

from splittune import BatchSplit, Measurement, Outcome
from splittune.hardware import DeviceMemory
from splittune.runners.ranks.control import ControlGroup
from splittune.runners.ranks.crew import Crew, follow
from splittune.runners.ranks.orders import Answer, Order, Probe

NUM_TRIALS = 200
# Agreements before those that are timed: the first connects the ranks. A choice.
NUM_WARM_UP = 20
# Seconds for an agreement that are hoped for: a trial takes hundreds of times as long. A choice.
BOUND_S = 0.010


class Idle:
    """Answers at once, with as much as a rank has to say of a noisy trial."""

    def __init__(self) -> None:
        memory = DeviceMemory(
            device=0,
            total_bytes=24 << 30,
            outside_bytes=1 << 30,
            peak_allocated_bytes=20 << 30,
            peak_reserved_bytes=21 << 30,
        )
        split = BatchSplit(global_batch_size=48, accumulation_steps=3, shard_sizes=(16,))
        times_s = tuple(0.1 + 1e-6 * number for number in range(20))
        self._answer = Answer(
            measurement=Measurement(
                split=split,
                outcome=Outcome.OK,
                micro_step_times_s=3 * times_s,
                update_times_s=times_s,
                memory=(memory,),
                device_busy_s=(0.1,),
            )
        )

    def obey(self, order: Order) -> Answer:
        return self._answer

    def close(self) -> None: ...


def time_on_rank() -> list[float]:
    """Seconds of each agreement, as rank 0 has it; nothing on the others."""
    control, num_ranks = ControlGroup(), dist.get_world_size()
    try:
        if dist.get_rank():
            follow(control, Idle())
            return []
        crew, times_s = Crew(control, Idle()), []
        order = Probe(shares=(16,) * num_ranks, accumulation_steps=3, in_full=(False,) * num_ranks)
        for _ in range(NUM_WARM_UP + NUM_TRIALS):
            start = time.perf_counter()
            answers = crew.obey(order)
            times_s.append(time.perf_counter() - start)
            assert len(answers) == num_ranks
        crew.dismiss()
        return times_s[NUM_WARM_UP:]
    finally:
        control.close()
