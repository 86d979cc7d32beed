"""The page of a search that left no config: nothing fitted, or it was interrupted and says what there is."""

from __future__ import annotations

from splittune.report.page.document import document, headline, section, tile, tiles
from splittune.report.page.markup import Markup, tag
from splittune.report.page.picture import cut
from splittune.report.page.search import listed, rate_text, tried_text
from splittune.report.page.source import SearchFiles, TrialRow
from splittune.report.page.tuned import fastest_of, pictured_trials, search_pictures
from splittune.report.words import count_of
from splittune.units import format_bytes, format_time

_WRITTEN = "Written by splittune."


def page_of_tables(files: SearchFiles) -> str:
    """``report.html`` of the tables alone."""
    names = dict.fromkeys(card.device_name for card in files.cards)
    cards = ", ".join(cut(name, 60) for name in names)
    best = fastest_of(files.trials)
    if best is None:
        header, title = _where_nothing_fits(files, cards), "no split fits"
    else:
        header, title = _unfinished(files, cards, best), "an unfinished search"
    body = [header, *pictured_trials(search_pictures(files), files.trials, best)]
    return document(f"splittune: {title}", body, [_WRITTEN])


def _where_nothing_fits(files: SearchFiles, cards: str) -> Markup:
    smallest = min(files.trials, key=lambda row: (row.micro_batch_size, max(row.shard_sizes)))
    lead = (
        f"{count_of(len(files.trials), 'trial')} ended, and none fitted. The smallest had "
        f"{count_of(smallest.micro_batch_size, 'sample')} in a micro-batch: "
        f"{cut(smallest.message or smallest.outcome.value, 300)}"
    )
    return headline(cards, "No split fits", lead, _kind(files))


def _unfinished(files: SearchFiles, cards: str, best: TrialRow) -> Markup:
    """What there is, and that it is not the answer."""
    failed = sum(not row.fits for row in files.trials)
    lead = (
        f"It was interrupted after {tried_text(len(files.trials), 'trial', failed)}, and wrote no config: what follows "
        "is the best so far, which was not measured again and is beside no baseline."
    )
    steps = count_of(best.accumulation_steps, "accumulation step")
    step = "" if best.step_time_s is None else f"; {format_time(best.step_time_s)} a step"
    each = [
        tile("Fastest so far", listed(best), f"samples per GPU, in {steps}; trial {best.number}"),
        tile("Its speed", f"{rate_text(best.throughput)} samples/s", f"{_kind(files)}{step}"),
    ]
    if best.least_headroom_bytes is not None:
        each.append(tile("Room left", format_bytes(best.least_headroom_bytes), "on the fullest card"))
    command = tag("pre", tag("code", "splittune tune FILE.py:FUNCTION ... --storage FILE"))
    sentence = "A search with --storage keeps its trials in that file; the same command goes on where it stopped:"
    go_on = section("Go on with it", command, sentence=sentence, class_="do")
    return tag("header", headline(cards, "The search is not finished", lead, _kind(files)), tiles(each), go_on)


def _kind(files: SearchFiles) -> str:
    return "modelled" if files.is_modelled else "measured"
