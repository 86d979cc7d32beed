"""The section of a page that says what was tried beside the split."""

from __future__ import annotations

from collections.abc import Sequence

from splittune.report.advice import AdviceRow, gain_text, sorted_rows
from splittune.report.page.document import section
from splittune.report.page.markup import Markup, tag
from splittune.report.page.picture import cut
from splittune.report.page.tables import table

# Characters of a finding or a cost; the whole stands in advice.csv. A choice.
_MOST_WORDS = 240


def advice_section(rows: Sequence[AdviceRow]) -> Markup | None:
    """What no split can help, and a row for every remedy, best first; None where nobody asked."""
    if not rows:
        return None
    ordered = sorted_rows(rows)
    limits = [tag("p", row.finding) for row in ordered if row.is_limit]
    heads = [("remedy", "w"), ("gain", ""), ("split", "t"), ("what was found", "w"), ("cost to you", "w")]
    cells = [
        (
            [
                row.remedy,
                gain_text(row),
                "" if row.accumulation_steps is None else f"{row.accumulation_steps} x ({row.shard_sizes})",
                cut(row.finding, _MOST_WORDS),
                cut(row.cost, _MOST_WORDS),
            ],
            row.is_worth_it,
        )
        for row in ordered
        if not row.is_limit
    ]
    caption = "Gains are samples a second over the best split without; each is of a few trials, so there may be more."
    return section("What else would help", *limits, table(caption, heads, cells) if cells else None)
