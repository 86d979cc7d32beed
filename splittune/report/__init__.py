"""What people and spreadsheets read of a search: the result, its tables, its explanation, progress on a console."""

from splittune.report.explain import MemoryParts, explain, memory_parts
from splittune.report.tables import TrialRecord, devices_table, save_csv, trials_table
from splittune.report.tune_result import TuneResult, save_tables

__all__ = [
    "MemoryParts",
    "TrialRecord",
    "TuneResult",
    "devices_table",
    "explain",
    "memory_parts",
    "save_csv",
    "save_tables",
    "trials_table",
]
