"""What would help beside the split, tried on the job itself."""

from splittune.advice.advise import advise
from splittune.advice.job import SourceJob, TaskJob

__all__ = ["SourceJob", "TaskJob", "advise"]
