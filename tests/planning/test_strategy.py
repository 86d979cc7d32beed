"""plan() by strategy: ranks of unlike cards, a thousand of them, and both strategies side by side."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from splittune import BatchSplit, ConfigError, DeviceError, Measurement, Outcome, SplitConfig, TrainingTask, plan
from splittune.ranks.batch_norm import synchronised_batch_norm
from splittune.report.capacity.console import show_capacity, table_of
from splittune.report.capacity.strategies import compared
from splittune.runners.modelled_ranks.one_card import OneCardTrials
from tests.planning.jobs import FULL, SMALL, job, too_large
from tests.report.results import Screen
from tests.runners.modelled_ranks.jobs import products

MACHINE = "1xT4,1xA10"


def speed_of(task: TrainingTask, card: str, share: int) -> float:
    """Samples/s of one card by itself, which waits for nobody, by a plan for it alone."""
    split = BatchSplit(global_batch_size=share, accumulation_steps=1, shard_sizes=(share,))
    (found,) = plan(task, f"1x{card}", splits=[split], progress=False).measurements
    assert found.throughput is not None
    return found.throughput


def test_unlike_cards_get_shares_by_their_speed() -> None:
    """They beat the even split, and reach 95 % of the sum of the cards' speeds, as each has it by itself."""
    (found,) = plan(products(), MACHINE, strategy="ddp", global_batch_sizes=[2**16], **SMALL).searches
    result = found.result
    assert result is not None
    assert result.config.strategy == "ddp"
    assert result.speedup is not None
    assert result.speedup > 1.2
    shares = zip(("T4", "A10"), result.best.split.shard_sizes, strict=True)
    assert (result.best.throughput or 0.0) >= 0.95 * sum(speed_of(products(), card, share) for card, share in shares)


def test_1024_cards_of_four_kinds_reach_95_percent_of_the_sum_of_their_speeds() -> None:
    """Of a real model, its whole step with all-reduce and update included, which a large batch makes small."""
    counts = {"T4": 256, "A10": 256, "V100-16GB": 256, "A100-40GB": 256}
    machine = ",".join(f"{count}x{name}" for name, count in counts.items())
    size = 2**25
    (found,) = plan(products(), machine, strategy="ddp", global_batch_sizes=[size], **SMALL).searches
    result = found.result
    assert result is not None
    split = result.best.split
    shares = {name: split.shard_sizes[place * 256] for place, name in enumerate(counts)}
    fastest = sum(counts[name] * speed_of(products(), name, share) for name, share in shares.items())
    assert (result.best.throughput or 0.0) >= 0.95 * fastest
    assert sum(split.shard_sizes) == size
    assert result.speedup is not None
    assert result.speedup > 1.5
    assert found.as_row().why.startswith("The fullest card is GPU ")


def test_the_planned_split_is_the_one_that_is_foretold_when_given() -> None:
    """A search's best and the same split given have the same figures."""
    (found,) = plan(job(), MACHINE, strategy="ddp", global_batch_sizes=[64], **SMALL).searches
    assert found.result is not None
    best = found.result.best
    given = plan(job(), MACHINE, strategy="ddp", splits=[best.split], progress=False)
    assert given.measurements == (best,)
    assert [row.strategy for row in given.rows] == ["ddp"]


def test_either_plans_both_side_by_side(tmp_path: Path) -> None:
    """Two rows for each batch size, each with its config, and a sentence that says which is faster and why."""
    found = plan(products(), "4xT4", strategy="either", global_batch_sizes=[64, 4096], **SMALL)
    assert [(row.strategy, row.global_batch_size) for row in found.rows] == [
        ("dp", 64),
        ("dp", 4096),
        ("ddp", 64),
        ("ddp", 4096),
    ]
    found.save(tmp_path)
    rows = list(csv.DictReader((tmp_path / "capacity.csv").read_text().splitlines()))
    assert [row["strategy"] for row in rows] == ["dp", "dp", "ddp", "ddp"]
    assert [row["config"] for row in rows][1::2] == ["split-4xT4-4096.json", "split-4xT4-ddp-4096.json"]
    assert [SplitConfig.load(tmp_path / row["config"]).strategy for row in rows] == ["dp", "dp", "ddp", "ddp"]
    lines = table_of(found.rows)
    assert [line.split()[1:3] for line in lines[2:]] == [
        ["dp", "64"],
        ["ddp", "64"],
        ["dp", "4096"],
        ["ddp", "4096"],
    ]
    small, large = compared(found.rows)
    speeds = {(row.strategy, row.global_batch_size): row.best.throughput for row in found.rows if row.best is not None}
    gain = (speeds["ddp", 4096] or 0.0) / (speeds["dp", 4096] or 1.0)
    assert gain > 1
    assert large.startswith(f'4xT4, batch 4096: "ddp" is {gain:.2f} times as fast as "dp" (modelled): ')
    assert small.startswith("4xT4, batch 64: ")
    screen = Screen()
    show_capacity(found.rows, screen.console)
    assert large in screen.text


def test_one_process_needs_no_column_for_the_strategy() -> None:
    """The console is as it was."""
    found = plan(job(), "2xT400-4GB", **SMALL)
    assert "strategy" not in table_of(found.rows)[1]
    assert compared(found.rows) == ()


def test_one_card_is_legal_under_either_strategy() -> None:
    """It takes as long, for it has nobody to wait for."""
    split = BatchSplit(global_batch_size=16, accumulation_steps=2, shard_sizes=(8,))
    process, rank = plan(job(), "1xT4", strategy="either", splits=[split], progress=False).measurements
    assert rank.step_time_s == pytest.approx(process.step_time_s)
    assert rank.notes == ()


def test_ranks_on_which_nothing_fits_are_a_row() -> None:
    """What is lacking is said, of the card that lacks it."""
    (row,) = plan(too_large(), FULL, strategy="ddp", progress=False).searches
    assert row.result is None
    assert row.global_batch_size == 4
    assert {trial.measurement.outcome for trial in row.trials} == {Outcome.OUT_OF_MEMORY}
    assert "device 0" in row.lacking
    assert compared(plan(too_large(), FULL, strategy="either", progress=False).rows) == (
        f'{FULL}, batch 4: neither "dp" nor "ddp" fits.',
    )


def test_a_step_that_changes_with_its_size_is_run_in_full(caplog: pytest.LogCaptureFixture) -> None:
    """What is played shows nothing of it; the best is run in full and does, and all is searched again."""

    def step(model: Any, batch: Any) -> Any:
        outputs = model(batch[0])
        return (outputs.exp() if len(outputs) >= 1000 else outputs).square().mean()

    (found,) = plan(job(step_fn=step), "2xT4", strategy="ddp", global_batch_sizes=[2400], **SMALL).searches
    assert "each split is run in full" in caplog.text
    assert found.result is not None
    (alone,) = plan(
        job(step_fn=step), "2xT4", strategy="ddp", splits=[found.result.best.split], progress=False
    ).measurements
    assert found.result.best.step_time_s == pytest.approx(alone.step_time_s)


def test_a_step_that_reads_values_is_run_on_real_tensors() -> None:
    """The plan says why, and no share beyond the batch is tried, for it would need its memory here."""
    largest: list[int] = []

    def step(model: Any, batch: Any) -> Any:
        loss = model(batch[0]).square().mean()
        largest.append(len(batch[0]))
        return loss if loss.item() >= 0 else 2 * loss

    (found,) = plan(job(step_fn=step), "2xT4", strategy="ddp", global_batch_sizes=[48], **SMALL).searches
    assert found.result is not None
    assert found.result.best.split.shard_sizes == (24, 24)
    assert found.needs_values is not None
    assert "loss.item()" in found.needs_values
    assert max(largest) <= 48
    assert found.largest is not None
    assert not found.largest.is_measured


def test_batch_norm_has_its_least_share() -> None:
    """4 samples on the slow card at least, as in one process."""
    task = job()
    task.model = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 8))
    (found,) = plan(task, "1xT400-4GB,1xA100-80GB", strategy="ddp", global_batch_sizes=[16], **SMALL).searches
    assert found.result is not None
    assert min(found.result.best.split.shard_sizes) >= 4


@pytest.mark.parametrize("norm", [nn.SyncBatchNorm(512), synchronised_batch_norm(nn.BatchNorm1d(512))])
def test_statistics_over_all_ranks_need_no_least_share(norm: nn.Module) -> None:
    """The slow card may have fewer than 4 samples then; in one process, whose replicas do not share them, none may."""
    task = job()
    task.model = nn.Sequential(nn.Linear(64, 512), norm, *(nn.Linear(512, 512) for _ in range(8)), nn.Linear(512, 8))
    (found,) = plan(task, "1xT400-4GB,1xA100-80GB", strategy="ddp", global_batch_sizes=[16], **SMALL).searches
    assert found.result is not None
    assert min(found.result.best.split.shard_sizes) < 4


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[BatchSplit]:
    """The splits of one card that were really run."""
    splits: list[BatchSplit] = []
    run = OneCardTrials._run

    def counted(self: OneCardTrials, kind: Any, split: BatchSplit, *, in_full: bool) -> Measurement:
        splits.append(split)
        return run(self, kind, split, in_full=in_full)

    monkeypatch.setattr(OneCardTrials, "_run", counted)
    return splits


def test_finished_rows_are_kept_by_strategy(tmp_path: Path, ran: list[BatchSplit]) -> None:
    """The same plan is not searched again; "dp" and "ddp" of one machine are two rows, and another job a third."""
    options: dict[str, Any] = SMALL | {"storage": tmp_path / "plan.json"}
    first = plan(job(), "2xT400-4GB", strategy="ddp", **options)
    assert ran
    ran.clear()
    assert plan(job(), "2xT400-4GB", strategy="ddp", **options) == first
    assert not ran
    process, ranks = plan(job(), "2xT400-4GB", strategy="either", **options).searches
    assert not ran
    assert (process.strategy, ranks) == ("dp", first.searches[0])
    plan(job(width=128), "2xT400-4GB", strategy="ddp", **options)
    assert ran


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"strategy": "DDP"}, ConfigError, r"strategy is 'DDP': expected one of .* Did you mean 'ddp'"),
        ({"strategy": "fsdp"}, ConfigError, "strategy is 'fsdp': expected one of"),
        ({"strategy": None}, ConfigError, "strategy is None"),
        ({"strategy": "dp", "devices": "65xT4"}, DeviceError, "asks for 65 GPUs: expected 1 to 64"),
        ({"strategy": "either", "devices": "65xT4"}, DeviceError, "asks for 65 GPUs: expected 1 to 64"),
        ({"strategy": "ddp", "devices": "9000xT4,9000xA10"}, DeviceError, "18000 devices: expected at most 16384"),
        (
            {
                "strategy": "ddp",
                "splits": [BatchSplit(global_batch_size=4, accumulation_steps=1, shard_sizes=(2, 1, 1))],
            },
            ConfigError,
            "is for 3 cards",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(given: dict[str, Any], error: type[Exception], words: str) -> None:
    """A strategy that is none, with the nearest; more cards than one process, or anybody, drives."""
    with pytest.raises(error, match=words):
        plan(**({"task": job(), "devices": "2xT400-4GB", "progress": False} | given))
