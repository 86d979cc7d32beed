"""The largest micro-batch that fits on a machine, found by a few measurements more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.capacity.row import LargestMicroBatch
from splittune.search import Trial
from splittune.search.models.growth import growth_of
from splittune.split import BatchSplit
from splittune.split.shards import share_out

logger = logging.getLogger(__name__)

# It ends once the largest size that fits and the smallest that does not differ by a 100th part. A
# choice: growth along a line is met at the first or second try, and the third shows that no more fits.
PRECISION = 100
# Measurements at most. A choice: three until growth is known, and seven that halve a factor of 2 down
# to a 100th part.
MAX_RUNS = 10
# Bytes for each sample of a share: what is less is no growth, but noise of the fit.
LEAST_GROWTH = 1.0
# The first size is so many times the largest trial where growth is not known. A choice.
BLIND_FACTOR = 8
# Samples: beyond that hardly anybody goes, and listing which samples a micro-batch is made of begins
# to take as long as a step. A choice.
MAX_MICRO_BATCH = 2**16


def largest_micro_batch(
    trials: Sequence[Trial],
    measure: Callable[[BatchSplit], Measurement] | None,
    *,
    min_headroom_bytes: Sequence[int],
    min_shard_size: int = 0,
) -> LargestMicroBatch | None:
    """The largest micro-batch that fits in a step by itself; None where no trial fits.

    `trials` are a search's; `measure` judges a split by `min_headroom_bytes`, one for each card, and None forbids it:
    then the answer is the largest of the trials, a lower bound. The first size tried is where the growth of the
    trials' peaks puts the limit, with every card full; each run makes that growth known better, and what failed halves
    the gap. A job that itself refuses a size nobody asked for ends it, with a lower bound; so does `MAX_MICRO_BATCH`.

    Worked: two cards of 100 MiB that hold 20 MiB, and a sample takes 2 MiB. Trials at 8 samples put the limit at
    2 x 40 = 80; 80 fits, 81 does not, and 80 is the answer.
    """
    runs = [trial.measurement for trial in trials if _ran(trial.measurement)]
    fitting = [run for run in runs if run.outcome is Outcome.OK]
    if not fitting:
        return None
    best = max(fitting, key=lambda run: run.split.micro_batch_size).split
    if measure is None or best.micro_batch_size >= MAX_MICRO_BATCH:
        return LargestMicroBatch(split=best, is_measured=False)
    failed: list[BatchSplit] = []
    for _ in range(MAX_RUNS):
        keeps = best.micro_batch_size
        step = max(1, keeps // PRECISION)
        shards = _full_shards(runs, min_headroom_bytes, min_shard_size)
        fails = _least_failing(failed, shards)
        if fails - keeps <= step:
            break
        size = min(max(sum(shards), keeps + step), MAX_MICRO_BATCH)
        size = (keeps + fails) // 2 if size >= fails else size
        try:
            run = measure(_single_step(size, shards))
        except Exception as error:  # noqa: BLE001  the job's own, at a size that is ours
            logger.info("a micro-batch of %d samples was refused by the job: %s: %s", size, type(error).__name__, error)
            break
        if run.outcome is Outcome.OK:
            best = run.split
        else:
            failed.append(run.split)
        runs += [run] if _ran(run) else []
    keeps, fails = best.micro_batch_size, _least_failing(failed, best.shard_sizes)
    is_bracketed = fails <= MAX_MICRO_BATCH and fails - keeps <= max(1, keeps // PRECISION)
    return LargestMicroBatch(split=best, is_measured=is_bracketed)


def _least_failing(failed: Sequence[BatchSplit], shards: Sequence[int]) -> int:
    """The smallest size that must fail in these proportions: every card has as much as in a split that failed.

    Shares are rounded, so a sample less on each card counts as much. Worked: (10, 31) failed; in the proportions
    (1, 1) that is 60 samples, of which each card has 30.
    """
    total = sum(shards)
    least = MAX_MICRO_BATCH + 1
    for split in failed:
        pairs = [(lost, shard) for lost, shard in zip(split.shard_sizes, shards, strict=True) if lost]
        if all(shard for _, shard in pairs):
            least = min(least, max(-(-(lost - 1) * total // shard) for lost, shard in pairs))
    return least


def _ran(run: Measurement) -> bool:
    return bool(run.memory) and run.throughput is not None


def _single_step(num_samples: int, shards: Sequence[int]) -> BatchSplit:
    return BatchSplit(global_batch_size=num_samples, accumulation_steps=1, shard_sizes=share_out(num_samples, shards))


def _full_shards(runs: Sequence[Measurement], demands: Sequence[int], min_shard_size: int) -> tuple[int, ...]:
    """The shards at which every card is full, by the growth of the peaks; where none is known, far more than ran.

    With a bytes for each sample of a share, and on GPU 0 b for each of the micro-batch m, card i can take the run's
    share and ``(free_i - b (m - m_run)) / a`` more, b being 0 but on GPU 0; the sum of the shares is m.
    """
    grown, run = growth_of(runs), max(runs, key=lambda run: run.split.micro_batch_size)
    shards, micro_batch = run.split.shard_sizes, run.split.micro_batch_size
    per_sample, per_whole = grown.per_sample_bytes, grown.per_micro_batch_sample_bytes or 0.0
    if per_sample is None or per_sample < LEAST_GROWTH:
        return (BLIND_FACTOR * max(*shards, 1),) * len(shards)
    spare = [_spare_bytes(run, device, demand) for device, demand in enumerate(demands)]
    full = [shard + free / per_sample for shard, free in zip(shards, spare, strict=True)]
    ratio = per_whole / per_sample
    total = (sum(full) + ratio * micro_batch) / (1 + ratio)
    full[0] -= ratio * (total - micro_batch)
    if full[0] < min_shard_size and len(full) > 1:
        # GPU 0's outputs alone fill it: the others may take what leaves it its least share
        room = full[0] + ratio * (total - micro_batch) - min_shard_size
        others = min(sum(full[1:]), micro_batch + room / ratio - min_shard_size)
        part = others / max(sum(full[1:]), 1.0)
        full = [float(min_shard_size), *(part * shard for shard in full[1:])]
    return tuple(max(min_shard_size, int(shard)) for shard in full)


def _spare_bytes(run: Measurement, device: int, demand: int) -> int:
    """What a larger share may add to the card's peak in forward and backward before the headroom is used up.

    Besides what was left that is what only the update needed, and the gradients that waited where the run accumulated.
    """
    memory = run.memory[device]
    only_update = max(0, memory.peak_allocated_bytes - memory.batch_peak_bytes)
    waiting = 0
    if run.split.accumulation_steps > 1 and memory.single_step_peak_bytes is not None:
        waiting = max(0, memory.batch_peak_bytes - memory.single_step_peak_bytes)
    return memory.headroom_bytes - demand + only_update + waiting
