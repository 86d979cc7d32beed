"""A verification on a console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

from splittune.units import format_bytes

if TYPE_CHECKING:
    from splittune.verify.result import Verification


def show_verification(result: Verification, console: Console) -> None:
    """Every device's peaks in training and evaluation beside the plan, the loss, and what else is to be known."""
    planned = result.config.planned_peak_reserved_bytes or (None,) * len(result.devices)
    table = Table(
        Column("device", no_wrap=True), "planned peak", "in training", "in evaluation", "", title="Memory reserved"
    )
    for index, device in enumerate(result.devices):
        plan, evaluation = planned[index], result.evaluation_peak_reserved_bytes[index]
        unevaluated = "no more" if result.num_evaluations else "not run"
        table.add_row(
            f"GPU {index}  {device.name}",
            "not measured" if plan is None else format_bytes(plan),
            format_bytes(result.training_peak_reserved_bytes[index]),
            unevaluated if evaluation is None else format_bytes(evaluation),
            result.verdicts[index],
        )
    console.print(table)
    if result.losses:
        loss = (
            f"The loss was {result.losses[0]:.3f} at step 1 and {result.losses[-1]:.3f} at step {len(result.losses)}."
        )
        console.print(loss, highlight=False)
    for note in (*result.notes, *([] if result.lack is None else [result.lack.message])):
        console.print(note, highlight=False, markup=False)
    if result.config.eval_batch_size is not None:
        console.print(
            f"Evaluation batches of {result.config.eval_batch_size} samples keep the headroom: under torch.no_grad() the "
            "wrapped model takes them at once.",
            highlight=False,
        )
