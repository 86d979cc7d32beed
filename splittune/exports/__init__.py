"""A config in the words of the tools that train: one file a tool."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable

from splittune.config.data import ConfigData
from splittune.errors import ConfigError
from splittune.exports import accelerate, composer, deepspeed, lightning, torchrun, torchtitan, transformers
from splittune.exports.base import Export, Tool
from splittune.exports.even import TriedSplit, best_even, is_even
from splittune.exports.saved import TRIALS_FILE, config_file_in, read_trials

__all__ = ["TOOLS", "Export", "Tool", "TriedSplit", "best_even", "export_config", "export_saved", "is_even"]

_Exporter = Callable[[ConfigData, Iterable[TriedSplit], str], Export]
_MODULES = (torchrun, lightning, accelerate, transformers, deepspeed, composer, torchtitan)
_EXPORTERS: dict[str, _Exporter] = {module.TOOL.name: module.export for module in _MODULES}

TOOLS: dict[str, Tool] = {module.TOOL.name: module.TOOL for module in _MODULES}
"""Every tool by the name that ``--to`` takes."""


def export_config(
    config: ConfigData, to: str, *, trials: Iterable[TriedSplit] = (), config_path: str = "split.json"
) -> Export:
    """`config` as the tool `to` reads it; `config_path` is where a training script finds the config.

    Raises:
        ConfigError: an unknown tool, or one that cannot express the config; the message says what comes nearest.
    """
    return _exporter_to(to)(config, trials, config_path)


def export_saved(path: str | os.PathLike[str], to: str) -> Export:
    """What `result.save` left in a folder, or the config in a file, as the tool `to` reads it.

    Trials are those of the ``trials.csv`` beside the config.

    Raises:
        ConfigError: no config there, one of a newer schema, a broken table, or what `export_config` raises.
    """
    exporter = _exporter_to(to)  # before anything is read
    file = config_file_in(path)
    config = ConfigData.load(file)
    trials = read_trials(file.parent / TRIALS_FILE)
    return exporter(config, trials, file.as_posix())


def _exporter_to(tool: str) -> _Exporter:
    if tool not in _EXPORTERS:
        near = difflib.get_close_matches(tool.lower(), TOOLS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no tool is called {tool!r}: expected one of {', '.join(TOOLS)}.{hint}")
    return _EXPORTERS[tool]
