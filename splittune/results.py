"""The public names of the first release's `splittune.results`, which `config/` and `report/` hold now."""

from splittune.config import SCHEMA, MicroBatch, SplitConfig
from splittune.report import (
    MemoryParts,
    TrialRecord,
    TuneResult,
    devices_table,
    explain,
    memory_parts,
    save_csv,
    save_tables,
    trials_table,
)

__all__ = [
    "SCHEMA",
    "MemoryParts",
    "MicroBatch",
    "SplitConfig",
    "TrialRecord",
    "TuneResult",
    "devices_table",
    "explain",
    "memory_parts",
    "save_csv",
    "save_tables",
    "trials_table",
]
