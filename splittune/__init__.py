"""splittune finds the batch split that trains fastest without running out of memory, and emits a config to train with.

from splittune import autotune

result = autotune(model, loader)
result.save("runs/split")
model = result.config.wrap(model)
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from splittune.config import MicroBatch, SplitConfig
from splittune.errors import (
    ConfigError,
    DeviceError,
    InvalidSplitError,
    JobError,
    NoFeasibleSplitError,
    NvmlUnavailableError,
    RanksError,
    SplittuneError,
    WindowError,
    WorkerError,
)
from splittune.parallel import BalancedDataParallel, accumulate, data_parallel, load_state_dict
from splittune.planning import Plan, plan
from splittune.profiling.foretold import Foretold
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report import TuneResult
from splittune.split import BatchSplit, SplitSpace
from splittune.training import TrainingTask
from splittune.tuner import autotune
from splittune.verify import verify
from splittune.verify.result import Verification

__all__ = [
    "BalancedDataParallel",
    "BatchSplit",
    "ConfigError",
    "DeviceError",
    "Foretold",
    "InvalidSplitError",
    "JobError",
    "Measurement",
    "MicroBatch",
    "NoFeasibleSplitError",
    "NvmlUnavailableError",
    "Outcome",
    "Plan",
    "RanksError",
    "SplitConfig",
    "SplitSpace",
    "SplittuneError",
    "TrainingTask",
    "TuneResult",
    "Verification",
    "WindowError",
    "WorkerError",
    "accumulate",
    "autotune",
    "data_parallel",
    "load_state_dict",
    "plan",
    "verify",
]


__version__: str
if not TYPE_CHECKING:  # to a type checker every name that is not above is a mistake

    def __getattr__(name: str) -> str:
        if name == "__version__":
            return version("splittune")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
