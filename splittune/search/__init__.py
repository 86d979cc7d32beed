"""The search for the best split: it sees only `measure`, never a device."""

from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.memory import MemoryModel
from splittune.search.models.step_time import TimeModel
from splittune.search.result import SearchResult, Trial
from splittune.search.samplers.guided import GuidedSampler
from splittune.search.samplers.parameters import suggest_split
from splittune.search.samplers.registry import DEFAULT_SAMPLER, SAMPLER_NAMES
from splittune.search.storage.records import report
from splittune.search.study import find_best_split

__all__ = [
    "DEFAULT_SAMPLER",
    "SAMPLER_NAMES",
    "GuidedSampler",
    "JudgedTrial",
    "MemoryModel",
    "SearchResult",
    "TimeModel",
    "Trial",
    "find_best_split",
    "report",
    "suggest_split",
]
