"""The search for the best split: it sees only `measure`, never a device."""

from splittune.search.attempt import Attempt
from splittune.search.candidates import Candidates
from splittune.search.coarse_to_fine import CoarseToFineSampler
from splittune.search.history import PARAMETER
from splittune.search.registry import DEFAULT_SAMPLER, SAMPLER_NAMES
from splittune.search.result import SearchResult, Trial
from splittune.search.sampler import CandidateSampler, Proposal
from splittune.search.study import find_best_split

__all__ = [
    "DEFAULT_SAMPLER",
    "PARAMETER",
    "SAMPLER_NAMES",
    "Attempt",
    "CandidateSampler",
    "Candidates",
    "CoarseToFineSampler",
    "Proposal",
    "SearchResult",
    "Trial",
    "find_best_split",
]
