"""The folder that a plan is saved in: the table, the picture, the report, and a config for each row that fits."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from splittune.report.capacity.picture import draw, save_picture
from splittune.report.capacity.table import capacity_table, modules_table
from splittune.report.files import CAPACITY_FILE, MODULES_FILE, PICTURE_FILE
from splittune.report.page import save_plan_report
from splittune.report.tables import save_csv

if TYPE_CHECKING:
    from splittune.report.capacity.row import CapacityRow

logger = logging.getLogger(__name__)


def save_capacity(rows: Sequence[CapacityRow], folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write ``capacity.csv``, ``modules.csv``, configs, ``capacity.png``, ``report.html``; returns what was written.

    There is a config for each row that has one, the modules where they are known, and a report where there are rows.

    Without matplotlib the picture is left out, which is logged with the command that installs it; one that an earlier
    plan left there is removed, for it would show other rows than the table.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    place, names = Path(folder), [config_name(row) for row in rows]
    written = [save_csv(capacity_table(rows, config_names=names), place / CAPACITY_FILE)]
    written += [
        row.config.save(place / name)
        for row, name in zip(rows, names, strict=True)
        if row.config is not None and name is not None
    ]
    modules = next((row.modules for row in rows if row.modules), ())
    if modules:
        written.append(save_csv(modules_table(modules), place / MODULES_FILE))
    else:
        (place / MODULES_FILE).unlink(missing_ok=True)
    try:
        figure = draw(rows)
    except ModuleNotFoundError as error:
        (place / PICTURE_FILE).unlink(missing_ok=True)
        logger.warning("%s is not drawn. %s", PICTURE_FILE, error)
    else:
        written.append(save_picture(figure, place / PICTURE_FILE))
    if rows:
        written.append(save_plan_report(place))
    return tuple(written)


def config_name(row: CapacityRow) -> str | None:
    """``"split-4xRTX3090-512.json"``: where a row's config lies in the folder; None for a row without one.

    Of ranks it is ``"split-4xRTX3090-ddp-512.json"``.
    """
    if row.config is None:
        return None
    machine = re.sub(r"[^\w.-]+", "_", row.devices)
    ranks = "" if row.strategy == "dp" else f"-{row.strategy}"
    return f"split-{machine}{ranks}-{row.global_batch_size}.json"
