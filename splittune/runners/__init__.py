"""Where a job's trials run: in this process, or in a worker that may die."""

from splittune.runners.base import DeviceSnapshot, DeviceView, JobFacts, Runner, SplitProfiler
from splittune.runners.in_process import InProcessRunner
from splittune.runners.worker import WorkerRunner

__all__ = [
    "DeviceSnapshot",
    "DeviceView",
    "InProcessRunner",
    "JobFacts",
    "Runner",
    "SplitProfiler",
    "WorkerRunner",
]
