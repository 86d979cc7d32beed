"""A split as Optuna's parameters, and back: accumulation steps, and shares of the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from splittune.search.candidates.table import micro_batches
from splittune.split import BatchSplit, SplitSpace, even_shards, shards_with_gpu0
from splittune.split.shards import fit_shards

if TYPE_CHECKING:
    import optuna

STEPS = "accumulation_steps"
GPU0_SHARE = "gpu0_share"


def share_names(space: SplitSpace) -> tuple[str, ...]:
    """The parameters beside the steps.

    ``("gpu0_share",)``, or ``("share_0", "share_1", ...)`` where every device has its own share;
    none for one device.
    """
    if space.num_devices == 1:
        return ()
    return (GPU0_SHARE,) if space.shares == "gpu0" else tuple(f"share_{i}" for i in range(space.num_devices))


def distributions_of(space: SplitSpace) -> dict[str, BaseDistribution]:
    """Optuna's distribution of each parameter.

    Steps go from 1 to the most that leave every device `min_shard_size`, evenly in logarithms;
    shares go from 0 to 1.
    """
    smallest = max(1, space.num_devices * space.min_shard_size)
    most = max(steps for steps, size in micro_batches(space) if size >= smallest)
    return {
        STEPS: IntDistribution(1, most, log=True),
        **{name: FloatDistribution(0.0, 1.0) for name in share_names(space)},
    }


def params_of(space: SplitSpace, split: BatchSplit) -> dict[str, int | float]:
    """The parameters of `split`; `split_of` reads them back equal.

    Example: 1 x (4 + 20 + 20 + 20) has ``gpu0_share`` 4 / 64.
    """
    size = split.micro_batch_size
    shares = [shard / size for shard in split.shard_sizes]
    return {STEPS: split.accumulation_steps, **dict(zip(share_names(space), shares, strict=False))}


def split_of(space: SplitSpace, params: Mapping[str, int | float]) -> BatchSplit:
    """The split of `space` nearest to any values within `distributions_of`.

    Of the steps with the same largest micro-batch it has the fewest. Shares of each device are taken
    in proportion.
    """
    steps, size = next((k, m) for k, m in reversed(list(micro_batches(space))) if k <= params[STEPS])
    n, smallest = space.num_devices, space.min_shard_size
    if n == 1:
        shards: tuple[int, ...] = (size,)
    elif space.shares == "gpu0":
        gpu0 = round(params[GPU0_SHARE] * size)
        shards = shards_with_gpu0(size, n, min(max(gpu0, smallest), size - (n - 1) * smallest))
    else:
        shards = _in_proportion(size, smallest, [params[name] for name in share_names(space)])
    return BatchSplit(global_batch_size=space.global_batch_size, accumulation_steps=steps, shard_sizes=shards)


def suggest_split(trial: optuna.Trial, space: SplitSpace) -> BatchSplit:
    """Ask a trial of one's own ``study.optimize`` for a split; tell the outcome with `report`."""
    params: dict[str, int | float] = {}
    for name, distribution in distributions_of(space).items():
        if isinstance(distribution, IntDistribution):
            params[name] = trial.suggest_int(name, distribution.low, distribution.high, log=True)
        else:
            params[name] = trial.suggest_float(name, 0.0, 1.0)
    return split_of(space, params)


def _in_proportion(size: int, smallest: int, shares: list[float]) -> tuple[int, ...]:
    """`size` samples in these proportions, `smallest` at least for each.

    What is to be shared beyond that goes by largest remainder.
    """
    wanted = [max(0.0, share * size - smallest) for share in shares]
    rest, fine = size - smallest * len(shares), 1 << 20
    if sum(wanted) <= 0:
        return even_shards(size, len(shares))
    # whole numbers far above the size stand for the proportions, which Hamilton's method then
    # rounds
    total = sum(wanted)
    weights = [round(fine * size * share / total) for share in wanted]
    return tuple(smallest + own for own in fit_shards(rest, weights))
