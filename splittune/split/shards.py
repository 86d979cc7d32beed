"""How the samples of one micro-batch are spread over the devices: pure integers."""

from __future__ import annotations

from collections.abc import Sequence

from splittune.errors import InvalidSplitError


def spread_evenly(num_samples: int, num_parts: int) -> tuple[int, ...]:
    """`num_samples` over `num_parts`, the larger parts first: ``(8, 3)`` gives ``(3, 3, 2)``."""
    share, remainder = divmod(num_samples, num_parts)
    return tuple(share + (part < remainder) for part in range(num_parts))


def shards_with_gpu0(micro_batch_size: int, num_devices: int, gpu0_bsz: int) -> tuple[int, ...]:
    """GPU 0 takes exactly `gpu0_bsz`; the others share the rest as evenly as integers allow.

    ``(13, 4, 3)`` gives ``(3, 4, 3, 3)``. GPU 0's share may be the smaller, equal or larger one.

    Raises:
        InvalidSplitError: the share is negative, exceeds the micro-batch, or leaves samples for nobody.
    """
    rest = micro_batch_size - gpu0_bsz
    num_others = num_devices - 1
    if num_devices < 1:
        raise InvalidSplitError(f"num_devices={num_devices}: expected at least 1 device.")
    if gpu0_bsz < 0 or rest < 0:
        raise InvalidSplitError(
            f"gpu0_bsz={gpu0_bsz} cannot be taken from a micro-batch of {micro_batch_size}: "
            f"expected 0 <= gpu0_bsz <= {micro_batch_size}. Choose a share in that range."
        )
    if num_others == 0:
        if rest:
            raise InvalidSplitError(
                f"gpu0_bsz={gpu0_bsz} of a micro-batch of {micro_batch_size} leaves {rest} samples, and there is "
                f"no other device to take them. On one device the share is the whole micro-batch: "
                f"use gpu0_bsz={micro_batch_size}, or more accumulation steps for a smaller micro-batch."
            )
        return (gpu0_bsz,)
    return (gpu0_bsz, *spread_evenly(rest, num_others))


def even_shards(micro_batch_size: int, num_devices: int) -> tuple[int, ...]:
    """The even split: ``(10, 4)`` gives ``(2, 3, 3, 2)``. A remainder never goes to GPU 0, which holds most."""
    return shards_with_gpu0(micro_batch_size, num_devices, micro_batch_size // max(num_devices, 1))


def fit_shards(micro_batch_size: int, shard_sizes: Sequence[int]) -> tuple[int, ...]:
    """Shard sizes for a micro-batch no larger than the one `shard_sizes` were tuned for.

    Each shard shrinks in proportion, rounded by largest remainder (Hamilton's method; ties go to the later
    device, away from GPU 0), so that none exceeds its tuned size: ``fit_shards(5, (2, 4, 4))`` gives ``(1, 2, 2)``.
    The wrapper, the search space, the planner and the samplers all call this one function.

    Raises:
        InvalidSplitError: the micro-batch is larger than the sum of the shards: somebody would exceed their share.
    """
    tuned = sum(shard_sizes)
    if micro_batch_size < 0:
        raise InvalidSplitError(f"a micro-batch of {micro_batch_size} samples: expected at least 0.")
    if micro_batch_size > tuned:
        arithmetic = " + ".join(map(str, shard_sizes))
        raise InvalidSplitError(
            f"a micro-batch of {micro_batch_size} samples does not fit the tuned shards {arithmetic} = {tuned}: "
            f"{micro_batch_size - tuned} more than every device's share together. Send at most {tuned} samples at a time "
            "(SplitConfig.micro_batches cuts a batch accordingly), or tune for a larger batch."
        )
    # A remainder above zero means the exact share lies below the tuned one, so rounding up never exceeds it.
    return share_out(micro_batch_size, shard_sizes)


def share_out(num_samples: int, shard_sizes: Sequence[int]) -> tuple[int, ...]:
    """`num_samples`, however many, in the proportions of `shard_sizes`; `fit_shards` says how it is rounded.

    ``share_out(5, (2, 4, 4))`` gives ``(1, 2, 2)``, ``share_out(30, (2, 4, 4))`` gives ``(6, 12, 12)``.
    """
    tuned = sum(shard_sizes)
    if tuned == 0:
        return tuple(shard_sizes)
    shares = [num_samples * shard // tuned for shard in shard_sizes]
    remainders = [num_samples * shard % tuned for shard in shard_sizes]
    by_remainder = sorted(range(len(shares)), key=lambda device: (-remainders[device], -device))
    for device in by_remainder[: num_samples - sum(shares)]:
        shares[device] += 1
    return tuple(shares)
