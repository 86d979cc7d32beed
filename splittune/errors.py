"""The exceptions splittune raises of its own accord.

    SplittuneError
    ├── InvalidSplitError(ValueError)      a split whose arithmetic does not hold
    ├── NoFeasibleSplitError               every split tried lacked memory
    ├── ConfigError(ValueError)            unusable input: a job, a batch, a config file
    │   └── JobError                       the file or function that makes the job raised
    ├── WindowError                        an accumulation window that was misused
    ├── WorkerError                        the process that runs the trials could not be kept alive
    ├── RanksError                         ranks of a process group that were lost in a search
    └── DeviceError                        a device that is missing, repeated or unknown
        └── NvmlUnavailableError           NVML cannot be reached

The user's own exceptions are never wrapped in one of these: they pass through with their type, and a note that says
which part of the job raised. Where the job is made by name, `FILE.py:FUNCTION`, they are the cause of a `JobError`.
"""

from __future__ import annotations


class SplittuneError(Exception):
    """Base of everything splittune raises of its own accord."""


class InvalidSplitError(SplittuneError, ValueError):
    """A split breaks the arithmetic; the message shows the sum that fails."""


class NoFeasibleSplitError(SplittuneError):
    """No split tried fits in memory; the message names the smallest, what it lacked, and where."""


class ConfigError(SplittuneError, ValueError):
    """Input that cannot be used: a job, a loader, a batch, or a config file."""


class JobError(ConfigError):
    """The file or function that makes the job raised: its own exception is the cause."""


class WindowError(SplittuneError):
    """Gradients were used or changed while an accumulation window still held part of them on other devices."""


class WorkerError(SplittuneError):
    """The worker could not be kept alive; the message says how it ended. What was measured before is kept."""


class RanksError(SplittuneError):
    """A rank was lost, or has not come in time: the search ends on all of them. What was measured before is kept."""


class DeviceError(SplittuneError):
    """A device is missing, named twice, or not known."""


class NvmlUnavailableError(DeviceError):
    """NVML, NVIDIA's management library, cannot be loaded or does not answer."""


def add_note(error: BaseException, words: str) -> None:
    """A sentence below an exception's traceback: which part of the job raised it, say. Python 3.10 has no notes."""
    if hasattr(error, "add_note"):
        error.add_note(words)
