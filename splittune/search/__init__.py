"""The search for the best split: it sees only `measure`, never a device."""

from splittune.search.attempt import Attempt
from splittune.search.history import report
from splittune.search.memory_model import MemoryModel
from splittune.search.parameters import suggest_split
from splittune.search.registry import DEFAULT_SAMPLER, SAMPLER_NAMES
from splittune.search.result import SearchResult, Trial
from splittune.search.sampler import GuidedSampler
from splittune.search.study import find_best_split
from splittune.search.time_model import TimeModel

__all__ = [
    "DEFAULT_SAMPLER",
    "SAMPLER_NAMES",
    "Attempt",
    "GuidedSampler",
    "MemoryModel",
    "SearchResult",
    "TimeModel",
    "Trial",
    "find_best_split",
    "report",
    "suggest_split",
]
