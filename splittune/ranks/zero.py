"""What torch's ZeroRedundancyOptimizer leaves of the optimizer state on every rank.

It keeps each parameter's state on one rank only, and deals out whole parameters: one that holds
most of the state limits what is freed. Parameters and gradients stay on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from splittune.checks import checked_int
from splittune.errors import ConfigError
from splittune.parallel.nesting import tensors_of
from splittune.units import format_bytes


def zero_partition(
    parameter_sizes: Sequence[int], num_ranks: int, *, group_lengths: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """The positions of each rank's parameters: the largest first, each to who has fewest elements.

    Of ranks that have as many, the first takes it; so do, of parameters as large, those given
    first. Groups follow one another. Worked: ``zero_partition([4, 9, 2, 3], 2)`` gives
    ``((1,), (0, 3, 2))``: the 9 goes to rank 0, then 4, 3 and 2 to rank 1, which has 4 + 3 = 7
    before the 2.

    Args:
        parameter_sizes: elements of each parameter, as the optimizer was given them.
        num_ranks: among whom they are dealt out.
        group_lengths: parameters in each of the optimizer's groups; None for one group.

    Raises:
        ConfigError: no rank, or groups that do not sum to the parameters.
    """
    lengths = [len(parameter_sizes)] if group_lengths is None else list(group_lengths)
    if sum(lengths) != len(parameter_sizes):
        raise ConfigError(
            f"groups of {' + '.join(map(str, lengths)) or 'nothing'} = {sum(lengths)} parameters: expected "
            f"{len(parameter_sizes)}, as many as have a size."
        )
    taken = [0] * checked_int("num_ranks", num_ranks, at_least=1)
    parts: list[list[int]] = [[] for _ in taken]
    start = 0
    for length in lengths:
        group = range(start, start + length)
        for position in sorted(group, key=lambda each: -parameter_sizes[each]):
            rank = taken.index(min(taken))
            parts[rank].append(position)
            taken[rank] += parameter_sizes[position]
        start += length
    return tuple(map(tuple, parts))


def zero_state_bytes(
    state_bytes: Sequence[int],
    parameter_sizes: Sequence[int],
    num_ranks: int,
    *,
    group_lengths: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The optimizer state that each rank keeps, from that of each parameter.

    Worked: two parameters of 9 and 4 elements, with 72 and 32 bytes of state, on 2 ranks: (72, 32).
    """
    parts = zero_partition(parameter_sizes, num_ranks, group_lengths=group_lengths)
    return tuple(sum(state_bytes[position] for position in part) for part in parts)


def state_bytes_of(optimizer: Optimizer) -> tuple[int, ...]:
    """Bytes of state that `optimizer` holds for each parameter, on that one's device.

    0 before the first step. Of a ZeroRedundancyOptimizer those of this rank: 0 for what another
    one keeps.
    """
    # it holds what was dealt to this rank in an optimizer of its own
    holder: Any = getattr(optimizer, "optim", optimizer) if _is_zero(optimizer) else optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return tuple(
        sum(
            tensor.numel() * tensor.element_size()
            for _, tensor in tensors_of(dict(holder.state[parameter]) if parameter in holder.state else {})
            if tensor.device == parameter.device
        )
        for parameter in parameters
    )


def describe_zero(
    state_bytes: Sequence[int],
    parameter_sizes: Sequence[int],
    num_ranks: int,
    *,
    group_lengths: Sequence[int] | None = None,
) -> str:
    """What it would free on every card, in a sentence; empty where it would free nothing.

    Worked: state of 3.00 GiB and 1.00 GiB on 2 ranks gives "ZeroRedundancyOptimizer would keep 1.00
    to 3.00 GiB of the 4.00 GiB of optimizer state on each of 2 cards (modelled): it frees at least
    1.00 GiB, for it deals out whole parameters, and the largest has 3.00 GiB."
    """
    total = sum(state_bytes)
    kept = zero_state_bytes(state_bytes, parameter_sizes, num_ranks, group_lengths=group_lengths)
    freed = total - max(kept)
    if not freed:
        return ""
    fewest, most = format_bytes(min(kept)), format_bytes(max(kept))
    if fewest == most:
        span = most
    else:
        span = f"{fewest.split()[0]} to {most}" if fewest.split()[1] == most.split()[1] else f"{fewest} to {most}"
    return (
        f"ZeroRedundancyOptimizer would keep {span} of the {format_bytes(total)} of optimizer state on each of "
        f"{num_ranks} cards (modelled): it frees at least {format_bytes(freed)}, for it deals out whole parameters, "
        f"and the largest has {format_bytes(max(state_bytes))}."
    )


def _is_zero(optimizer: Optimizer) -> bool:
    # whoever has one has imported it; importing it here would take a second, and warn
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer)
