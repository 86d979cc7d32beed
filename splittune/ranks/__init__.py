"""Beyond one process: what every rank of a process group does."""

from splittune.ranks.loader import ShardedLoader
from splittune.ranks.sampler import RankBatchSampler
from splittune.ranks.share import RankShare

__all__ = ["RankBatchSampler", "RankShare", "ShardedLoader"]
