"""Exceptions that cross from one process to another as plain data: their kind and text, and where they were raised."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from typing import Any

from splittune.errors import JobError, SplittuneError


class RaisedInWorkerError(Exception):
    """The cause of an exception that was raised in a worker: its message is the traceback there."""


def describe_error(error: BaseException) -> dict[str, Any]:
    """The exception in JSON types; `rebuild_error` makes one like it.

    An error of splittune's own says all in its message: only the traceback of the user's exception behind it is kept.
    """
    raised: BaseException | None = error
    if isinstance(error, SplittuneError):
        said = SplittuneError if isinstance(error, JobError) else (SplittuneError, OSError)
        raised = None if isinstance(error.__cause__, said) else error.__cause__
    return {
        "kinds": [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__],
        "text": str(error),
        "traceback": "" if raised is None else "".join(traceback.format_exception(raised)),
    }


def rebuild_error(data: Mapping[str, Any]) -> BaseException:
    """An exception of the same name, text and kind, whose cause tells where it was raised.

    It is caught as the nearest of its classes that is loaded here: a class of a job's file that only the worker has
    loaded is caught as the class it was derived from. Attributes besides the message are not carried over.

    Example: ``class LabelError(ValueError)`` of job.py arrives as a ``job.LabelError`` that `except
    ValueError` catches.
    """
    (module, name), text = data["kinds"][0], data["text"]
    error: BaseException | None = None
    for base in map(_loaded_class, data["kinds"]):
        if base is not None and error is None:
            namespace = {"__module__": module, "__qualname__": name, "__str__": lambda _: text, "__doc__": base.__doc__}
            error = _made_bare(type(name.rpartition(".")[2], (base,), namespace))
    assert error is not None, "every exception is a BaseException"
    error.args = (text,)
    if data["traceback"]:
        error.__cause__ = RaisedInWorkerError("\n" + data["traceback"].rstrip())
    return error


def _loaded_class(names: list[str]) -> type[BaseException] | None:
    module, name = names
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _made_bare(kind: type[BaseException]) -> BaseException | None:
    """An instance whose `__init__` was not run: what that would need is not known here. None where it insists."""
    try:
        return kind.__new__(kind)
    except TypeError:
        return None
