"""The config that tuning emits and training reads: its data, its JSON, and what it does to a model and a batch."""

from splittune.config.micro_batches import MicroBatch
from splittune.config.schema import SCHEMA
from splittune.config.split_config import SplitConfig

__all__ = ["SCHEMA", "MicroBatch", "SplitConfig"]
