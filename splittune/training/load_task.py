"""``FILE.py:FUNCTION`` on the command line: finds the function, calls it, and checks that it gives a TrainingTask."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from splittune.errors import ConfigError, JobError
from splittune.training import TrainingTask

_EXPECTED = (
    "expected FILE.py:FUNCTION, where FUNCTION() returns splittune.TrainingTask(model, loader, ...), "
    "such as train.py:make_task"
)


def load_task(target: str) -> TrainingTask:
    """The task that ``FILE.py:FUNCTION`` returns.

    The file is imported under its own name, unless a module of that name is loaded already, with its folder on
    ``sys.path``, as ``python FILE.py`` would have it; code under ``if __name__ == "__main__"`` is not run. An exception
    of the file or the function is the user's own, and passes through as the cause of the error, with its traceback.

    Raises:
        ConfigError: malformed, no such file or function, or it returned something else.
        JobError: it raised.
    """
    file_name, _, function_name = checked_target(target).rpartition(":")
    return _task_of(_import(Path(file_name)), function_name, file_name, target)


def checked_target(target: str) -> str:
    """The same ``FILE.py:FUNCTION``; the file is there, and was not read.

    Raises:
        ConfigError: malformed, or no such file.
    """
    file_name, separator, function_name = target.rpartition(":")
    if not separator or not file_name.endswith(".py") or not function_name.isidentifier():
        raise ConfigError(f"{target!r} names no job: {_EXPECTED}.")
    if not Path(file_name).is_file():
        raise ConfigError(f"there is no file {file_name!r} (from {Path.cwd()}): {_EXPECTED}. Check the path.")
    return target


def load_task_from_module(module_name: str, function_name: str) -> TrainingTask:
    """The task that a function of an importable module returns.

    Raises:
        ConfigError: no such function, or it returned something else.
        JobError: module or function raised.
    """
    target = f"{module_name}.{function_name}"
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise JobError(
            f"importing {module_name} raised {type(error).__name__}: {error}. Mend the module first."
        ) from error
    return _task_of(module, function_name, module_name, target)


def _task_of(module: ModuleType, function_name: str, origin: str, target: str) -> TrainingTask:
    """What the module's function gives; `origin` and `target` are the module and the function in the user's words."""
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and value_is_from(value, module)]
        found = f"it defines {', '.join(names)}" if names else "it defines no function"
        raise ConfigError(f"{origin} has no function {function_name!r}: {found}; {_EXPECTED}.")
    task = _call(function, target)
    if not isinstance(task, TrainingTask):
        raise ConfigError(f"{target} returned an object of type {type(task).__name__}: {_EXPECTED}.")
    return task


def value_is_from(value: object, module: ModuleType) -> bool:
    """Whether a function was defined in this module rather than imported into it."""
    return getattr(value, "__module__", None) == module.__name__


def _import(path: Path) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else f"job_{path.stem}"  # a file called random.py, say
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported as a Python file: {_EXPECTED}.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[name] = module  # pickling, and data loaders' workers, look the module up by its name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that parses its own command line exits
        raise JobError(f"importing {path} raised {type(error).__name__}: {error}. Mend the file first.") from error
    return module


def _call(function: Callable[[], object], target: str) -> object:
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise JobError(
            f"{target} raised {type(error).__name__}: {error}. It is called without arguments and must return a "
            "TrainingTask."
        ) from error
