"""What people do today beside the tuned split: the batch spread evenly, and halved until it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splittune.profiling.measurement import Measurement
from splittune.report.page.document import section
from splittune.report.page.markup import Markup
from splittune.report.page.search import rate_text
from splittune.report.page.source import TrialRow
from splittune.report.page.tables import table
from splittune.report.words import rate_of, shape_of, shares_of
from splittune.split import BatchSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Halved:
    """The batch halved until an even split of it fits in one micro-batch: another batch than the user's."""

    split: BatchSplit
    rate: float
    """Samples a second, of the smaller batch."""
    trial: int
    """The number of the trial whose micro-step and update these are."""


def halved_until_it_fits(trials: Sequence[TrialRow], baseline: Measurement) -> Halved | None:
    """What the trials tell of it; None where the whole batch fits, or no micro-batch of a halved one was timed.

    A step of the halved batch is one micro-step and one update of the even split that accumulates as often as the batch
    was halved, so nothing more is measured. Worked: of 64 samples in 4 steps of 16, with micro-steps of 100 ms and an
    update of 20 ms, 16 samples a step remain, and 133 samples/s of the 152 that 64 have. As no gradients wait in such a
    step, a batch twice as large may fit that does not when it is accumulated.
    """
    whole, turns = baseline.split.global_batch_size, 2
    if baseline.split.accumulation_steps == 1:
        return None
    while whole % turns == 0 and whole // turns >= baseline.split.num_devices:
        if turns >= baseline.split.accumulation_steps:
            split = BatchSplit.even(
                global_batch_size=whole // turns, accumulation_steps=1, num_devices=baseline.split.num_devices
            )
            shape = (turns, split.shard_sizes, baseline.loss_placement)
            for row in reversed(trials):
                if row.shape == shape and row.fits and row.micro_step_time_s and row.update_time_s is not None:
                    step_s = row.micro_step_time_s + row.update_time_s
                    return Halved(split=split, rate=split.global_batch_size / step_s, trial=row.number)
        turns *= 2
    return None


def beside_today(
    best: Measurement, baseline: Measurement | None, trials: Sequence[TrialRow], kind: str
) -> Markup | None:
    """A row for each way; None where no even split fits. `kind` says whether figures are measured or modelled."""
    if baseline is None or best.throughput is None or baseline.throughput is None:
        return None
    halved = halved_until_it_fits(trials, baseline)
    batch = str(best.split.global_batch_size)
    rows = [
        (["this config", shape_of(best.split), batch, rate_of(best), ""], True),
        (
            [
                "the same batch, spread evenly",
                shape_of(baseline.split),
                batch,
                rate_of(baseline),
                _gain(best.throughput, baseline.throughput),
            ],
            False,
        ),
    ]
    derived = ""
    if halved is not None:
        rows.append(
            (
                [
                    "the batch halved until it fits",
                    f"1 x ({shares_of(halved.split)})",
                    str(halved.split.global_batch_size),
                    rate_text(halved.rate),
                    _gain(best.throughput, halved.rate),
                ],
                False,
            )
        )
        derived = (
            f" The halved batch's is derived: one micro-step and one update of trial {halved.trial}. Where gradients "
            "need not wait, a batch twice as large may fit."
        )
    heads = [("", "w"), ("steps x samples per GPU", "t"), ("samples a step", "n"), ("samples/s", "n"),
             ("this config is", "n")]  # fmt: skip
    said = "The even split at the fewest accumulation steps that fit"
    if halved is not None:
        said = f"{said}, and a smaller batch, which trains otherwise: its gradients are those of fewer samples"
    return section(
        "Beside what people do today", table(f"Samples a second, {kind}.{derived}", heads, rows), sentence=f"{said}."
    )


def _gain(rate: float, than: float) -> str:
    return f"{rate / than:.2f} times as fast"
