"""The page of a plan: the best machine and batch size, the capacity curves, what fills the limiting cards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import cast, get_args

from splittune.config.data import Strategy
from splittune.config.files import read_text
from splittune.errors import ConfigError
from splittune.hardware.base import Device, DeviceMemory
from splittune.report.capacity.strategies import Use, compared_uses
from splittune.report.files import CAPACITY_FILE, MODULES_FILE
from splittune.report.memory_parts import MemoryParts
from splittune.report.page.document import document, headline, pictured, section, tile, tiles
from splittune.report.page.markup import Markup, join, tag
from splittune.report.page.memory import CardMemory, limits_picture, pieces_of
from splittune.report.page.modules import modules_picture, modules_table
from splittune.report.page.picture import Picture, across, cut, dot, line, square, ticks, words
from splittune.report.page.search import rate_text
from splittune.report.page.source import known, rows_of
from splittune.report.page.tables import limits_tables, table
from splittune.report.words import LEAST_SPEEDUP, count_of, describe_model_error
from splittune.training.module_memory import ModuleMemory
from splittune.units import format_bytes, format_time

# Between the figures of a machine's cards in capacity.csv.
SEPARATOR = ";"
_HEIGHT = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A row of ``capacity.csv``, as far as a report shows it."""

    devices: str
    strategy: str
    global_batch_size: int
    fits: bool
    shape: str
    """``"2 x (8+24)"``; empty where no split was found."""
    rate: float | None
    step_time_s: float | None
    speedup: float | None
    is_given: bool
    even_shape: str
    even_rate: float | None
    largest: str
    limiting: CardMemory | None
    why: str
    config: str
    message: str
    use: Use
    """What a comparison of strategies needs of it."""

    @property
    def largest_share(self) -> int:
        """Samples: of ``"2 x (8+24)"`` 24, of ``"2 x (512x4+512x12)"`` 12."""
        shares = self.shape.partition("(")[2].rstrip(")")
        return max((int(share.rpartition("x")[2]) for share in shares.split("+") if share), default=0)

    @property
    def machine(self) -> str:
        return self.devices if self.strategy == "dp" else f'{self.devices} as "{self.strategy}"'


def read_plan(folder: str | os.PathLike[str]) -> tuple[PlanRow, ...]:
    """The rows of a plan.

    Raises:
        ConfigError: ``capacity.csv`` is missing, half-written or empty.
    """
    path = Path(folder) / CAPACITY_FILE
    rows = rows_of(read_text(path, "Plan again."), str(path), plan_row_of)
    if not rows:
        raise ConfigError(f"{path} has no row: there is nothing to report. Plan again.")
    return rows


def read_modules(folder: str | os.PathLike[str]) -> tuple[ModuleMemory, ...]:
    """What the job's modules hold; none where the plan has not looked.

    Raises:
        ConfigError: ``modules.csv`` is half-written.
    """
    path = Path(folder) / MODULES_FILE
    return rows_of(read_text(path, "Plan again."), str(path), _module_of) if path.is_file() else ()


def plan_page(rows: Sequence[PlanRow], modules: Sequence[ModuleMemory] = ()) -> str:
    """``report.html`` of a plan."""
    pictures = plan_pictures(rows)
    lacking = [f"{row.machine}, batch {row.global_batch_size}: {row.message}" for row in rows if not row.fits]
    best = _best(rows)
    body = [
        _answer(rows),
        _why(rows, best),
        pictured(pictures["curves"], plan_table(rows)),
        pictured(pictures["memory"], *limits_tables(_limits(rows))) if "memory" in pictures else None,
        _pictured_modules(modules, best),
        section("What does not fit", *(tag("p", cut(text, 400)) for text in lacking)) if lacking else None,
    ]
    title = _headline(best)
    return document(f"splittune: {title}", body, [describe_model_error(), "Written by splittune."])


def _why(rows: Sequence[PlanRow], best: PlanRow | None) -> Markup | None:
    """What limits the best row, and of machines that were planned both ways which is faster."""
    said = [] if best is None or not best.why else [best.why]
    said += compared_uses([row.use for row in rows])
    return section("Why", *(tag("p", text) for text in said), class_="why") if said else None


def plan_pictures(rows: Sequence[PlanRow]) -> dict[str, Picture]:
    """The pictures of a plan, by name."""
    pictures = {"curves": _curves(rows)}
    limits = _limits(rows)
    if limits:
        pictures["memory"] = limits_picture(limits)
    return pictures


def _limits(rows: Sequence[PlanRow]) -> list[tuple[str, CardMemory]]:
    """Each row whose limiting card is known, with that card."""
    limits = [(f"batch {row.global_batch_size}: {row.machine}", row.limiting) for row in rows]
    return [(name, card) for name, card in limits if card is not None]


def _pictured_modules(modules: Sequence[ModuleMemory], best: PlanRow | None) -> Markup | None:
    """What the modules hold where the fastest row has its largest share."""
    if not modules or best is None:
        return None
    samples = best.largest_share
    return pictured(modules_picture(modules, samples), modules_table(modules, samples))


def plan_answer(rows: Sequence[PlanRow]) -> tuple[str, str]:
    """The answer in large words, and in a sentence or two."""
    best = _best(rows)
    return _headline(best), "What each lacked stands below." if best is None else f"{_gain(best)} (modelled)"


def _best(rows: Sequence[PlanRow]) -> PlanRow | None:
    fitting = [row for row in rows if row.fits and row.rate is not None]
    return max(fitting, key=lambda row: row.rate or 0.0, default=None)


def _headline(best: PlanRow | None) -> str:
    if best is None:
        return "No split fits on any of these machines"
    return f"{rate_text(best.rate)} samples/s on {cut(best.devices, 60)}, at batch {best.global_batch_size}"


def _answer(rows: Sequence[PlanRow]) -> Markup:
    best, machines = _best(rows), list(dict.fromkeys(row.devices for row in rows))
    kicker = f"A plan of {count_of(len(rows), 'row')}: {cut(', '.join(machines), 160)}"
    if best is None:
        return tag("header", headline(kicker, _headline(best), "What each lacked stands below.", "modelled"))
    each = [tile("What to set", best.shape, f"accumulation steps x samples per GPU, at batch {best.global_batch_size}")]
    step = "" if best.step_time_s is None else f"{format_time(best.step_time_s)} a step; "
    even = "no even split fits" if best.even_rate is None else f"the even split gives {rate_text(best.even_rate)}"
    each.append(tile("Speed", f"{rate_text(best.rate)} samples/s", f"modelled; {step}{'' if best.is_given else even}"))
    if best.limiting is not None:
        free = format_bytes(best.limiting.memory.headroom_bytes)
        demanded = best.limiting.demanded_bytes
        must = f"; {format_bytes(demanded)} must stay free" if demanded else ""
        each.append(tile("Room left", free, f"on GPU {best.limiting.device.index}, the fullest card{must}"))
    if best.largest:
        each.append(tile("Largest micro-batch", best.largest, "samples at once, without accumulation"))
    cards = '["cuda:0", ...]' if best.strategy == "dp" else '"cuda"'
    code = f'config = splittune.SplitConfig.load("{best.config}")\nmodel = config.wrap(model, devices={cards})'
    do = section("Train with it", tag("pre", tag("code", code)), class_="do",
                 sentence="The config lies beside this page; name the real cards:")  # fmt: skip
    shown = headline(kicker, _headline(best), _gain(best), "modelled")
    return tag("header", shown, tiles(each), do if best.config else None)


def _gain(best: PlanRow) -> str:
    if best.is_given:
        return f"The fastest of the given splits that fit: {best.shape}."
    if best.even_rate is None or best.speedup is None:
        return "No even split fits there, at any number of accumulation steps."
    if best.speedup < LEAST_SPEEDUP:
        return f"The even split that people use, {best.even_shape}, is as fast."
    return f"That is {best.speedup:.2f} times the even split that people use, {best.even_shape}."


def _curves(rows: Sequence[PlanRow]) -> Picture:
    """Samples a second against the batch size, machine below machine, on one scale."""
    marks = ticks(max((max(row.rate or 0.0, row.even_rate or 0.0) for row in rows), default=1.0), 3)
    top, drawn, y = marks[-1], [], 0.0
    for machine, group in groupby(rows, key=lambda row: row.machine):
        of_machine = list(group)
        drawn.append(words(cut(machine, 46), 0, y + 14, "b", -52))
        y += 30
        for mark in marks:
            at = y + _HEIGHT * (1 - mark / top)
            drawn += [across(at, "grid"), words(rate_text(mark) if mark else "0", 0, at + 4, "e s", -8)]
        drawn += _curve(of_machine, [row.even_rate for row in of_machine], y, top, "even", "edot")
        drawn += _curve(of_machine, [row.rate if row.fits else None for row in of_machine], y, top, "tuned", "dot")
        each = max(1, -(-len(of_machine) // 6))
        for place, row in enumerate(of_machine):
            if not row.fits:
                drawn.append(square(_x(place, of_machine), y + _HEIGHT, 12, "lack", "does not fit"))
            if place % each == 0:
                label = cut(row.shape, 12) if row.is_given and len(of_machine) > 1 else str(row.global_batch_size)
                drawn.append(words(label, _x(place, of_machine), y + _HEIGHT + 22, "s m"))
        y += _HEIGHT + 46
    key = [("tuned", "the best split")] + [("even", "the even split")] * any(row.even_rate for row in rows)
    key += [("lack", "does not fit")] * any(not row.fits for row in rows)
    return Picture(
        title="Throughput by batch size",
        sentence="Samples a second (modelled) against the global batch, machine below machine, on one scale.",
        content=join(drawn),
        height=y - 16,
        left=52,
        right=8,
        key=tuple(key),
    )


def _curve(
    rows: Sequence[PlanRow], rates: Sequence[float | None], y: float, top: float, kind: str, mark: str
) -> list[Markup]:
    places = [(_x(place, rows), y + _HEIGHT * (1 - rate / top), rate, rows[place])
              for place, rate in enumerate(rates) if rate is not None]  # fmt: skip
    lines = [line(*one[:2], *other[:2], kind) for one, other in pairwise(places)]
    dots = [dot(x, at, 5, mark, f"batch {row.global_batch_size}: {rate_text(rate)} samples/s")
            for x, at, rate, row in places]  # fmt: skip
    return [*lines, *dots]


def _x(place: int, rows: Sequence[PlanRow]) -> float:
    return (place + 0.5) / len(rows)


def plan_table(rows: Sequence[PlanRow]) -> Markup:
    """A row for each machine and batch size."""
    best = _best(rows)
    heads = [("machine", "w"), ("batch", "n"), ("best split", "t"), ("samples/s", "n"), ("step", "n"),
             ("even split", "t"), ("its samples/s", "n"), ("gain", "n"), ("largest micro-batch", "n"),
             ("config", "w")]  # fmt: skip
    cells = [
        (
            [
                row.machine,
                str(row.global_batch_size),
                row.shape if row.fits else "does not fit",
                rate_text(row.rate) if row.fits else "",
                format_time(row.step_time_s) if row.fits and row.step_time_s is not None else "",
                row.even_shape,
                rate_text(row.even_rate),
                "" if row.speedup is None else f"{row.speedup:.2f} x",
                row.largest,
                row.config,
            ],
            row is best,
        )
        for row in rows
    ]
    return table("All of it is modelled; more of each row, and of every card, in capacity.csv.", heads, cells)


def plan_row_of(cells: Mapping[str, str]) -> PlanRow:
    """A row of ``capacity.csv``."""
    largest, is_measured = cells["largest_micro_batch_size"], cells["largest_micro_batch_is_measured"] == "True"
    steps, even_steps = cells["accumulation_steps"], cells["even_accumulation_steps"]
    return PlanRow(
        devices=cells["devices"],
        strategy=cells["strategy"],
        global_batch_size=int(cells["global_batch_size"]),
        fits=cells["fits"] == "True",
        shape=f"{int(steps)} x ({cells['shard_sizes']})" if steps else "",
        rate=known(float, cells["throughput_samples_per_s"]),
        step_time_s=known(float, cells["step_time_s"]),
        speedup=known(float, cells["speedup_over_even"]),
        is_given=not cells["even_fits"],
        even_shape=f"{int(even_steps)} x ({cells['even_shard_sizes']})" if even_steps else "",
        even_rate=known(float, cells["even_throughput_samples_per_s"]),
        largest="" if not largest else f"{'' if is_measured else '≥ '}{int(largest):,}",
        limiting=_limiting(cells),
        why=cells["why"] if cells["fits"] == "True" else "",
        config=cells["config"],
        message=cells["message"],
        use=_use_of(cells),
    )


def _module_of(cells: Mapping[str, str]) -> ModuleMemory:
    return ModuleMemory(
        name=cells["module"],
        count=int(cells["count"]),
        parameter_bytes=int(cells["parameter_bytes"]),
        activation_bytes=known(int, cells["activation_bytes"]),
    )


def _use_of(cells: Mapping[str, str]) -> Use:
    even_steps = known(int, cells["even_accumulation_steps"])
    if cells["strategy"] not in get_args(Strategy):
        raise ValueError(f"strategy is {cells['strategy']!r}: expected one of {', '.join(get_args(Strategy))}")
    return Use(
        devices=cells["devices"],
        strategy=cast("Strategy", cells["strategy"]),
        global_batch_size=int(cells["global_batch_size"]),
        is_given=not cells["even_fits"],
        fits=cells["fits"] == "True",
        accumulation_steps=known(int, cells["accumulation_steps"]) or 1,
        micro_step_time_s=known(float, cells["micro_step_time_s"]),
        step_time_s=known(float, cells["step_time_s"]),
        throughput=known(float, cells["throughput_samples_per_s"]),
        needs_splitting=even_steps is None or even_steps > 1,
    )


def _limiting(cells: Mapping[str, str]) -> CardMemory | None:
    """The card with the least headroom, in its parts; None where nothing ran on it."""
    device = known(int, cells["limiting_device"])
    if device is None or cells["fits"] != "True" or not cells["total_bytes"]:
        return None

    def of(column: str) -> int | None:
        return known(int, cells[column].split(SEPARATOR)[device]) if cells[column] else None

    memory = DeviceMemory(
        device=device,
        total_bytes=of("total_bytes") or 0,
        outside_bytes=of("outside_bytes") or 0,
        peak_allocated_bytes=of("peak_allocated_bytes") or 0,
        peak_reserved_bytes=of("peak_reserved_bytes") or 0,
    )
    parts = MemoryParts(
        device=device,
        outside_bytes=memory.outside_bytes,
        peak_bytes=memory.peak_allocated_bytes,
        per_share_bytes=of("share_bytes"),
        whole_batch_bytes=of("whole_batch_bytes"),
        fixed_bytes=of("fixed_bytes"),
        parameter_bytes=of("parameter_bytes"),
        optimizer_bytes=of("optimizer_bytes"),
        gradient_bytes=of("gradient_bytes"),
    )
    card = Device(index=device, name=cells["limiting_device_name"], torch_device="", total_bytes=memory.total_bytes)
    return CardMemory(
        device=card,
        memory=memory,
        samples=0,
        demanded_bytes=of("min_headroom_bytes") or 0,
        parts=pieces_of(memory, parts),
    )
