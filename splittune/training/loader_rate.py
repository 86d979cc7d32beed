"""How many samples a second the loader gives, and what to set where that is less than the cards train."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader

from splittune.parallel.samples import batch_size_of
from splittune.training.batches import batch_size_given

MEASURED_S = 1.0
MAX_BATCHES_TIMED = 100


def measure_loader_rate(
    loader: Iterable[Any], *, measured_s: float = MEASURED_S, clock: Callable[[], float] = time.perf_counter
) -> float | None:
    """Samples a second that `loader` gives to somebody who only reads; None if it has too few batches to tell.

    Every worker's first batch is left out: the workers start with it, and theirs all come at once. From then on batches
    are timed for `measured_s`, the last one beyond it included, 100 of them at most. An exception of the data set's own
    passes through.

    The loader keeps no workers that it did not have before. Reading draws from random number generators: what was their
    state, the caller puts back.

    Worked: batches of 32 samples that come every 0.25 s are 128 samples/s.
    """
    kept = getattr(loader, "_iterator", None)  # a DataLoader's own, where it keeps its workers
    batches, expected = iter(loader), batch_size_given(loader)
    try:
        for _ in range(max(1, getattr(loader, "num_workers", 0))):
            next(batches)
        start_s = now_s = clock()
        num_samples, num_batches = 0, 0
        while now_s - start_s < measured_s and num_batches < MAX_BATCHES_TIMED:
            batch = next(batches, None)
            if batch is None:
                break
            now_s = clock()
            num_samples, num_batches = num_samples + batch_size_of(batch, expected=expected), num_batches + 1
    except StopIteration:
        return None
    finally:
        del batches
        if isinstance(loader, DataLoader) and loader._iterator is not kept:
            loader._iterator = kept
    return num_samples / (now_s - start_s) if now_s > start_s else None


def describe_slow_loader(advice: str, loader_rate: float, needed_rate: float) -> str | None:
    """What to tell the user of a loader that gives fewer samples a second than `needed_rate`; else None.

    `advice` is `what_to_set`. Example: ``"The loader gives 850 samples/s and the cards train 1,200:
    ... Set num_workers=4 or so (it is 0) ..."``.
    """
    if loader_rate >= needed_rate:
        return None
    return (
        f"The loader gives {loader_rate:,.0f} samples/s and the cards train {needed_rate:,.0f}: they will wait for "
        f"data, and no split will help with that. {advice}"
    )


def what_to_set(loader: Iterable[Any]) -> str:
    """What would make this loader faster, by what is set already."""
    if not isinstance(loader, DataLoader):
        return (
            f"It is a {type(loader).__name__}, which makes its batches in the training process: read ahead in others, "
            "with torch.utils.data.DataLoader(..., num_workers=4, pin_memory=True) say."
        )
    advice = []
    if loader.num_workers == 0:
        advice.append("num_workers=4 or so (it is 0: batches are made in the training process, between its steps)")
    else:
        advice.append(f"more num_workers (they are {loader.num_workers}), up to the processor's cores")
        if not loader.persistent_workers:
            advice.append("persistent_workers=True, so that they are not started anew every epoch")
    if not loader.pin_memory:
        advice.append(
            "pin_memory=True, with which non-blocking copies to the cards (the wrapper's are; yours are with "
            "non_blocking=True) overlap with training"
        )
    unless = " If that does not help, make each sample cheaper: decode or resize it once, beforehand."
    return f"Set {'; '.join(advice)}.{unless}"
