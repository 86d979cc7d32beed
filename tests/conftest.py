"""What every test shares: one thread for torch, quick collections of garbage, and the table of faults."""

from __future__ import annotations

import gc
import random
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from splittune.hardware.virtual.ledger import Ledger
from tests.faults.table import KEPT, PROPERTY, Gathered, as_csv, as_lines, differences, read, updated
from tests.slow import LONGEST, SLOW
from tests.standin import devices as standins

torch.set_num_threads(1)  # so that workers do not fight over the cores

GATHERED = pytest.StashKey[Gathered]()


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """After every trial garbage is collected: all that other tests have imported and left is not looked at each time.

    Nor does `gc.get_referrers` see it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """A test draws the same numbers in any order and on any worker: what fails once fails again."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Weak references to every storage that any ledger accounted for."""
    refs: list[weakref.ref[Any]] = []
    add = Ledger._add

    def add_and_note(self: Ledger, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        refs.append(weakref.ref(tensor.untyped_storage()))
        add(self, tensor, *args, **kwargs)

    monkeypatch.setattr(Ledger, "_add", add_and_note)
    return refs


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[[str, str, str, str], None]:
    """Notes a fault for the table: what, where, its outcome, and what the test checked afterwards."""

    def note(fault: str, where: str, outcome: str, checked: str) -> None:
        request.node.user_properties.append((PROPERTY, [fault, where, outcome, checked]))

    return note


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    items.sort(
        key=lambda item: next((n for n, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST))
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-faults", action="store_true", help=f"bring {KEPT.name} up to date with the tests run")
    parser.addoption(
        "--standin", action="store_true", help="run the tests marked so, on devices that stand in for cards"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests on stand-in devices name them as they are imported: without the devices only their run is collected."""
    is_on_them = collection_path.parent.name == "standin" and collection_path.name != "test_run.py"
    return True if is_on_them and not config.getoption("--standin") else None


def pytest_configure(config: pytest.Config) -> None:
    # A shell without job control starts what it puts in the background with Ctrl-C ignored, and every process started
    # from there inherits that: a dozen tests press Ctrl-C in themselves or in a process of their own.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--standin"):
        standins.register()  # for the whole process: torch is another one with them
        config.option.markexpr = "standin"
    if not hasattr(config, "workerinput"):  # xdist's workers send their reports to the process that has none
        config.stash[GATHERED] = Gathered()
        config.pluginmanager.register(_Table(config), "fault_table")


class _Table:
    """Gathers the faults of all reports, and fails the run where the kept table says otherwise."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.gathered = config, config.stash[GATHERED]
        self.complaints: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.gathered.add(report.nodeid, report.user_properties)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        kept = read()
        if self.config.getoption("--write-faults"):
            KEPT.write_text(as_csv(updated(self.gathered, kept)), encoding="utf-8")
            return
        self.complaints = differences(self.gathered, kept)
        if self.complaints and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.gathered.faults:
            terminalreporter.section("faults tried")
            for line in as_lines(self.gathered.faults):
                terminalreporter.write_line(line)
        if self.complaints:
            terminalreporter.section(f"{KEPT.name} says otherwise", red=True)
            for complaint in self.complaints:
                terminalreporter.write_line(complaint, red=True)
            terminalreporter.write_line("If the run is right: pytest --write-faults", red=True)
