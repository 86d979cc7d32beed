"""How the samples of one micro-batch are spread over the devices: pure integers."""

from __future__ import annotations

from collections.abc import Sequence

from splittune.checks import as_int
from splittune.errors import InvalidSplitError


def spread_evenly(num_samples: int, num_parts: int) -> tuple[int, ...]:
    """`num_samples` over `num_parts`, the larger parts first: ``(8, 3)`` gives ``(3, 3, 2)``."""
    share, remainder = divmod(num_samples, num_parts)
    return tuple(share + (part < remainder) for part in range(num_parts))


def shards_with_gpu0(micro_batch_size: int, num_devices: int, gpu0_bsz: int) -> tuple[int, ...]:
    """GPU 0 takes exactly `gpu0_bsz`; the others share the rest as evenly as integers allow.

    ``(13, 4, 3)`` gives ``(3, 4, 3, 3)``. GPU 0's share may be the smaller, equal or larger one.

    Raises:
        InvalidSplitError: the share is negative, exceeds the micro-batch, or leaves samples for
            nobody.
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
    """The even split: ``(10, 4)`` gives ``(2, 3, 3, 2)``. A remainder never goes to GPU 0."""
    return shards_with_gpu0(micro_batch_size, num_devices, micro_batch_size // max(num_devices, 1))


def fit_shards(micro_batch_size: int, shard_sizes: Sequence[int], min_shard_size: int = 1) -> tuple[int, ...]:
    """Shard sizes for a micro-batch no larger than the one `shard_sizes` were tuned for.

    Each shard shrinks in proportion, rounded by largest remainder (Hamilton's method), so none
    exceeds its tuned size. Ties go to the later device, away from GPU 0. Example:
    ``fit_shards(5, (2, 4, 4))`` gives ``(1, 2, 2)``.

    Where that leaves a device fewer than `min_shard_size` samples, as BatchNorm cannot train on
    one, the micro-batch goes to the most devices that all get as many, those with the largest
    shares: ``fit_shards(5, (2, 4, 4), 2)`` gives ``(0, 2, 3)``. Where no choice of devices does it,
    the minimum gives way: ``fit_shards(3, (2, 2), 2)`` is ``(1, 2)``.

    Raises:
        InvalidSplitError: the micro-batch is larger than the sum of the shards: somebody would
            exceed their share.
    """
    tuned = sum(shard_sizes)
    if micro_batch_size < 0:
        raise InvalidSplitError(f"a micro-batch of {micro_batch_size} samples: expected at least 0.")
    if micro_batch_size > tuned:
        arithmetic = " + ".join(map(str, shard_sizes))
        raise InvalidSplitError(
            f"a micro-batch of {micro_batch_size} samples does not fit the tuned shards {arithmetic} = {tuned}: "
            f"{micro_batch_size - tuned} more than every device's share together. Send at most {tuned} samples at a "
            "time (SplitConfig.micro_batches cuts a batch accordingly), or tune for a larger batch."
        )
    # A remainder above zero means the exact share lies below the tuned one, so rounding up never
    # exceeds it.
    shares = share_out(micro_batch_size, shard_sizes)
    if all(share == 0 or share >= min_shard_size for share in shares):
        return shares
    return _on_fewer_devices(micro_batch_size, shard_sizes, min_shard_size) or shares


def _on_fewer_devices(micro_batch_size: int, shard_sizes: Sequence[int], min_shard_size: int) -> tuple[int, ...] | None:
    """The micro-batch on the most devices that can each have `min_shard_size`; None where no number of them can.

    Of as many devices those with the largest shares hold most: if they cannot hold the micro-batch, no others can.
    """
    by_size = sorted(range(len(shard_sizes)), key=lambda device: (-shard_sizes[device], -device))
    for count in range(len(by_size), 0, -1):
        rest = micro_batch_size - count * min_shard_size
        spare = [shard_sizes[device] - min_shard_size for device in by_size[:count]]
        if rest < 0 or min(spare) < 0 or rest > sum(spare):
            continue
        chosen = sorted(by_size[:count])
        extra = share_out(rest, [shard_sizes[device] - min_shard_size for device in chosen])
        shares = dict(zip(chosen, extra, strict=True))
        return tuple(min_shard_size + shares[d] if d in shares else 0 for d in range(len(shard_sizes)))
    return None


def shards_for(
    batch_size: int,
    *,
    num_devices: int,
    gpu0_bsz: int | None = None,
    shard_sizes: Sequence[int] | None = None,
    largest_trained: int = 0,
    eval_batch_size: int | None = None,
    trains: bool = True,
    records: bool = True,
    min_shard_size: int = 1,
) -> tuple[int, ...]:
    """Samples for each device: where a wrapper's micro-batch meets the shares it was given.

    With every device's share, ``shard_sizes=(2, 4, 4)``:

    - up to 10 samples shrink every shard, see `fit_shards`: 5 give ``(1, 2, 2)``;
    - more are refused, save up to `eval_batch_size` without gradients: 30 give ``(6, 12, 12)``.

    With GPU 0's, ``gpu0_bsz=3`` on 4 devices:

    - the largest micro-batch trained on gives GPU 0 exactly that: 13 give ``(3, 4, 3, 3)``;
    - a smaller one then shrinks those: 6 after 13 give ``(1, 2, 1, 2)``;
    - one below `gpu0_bsz`, with none trained on, is refused in training, and spread evenly
      otherwise: 2 give ``(0, 1, 1, 0)``.

    Args:
        batch_size: samples of this micro-batch.
        num_devices: as many shards are given.
        gpu0_bsz: GPU 0's share; None when `shard_sizes` is given.
        shard_sizes: every device's share of the largest micro-batch; None when `gpu0_bsz` is given.
        largest_trained: samples of the largest micro-batch trained on so far, 0 before the first.
        eval_batch_size: with `shard_sizes`, what may be taken at once without gradients.
        trains: whether this micro-batch is trained on.
        records: whether gradients are recorded.
        min_shard_size: samples that every device needs which gets any: 2 where BatchNorm trains.

    Raises:
        InvalidSplitError: somebody would get more, or GPU 0 less, than the share it was given.
    """
    if shard_sizes is not None:
        if eval_batch_size is None or batch_size <= sum(shard_sizes):
            return fit_shards(batch_size, shard_sizes, min_shard_size)
        return _grown_shards(batch_size, shard_sizes, eval_batch_size, records=records)
    if gpu0_bsz is None:
        raise InvalidSplitError("got neither gpu0_bsz nor shard_sizes: expected one of them.")
    if batch_size == 0:
        return (0,) * num_devices
    if batch_size <= largest_trained:
        return fit_shards(batch_size, shards_with_gpu0(largest_trained, num_devices, gpu0_bsz), min_shard_size)
    if batch_size >= gpu0_bsz:
        return shards_with_gpu0(batch_size, num_devices, gpu0_bsz)
    if trains:
        raise InvalidSplitError(
            f"gpu0_bsz={gpu0_bsz} exceeds the first micro-batch, of {batch_size} samples, by "
            f"{gpu0_bsz - batch_size}. Use gpu0_bsz <= {batch_size}, or a larger batch."
        )
    return even_shards(batch_size, num_devices)


def _grown_shards(
    batch_size: int, shard_sizes: Sequence[int], eval_batch_size: int, *, records: bool
) -> tuple[int, ...]:
    """The shards of an evaluation batch larger than any micro-batch trained on."""
    if batch_size <= eval_batch_size and not records:
        return share_out(batch_size, shard_sizes)
    raise InvalidSplitError(
        f"a batch of {batch_size} samples: expected at most {sum(shard_sizes)} in training (the shards are "
        f"{tuple(shard_sizes)}), and at most eval_batch_size={eval_batch_size} in evaluation, under torch.no_grad(). "
        + ("Use SplitConfig.micro_batches, or no_grad()." if records else "Use a smaller batch.")
    )


def share_out(num_samples: int, shard_sizes: Sequence[int]) -> tuple[int, ...]:
    """`num_samples`, however many, in the proportions of `shard_sizes`, rounded as by `fit_shards`.

    ``share_out(5, (2, 4, 4))`` gives ``(1, 2, 2)``, ``share_out(30, (2, 4, 4))`` gives ``(6, 12,
    12)``.
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


def checked_shares(
    gpu0_bsz: int | None, shard_sizes: Sequence[int] | None, num_devices: int
) -> tuple[int | None, tuple[int, ...] | None]:
    """GPU 0's share, or every device's, as given to a wrapper; integers of NumPy's become Python's.

    Raises:
        InvalidSplitError: both or none is given, a share is no integer of at least 0, or there are
            not as many shares as devices.
    """
    if (gpu0_bsz is None) == (shard_sizes is None):
        raise InvalidSplitError(
            f"got gpu0_bsz={gpu0_bsz} and shard_sizes={shard_sizes}: expected one of them. "
            "gpu0_bsz gives GPU 0's share, shard_sizes every device's."
        )
    if shard_sizes is None:
        share = _as_count(gpu0_bsz)
        if share is None:
            raise InvalidSplitError(f"gpu0_bsz is {gpu0_bsz!r}: expected an integer of at least 0, GPU 0's samples.")
        if share == 0 and num_devices == 1:
            raise InvalidSplitError("gpu0_bsz=0 on one device leaves the whole batch to nobody: use a larger share.")
        return share, None
    given = tuple(shard_sizes)
    sizes = tuple(size for size in map(_as_count, given) if size is not None)
    if len(sizes) != len(given) or sum(sizes) == 0:
        raise InvalidSplitError(f"shard_sizes is {given}: expected integers of at least 0, not all 0.")
    if len(sizes) != num_devices:
        raise InvalidSplitError(
            f"shard_sizes={sizes} has {len(sizes)} shares for {num_devices} devices: expected one for each device."
        )
    return None, sizes


def _as_count(value: object) -> int | None:
    """`value` as an int of at least 0; None where it is none, as True and 2.0 are not."""
    count = as_int(value)
    return count if count is not None and count >= 0 else None
