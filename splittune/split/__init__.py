"""Splits as pure integers: what one is, which are legal, how a short micro-batch is sharded."""

from splittune.split.batch_split import BatchSplit
from splittune.split.micro_batches import micro_batch_sizes_of
from splittune.split.rank_part import RankPart, rank_part
from splittune.split.shards import even_shards, fit_shards, shards_for, shards_with_gpu0, spread_evenly
from splittune.split.space import Shares, SplitSpace

__all__ = [
    "BatchSplit",
    "RankPart",
    "Shares",
    "SplitSpace",
    "even_shards",
    "fit_shards",
    "micro_batch_sizes_of",
    "rank_part",
    "shards_for",
    "shards_with_gpu0",
    "spread_evenly",
]
