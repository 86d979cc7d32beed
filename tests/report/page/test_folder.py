"""report.html of a folder: the same bytes as were saved, small, with all figures, and clear words for bad input."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from splittune import ConfigError
from splittune.report.capacity.files import save_capacity
from splittune.report.capacity.strategies import compared
from splittune.report.capacity.table import capacity_table
from splittune.report.page import save_report, save_tables_report
from splittune.report.page.search import rate_text
from splittune.report.tables import save_csv
from splittune.training.module_memory import ModuleMemory
from splittune.units import GIB, format_bytes
from tests.report.capacity.rows import ONE_STEP, TUNED, lacking, lacking_row, ran, row, trials_of
from tests.report.page import folders

LARGEST = 300_000


def report_of(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("cards", [folders.NORMAL, folders.MEASURED, folders.ONE, folders.RANKS, folders.HOSTILE])
def test_saved_twice_and_made_from_the_folder_it_is_the_same_bytes(cards: folders.Cards, tmp_path: Path) -> None:
    """Nothing in it is of the moment or of the place, and nothing that is not in the other files."""
    batch = 8 * len(cards.names)
    folders.search(cards, batch=batch).save(tmp_path / "one")
    folders.search(cards, batch=batch).save(tmp_path / "two")
    saved = (tmp_path / "one/report.html").read_bytes()
    assert (tmp_path / "two/report.html").read_bytes() == saved
    (tmp_path / "one/report.html").unlink()
    assert save_report(tmp_path / "one") == tmp_path / "one/report.html"
    assert (tmp_path / "one/report.html").read_bytes() == saved


def test_a_plan_is_reported_from_its_folder_too(tmp_path: Path) -> None:
    """`Plan.save` writes it, and the table alone gives it again; what does not fit is named."""
    save_capacity([row(), lacking_row()], tmp_path)
    saved = report_of(tmp_path)
    save_report(tmp_path)
    assert report_of(tmp_path) == saved
    assert "128 samples/s on 2xCARD, at batch 64" in saved
    assert "1.60 times the even split that people use" in saved
    assert "no split fits: device 1 lacked 2.00 GiB." in saved
    assert "modelled" in saved


def test_the_answer_comes_first(tmp_path: Path) -> None:
    """What to set, how much faster, how sure, and whether it is measured."""
    result = folders.search(folders.MEASURED)
    result.save(tmp_path)
    text = re.sub(r"<style>.*?</style>|<[^>]+>", " ", report_of(tmp_path))
    header = text[: text.index("Memory of every card")]
    assert result.speedup is not None
    assert result.speedup > 1.005
    assert f"{result.speedup:.2f} times as fast, at the same batch size" in header
    assert "+".join(map(str, result.best.split.shard_sizes)) in header
    assert "95 % interval" in header
    assert "measured" in header
    assert "modelled" not in header


def test_every_part_of_every_card_stands_in_a_table(tmp_path: Path) -> None:
    """What the picture shows of the best split, in figures; the parts sum to what is held."""
    result = folders.search(folders.NORMAL)
    result.save(tmp_path)
    page = report_of(tmp_path)
    (parts, *_), memory = json.loads((tmp_path / "result.json").read_text())["best_parts"], result.best.memory[0]
    known = (
        "outside_bytes",
        "per_share_bytes",
        "whole_batch_bytes",
        "parameter_bytes",
        "optimizer_bytes",
        "gradient_bytes",
    )
    for name in known:
        assert f">{format_bytes(parts[name])}<" in page, name
    rest = parts["fixed_bytes"] - sum(parts[name] for name in known[-3:])
    reserve = memory.peak_reserved_bytes - parts["peak_bytes"]
    assert sum(parts[name] for name in known) + rest + reserve == memory.outside_bytes + memory.peak_reserved_bytes
    assert parts["optimizer_bytes"] > 0
    assert parts["gradient_bytes"] > 0


@pytest.mark.parametrize(("cards", "batch"), [(folders.NORMAL, 64), (folders.RANKS, 2048)])
def test_a_report_of_many_trials_stays_small(cards: folders.Cards, batch: int, tmp_path: Path) -> None:
    """200 trials, of 4 cards or of 64 ranks, whose like cards are one line."""
    folders.search(cards, batch=batch, num_trials=200).save(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < LARGEST


def test_names_are_text(tmp_path: Path) -> None:
    """A card or a model with a script for a name runs nothing: it is there to read, in every place."""
    folders.search(folders.HOSTILE, job=folders.SCRIPT).save(tmp_path)
    page = report_of(tmp_path)
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert "default-src &#x27;none&#x27;" in page


def test_where_nothing_fits_the_tables_alone_are_reported(tmp_path: Path) -> None:
    """The failures and what was lacking; a config that an earlier search left there is not mixed in."""
    folders.failed(tmp_path)
    save_report(tmp_path)
    page = report_of(tmp_path)
    assert "No split fits" in page
    assert "device 0: 1.00 GiB lacked" in page
    assert "How the search went" not in page, "nothing was timed"
    folders.search(folders.NORMAL).save(tmp_path)
    folders.failed(tmp_path)
    assert save_tables_report(tmp_path).read_text(encoding="utf-8") == page
    with pytest.raises(ConfigError, match=r"trials\.csv has no trial of the split in split\.json.*Tune again"):
        save_report(tmp_path)


def test_a_result_without_trials_or_memory_has_a_report(tmp_path: Path) -> None:
    """What is not known is left out, not drawn as nothing."""
    result = folders.search(folders.NORMAL)
    bare = replace(result.best, memory=(), device_busy_s=None)
    replace(result, best=bare, baseline=None, trials=(), modules=()).save(tmp_path)
    page = report_of(tmp_path)
    assert "It fits, where no even split does" in page
    assert "Memory of every card" not in page
    assert '<svg class="pic"' not in page


def broken(folder: Path, name: str, text: str | None) -> Path:
    folders.search(folders.NORMAL).save(folder)
    (folder / "report.html").unlink()
    path = folder / name
    if text is None:
        path.unlink()
    else:
        path.write_text(text.replace("KEPT", path.read_text()) if "KEPT" in text else text)
    return folder


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("split.json", None, r"no split\.json in .*with 12 trials and a result\.json"),
        ("split.json", '{"schema": 99}', r"schema is 99, newer than this splittune reads"),
        ("split.json", "{", r"split\.json.*no complete JSON"),
        ("trials.csv", None, r"cannot read .*trials\.csv: No such file.*Is the path right"),
        ("trials.csv", "", r"trials\.csv is half-written"),
        ("trials.csv", "KEPT7,search", r"trials\.csv is half-written: .* the last one does not end"),
        ("trials.csv", "KEPT7,search\n", r"trials\.csv, line 14: 2 cells, expected 26"),
        ("trials.csv", "trial,kind\n0,search\n", r"trials\.csv has no column 'outcome'"),
        (
            "devices.csv",
            "trial,device,device_name,total_bytes,busy_s\n0,0,x,1,\n",
            r"devices\.csv has 1 rows: expected 48",
        ),
        ("devices.csv", "trial,device,device_name,total_bytes,busy_s\n0,zero,x,1,\n", r"devices\.csv, line 2: .*zero"),
        ("result.json", None, r"cannot read .*result\.json"),
        ("result.json", '{"schema": 9}', r"result\.json: schema is 9, expected 1.*Upgrade splittune"),
        ("result.json", '{"schema": 1', r"result\.json is half-written or edited"),
        ("result.json", '{"schema": 1, "baseline": {}}', r"result\.json is half-written or edited: KeyError"),
        ("result.json", "[]", r"result\.json is half-written or edited"),
    ],
)
def test_bad_input_is_named(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    """The error names the file and what to do, and no report is written."""
    folder = broken(tmp_path, name, text)
    with pytest.raises(ConfigError, match=message):
        save_report(folder)
    assert not (folder / "report.html").exists()


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    """Nothing there, or a plan of no row."""
    with pytest.raises(ConfigError, match=r"cannot read .*elsewhere.*Expected the folder that `splittune tune`"):
        save_report(tmp_path / "elsewhere")
    save_csv(capacity_table([]), tmp_path / "capacity.csv")
    with pytest.raises(ConfigError, match=r"capacity\.csv has no row"):
        save_report(tmp_path)


@pytest.mark.parametrize("cards", [folders.NORMAL, folders.MEASURED, folders.ONE, folders.HOSTILE])
def test_of_a_search_that_was_interrupted_there_is_what_there_is(cards: folders.Cards, tmp_path: Path) -> None:
    """The fastest so far, called so, and every trial; no config to train with, and how to go on."""
    folders.unfinished(tmp_path, cards)
    page = save_report(tmp_path).read_text(encoding="utf-8")
    rates = [trial.measurement.throughput for trial in folders.search(cards, job=folders.SCRIPT).trials[:6]]
    assert "<h1>The search is not finished</h1>" in page
    assert f">{rate_text(max(rate for rate in rates if rate is not None))} samples/s<" in page
    assert page.count("expected to gain 3.1 %") == 6
    assert "split.json" not in page
    assert "--storage FILE" in page
    assert ("modelled" in page) == cards.is_modelled
    saved = (tmp_path / "report.html").read_bytes()
    folders.search(cards).save(tmp_path)
    folders.unfinished(tmp_path, cards)
    assert save_tables_report(tmp_path).read_bytes() == saved, "what an earlier search left is not mixed in"


def test_copies_and_waiting_are_told_apart_where_they_are_known(tmp_path: Path) -> None:
    """On modelled cards; of real ones both are one, in the picture and in the table."""
    folders.search(folders.NORMAL).save(tmp_path / "modelled")
    folders.search(folders.MEASURED).save(tmp_path / "measured")
    modelled, measured = (report_of(tmp_path / name) for name in ("modelled", "measured"))
    assert 'data-l="copies"' in modelled
    assert 'data-l="waits"' in modelled
    assert ">copies: " in modelled
    assert 'data-l="copies"' not in measured
    assert 'data-l="waits, or copies"' in measured


def test_a_plan_in_which_nothing_fits_says_so_first(tmp_path: Path) -> None:
    """What each row lacked follows; there is nothing to draw a memory of."""
    save_capacity([lacking_row(), lacking_row(devices="1xCARD")], tmp_path)
    page = report_of(tmp_path)
    assert "<h1>No split fits on any of these machines</h1>" in page
    assert page.count("device 1 lacked 2.00 GiB.") == 2
    assert "Memory of the fullest card" not in page


def test_a_plan_of_both_strategies_says_which_is_faster_and_why(tmp_path: Path) -> None:
    """For each machine and batch size the sentence that the console has, from the table alone."""
    rows = [
        row(),
        row(strategy="ddp", best=ran(ONE_STEP, 0.3)),
        lacking_row(),
        row(strategy="ddp", global_batch_size=128),
    ]
    save_capacity(rows, tmp_path)
    page = html.unescape(report_of(tmp_path))
    sentences = compared(rows)
    assert len(sentences) == 2
    assert '2xCARD, batch 64: "ddp" is 1.67 times as fast as "dp" (modelled): it needs 1 accumulation step' in page
    assert all(f"<p>{sentence}</p>" in page for sentence in sentences)


def test_a_plan_says_what_must_stay_free_and_what_fills_the_limiting_cards(tmp_path: Path) -> None:
    """The demanded headroom in the picture and in the table; parameters and optimizer apart; every module."""
    result = folders.search(folders.NORMAL)
    planned = row(
        devices="4xRTX3090",
        cards=result.config.devices,
        best=result.best,
        baseline=result.baseline,
        trials=result.trials,
        config=result.config,
        model=result.model,
        modules=(*result.modules, ModuleMemory(name=folders.SCRIPT, count=1, parameter_bytes=1)),
    )
    save_capacity([planned], tmp_path)
    page = html.unescape(report_of(tmp_path))
    part = next(part for part in planned.parts if part.device == planned.limiting_device)
    assert page.count("must stay free") >= 3, "the key, the bar, the table"
    assert f"{format_bytes(GIB // 2)} must stay free" in page
    for size in (part.parameter_bytes, part.optimizer_bytes, part.gradient_bytes):
        assert size
        assert f">{format_bytes(size)}<" in page
    assert "Which modules hold it" in page
    assert "h.*.mlp (12)" in page
    assert "<script" not in report_of(tmp_path)
    saved = report_of(tmp_path)
    save_report(tmp_path)
    assert report_of(tmp_path) == saved
    save_capacity([lacking_row(modules=())], tmp_path)
    assert not (tmp_path / "modules.csv").exists(), "another plan's"


def test_a_half_written_table_of_modules_is_named(tmp_path: Path) -> None:
    """As the other tables are."""
    save_capacity([row()], tmp_path)
    (tmp_path / "modules.csv").write_text("module,count,parameter_bytes,activation_bytes\nx,1,2")
    with pytest.raises(ConfigError, match=r"modules\.csv is half-written"):
        save_report(tmp_path)


def test_a_plan_of_given_splits_compares_them_with_nothing(tmp_path: Path) -> None:
    """The fastest that fits is named, by its split."""
    given = [
        row(best=run, baseline=None, trials=trials_of(run), largest=None, is_given=True)
        for run in (ran(TUNED), lacking(ONE_STEP))
    ]
    save_capacity(given, tmp_path)
    page = report_of(tmp_path)
    assert "The fastest of the given splits that fit: 2 x (8+24)." in page
    assert "even split" not in page[: page.index("Throughput by batch size")]
