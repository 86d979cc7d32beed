"""The user's training job: one optimizer step, the batches for it, and a snapshot to leave it as found."""

from splittune.training.batches import SampleBatch, read_batches
from splittune.training.snapshot import Snapshot
from splittune.training.step import TrainingStep
from splittune.training.task import TrainingTask

__all__ = ["SampleBatch", "Snapshot", "TrainingStep", "TrainingTask", "read_batches"]
