"""capacity.csv: every column documented, absent figures empty, the same bytes every time."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pandas as pd

from splittune.report.capacity.table import capacity_table, modules_table
from splittune.report.tables import save_csv
from splittune.units import GIB
from tests.report.capacity.rows import MODULES, ONE_STEP, lacking, lacking_row, ran, row


def test_every_column_is_documented_and_no_other() -> None:
    """The docstring names the columns in their order."""
    documented = re.findall(r"^\| `(\w+)` \|", inspect.getdoc(capacity_table) or "", flags=re.MULTILINE)
    assert documented == list(capacity_table([]).columns)


def test_every_column_of_the_modules_is_documented() -> None:
    """As those of the rows are."""
    documented = re.findall(r"^\| `(\w+)` \|", inspect.getdoc(modules_table) or "", flags=re.MULTILINE)
    assert documented == list(modules_table([]).columns)
    assert list(modules_table(MODULES)["module"]) == ["blocks.*.mlp", "norm"]


def test_a_row_reads_back(tmp_path: Path) -> None:
    """Best split, even split and largest micro-batch as they were; cards' figures in their order."""
    place = save_csv(capacity_table([row()], config_names=["split.json"]), tmp_path / "capacity.csv")
    (found,) = pd.read_csv(place).to_dict("records")
    assert (found["devices"], found["global_batch_size"], found["fits"], found["is_modelled"]) == (
        "2xCARD",
        64,
        True,
        True,
    )
    assert (found["accumulation_steps"], found["shard_sizes"], found["throughput_samples_per_s"]) == (2, "8+24", 128)
    assert (found["even_accumulation_steps"], found["even_shard_sizes"]) == (4, "8+8")
    assert (found["even_fits"], found["speedup_over_even"]) == (True, 1.6)
    assert (found["largest_micro_batch_size"], found["largest_micro_batch_shards"]) == (40, "10+30")
    assert found["peak_reserved_bytes"] == f"{5 * GIB};{4 * GIB}"
    assert found["headroom_bytes"] == f"{int(2.75 * GIB)};{int(3.75 * GIB)}"
    assert found["share_bytes"] == f"{GIB};{3 * GIB}"
    assert found["whole_batch_bytes"] == f"{GIB * 3 // 2};0"
    assert found["fixed_bytes"] == f"{GIB * 5 // 2};{GIB}"
    assert (found["limiting_device"], found["limiting_device_name"], found["config"]) == (0, "CARD", "split.json")
    assert found["outcome"] == "ok"


def test_what_does_not_fit_has_empty_cells(tmp_path: Path) -> None:
    """Never 0: neither split nor times nor memory; the outcome and what was lacking stand there."""
    place = save_csv(capacity_table([lacking_row()]), tmp_path / "capacity.csv")
    (found,) = pd.read_csv(place, keep_default_na=False).to_dict("records")
    empty = (
        "shard_sizes",
        "throughput_samples_per_s",
        "step_time_s",
        "peak_reserved_bytes",
        "even_shard_sizes",
        "config",
    )
    assert {found[name] for name in empty} == {""}
    assert (str(found["fits"]), str(found["even_fits"]), found["outcome"]) == ("False", "False", "out_of_memory")
    assert found["message"] == "no split fits: device 1 lacked 2.00 GiB."


def test_given_splits_say_nothing_of_an_even_one() -> None:
    """Nobody looked: the cell is empty, not False."""
    given = [row(baseline=None, largest=None, is_given=True), lacking_row(best=lacking(ONE_STEP), is_given=True)]
    table = capacity_table(given)
    assert table["even_fits"].isna().all()
    assert list(table["outcome"]) == ["ok", "out_of_memory"]
    assert list(table["shard_sizes"]) == ["8+24", "32+32"]


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    """Written twice, the file is the same."""
    rows = [row(), lacking_row(), row(best=ran(ONE_STEP), global_batch_size=256)]
    one, other = (save_csv(capacity_table(rows), tmp_path / name).read_bytes() for name in ("one.csv", "other.csv"))
    assert one == other
