"""What tuning hands over: the config to train with, and the trials as tables."""

from splittune.results.config import SplitConfig
from splittune.results.config_file import SCHEMA
from splittune.results.explain import MemoryParts, explain, memory_parts
from splittune.results.micro_batches import MicroBatch
from splittune.results.tables import TrialRecord, devices_table, save_csv, trials_table
from splittune.results.tune_result import TuneResult, save_tables

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
