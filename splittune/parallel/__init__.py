"""Training on several devices with a share of the batch for each."""

from splittune.parallel.accumulate import accumulate
from splittune.parallel.base import SplitModule
from splittune.parallel.data_parallel import BalancedDataParallel
from splittune.parallel.functional import data_parallel
from splittune.parallel.link import Link, TorchLink
from splittune.parallel.state_dict import load_state_dict

__all__ = [
    "BalancedDataParallel",
    "Link",
    "SplitModule",
    "TorchLink",
    "accumulate",
    "data_parallel",
    "load_state_dict",
]
