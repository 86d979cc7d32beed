"""The house stands: every module of splittune imports only its own floor and those below, and few touch the neighbours.

The walk reads source with `ast`, so it also sees imports inside functions and under `TYPE_CHECKING`, and needs nothing
of splittune to be importable.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SURFACE = "splittune"  # the package's __init__: re-exports what users import, and stands outside the house
MAX_LINES = 400

# From the top floor to the ground; modules and packages of one floor may import one another.
FLOORS = (
    ("__main__", "cli"),
    ("demo", "results"),
    ("integrations", "planning"),
    ("advice", "collective", "foretelling", "modelled_ddp", "options", "tuner", "verify"),
    ("report",),
    ("runners",),
    ("config", "exports"),
    ("search",),
    ("profiling",),
    ("training",),
    ("hardware",),
    ("ranks",),
    ("parallel",),
    ("split",),
    ("cards", "checks", "errors", "fakes", "signals", "units"),
)
TESTS = "tests"

# A room that is told even less than its floor would allow.
SEES_ONLY = {
    "splittune.search": (
        "splittune.search",
        "splittune.profiling.measurement",
        "splittune.profiling.noise",
        "splittune.hardware.base",
        "splittune.split",
        "splittune.checks",
        "splittune.errors",
        "splittune.units",
        "splittune.signals",
    ),
}

# Every dependency, and who may import it.
EVERYBODY = (SURFACE,)
IMPORTERS = {
    "torch": EVERYBODY,
    "pynvml": ("splittune.hardware.cuda.nvml",),
    "optuna": ("splittune.search",),
    "numpy": ("splittune.search",),
    "scipy": ("splittune.search",),
    "pandas": ("splittune.report",),
    "matplotlib": ("splittune.report",),
    "typer": ("splittune.cli",),
    "pytorch_lightning": ("splittune.integrations.lightning",),
    "transformers": ("splittune.integrations.transformers",),
    "rich": ("splittune.cli", "splittune.report", "splittune.verify.console"),
}
WITHOUT_TORCH = (
    "splittune.search",
    "splittune.split",
    "splittune.profiling.measurement",
    "splittune.profiling.noise",
    "splittune.checks",
    "splittune.errors",
    "splittune.units",
    "splittune.signals",
)


def complaints_about(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What is wrong with `source` as the module of this dotted name; nothing when it keeps the rules."""
    tree = ast.parse(source)
    complaints = [*complaints_about_shape(tree, source)]
    for line, imported in imports_of(tree, module if is_package else module.rpartition(".")[0]):
        if is_within(imported, (SURFACE,)):
            complaint = complaint_about_floor(module, imported)
        else:
            complaint = complaint_about_dependency(module, imported)
        if complaint:
            complaints.append(f"line {line}: {complaint}")
    return complaints


def complaints_about_shape(tree: ast.Module, source: str) -> Iterator[str]:
    """Length, and a first sentence that says what the module is for."""
    num_lines = len(source.splitlines())
    if num_lines > MAX_LINES:
        yield f"{num_lines} lines: at most {MAX_LINES}. Split it where its one-line purpose needs an 'and'."
    summary, *rest = (ast.get_docstring(tree) or "").splitlines() or [""]
    if not summary.endswith((".", "?", ":")) or (rest and rest[0]):
        yield "no docstring that starts with one line: a sentence that says what the module is for."


def complaint_about_floor(module: str, imported: str) -> str | None:
    """An import of splittune's own that goes up, or further down than the room may see."""
    if module == SURFACE:
        return None
    own_floor, its_floor = floor_of(module), 0 if is_of_surface(imported) else floor_of(imported)
    if own_floor is None or its_floor is None:
        return f"{module if own_floor is None else imported} stands on no floor: place it in FLOORS of this test."
    if its_floor < own_floor:
        return f"{module} imports {imported}, which stands on a floor above."
    for room, visible in SEES_ONLY.items():
        if is_within(module, (room,)) and not is_within(imported, visible):
            return f"{module} imports {imported}; {room} sees only {', '.join(visible)}."
    return None


def complaint_about_dependency(module: str, imported: str) -> str | None:
    """An import of somebody else's package by a module that is not among its importers."""
    distribution = imported.partition(".")[0]
    if distribution in sys.stdlib_module_names:
        return None
    if distribution not in IMPORTERS:
        return f"{module} imports {distribution}, which is no dependency: declare it, and place it in IMPORTERS."
    if not is_within(module, IMPORTERS[distribution]):
        return f"{module} imports {distribution}: only {', '.join(IMPORTERS[distribution])} may."
    if distribution == "torch" and is_within(module, WITHOUT_TORCH):
        return f"{module} imports torch: it is plain arithmetic and data, and is tested without."
    return None


def complaints_about_test(module: str, source: str) -> list[str]:
    """Imports of one test module by another; what two of them need is a fixture, or a module that holds no tests."""
    return [
        f"line {line}: {module} imports {name}: tests share fixtures and plain modules, never a test_*.py."
        for line, name in imports_of(ast.parse(source), module.rpartition(".")[0])
        if is_within(name, (TESTS,)) and any(part.startswith("test_") for part in name.split("."))
    ]


def imports_of(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, anywhere in the module; `package` resolves relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = [node.module] if node.module else []
            if node.level:
                origin = [*package.split(".")[: len(package.split(".")) - node.level + 1], *origin]
            # `from a import b` may import the module a.b: the longer name decides
            yield from ((node.lineno, ".".join([*origin, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, name) for name in names if isinstance(name, str))


def floor_of(name: str) -> int | None:
    """Index of the floor the name stands on, 0 at the top; None where nothing was placed."""
    room = name.split(".")[1]
    return next((index for index, floor in enumerate(FLOORS) if room in floor), None)


def is_of_surface(name: str) -> bool:
    """True for splittune itself and what its __init__ re-exports: ``splittune.autotune`` is no module."""
    return name == SURFACE or (name.count(".") == 1 and floor_of(name) is None and not is_module(name.split(".")[1]))


def is_module(room: str) -> bool:
    """True for a module or package directly in splittune."""
    return (ROOT / SURFACE / room).is_dir() or (ROOT / SURFACE / f"{room}.py").is_file()


def is_within(name: str, places: tuple[str, ...]) -> bool:
    """True when the dotted name is one of the places or inside one."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


def modules(top: str = SURFACE) -> dict[str, Path]:
    """Every module of splittune, or of another package here, by its dotted name."""
    found = {}
    for path in sorted((ROOT / top).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@pytest.mark.parametrize("module", sorted(modules()))
def test_module_keeps_its_floor(module: str) -> None:
    """It imports only what it may, is short, and says in a line what it is for."""
    path = modules()[module]
    complaints = complaints_about(module, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py")
    assert not complaints, "\n".join([f"{path.relative_to(ROOT)}:", *complaints])


def test_everything_in_the_house_has_a_floor() -> None:
    """A new module or package must be placed before anything imports it."""
    rooms = {name.split(".")[1] for name in modules() if name != SURFACE}
    placed = {room for floor in FLOORS for room in floor}
    unplaced = sorted(rooms - placed)
    assert not unplaced, f"place {', '.join(unplaced)} in FLOORS of this test."


def test_the_house_has_every_room_that_is_named() -> None:
    """A room that went leaves no floor, no rule and no leave to import behind."""
    floors = [f"{SURFACE}.{room}" for floor in FLOORS for room in floor]
    rules = [room for rooms in (SEES_ONLY, *SEES_ONLY.values(), *IMPORTERS.values(), WITHOUT_TORCH) for room in rooms]
    there = {*modules(), *(".".join(path.relative_to(ROOT).parts) for path in (ROOT / SURFACE).rglob("*"))}
    gone = sorted({*floors, *rules} - there)
    assert not gone, f"{', '.join(gone)} is named in this test and not there."


def test_no_test_imports_another() -> None:
    """Helpers stand in fixtures and plain modules, so that a test can be moved or removed without a look around."""
    sources = {module: path.read_text(encoding="utf-8") for module, path in modules(TESTS).items()}
    complaints = [line for module, source in sources.items() for line in complaints_about_test(module, source)]
    assert not complaints, "\n".join(complaints)


def test_nobody_imports_a_neighbours_private_name() -> None:
    """What a module uses of another one has a public name, and with it a contract."""
    private = [
        f"{module}:{line} imports {name}"
        for module, path in modules().items()
        for line, name in imports_of(ast.parse(path.read_text(encoding="utf-8")), module)
        if is_within(name, (SURFACE,)) and any(re.match(r"_[^_]", part) for part in name.split("."))
    ]
    assert not private, "\n".join(private)


def test_the_walk_sees_the_house() -> None:
    """The checks above are not empty: the ground floor and a module within a package are among those walked."""
    assert {"splittune", "splittune.errors", "splittune.split", "splittune.split.shards"} <= modules().keys()


DOC = '"""A module."""\n'


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("splittune.split.shards", "from splittune.hardware.base import Device", "a floor above"),
        ("splittune.split.shards", "import splittune.hardware.base as base", "a floor above"),
        ("splittune.split.shards", "from splittune import hardware", "a floor above"),
        ("splittune.split.shards", "from ..hardware import base", "a floor above"),
        ("splittune.split.shards", "from .. import hardware", "a floor above"),
        ("splittune.hardware.base", "def f():\n    import splittune.tuner", "a floor above"),
        ("splittune.parallel.link", "if TYPE_CHECKING:\n    from splittune.hardware import Device", "a floor above"),
        ("splittune.parallel.link", "import importlib\nimportlib.import_module('splittune.tuner')", "a floor above"),
        ("splittune.tuner", "from splittune import autotune", "a floor above"),
        ("splittune.errors", "import splittune", "a floor above"),
        ("splittune.attic", "import splittune.split", "splittune.attic stands on no floor"),
        ("splittune.tuner", "from splittune.attic import ghosts", "splittune.attic.ghosts stands on no floor"),
        ("splittune.search.study", "from splittune.profiling import Profiler", "splittune.search sees only"),
        ("splittune.search.study", "from splittune.profiling.profiler import Profiler", "splittune.search sees only"),
        ("splittune.search.study", "from splittune.hardware import CudaHardware", "splittune.search sees only"),
        ("splittune.search.study", "import torch", "without"),
        ("splittune.split.space", "from torch import nn", "without"),
        ("splittune.profiling.measurement", "import torch.nn", "without"),
        ("splittune.hardware.cuda", "import pynvml", "only splittune.hardware.cuda.nvml may"),
        ("splittune.tuner", "import optuna", "only splittune.search may"),
        ("splittune.tuner", "import pandas as pd", "only splittune.report may"),
        ("splittune.cli", "from matplotlib import pyplot", "only splittune.report may"),
        ("splittune.cli", "__import__('matplotlib.pyplot')", "only splittune.report may"),
        ("splittune.demo", "import typer", "only splittune.cli may"),
        ("splittune.tuner", "from rich.console import Console", "only splittune.cli, splittune.report"),
        ("splittune.training.task", "import transformers", "only splittune.integrations.transformers may"),
        ("splittune.integrations.lightning", "import deepspeed", "no dependency"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str, complaint: str) -> None:
    """The check can fail: upwards, sideways, hidden in functions and under TYPE_CHECKING, or somebody else's."""
    complaints = complaints_about(module, DOC + source)
    assert len(complaints) == 1
    assert complaint in complaints[0]


@pytest.mark.parametrize(
    "source",
    [
        "from tests.faults.test_faults import Job",
        "from tests.faults import test_faults",
        "import tests.test_signals",
        "from ..test_signals import count_calls",
        "def f():\n    from tests.test_signals import count_calls",
    ],
)
def test_a_test_that_imports_another_is_found(source: str) -> None:
    """That check can fail too, however the import is written; helpers may be imported."""
    assert len(complaints_about_test("tests.verify.test_run", source)) == 1
    assert complaints_about_test("tests.verify.test_run", "from tests.faults.trapped import Job") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("splittune.cli", "import typer\nfrom rich.table import Table\nfrom splittune import autotune, demo"),
        ("splittune.__main__", "from splittune.cli import main"),
        ("splittune.tuner", "from splittune.search import find_best_split\nfrom splittune.config import SplitConfig"),
        ("splittune.search.study", "import optuna\nfrom splittune.profiling.measurement import Measurement"),
        ("splittune.search.study", "from splittune.profiling import measurement\nfrom . import result"),
        ("splittune.hardware.cuda.nvml", "import pynvml\nfrom splittune.errors import NvmlUnavailableError"),
        ("splittune.hardware.virtual.ledger", "import torch\nfrom splittune.hardware.base import Device"),
        ("splittune.report.tables", "import pandas as pd\nfrom matplotlib import pyplot as plt"),
        ("splittune", "from splittune.tuner import autotune\nfrom splittune.split import BatchSplit"),
    ],
)
def test_an_allowed_import_is_not_complained_about(module: str, source: str) -> None:
    """Down the house, within a room, and each dependency at its importer."""
    assert complaints_about(module, DOC + source) == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("", "no docstring"),
        ("import os", "no docstring"),
        ('"""A summary that goes on\nin the next line."""', "no docstring"),
        (DOC + "\n" * MAX_LINES, f"{MAX_LINES + 1} lines: at most {MAX_LINES}"),
    ],
)
def test_a_module_without_shape_is_found(source: str, complaint: str) -> None:
    """No purpose in one line, or too much of it."""
    complaints = complaints_about("splittune.units", source)
    assert len(complaints) == 1
    assert complaint in complaints[0]
