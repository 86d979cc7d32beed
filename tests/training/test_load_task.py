"""FILE.py:FUNCTION: how the file is imported, and what is said where it gives no task."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from splittune import ConfigError, TrainingTask
from splittune.training.load_task import load_task

TASK = """
import torch
from splittune import TrainingTask

def make_task():
    return TrainingTask(torch.nn.Linear(2, 1), [torch.zeros(4, 2)])
"""


@pytest.fixture(autouse=True)
def _modules_as_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Imports search no more than before, and what a job imported is forgotten."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(text: str, name: str = "my_job.py") -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name


@pytest.mark.parametrize("name", ["my_job.py", "folder/my_job.py", "my-job.py", "v1.2.py", "with space/a:b.py"])
def test_the_functions_task_is_returned(name: str) -> None:
    """Wherever the file is and whatever it is called, its function's task is returned."""
    assert isinstance(load_task(f"{write(TASK, name)}:make_task"), TrainingTask)


def test_an_absolute_path_will_do(tmp_path: Path) -> None:
    """The file may be named by its whole path."""
    write(TASK)
    assert isinstance(load_task(f"{tmp_path / 'my_job.py'}:make_task"), TrainingTask)


def test_modules_beside_the_file_are_found() -> None:
    """The file imports its neighbours, as it does when it is run itself."""
    write(TASK, "project/the_neighbour.py")
    write("from the_neighbour import make_task", "project/my_job.py")
    assert isinstance(load_task("project/my_job.py:make_task"), TrainingTask)


def test_code_for_running_the_file_is_not_run() -> None:
    """What stands under `if __name__ == "__main__"` is left alone: tuning does not start training."""
    write(TASK + '\nif __name__ == "__main__":\n    raise RuntimeError("training started")\n')
    load_task("my_job.py:make_task")


def test_the_file_is_importable_by_its_name() -> None:
    """Pickling and the workers of a data loader find the module by its name."""
    write(TASK + "\nclass Dataset: ...\n")
    load_task("my_job.py:make_task")
    assert sys.modules["my_job"].Dataset.__module__ == "my_job"


def test_a_file_called_like_a_module_does_not_replace_it() -> None:
    """A job in a file called random.py takes nothing away from those who use Python's own."""
    write(TASK, "random.py")
    assert isinstance(load_task("random.py:make_task"), TrainingTask)
    assert sys.modules["random"] is random


@pytest.mark.parametrize(
    "target", ["", "my_job", "my_job.py", "my_job:make_task", "my_job.py:", ":make_task", "my_job.py:not a name"]
)
def test_what_names_no_job_is_refused(target: str) -> None:
    """Anything but FILE.py:FUNCTION is refused with an example."""
    write(TASK)
    with pytest.raises(ConfigError, match=r"names no job: expected FILE.py:FUNCTION.*such as train.py:make_task"):
        load_task(target)


@pytest.mark.parametrize("name", ["nowhere.py", "folder.py"])
def test_a_file_that_is_not_there_is_refused(name: str, tmp_path: Path) -> None:
    """A missing file, or a folder of that name, is refused with where it was looked for."""
    Path("folder.py").mkdir()
    with pytest.raises(ConfigError, match=rf"there is no file '{name}' \(from {tmp_path}\)"):
        load_task(f"{name}:make_task")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TASK, "it defines make_task; expected FILE.py:FUNCTION"),
        ("import os\nfrom random import choice\nx = 3\n", "it defines no function; expected FILE.py:FUNCTION"),
        ("train = 3", "it defines no function"),
    ],
)
def test_a_function_that_is_not_there_is_refused(text: str, found: str) -> None:
    """A missing function is refused with the functions that the file itself defines; a number is none."""
    write(text)
    with pytest.raises(ConfigError, match=f"my_job.py has no function 'train': {found}"):
        load_task("my_job.py:train")


@pytest.mark.parametrize(
    ("text", "match", "cause"),
    [
        ("import not_installed_anywhere", "importing my_job.py raised ModuleNotFoundError", ModuleNotFoundError),
        ("def make_task(:", "importing my_job.py raised SyntaxError", SyntaxError),
        ("raise SystemExit(0)", "importing my_job.py raised SystemExit: 0", SystemExit),
        (
            "def make_task():\n    1 / 0",
            "my_job.py:make_task raised ZeroDivisionError: division by zero",
            ArithmeticError,
        ),
        ("def make_task():\n    exit()", "my_job.py:make_task raised SystemExit", SystemExit),
        ("def make_task(args): ...", "raised TypeError: .*'args'.*called without arguments", TypeError),
    ],
)
def test_what_the_file_or_the_function_raises_is_the_cause(text: str, match: str, cause: type[BaseException]) -> None:
    """The user's own exception, an exit too, is the cause of the error, so that its traceback can be shown."""
    write(text)
    with pytest.raises(ConfigError, match=match) as caught:
        load_task("my_job.py:make_task")
    assert isinstance(caught.value.__cause__, cause)


def test_ctrl_c_passes_through() -> None:
    """Ctrl-C while the job is made is Ctrl-C."""
    write("def make_task():\n    raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_task("my_job.py:make_task")


@pytest.mark.parametrize(("value", "kind"), [("None", "NoneType"), ("(1, 2)", "tuple"), ("load", "function")])
def test_what_is_no_task_is_refused(value: str, kind: str) -> None:
    """A function that returns anything but a TrainingTask is refused by what it returned."""
    write(f"def load(): ...\ndef make_task():\n    return {value}\n")
    with pytest.raises(ConfigError, match=f"returned an object of type {kind}: expected.*TrainingTask"):
        load_task("my_job.py:make_task")
