"""What people and spreadsheets read of a search: result, diagnosis, tables, progress."""

from splittune.report.diagnosis import Diagnosis, Remedy, diagnose
from splittune.report.explain import explain
from splittune.report.memory_parts import MemoryParts, memory_parts
from splittune.report.tables import TrialRecord, devices_table, save_csv, trials_table
from splittune.report.tune_result import TuneResult, save_tables

__all__ = [
    "Diagnosis",
    "MemoryParts",
    "Remedy",
    "TrialRecord",
    "TuneResult",
    "devices_table",
    "diagnose",
    "explain",
    "memory_parts",
    "save_csv",
    "save_tables",
    "trials_table",
]
