"""What would help beside the split, tried on the job itself."""

from splittune.advice.advise import advise
from splittune.advice.job import Job, SourceJob, TaskJob

__all__ = ["Job", "SourceJob", "TaskJob", "advise"]
