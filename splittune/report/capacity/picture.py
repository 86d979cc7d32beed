"""capacity.png: throughput and memory of a plan against the batch size, machine by machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splittune.errors import ConfigError
from splittune.report.capacity.row import named_of
from splittune.report.words import shape_of
from splittune.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Figure  # noqa: PLC0414  so that others name it from here

    from splittune.report.capacity.row import CapacityRow

INSTALL = 'Pictures need matplotlib: pip install "splittune[report]"'

# Colours that people with any colour vision tell apart: Okabe and Ito, "Color Universal Design", 2008.
TUNED = "#0072B2"
EVEN = "#E69F00"
NOT_FITTING = "#D55E00"
# What the fullest card holds, from the bottom: name, part of `CapacityRow.parts`, colour.
OUTSIDE = ("others: programs, CUDA context", "outside_bytes", "#999999")
PARTS = (
    ("parameters, gradients, optimizer", "fixed_bytes", "#56B4E9"),
    ("outputs and loss of the whole batch", "whole_batch_bytes", "#F0E442"),
    ("activations of its share", "per_share_bytes", "#009E73"),
)
REST = ("allocator's reserve, update", "#CC79A7")
BAR_WIDTH = 0.7
# A bar above this part of its card has its label inside, where the line of the card's memory is not. A choice.
NEAR_FULL = 0.75


def draw(rows: Sequence[CapacityRow]) -> Figure:
    """Above, samples per second of the best and of the even split; below, what the fullest card holds of its memory.

    A column for each machine and strategy. What does not fit is crossed out in both.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the message has the command that installs it.
        ConfigError: there is no row.
    """
    if not rows:
        raise ConfigError("the plan has no row: there is nothing to draw.")
    try:
        from matplotlib.figure import Figure as NewFigure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{INSTALL} ({error}).") from error
    machines = [(name, list(of_machine)) for name, of_machine in groupby(rows, key=named_of)]
    most = max(len(of_machine) for _, of_machine in machines)
    width = max(3.4, 1.0 + 0.62 * most)
    figure = NewFigure(figsize=(min(width * len(machines) + 2.9, 24), 6.4), layout="constrained")
    axes = figure.subplots(2, len(machines), squeeze=False)
    fastest = max((_rate(row) or 0.0 for row in rows), default=0.0) or 1.0
    for column, (name, of_machine) in enumerate(machines):
        _draw_throughput(axes[0][column], of_machine, fastest)
        _draw_memory(axes[1][column], of_machine)
        axes[0][column].set_title(name.replace(",", ",\n"), fontsize=11, fontweight="bold")
        axes[1][column].set_xlabel("split" if rows[0].is_given else "global batch size (samples)")
    axes[0][0].set_ylabel("samples/s (modelled)")
    axes[1][0].set_ylabel("fullest card at its peak (GiB)")
    figure.suptitle("Throughput and memory by batch size (modelled)", fontsize=13)
    _add_legend(figure, axes)
    return figure


def save_picture(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write it as PNG, without a date: the same figure gives the same bytes under the same matplotlib.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        figure.savefig(path, format="png", dpi=150, metadata={"Software": None})
    except OSError as error:
        raise ConfigError(
            f"cannot write {os.fspath(path)}: {error.strerror or error}. Choose another folder."
        ) from error
    return Path(path)


def _draw_throughput(axes: Axes, rows: Sequence[CapacityRow], fastest: float) -> None:
    places = range(len(rows))
    for label, colour, marker, rates, style in (
        ("even split, halved until it fits", EVEN, "s", [_even_rate(row) for row in rows], "--"),
        ("best split", TUNED, "o", [_rate(row) for row in rows], "-"),
    ):
        known = [(place, rate) for place, rate in zip(places, rates, strict=True) if rate is not None]
        if known:
            axes.plot(*zip(*known, strict=True), style, marker=marker, color=colour, label=label, zorder=3)
    for place, row in zip(places, rows, strict=True):
        rate, speedup = _rate(row), row.speedup
        if rate is not None:
            gain = f"\n{speedup:.2f}x" if speedup is not None and speedup >= 1.005 else ""
            axes.annotate(
                f"{rate:,.0f}{gain}" if rate >= 100 else f"{rate:#.3g}{gain}",
                (place, rate),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        else:
            _cross_out(axes, place)
    axes.set_ylim(0, fastest * 1.25)
    _finish(axes, rows)


def _draw_memory(axes: Axes, rows: Sequence[CapacityRow]) -> None:
    """Bars that make up what is held at the peak of the fullest card, under the line of its memory."""
    for place, row in enumerate(rows):
        device = row.limiting_device
        if row.best is None or not row.fits or device is None:
            _cross_out(axes, place)
            continue
        memory, floor = row.best.memory[device], 0.0
        held = (memory.outside_bytes + memory.peak_reserved_bytes) / GIB
        for label, amount, colour in _stack(row, device):
            axes.bar(place, amount, BAR_WIDTH, bottom=floor, color=colour, label=label, zorder=3)
            floor += amount
        is_near_the_line = held > NEAR_FULL * memory.total_bytes / GIB
        axes.annotate(
            f"GPU {device}\n{held:.3g}",
            (place, held),
            xytext=(0, -4 if is_near_the_line else 3),
            textcoords="offset points",
            ha="center",
            va="top" if is_near_the_line else "bottom",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
            zorder=5,
        )
    totals = [row.cards[row.limiting_device or 0].total_bytes / GIB for row in rows]
    for place, total in enumerate(totals):
        axes.hlines(total, place - 0.5, place + 0.5, colors="black", lw=1.5, label="memory of the card", zorder=4)
    axes.set_ylim(0, max(totals) * 1.22)
    _finish(axes, rows)


def _stack(row: CapacityRow, device: int) -> list[tuple[str, float, str]]:
    """The bar's pieces in GiB, from the bottom; they sum to what is held at the peak."""
    assert row.best is not None
    memory, parts = row.best.memory[device], row.parts[device]
    pieces = [(OUTSIDE[0], memory.outside_bytes, OUTSIDE[2])]
    if parts.fixed_bytes is None:
        pieces.append(("the job", memory.peak_reserved_bytes, TUNED))
    else:
        pieces += [(label, getattr(parts, name) or 0, colour) for label, name, colour in PARTS]
        rest = memory.outside_bytes + memory.peak_reserved_bytes - sum(amount for _, amount, _ in pieces)
        pieces.append((REST[0], max(rest, 0), REST[1]))
    return [(label, amount / GIB, colour) for label, amount, colour in pieces if amount > 0]


def _cross_out(axes: Axes, place: int) -> None:
    axes.axvspan(place - 0.5, place + 0.5, color=NOT_FITTING, alpha=0.12, lw=0)
    axes.annotate(
        "does not fit",
        (place, 0.5),
        xycoords=("data", "axes fraction"),
        rotation=90,
        ha="center",
        va="center",
        color=NOT_FITTING,
        fontweight="bold",
        fontsize=10,
    )


def _finish(axes: Axes, rows: Sequence[CapacityRow]) -> None:
    labels = [shape_of(row.best.split) if row.is_given and row.best else str(row.global_batch_size) for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=90 if rows[0].is_given else 0)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.yaxis.set_major_formatter("{x:,.4g}")
    axes.grid(axis="y", color="#dddddd", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)


def _add_legend(figure: Figure, axes: Any) -> None:
    """One legend beside the columns, each label once: the lines above, then the bars from their top."""
    lines, bars = (_labelled(each) for each in axes)
    handles = lines | dict(reversed(bars.items()))
    figure.legend(list(handles.values()), list(handles), loc="outside right center", fontsize=8.5, frameon=False)


def _labelled(axes: Any) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    for each in axes:
        handles |= {label: handle for handle, label in zip(*each.get_legend_handles_labels(), strict=True)}
    return handles


def _rate(row: CapacityRow) -> float | None:
    return row.best.throughput if row.best is not None and row.fits else None


def _even_rate(row: CapacityRow) -> float | None:
    return None if row.baseline is None else row.baseline.throughput
