"""Splits of a job at hand, foretold on shapes: what virtual cards say of them, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from splittune.fakes import NEEDS_VALUES
from splittune.hardware.virtual import VirtualHardware
from splittune.profiling.foretold import Foretold
from splittune.profiling.measurement import LossPlacement, Measurement
from splittune.profiling.profiler import Profiler
from splittune.runners.cards_as_host import CardsAsHost, OwnAutocastError
from splittune.runners.fake_copy import Unkept, on_shapes
from splittune.runners.shapes import describe_need, why_not
from splittune.split import BatchSplit
from splittune.training import SampleBatch, TrainingTask
from splittune.training.reach import reach
from splittune.training.saved import SavedContainer

Asked = tuple[BatchSplit, LossPlacement]


class LateError(Exception):
    """The time for foretelling is over."""


def foretell(
    task: TrainingTask, samples: SampleBatch, cards: VirtualHardware, asked: Sequence[Asked], *, budget_s: float
) -> Foretold:
    """What `cards` say of the splits, in their order, until one cannot be told; `why` says why that is.

    Nothing of the job is changed. One that needs values is not foretold: with real tensors on the CPU nobody knows how
    long it takes. No error comes out of it, whatever the job's own functions raise where tensors have no values.

    Args:
        task: the job; its model, optimizer and batches may live on cards, of which nothing is asked.
        samples: what micro-batches are made of.
        cards: virtual ones.
        asked: splits, each with where the loss is computed.
        budget_s: seconds for all of them.
    """
    ends_at_s = time.monotonic() + budget_s
    planned: list[Measurement] = []
    kept = _kept_of(task)
    try:
        with _Deadline(ends_at_s):
            why = why_not(task) or ""
            for split, placement in [] if why else asked:
                planned.append(_on_shapes(task, samples, cards, split, placement))
    except LateError:
        why = f"that took longer than {budget_s:g} s"
    except OwnAutocastError as error:
        why = str(error)
    except NEEDS_VALUES as error:
        why = describe_need(error)
    except Exception as error:  # noqa: BLE001  the measured result is what counts, and is not to be lost by this
        why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removesuffix(": ")
    finally:
        for each in kept:
            each.restore()
    return Foretold(planned=tuple(planned), why=why.removesuffix("."))


def _on_shapes(
    task: TrainingTask,
    samples: SampleBatch,
    cards: VirtualHardware,
    split: BatchSplit,
    placement: LossPlacement,
) -> Measurement:
    with on_shapes(task, samples) as (copied, shapes), CardsAsHost():
        return Profiler(copied, cards, shapes, Unkept(), loss_placement=placement).measure(split)


def _kept_of(task: TrainingTask) -> list[Any]:
    """The names and lists that the job's functions keep tensors in: none without values stays there."""
    found = reach((task.loss_fn, task.step_fn, *task.other_state))
    return [*found.bindings, *(SavedContainer(each) for each in found.containers)]


class _Deadline(TorchFunctionMode):
    """Inside, torch's functions raise `LateError` from a moment on."""

    def __init__(self, ends_at_s: float) -> None:
        super().__init__()
        self._ends_at_s = ends_at_s

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if time.monotonic() > self._ends_at_s:
            raise LateError
        return func(*args, **(kwargs or {}))
