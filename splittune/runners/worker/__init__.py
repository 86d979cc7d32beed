"""Trials in a process of their own, which makes the job anew and may crash or hang without ending the search."""

from splittune.runners.worker.runner import DEFAULT_TRIAL_TIMEOUT_S, JobSource, WorkerRunner

__all__ = ["DEFAULT_TRIAL_TIMEOUT_S", "JobSource", "WorkerRunner"]
