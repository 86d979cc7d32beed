"""A verification on a console."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

from splittune.report.words import gpus
from splittune.units import format_bytes

if TYPE_CHECKING:
    from splittune.verify.result import Verification


def show_verification(result: Verification, console: Console) -> None:
    """Show each device's peaks in training and evaluation beside the plan, the loss, and notes.

    Neighbours of one name with the same figures share a line.
    """
    title = "Memory reserved (virtual GPUs: accounted)" if result.is_modelled else "Memory reserved"
    table = Table(Column("device", no_wrap=True), "planned peak", "in training", "in evaluation", "", title=title)
    for cells, group in groupby(range(len(result.devices)), key=lambda index: _cells(result, index)):
        table.add_row(f"{gpus(list(group))}  {cells[0]}", *cells[1:])
    console.print(table)
    if result.losses:
        first, last, num_steps = result.losses[0], result.losses[-1], len(result.losses)
        _say(f"The loss was {first:.3f} at step 1 and {last:.3f} at step {num_steps}.", console)
    for note in (*result.notes, *([] if result.lack is None else [result.lack.message])):
        _say(note, console)
    if result.config.eval_batch_size is not None:
        _say(
            f"Evaluation batches of {result.config.eval_batch_size} samples keep the headroom: under torch.no_grad() "
            "the wrapped model takes them at once.",
            console,
        )


def _cells(result: Verification, index: int) -> tuple[str, ...]:
    """Name, planned peak, peak in training, peak in evaluation, verdict."""
    planned = result.config.planned_peak_reserved_bytes or (None,) * len(result.devices)
    plan, evaluation = planned[index], result.evaluation_peak_reserved_bytes[index]
    unevaluated = "no more" if result.num_evaluations else "not run"
    return (
        result.devices[index].name,
        "not measured" if plan is None else format_bytes(plan),
        format_bytes(result.training_peak_reserved_bytes[index]),
        unevaluated if evaluation is None else format_bytes(evaluation),
        result.verdicts[index],
    )


def _say(text: str, console: Console) -> None:
    console.print(text, highlight=False, markup=False)
