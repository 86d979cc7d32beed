"""The pictures of a search: throughput over share and accumulation, and the best so far."""

from __future__ import annotations

from collections.abc import Sequence

from splittune.profiling.measurement import Outcome
from splittune.report.page.markup import Markup, join
from splittune.report.page.picture import SHADES, Picture, across, dot, down, line, square, ticks, words
from splittune.report.page.source import TrialRow
from splittune.report.words import count_of
from splittune.split.batch_split import listed_shares

_MOST_HEIGHT = 520
_HISTORY_HEIGHT = 210
WHAT_FAILED = {
    Outcome.OK: "fits",
    Outcome.OUT_OF_MEMORY: "out of memory",
    Outcome.NO_HEADROOM: "too little left free",
    Outcome.CRASHED: "crashed",
}


def rate_text(rate: float | None) -> str:
    """``"5,674"``, ``"5.67"`` where few; empty where nothing was timed."""
    if rate is None:
        return ""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:#.3g}"


def tried_text(number: int, noun: str, failed: int) -> str:
    """``"12 trials, 3 of which did not fit"``, or ``"12 trials, all of which fit"``."""
    return f"{count_of(number, noun)}, {f'{failed} of which did not fit' if failed else 'all of which fit'}"


def split_map(trials: Sequence[TrialRow], best: TrialRow | None, baseline: TrialRow | None) -> Picture:
    """Every split that was tried: a row for each number of accumulation steps, across GPU 0's share.

    With one card, whose share is always the whole, throughput is across.
    """
    latest = {row.shape: row for row in trials if row.throughput is not None or not row.fits}
    steps = sorted({row.accumulation_steps for row in latest.values()})
    row_height = max(min(30.0, _MOST_HEIGHT / max(len(steps), 1)), 9.0)
    each = max(1, round(14 / row_height + 0.4))  # rows to one that is labelled
    height = row_height * len(steps)
    is_single = all(len(row.shard_sizes) == 1 for row in latest.values())
    timed = [(row.throughput, row.fits) for row in latest.values() if row.throughput is not None]
    rates = [rate for rate, fits in timed if fits]
    least, most = min(rates, default=0.0), max(rates, default=1.0)
    if is_single:
        marks = ticks(max((rate for rate, _ in timed), default=1.0))
        top, labels = marks[-1], [rate_text(mark) if mark else "0" for mark in marks]
    else:
        top = _round_up(max((_share(row) for row in latest.values()), default=1.0))
        marks = ticks(top, 4)
        top, labels = marks[-1], [f"{100 * mark:.4g} %" for mark in marks]
    drawn: list[Markup] = []
    for place, count in enumerate(steps):
        y = (place + 0.5) * row_height
        drawn.append(across(y, "grid"))
        if place % each == 0:
            drawn.append(words(count_of(count, "step"), 0, y + 4, "e s", -12))
    for place, (mark, label) in enumerate(zip(marks, labels, strict=True)):
        drawn.append(down(mark / top, 0, height, "grid"))
        drawn.append(
            words(label, mark / top, height + 16, "s m" if 0 < place < len(marks) - 1 else "s" if not place else "s e")
        )
    what = "samples/s" if is_single else "GPU 0's part of each micro-batch"
    drawn.append(words(what, 0.5, height + 34, "s m"))
    radius = min(8.0, row_height / 2 - 1)
    for row in sorted(latest.values(), key=lambda row: row.throughput or 0.0):
        x = (row.throughput or 0.0) / top if is_single else _share(row) / top
        y = (steps.index(row.accumulation_steps) + 0.5) * row_height
        if row.throughput is None or not row.fits:
            drawn.append(square(x, y, 1.8 * radius, "lack", f"{_said(row)}: {WHAT_FAILED[row.outcome]}"))
        else:
            shade = 0 if most <= least else min(int((row.throughput - least) / (most - least) * SHADES), SHADES - 1)
            drawn.append(dot(x, y, radius, f"h{shade}", f"{_said(row)}: {rate_text(row.throughput)} samples/s"))
        if best is not None and row.shape == best.shape:
            drawn.append(dot(x, y, radius + 3, "best"))
        elif baseline is not None and row.shape == baseline.shape:
            drawn.append(dot(x, y, radius + 3, "base"))
    has_base = baseline is not None and (best is None or baseline.shape != best.shape)
    ramp = [("ramp", f"{rate_text(least)} to {rate_text(most)} samples/s")] if rates and most > least else []
    key = ramp or ([("h0", f"{rate_text(most)} samples/s")] if rates else [])
    key += [("best", "the best")] * (best is not None) + [("base", "the even split")] * has_base
    failed = sum(not row.fits for row in latest.values())
    key += [("lack", "does not fit, or leaves too little free")] * bool(failed)
    told = f"{tried_text(len(latest), 'split', failed)}: down, the accumulation steps;"
    told = f"{told} across, {'samples a second' if is_single else 'how much of each micro-batch GPU 0 takes'}"
    return Picture(
        title="What was tried",
        sentence=f"{told}{'' if is_single or not rates else '; the stronger the colour, the faster'}.",
        content=join(drawn),
        height=height + 42,
        left=74,
        right=14,
        key=tuple(key),
    )


def history(trials: Sequence[TrialRow], even_rate: float | None, stopped: str) -> Picture:
    """Trial by trial: what each gave, and the best that was known by then."""
    rates = [row.throughput for row in trials if row.throughput is not None]
    marks = ticks(max([*rates, even_rate or 0.0], default=0.0))
    top, height, radius = marks[-1], _HISTORY_HEIGHT, 5.0 if len(trials) <= 60 else 3.0

    def y_of(rate: float) -> float:
        return height * (1 - rate / top)

    def x_of(place: float) -> float:
        return (place + 0.5) / max(len(trials), 1)

    drawn = [join((across(y_of(mark), "grid"), words(rate_text(mark) if mark else "0", 0, y_of(mark) + 4, "e s", -8)))
             for mark in marks]  # fmt: skip
    if even_rate is not None:
        drawn.append(across(y_of(even_rate), "even"))
    so_far: float | None = None
    for place, row in enumerate(trials):
        before = so_far
        if row.fits and row.throughput is not None:
            so_far = max(so_far or 0.0, row.throughput)
        if before is not None and so_far is not None:
            drawn.append(line(x_of(place - 1), y_of(before), x_of(place), y_of(before), "tuned"))
            if so_far > before:
                drawn.append(line(x_of(place), y_of(before), x_of(place), y_of(so_far), "tuned"))
    for place, row in enumerate(trials):
        said = f"trial {row.number}, {_said(row)}"
        if row.throughput is None or not row.fits:
            at = height if row.throughput is None else y_of(row.throughput)
            drawn.append(square(x_of(place), at, 2 * radius, "lack", f"{said}: {WHAT_FAILED[row.outcome]}"))
        else:
            kind = "again" if row.kind == "confirm" else "dot"
            drawn.append(dot(x_of(place), y_of(row.throughput), radius, kind, f"{said}: {rate_text(row.throughput)}"))
    each = max(1, -(-len(trials) // 10))
    drawn += [words(str(row.number), x_of(place), height + 20, "s m")
              for place, row in enumerate(trials) if place % each == 0]  # fmt: skip
    drawn.append(words("trial", 0.5, height + 38, "s m"))
    key = [("tuned", "the best so far")]
    key += [("even", f"the even split: {rate_text(even_rate)}")] * (even_rate is not None)
    key += [("dot", "a trial")]
    key += [("again", "measured again at the end")] * any(row.kind == "confirm" for row in trials)
    key += [("lack", "does not fit, or leaves too little free")] * any(not row.fits for row in trials)
    return Picture(
        title="How the search went",
        sentence=f"Samples a second, trial by trial. {stopped}".strip(),
        content=join(drawn),
        height=height + 46,
        left=52,
        right=8,
        key=tuple(key),
    )


def _share(row: TrialRow) -> float:
    return row.gpu0_bsz / max(row.micro_batch_size, 1)


def _round_up(share: float) -> float:
    return min(1.0, max(share * 1.05, 0.02))


def _said(row: TrialRow) -> str:
    return f"{row.accumulation_steps} x ({listed(row)})"


def listed(row: TrialRow) -> str:
    """The trial's shards, ``"4+20+20+20"``; of many cards like ones together."""
    return listed_shares(row.shard_sizes, plus="+", times="x")
